"""Drivers and engines in a world that fails: how a driver begins, what it adopts, what it starts and drains, what the
router is given, how an engine joins and leaves. What decides is the product's code, on the model of etcd; Ray, SGLang
and the router's process are left out.

Drivers are killed, and stopped while another begins; the run is moved to another host; Ray is lost; the epoch is ended
by a global restart; engines of an epoch that is over live on for a while. Whatever the product calls, something else
may happen before it. ``RuleViolated`` is raised where a request is lost or answered with weights that nobody verified,
where engines that serve are ended without a cause, and where a driver writes that was replaced.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

from chaos_tests.event_log import Event
from chaos_tests.sim.store import Interference, Log, ObservedEtcd, SimClient
from chaos_tests.sim.violation import RuleViolated
from chaos_tests.validate.running import RECOVERY_S
from elastic_rl.config import ROLLOUT_POOL, Config
from elastic_rl.coordinator.election.election import Election
from elastic_rl.coordinator.operations.controller import OperationController
from elastic_rl.coordinator.operations.service import OperationService
from elastic_rl.coordinator.snapshot import ClusterSnapshot
from elastic_rl.driver import __main__ as driver_main
from elastic_rl.driver import placement
from elastic_rl.driver import plan as driver_plan
from elastic_rl.driver.placement import Placer
from elastic_rl.driver.routing import Routes, Unconfirmed, compare
from elastic_rl.engine.departure import Departure, LeaveStep
from elastic_rl.engine.lifecycle import EngineLifecycle
from elastic_rl.engine.record import EngineRecord
from elastic_rl.errors import Conflict, Fenced, IllegalTransition
from elastic_rl.etcd import fencing
from elastic_rl.etcd.cluster_records import Assignment, JobPhase, RunStatus, driver_of
from elastic_rl.etcd.decoding import R, decode_bytes
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.records import Engine, EngineState, Operation, PoolSpec, PoolStatus
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.etcd.transaction import Compare, KeyValue, Op

JOB, CLUSTER, LEADER = "j", "c", "r0"
KEYS, CLUSTER_KEYS = Keys(JOB), ClusterKeys(CLUSTER)
CONFIG = Config(job=JOB, cluster=CLUSTER)
KIND = f"engines/{ROLLOUT_POOL}"
TICK_S, END_S, QUIET_S = 0.5, 60.0, 30.0
"""A run is so long; nothing fails in its last seconds."""
DRAIN_S = 40.0
"""Longer than any request takes."""


class SimRouter:
    """The router of one epoch: URLs that it sends requests to."""

    def __init__(self, epoch: int) -> None:
        self.epoch, self.listed = epoch, set[str]()


class SimEngine:
    """The runner of an engine, with its server. Its first ``step`` may come long after it was started."""

    def __init__(self, world: EngineWorld, ctx: RunContext, name: str, router: SimRouter) -> None:
        self.world, self.ctx, self.name, self.router = world, ctx, name, router
        self.url, self.incarnation = f"http://{name}", f"{name}-{ctx.epoch}"
        self.etcd = SimClient(world.model, lambda: world.now, world.interference)
        self.record = EngineRecord(ctx, self.etcd, name, self.incarnation)
        self.life = EngineLifecycle()
        self.departure: Departure | None = None
        self.started_at, self.ends_at = world.now, float("inf")
        self.requests = list[float]()
        """When each ends that is in flight."""
        self.has_record = self.told_to_drain = self.ended = False

    def step(self) -> None:
        """A pass of the runner. One whose epoch is over, or that was replaced, ends."""
        if self.world.now >= self.ends_at:
            self.end()
        if self.ended:
            return
        self.requests = [at for at in self.requests if at > self.world.now]
        try:
            self._step()
        except Fenced:
            self.world.counts["engine fenced"] += 1
            self.end()

    def _step(self) -> None:
        exists, record = self.record.read()
        if self.has_record and not exists:
            self.end()
            return
        if self.told_to_drain or record is not None and record.state is EngineState.DRAINING:
            self._leave()
        elif self.life.state is EngineState.STARTING:
            self.life = self.life.up() if self.world.rng.random() < 0.5 else self.life
            self._write()
        elif self.life.applying:
            if self.world.rng.random() < 0.5:
                self.life = self.life.verified(self.life.applying)
                self._write()
        else:
            self._follow()

    def _follow(self) -> None:
        """Joins the router as soon as it may, and follows the head."""
        if self.life.state is EngineState.SYNCING:
            with suppress(IllegalTransition):  # nothing is verified in it yet
                routed = self.life.routed()
                self.router.listed.add(self.url)
                self.life = routed
                self._write()
                return
        if self.life.accepts(self.world.head) and self.world.rng.random() < 0.6:
            self.life = self.life.begin(self.world.head)
            self._write()

    def _leave(self) -> None:
        if self.departure is None:
            self.departure = Departure(self.world.now, DRAIN_S)
            self.life = self.life.drain()
            self._write()
            self.router.listed.discard(self.url)
        others = [e for e in self.world.alive if e is not self and e.url in self.router.listed and e.life.version]
        step = self.departure.step(self.world.now, len(self.requests), can_hand_over=bool(others))
        if step is LeaveStep.ABORT:
            self.world.counts["handed over"] += len(self.requests)
            for at in self.requests:
                self.world.rng.choice(others).requests.append(at)
            self.requests.clear()
        elif step in (LeaveStep.DONE, LeaveStep.GIVE_UP):
            if self.requests:
                raise RuleViolated("I6", f"{self.name} left the pool with {len(self.requests)} requests in flight")
            self.world.counts["left"] += 1
            self.record.delete()
            self.end()

    def _write(self) -> None:
        state = self.life.state
        self.record.write(Engine(
            id=self.name, pool=ROLLOUT_POOL, state=state, epoch=self.ctx.epoch, incarnation=self.incarnation,
            url=self.url, version=self.life.version, applying=self.life.applying, started_at=self.started_at))
        self.has_record = True

    def end(self) -> None:
        self.ended = True
        self.router.listed.discard(self.url)


class SimDriver:
    """A driver, and the supervisor of the run beside it."""

    def __init__(self, world: EngineWorld, name: str, assignment: int) -> None:
        self.world, self.name, self.ended, self._in_pass = world, name, False, False
        self.etcd = SimClient(world.model, lambda: world.now, world.interference)
        ctx = RunContext(config=CONFIG, etcd_endpoints=["e:1"], job=JOB, epoch=0, assignment=assignment,
                         model_dir="", host="h")
        self.run_writer = FencedWriter.of_assignment(self.etcd, CLUSTER_KEYS, JOB, assignment)
        served = [engine for engine in world.alive if engine.ctx.epoch == world.ray_epoch == world.epoch]
        epoch, generation, adopts = driver_main._begin(self.etcd, ctx, name)
        if served and not adopts and world.ray_epoch == epoch - 1 and not world.epoch_was_ended:
            raise RuleViolated("I12", f"the driver {name} has begun epoch {epoch}, and ends {len(served)} engines "
                                      "that work")
        self.ctx = ctx.model_copy(update={"epoch": epoch, "generation": generation})
        self.writer = FencedWriter.of_driver(self.etcd, KEYS, epoch, generation)
        self.placer = Placer.of(self.ctx, self.etcd)
        if not adopts:
            world.begin_epoch(epoch)
        self.router, self.unconfirmed = world.router, Unconfirmed()
        self.engines = {placed.name: world.named[self.placer._scope + f"{KIND}/{placed.name}"]
                        for placed in self.placer.adopt(KIND)}
        world.counts["adopted"] += len(self.engines)
        for engine in self.engines.values():
            if engine.ctx.epoch != epoch:
                raise RuleViolated("I1", f"a driver of epoch {epoch} adopts {engine.name} of epoch {engine.ctx.epoch}")

    def step(self) -> None:
        """A pass; none where it was stopped in the middle of one, which then goes on."""
        if self.ended or self._in_pass:
            return
        self._in_pass = True
        try:
            self._step()
        except Fenced:
            self.world.counts["driver fenced"] += 1
            self.ended = True
        except Conflict:
            self.world.counts["conflict"] += 1
        finally:
            self._in_pass = False

    def _step(self) -> None:
        self.run_writer.write(Op.put(CLUSTER_KEYS.run_status(JOB), RunStatus(
            submission=1, phase=JobPhase.RUNNING, generation=self.ctx.assignment).encode()))
        records = {engine.id: engine for engine in (
            Engine.decode(kv.value) for kv in self.etcd.range(KEYS.engines_of_pool(ROLLOUT_POOL))[0])}
        changes, self.unconfirmed = compare(Routes.from_engines(records.values(), self.ctx.epoch), self.router.listed,
                                            self.unconfirmed)
        self.writer.require()
        self.router.listed |= changes.add
        self.router.listed -= changes.remove
        for name, engine in [*self.engines.items()]:
            if engine.ended:
                self.writer.write(Op.delete(KEYS.engine(name)))
                del self.engines[name]
        for name, record in records.items():
            if name not in self.engines and record.epoch < self.ctx.epoch:
                self.writer.write(Op.delete(KEYS.engine(name)))
        self._plan(records)
        states = Counter(records[name].state for name in self.engines if name in records)
        status = PoolStatus(name=ROLLOUT_POOL, ready=states[EngineState.READY], draining=states[EngineState.DRAINING],
                            starting=len(self.engines) - states[EngineState.READY] - states[EngineState.DRAINING],
                            message=str(self.ctx.generation))
        self.writer.write(Op.put(KEYS.pool_status(ROLLOUT_POOL), status.encode()))

    def _plan(self, records: dict[str, Engine]) -> None:
        running = [driver_plan.Running(name, EngineState.DRAINING if engine.told_to_drain else records[name].state
                           if name in records else EngineState.STARTING, engine.started_at)
                   for name, engine in self.engines.items()]
        todo = driver_plan.plan(self.world.desired, running, may_start=2)
        for _ in range(todo.start):
            name = f"{ROLLOUT_POOL}-{self.world.next_number()}"
            engine = SimEngine(self.world, self.ctx, name, self.router)
            self.writer.require()
            self.engines[name] = self.world.named[f"{self.placer._scope}{KIND}/{name}"] = engine
        for name in todo.drain:
            def change(raw: bytes | None) -> bytes | None:
                now = decode_bytes(raw, Engine) if raw else None
                return raw if now is None else now.replace(state=EngineState.DRAINING).encode()

            self.etcd.update(KEYS.engine(name), change, guards=self.writer.guards)
            self.engines[name].told_to_drain = True


class EngineWorld:
    def __init__(self, seed: int) -> None:
        self.rng, self.now, self.counts = random.Random(seed), 0.0, Counter[str]()
        self.log = Log("engines", seed, cluster=CLUSTER, clock=lambda: self.now)
        self.model = ObservedEtcd(self.log, self._written)
        self.interference = Interference(lambda: self.rng.random() < 0.04, self._anything)
        self.named = dict[str, SimEngine]()
        """What Ray has, by full names."""
        self.drivers, self._stopped = list[SimDriver](), list[SimDriver]()
        self.ray_epoch, self.epoch_was_ended = 0, False
        self.router = SimRouter(0)
        self.head, self.desired, self._numbers = 1, 3, 0
        self._leader = SimClient(self.model, lambda: self.now)
        term = self.model.txn((), [Op.put(CLUSTER_KEYS.leader(LEADER), b"")])
        guard = Compare.create(CLUSTER_KEYS.leader(LEADER), "==", term)
        writer = FencedWriter(self._leader, KEYS, lambda: [guard], LEADER)
        self._api = OperationService(self._leader, KEYS, cast(Election, SimpleNamespace(
            replica=LEADER, writer=writer)), CONFIG, clock=lambda: self.now)
        self._operations = OperationController(KEYS, {}, writer)

    # -- what there is -------------------------------------------------------------------------------------------------
    @property
    def alive(self) -> list[SimEngine]:
        return [engine for engine in self.named.values() if not engine.ended]

    @property
    def epoch(self) -> int:
        found = self.model.keys.get(KEYS.epoch())
        return found.version if found is not None else 0

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def begin_epoch(self, epoch: int) -> None:
        """A driver starts Ray anew. What an earlier epoch has left ends soon, and not at once."""
        for engine in self.alive:
            engine.ends_at = min(engine.ends_at, self.now + self.rng.uniform(0.0, 8.0))
        self.ray_epoch, self.epoch_was_ended, self.router = epoch, False, SimRouter(epoch)

    # -- a run ---------------------------------------------------------------------------------------------------------
    def run(self) -> None:
        with self._ray():
            self._assign()
            self.model.txn((), [Op.put(KEYS.pool_spec(ROLLOUT_POOL), PoolSpec(
                name=ROLLOUT_POOL, desired=self.desired).encode())])
            while self.now < END_S:
                self.now += TICK_S
                self._pass()
                self._ask()
                if self.now < END_S - QUIET_S:
                    if self.rng.random() < 0.12:
                        with self.interference.quiet():
                            self._anything()
                elif self._stopped:
                    self._go_on()
                if not self.drivers and self.rng.random() < 0.5:
                    with self.interference.quiet():
                        self._start_driver()
            if (serving := sum(e.life.state is EngineState.READY for e in self.alive)) < self.desired:
                raise RuleViolated("I6", f"{serving} of {self.desired} engines serve at the end")

    def go_on(self) -> None:
        """Nothing fails, for as long as the validators wait for a recovery, and longer."""
        with self._ray():
            until = self.now + 1.2 * RECOVERY_S
            while self.now < until:
                self.now += 0.1 * RECOVERY_S
                self._pass()

    def _pass(self) -> None:
        """A pass of each process."""
        for engine in self.alive:
            engine.step()
        for driver in [*self.drivers]:
            driver.step()
        self.drivers = [driver for driver in self.drivers if not driver.ended]
        self._follow_operations()

    def _follow_operations(self) -> None:
        """A pass of the leader over the operations of the API."""
        def records(prefix: str, kind: type[R]) -> list[R]:
            return [kind.decode(kv.value) for kv in self.model.range(prefix) if not kv.key.endswith("/status")]

        operations = records(KEYS.operations_prefix(), Operation)
        if any(not operation.state.ended for operation in operations[-2:]):
            found = self.model.keys.get(KEYS.pool_status(ROLLOUT_POOL))
            self._operations.update(ClusterSnapshot(
                JOB, now=self.now, leader_time=self.now, operations={op.id: op for op in operations},
                specs={spec.name: spec for spec in records(KEYS.pools_prefix(), PoolSpec)},
                statuses={ROLLOUT_POOL: PoolStatus.decode(found.value)} if found is not None else {},
                engines={engine.id: engine for engine in records(KEYS.engines_prefix(), Engine)},
                revisions=self.model.keys))

    def _anything(self) -> None:
        if self.now >= END_S - QUIET_S:
            return
        what = self.rng.choice(["kill", "kill", "stop", "stop", "move", "restart", "ray", "engine", "head", "head",
                                "scale", "scale", "go on", "go on"])
        self.counts.update(["steps", what])
        match what:
            case "kill":
                self._end_drivers()
            case "stop" if self.drivers:
                self._stopped += self.drivers
                self.drivers = []
                self._start_driver()
            case "go on" if self._stopped:
                self._go_on()
            case "move":
                self._end_drivers()
                self._assign()
                self._start_driver()
            case "restart":
                self.epoch_was_ended = True
                fencing.raise_epoch(SimClient(self.model, lambda: self.now), KEYS, fencing.GLOBAL_RESTART)
            case "ray":
                self.ray_epoch = 0
                for engine in self.alive:
                    engine.ends_at = min(engine.ends_at, self.now + self.rng.uniform(0.0, 8.0))
                self._end_drivers()
            case "engine" if self.alive:
                self.rng.choice(self.alive).end()
            case "head":
                self.head += 1
            case "scale":
                self._scale(self.rng.randrange(1, 5))

    def _scale(self, desired: int) -> None:
        """An operator says how many engines there are to be."""
        self.desired = desired
        self._api.scale(ROLLOUT_POOL, desired, by="operator")

    def _end_drivers(self) -> None:
        """Kills the driver, or stops it and its supervisor: they go on later, and do not know of the next one."""
        self._stopped += [driver for driver in self.drivers if self.rng.random() < 0.5]
        self.drivers = []

    def _go_on(self) -> None:
        driver = self._stopped.pop(0)
        with self.interference.quiet():
            driver.step()

    def _start_driver(self) -> None:
        with suppress(Fenced, Conflict):
            self.drivers.append(SimDriver(self, f"d{self.next_number()}", self._assignment))

    def _assign(self) -> None:
        """The leader gives the run to a host."""
        self.model.txn((), [Op.put(CLUSTER_KEYS.assignment(driver_of(JOB)), Assignment(host="h").encode())])
        self._assignment = self.model.keys[CLUSTER_KEYS.assignment(driver_of(JOB))].version

    def _ask(self) -> None:
        """Clients send requests, which the router gives to its engines."""
        serving = [engine for engine in self.alive if engine.url in self.router.listed]
        for engine in serving:
            if engine.ctx.epoch != self.router.epoch:
                raise RuleViolated("I1", f"the router of epoch {self.router.epoch} sends requests to {engine.name} of "
                                         f"epoch {engine.ctx.epoch}")
            if not engine.life.version:
                raise RuleViolated("I4", f"{engine.name} is asked, and no version was verified in it")
        if serving and self.rng.random() < 0.8:
            self.rng.choice(serving).requests.append(self.now + self.rng.uniform(1.0, 10.0))
            self.counts["requests"] += 1

    def _written(self, kv: KeyValue) -> None:
        """Only the newest driver writes the status of the pool."""
        if kv.key == KEYS.pool_status(ROLLOUT_POOL):
            by, newest = int(PoolStatus.decode(kv.value).message), self.model.keys[KEYS.driver()].version
            if by != newest:
                raise RuleViolated("I1", f"driver {by} has written the status of the pool, and driver {newest} had "
                                         "begun")

    @contextmanager
    def _ray(self) -> Iterator[None]:
        """What the driver asks of Ray, and of the files of its host, is answered by the world."""
        def actors() -> list[str]:
            return [name for name, engine in self.named.items() if not engine.ended]

        ray: Any = SimpleNamespace(util=SimpleNamespace(list_named_actors=actors), get_actor=self.named.__getitem__)
        with ExitStack() as stack:
            for what, by in {
                    "ray": ray, "get_placement_group": lambda name: name, "placement_group_table": lambda: {
                        name: {"name": name, "bundles": [{}], "state": "PENDING"} for name in actors()}}.items():
                stack.enter_context(mock.patch.object(placement, what, by))
            stack.enter_context(mock.patch.object(driver_main, "ray_epoch", lambda paths: self.ray_epoch))
            yield


def run(seed: int) -> EngineWorld:
    """The world after the run of a seed. Raises RuleViolated."""
    world = EngineWorld(seed)
    world.run()
    return world


def log(seed: int) -> list[Event]:
    """The log of a run, which goes on for longer than a pool may lack engines, without a fault."""
    world = EngineWorld(seed)
    with suppress(RuleViolated):
        world.run()
    with suppress(RuleViolated):
        world.go_on()
    return world.log.end()
