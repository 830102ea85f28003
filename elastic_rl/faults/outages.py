"""Outages: a part that the run cannot do without is away. The run pauses, says what it waits for, and goes on."""

from __future__ import annotations

import contextlib

import psutil

from elastic_rl.errors import ElasticRLError
from elastic_rl.etcd import fencing
from elastic_rl.faults import states
from elastic_rl.faults.context import INJECT_TIMEOUT_S, FaultContext, VictimTaken, stopped
from elastic_rl.faults.finding import ETCD, await_service, engines_of_pool, trainer_agents
from elastic_rl.faults.kinds import RecoversWithSteps
from elastic_rl.host.service_files import node_service
from elastic_rl.runtime.waiting import wait_until


class _Outage(RecoversWithSteps):
    """What the outages have in common."""

    may_go_unnoticed = True
    """An outage may be over before the run says that it waits."""
    part = ""
    """What the run is to say that it waits for; "": whatever it says."""

    def detected(self) -> bool:
        """The run says that it waits."""
        status = self.context.status()
        said = f"{status.waiting_kind}: {status.waiting_for}" if status is not None and status.waiting_for else ""
        if said and self.part in said:  # it may wait for something else in the moment in which this fault begins
            self.said = said
        return bool(self.said)


class EtcdStopped(_Outage):
    """SIGSTOP of etcd for a while: connections stay, and nothing answers."""

    def __init__(self, context: FaultContext, seconds: float) -> None:
        super().__init__(context)
        self.seconds, self.name = seconds, "etcd_stopped"

    def inject(self) -> tuple[str, str]:
        etcd = psutil.Process(await_service(self.context, ETCD))
        with stopped(self.context, etcd):
            self.context.ended.wait(self.seconds)
        return ETCD, f"pid {etcd.pid} was stopped for {self.seconds:g} s"

    def is_back(self) -> bool:
        """etcd runs: the same process, or another one that was started meanwhile."""
        return bool(self.context.service(ETCD))


class ServiceKilled(_Outage):
    """kill -9 of a service of the local cluster, whose owner restarts it on its data."""

    def __init__(self, context: FaultContext, service: str) -> None:
        super().__init__(context)
        self.service, self.name, self.victim = service, f"{service.partition('-')[0]}_killed", 0

    def inject(self) -> tuple[str, str]:
        self.victim = await_service(self.context, self.service)
        return self.service, self.context.kill(self.victim)

    def is_back(self) -> bool:
        return self.context.service(self.service) not in (0, self.victim)


class DcsNodeKilled(ServiceKilled):
    """kill -9 of the job's only DCS node."""

    def __init__(self, context: FaultContext) -> None:
        super().__init__(context, node_service(context.cfg.job))


class AllEnginesKilled(_Outage):
    name, part = "all_engines_killed", "engines"

    def __init__(self, context: FaultContext) -> None:
        super().__init__(context)
        self.desired, self.victims = 0, frozenset[str]()

    def inject(self) -> tuple[str, str]:
        self.desired = self.context.desired()
        wait_until(lambda: len(self.context.ready()) >= self.desired, timeout_s=INJECT_TIMEOUT_S,
                   what="a pool of ready engines")
        killed = dict[str, str]()
        for engine in engines_of_pool(self.context):
            with contextlib.suppress(VictimTaken):
                killed[engine.id] = self.context.kill(engine.pid)
        if not killed:
            raise VictimTaken("no engine that was ready was left to kill")
        self.victims = frozenset(killed)
        return "every engine", "; ".join(killed.values())

    def is_back(self) -> bool:
        return len(self.context.ready() - self.victims) >= self.desired


class RouterKilled(_Outage):
    name = "router_killed"

    def __init__(self, context: FaultContext) -> None:
        super().__init__(context)
        self.victim = 0

    def inject(self) -> tuple[str, str]:
        self.victim = wait_until(self.context.router_pid, timeout_s=INJECT_TIMEOUT_S, what="the router")
        return "router", self.context.kill(self.victim)

    def is_back(self) -> bool:
        return self.context.router_pid() not in (0, self.victim)


class ActorKilled(_Outage):
    """kill -9 of the actor's replica while the trainer is at a step of it."""

    name = "actor_killed"

    def __init__(self, context: FaultContext) -> None:
        super().__init__(context)
        self.victim = ""

    def inject(self) -> tuple[str, str]:
        executed = wait_until(lambda: states.training(self.context), timeout_s=INJECT_TIMEOUT_S,
                              what="a step that is being trained", poll_s=0.002)
        actor = next(iter(self.context.members("actor")), None)
        if actor is None:
            raise VictimTaken("no actor is there")
        self.victim = actor.incarnation
        return "actor", f"{self.context.kill(actor.pid)}; the trainer was {executed}"

    def is_back(self) -> bool:
        return any(actor.incarnation != self.victim for actor in self.context.members("actor"))


class SecondActor(_Outage):
    """Another actor takes the job over beside the one that runs, and is gone after a while."""

    name = "second_actor"

    def __init__(self, context: FaultContext, seconds: float) -> None:
        super().__init__(context)
        self.seconds, self.term = seconds, 0

    def inject(self) -> tuple[str, str]:
        etcd, keys = self.context.etcd, self.context.keys
        epoch = fencing.current_epoch(etcd, keys)
        with self.context.striking("another actor has begun a term"):
            self.term = fencing.begin_term(etcd, keys, epoch, "second actor")
        client = states.trainer_client(self.context, epoch=epoch, term=self.term)
        try:
            client.wait_ready()  # fences the first one off
            self.context.ended.wait(self.seconds)
        except ElasticRLError:
            pass  # the next replica has taken over already
        finally:
            client.close()
        return "actor", f"term {self.term} was begun beside the actor, for {self.seconds:g} s"

    def is_back(self) -> bool:
        """The job's own actor has begun a later term."""
        return fencing.current_term(self.context.etcd, self.context.keys) > self.term


class TrainerStopped(_Outage):
    """SIGSTOP of the trainer's agent and of all its ranks: nobody in the group can notice."""

    name, part = "trainer_stopped", "trainer"

    def __init__(self, context: FaultContext) -> None:
        super().__init__(context)
        self.victims = frozenset[str]()

    def inject(self) -> tuple[str, str]:
        members = self.context.trainer_ranks()
        self.victims = frozenset(member.incarnation for member in members)
        ranks = [psutil.Process(member.pid) for member in members if psutil.pid_exists(member.pid)]
        agent = next(map(psutil.Process, trainer_agents(rank.pid for rank in ranks)), None)
        if agent is None:
            raise VictimTaken("no whole trainer is there")
        for process in (agent, *ranks):
            self.context.stop(process)
        return "trainer", f"agent {agent.pid} and {len(ranks)} ranks were stopped"

    def is_back(self) -> bool:
        now = {member.incarnation for member in self.context.trainer_ranks()}
        return not now & self.victims and len(now) >= len(self.victims)
