"""Outages: a part that the run cannot do without is away. The run pauses, says what it waits for, and goes on."""

from __future__ import annotations

import psutil

from elastic_rl.errors import ElasticRLError
from elastic_rl.etcd import fencing
from elastic_rl.etcd.membership import members
from elastic_rl.etcd.records import EngineState
from elastic_rl.faults import states
from elastic_rl.faults.context import INJECT_TIMEOUT_S, FaultContext, stopped
from elastic_rl.host.job_secrets import dcs_security
from elastic_rl.host.service_files import node_service
from elastic_rl.runtime.waiting import wait_until
from elastic_rl.trainer.service.client import TrainerClient

_STEPS_AFTER = 2
"""Steps that the run has to do after an outage before it counts as over: one may have been under way."""


class _Outage:
    """What the outages have in common. ``said``: what the run's status said that it waits for."""

    name = ""
    may_go_unnoticed = True
    """An outage may be over before the run says that it waits."""
    part = ""
    """What the run is to say that it waits for; "": whatever it says."""

    def __init__(self, context: FaultContext) -> None:
        self.context, self.said, self.step = context, "", 0

    def _begins(self) -> None:
        self.step = self.context.step()

    def detected(self) -> bool:
        """The run says that it waits."""
        status = self.context.status()
        said = f"{status.waiting_kind}: {status.waiting_for}" if status is not None and status.waiting_for else ""
        if said and self.part in said:  # it may wait for something else in the moment in which this fault begins
            self.said = said
        return bool(self.said)

    def healed(self) -> bool:
        return self.context.step() >= self.step + _STEPS_AFTER

    def _service(self, name: str) -> int:
        """Pid of a service of the local cluster, once it runs."""
        return wait_until(lambda: self.context.service(name), timeout_s=INJECT_TIMEOUT_S, what=f"the service {name}")


class EtcdStopped(_Outage):
    """SIGSTOP of etcd for a while: connections stay, and nothing answers."""

    def __init__(self, context: FaultContext, seconds: float) -> None:
        super().__init__(context)
        self.seconds, self.name = seconds, "etcd_stopped"

    def inject(self) -> tuple[str, str]:
        self._begins()
        etcd = psutil.Process(self._service("etcd-0"))
        with stopped(self.context, etcd):
            self.context.ended.wait(self.seconds)
        return "etcd-0", f"pid {etcd.pid} was stopped for {self.seconds:g} s"


class ServiceKilled(_Outage):
    """kill -9 of a service of the local cluster, whose owner restarts it on its data."""

    def __init__(self, context: FaultContext, service: str) -> None:
        super().__init__(context)
        self.service, self.name = service, f"{service.partition('-')[0]}_killed"

    def inject(self) -> tuple[str, str]:
        self._begins()
        return self.service, self.context.kill(self._service(self.service))


class DcsNodeKilled(ServiceKilled):
    """kill -9 of the job's only DCS node."""

    def __init__(self, context: FaultContext) -> None:
        super().__init__(context, node_service(context.cfg.job))


class AllEnginesKilled(_Outage):
    name, part = "all_engines_killed", "engines"

    def inject(self) -> tuple[str, str]:
        wait_until(lambda: len(self.context.ready()) >= self.context.desired(), timeout_s=INJECT_TIMEOUT_S,
                   what="a pool of ready engines")
        self._begins()
        victims = [e for e in self.context.engines() if e.state is EngineState.READY and not e.external]
        return "every engine", "; ".join([self.context.kill(e.pid) for e in victims])


class RouterKilled(_Outage):
    name = "router_killed"

    def inject(self) -> tuple[str, str]:
        router = wait_until(self.context.router_pid, timeout_s=INJECT_TIMEOUT_S, what="the router")
        self._begins()
        return "router", self.context.kill(router)


class ActorKilled(_Outage):
    """kill -9 of the actor's replica while the trainer is at a step of it."""

    name = "actor_killed"

    def inject(self) -> tuple[str, str]:
        executed = wait_until(lambda: states.training(self.context), timeout_s=INJECT_TIMEOUT_S,
                              what="a step that is being trained", poll_s=0.002)
        self._begins()
        killed = self.context.kill(members(self.context.etcd, self.context.keys, "actor")[0].pid)
        return "actor", f"{killed}; the trainer was {executed}"


class SecondActor(_Outage):
    """Another actor takes the job over beside the one that runs, and is gone after a while."""

    name = "second_actor"

    def __init__(self, context: FaultContext, seconds: float) -> None:
        super().__init__(context)
        self.seconds, self.term = seconds, 0

    def inject(self) -> tuple[str, str]:
        self._begins()
        etcd, keys, cfg = self.context.etcd, self.context.keys, self.context.cfg
        epoch = fencing.current_epoch(etcd, keys)
        with self.context.striking("another actor has begun a term"):
            self.term = fencing.begin_term(etcd, keys, epoch, "second actor")
        client = TrainerClient(etcd, keys, dcs_security(cfg), epoch=epoch, term=self.term)
        try:
            client.wait_ready()  # fences the first one off
            self.context.ended.wait(self.seconds)
        except ElasticRLError:
            pass  # the next replica has taken over already
        finally:
            client.close()
        return "actor", f"term {self.term} was begun beside the actor, for {self.seconds:g} s"

    def healed(self) -> bool:
        newest = fencing.current_term(self.context.etcd, self.context.keys)
        return newest > self.term and super().healed()


class TrainerStopped(_Outage):
    """SIGSTOP of the trainer's agent and of all its ranks: nobody in the group can notice."""

    name, part = "trainer_stopped", "trainer"

    def inject(self) -> tuple[str, str]:
        self._begins()
        ranks = [psutil.Process(m.pid) for m in self.context.trainer_ranks()]
        agent = next(p for p in ranks[0].parents() if "elastic_rl.trainer.group.agent" in " ".join(p.cmdline()))
        for process in (agent, *ranks):
            self.context.stop(process)
        return "trainer", f"agent {agent.pid} and {len(ranks)} ranks were stopped"
