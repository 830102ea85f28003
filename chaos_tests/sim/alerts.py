"""The alerts of a job under a virtual clock: the leader's real code, which can die at any write, on a store in memory,
and receivers that fail in every way. For thousands of seeds; real etcd and real services have tests of their own."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from chaos_tests.sim.violation import RuleViolated
from elastic_rl.config import AlertConfig, Config
from elastic_rl.coordinator.alerts import rules
from elastic_rl.coordinator.alerts.controller import AlertController
from elastic_rl.coordinator.alerts.notifier import NOT_LEADING, Notification
from elastic_rl.coordinator.alerts.receiver_queue import WINDOW_S, AttemptResult, NotificationGroup, ReceiverQueue
from elastic_rl.coordinator.alerts.receivers import Receiver
from elastic_rl.coordinator.alerts.state_machine import Alert, Condition, Phase, notified_entry
from elastic_rl.coordinator.records import LastSeen
from elastic_rl.coordinator.snapshot import ClusterSnapshot
from elastic_rl.errors import Fenced
from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.client import Changed, ChangedRanges, Compare, KeyValue, Op
from elastic_rl.etcd.decoding import R, RangeDecoder
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.records import JobStatus, Member, Record, Severity, Silence

KEYS = Keys("j")
GUARD = ClusterKeys(KEYS.job).leader("leader")
TICK_S = 1.0
SKEW_S = 3.0
LATENCY_S = 4.0
_ACTOR = Member(role="actor", id="a", pid=1, host="h0")


class Died(Exception):
    """The leader's process ended."""


class MemoryEtcd:
    """What ``AlertController`` needs of etcd. The calling process dies at write number ``die_at``: before the write
    when that is odd, else after it and before the answer."""

    def __init__(self) -> None:
        self.kvs: dict[str, KeyValue] = {}
        self.revision, self.writes, self.die_at = 1, 0, 0
        self.counts: Counter[str] = Counter()
        """How often each of ``KINDS`` has happened."""
        self.groups: dict[str, NotificationGroup] = {}
        """By id, as first written."""
        self.silenced: set[tuple[str, str]] = set()
        """Group and alert, of alerts that were silenced when the group was first written."""

    def get(self, key: str) -> KeyValue | None:
        return self.kvs.get(key)

    def range(self, prefix: str, *, revision: int = 0) -> tuple[list[KeyValue], int]:
        return [self.kvs[key] for key in sorted(key for key in self.kvs if key.startswith(prefix))], self.revision

    def changed(self, prefixes: Sequence[str], keys: Sequence[str], *, since: int, limit: int) -> ChangedRanges:
        """See ``EtcdClient.changed``."""
        ranges = [self.range(prefix)[0] for prefix in prefixes]
        return ChangedRanges([Changed([kv for kv in kvs if kv.mod_revision > since], len(kvs), more=False)
                              for kvs in ranges], [], self.revision)

    def txn(self, compares: Sequence[Compare], then: Sequence[Op]) -> bool:
        if then:
            self.writes += 1
            if self.writes == self.die_at and self.writes % 2:
                self.counts["leader died before a write"] += 1
                raise Died
        held = all(self._holds(c) for c in compares)
        if held and then:
            self.revision += 1
            for op in then:
                self._apply(op)
            self.counts["write of several records"] += len(then) > 1
        if then and self.writes == self.die_at:
            self.counts["leader died after a write"] += 1
            raise Died
        return held

    def put(self, key: str, record: Record) -> int:
        """A write of another process."""
        self.revision += 1
        self._apply(Op.put(key, record.encode()))
        return self.revision

    def _holds(self, c: Compare) -> bool:
        kv = self.kvs.get(c.key)
        have = (kv.mod_revision if c.target == "mod" else kv.create_revision) if kv else 0
        return {"==": have == c.operand, ">": have > c.operand}[c.relation]  # type: ignore[operator]

    def _apply(self, op: Op) -> None:
        old = self.kvs.pop(op.key, None)
        if op.kind == "put":
            self.kvs[op.key] = KeyValue(op.key, op.data, old.create_revision if old else self.revision, self.revision,
                                        old.version + 1 if old else 1, 0)
        if op.kind == "put" and op.key.startswith(KEYS.receivers_prefix()):
            group = ReceiverQueue.decode(op.data).in_flight
            if group is not None and group.id not in self.groups:
                self.groups[group.id] = group
                self.counts[f"notification {group.phase}"] += 1
                self.counts["notification of several alerts"] += len(group.alerts) > 1
                for alert in (Alert.decode(kv.value) for kv in self.range(KEYS.alerts_prefix())[0]):
                    if alert.silenced_by and alert.id in group.alerts:
                        self.silenced.add((group.id, alert.id))


@dataclass
class Delivered:
    """A notification that arrived."""

    at: float
    receiver: str
    phase: Phase
    alerts: list[str]


@dataclass
class _Attempt:
    notification: Notification
    starts: float
    ends: float
    arrives: bool
    ok: bool


class SlowSender:
    """The sender of one process. A receiver takes a notification, refuses it, or takes it while the answer is lost."""

    job = "j"

    def __init__(self, simulation: AlertSimulation) -> None:
        self._simulation, self.attempts = simulation, dict[str, _Attempt]()
        self._results: dict[str, AttemptResult] = {}
        self.receivers = simulation.receivers

    def send(self, receiver: str, notification: Notification) -> bool:
        simulation, rng = self._simulation, self._simulation.rng
        starts = simulation.t + rng.choice([0.0, 0.0, TICK_S])
        health = simulation.health(receiver)
        simulation.counts["nothing reaches the receiver"] += health == "dead"
        simulation.counts["answer of the receiver lost"] += health == "mute"
        ends = starts + rng.uniform(0.1, LATENCY_S)
        self.attempts[receiver] = _Attempt(notification, starts, ends, health != "dead", health == "healthy")
        self._results.pop(receiver, None)
        return True

    def busy(self, receiver: str) -> bool:
        return receiver in self.attempts

    def last_result(self, receiver: str) -> AttemptResult | None:
        return self._results.get(receiver)

    def work(self, *, stopped: bool) -> None:
        """Advances the attempts. Those of a stopped process that have started go on in the network; none starts."""
        for name, attempt in list(self.attempts.items()):
            notification = attempt.notification
            if attempt.starts >= 0 and self._simulation.t >= attempt.starts and not stopped:
                if not notification.may_send():
                    del self.attempts[name]
                    self._results[name] = AttemptResult(notification.group_id, notification.attempt, False, NOT_LEADING)
                    self._simulation.counts["not sent by a leader that was replaced"] += 1
                    continue
                self._simulation.begin(name, notification)
                attempt.starts = -1.0
            if attempt.starts < 0 and self._simulation.t >= attempt.ends:
                self._simulation.counts["sent by a leader that is stopped"] += stopped
                if attempt.arrives:
                    self._simulation.deliver(name, notification)
                del self.attempts[name]
                self._results[name] = AttemptResult(notification.group_id, notification.attempt, attempt.ok,
                                                    "" if attempt.ok else "refused")


@dataclass
class SimulatedLeader:
    """A process that leads, or believes it does."""

    term: int
    skew_s: float
    sender: SlowSender
    controller: AlertController
    stopped: bool = False


class Cursor(Record):
    revision: int


@dataclass
class Fault:
    """A fault that comes and goes. A reported one is announced by events, the other seen in the member registry."""

    subject: str
    reported: bool
    severity: Severity
    present: bool = False
    episodes: int = 0


@dataclass
class AlertSimulation:
    rng: random.Random
    per_minute: int = 10
    group_wait_s: float = 2.0
    etcd: MemoryEtcd = field(default_factory=MemoryEtcd)
    t: float = 10_000.0

    def __post_init__(self) -> None:
        self.receivers = [Receiver("pager", frozenset({"error"})), Receiver("chat")]
        self.cfg = Config(job="j", alerts=AlertConfig(max_notifications_per_minute=self.per_minute,
                                                      group_wait_s=self.group_wait_s))
        self.leaders: list[SimulatedLeader] = []
        self.faults: list[Fault] = []
        self.events: list[tuple[int, Condition | None, str]] = []
        self.delivered: list[Delivered] = []
        self.attempts: dict[str, list[float]] = defaultdict(list)
        self.repeated: list[str] = []
        """Notifications that were sent once more, although their delivery had been recorded."""
        self.opened: dict[str, Alert] = {}
        self._alerts, self._queues = RangeDecoder(Alert), RangeDecoder(ReceiverQueue)
        self.finished = False
        """Whether the run is over. It can be resumed."""
        self.unhealthy: dict[str, str] = {}
        self.counts = self.etcd.counts

    # -- the environment ---------------------------------------------------------------------------------------
    def health(self, receiver: str) -> str:
        """healthy, dead (nothing arrives) or mute (it arrives, and the answer is lost)."""
        return self.unhealthy.get(receiver, "healthy")

    def begin(self, receiver: str, notification: Notification) -> None:
        """An attempt to send goes out."""
        self.attempts[receiver].append(self.t)
        group = self.etcd.groups[notification.group_id]
        entry = notified_entry(group.phase, receiver)
        known = [Alert.decode(kv.value) for kv in self.etcd.range(KEYS.alerts_prefix())[0]]
        if all(entry in alert.notified for alert in known if alert.id in group.alerts):
            self.repeated.append(f"{self.t:.0f} s: {receiver} is sent the {group.phase} of {', '.join(group.alerts)}")

    def deliver(self, receiver: str, notification: Notification) -> None:
        group = self.etcd.groups[notification.group_id]
        self.delivered.append(Delivered(self.t, receiver, group.phase, group.alerts))

    def toggle(self, fault: Fault) -> None:
        fault.present = not fault.present
        self.counts[f"{'reported ' if fault.reported else ''}fault {'began' if fault.present else 'ended'}"] += 1
        fault.episodes += fault.present
        if fault.reported:
            revision = self.etcd.put(KEYS.event(f"{len(self.events):06}"), Cursor(revision=0))
            self.events.append((revision, Condition("publish.failed", fault.subject, "m", fault.severity,
                                                    revision=revision), "") if fault.present else
                               (revision, None, f"publish.failed/{fault.subject}"))

    def restart(self, service: str) -> None:
        """A service of the local cluster ended and was started again, which is a one-time event."""
        revision = self.etcd.put(KEYS.event(f"{len(self.events):06}"), Cursor(revision=0))
        event = events.build(event_kinds.DCS_RESTARTED, service, "m", severity=Severity.WARNING, at=self.t)
        self.events.append((revision, rules.report(event, revision), ""))

    def prune_events(self) -> None:
        """Deletes every event, also those that no leader has read."""
        self.events.clear()

    def silence(self, subject: str, for_s: float) -> None:
        self.etcd.put(KEYS.silence(f"s{self.etcd.revision}"), Silence(
            id=f"s{self.etcd.revision}", subject=subject, created_at=self.t, until=self.t + for_s))

    # -- leaders -----------------------------------------------------------------------------------------------
    def elect(self) -> SimulatedLeader:
        """A new process leads from now on, whatever the old ones believe."""
        self.counts["elected"] += 1
        self.counts["elected beside one that believes it leads"] += any(not leader.stopped for leader in self.leaders)
        self.etcd.die_at = 0
        self.etcd.kvs.pop(GUARD, None)
        self.etcd.txn([], [Op.put(GUARD, b"")])
        leader = SimulatedLeader(self.etcd.revision, self.rng.uniform(-SKEW_S, SKEW_S), SlowSender(self),
                                 None)  # type: ignore[arg-type]

        def guarded(compares: Sequence[Compare], then: Sequence[Op]) -> bool:
            own_term = Compare.create(GUARD, "==", leader.term)
            if self.etcd.txn([own_term, *compares], then):
                return True
            if not self.etcd.txn([own_term], []):
                raise Fenced("over")
            self.counts["write refused since etcd has changed"] += 1
            return False

        leader.controller = AlertController(
            self.etcd, KEYS, self.cfg, leader.sender, guarded,  # type: ignore[arg-type]
            leads=lambda: self.leads(leader), clock=lambda: self.t + leader.skew_s)
        self.leaders.append(leader)
        return leader

    def leads(self, leader: SimulatedLeader) -> bool:
        guard = self.etcd.get(GUARD)
        return guard is not None and guard.create_revision == leader.term

    @property
    def leaderless(self) -> bool:
        return not any(self.leads(x) and not x.stopped for x in self.leaders)

    def reconcile(self, leader: SimulatedLeader) -> None:
        """One pass of a process that believes it leads. Raises Died."""
        found = self.etcd.get(KEYS.event_cursor())
        cursor = Cursor.decode(found.value).revision if found else 0
        fresh = [e for e in self.events if e[0] > cursor]
        reports, over = [], set()
        for _, condition, ended in fresh:
            if condition is not None:
                reports.append(condition)
                over.discard(condition.key)
            else:
                over.add(ended)
        write = [] if not fresh else [(
            Compare.mod(KEYS.event_cursor(), "==", found.mod_revision if found else 0),
            Op.put(KEYS.event_cursor(), Cursor(revision=fresh[-1][0]).encode()))]
        dead = [LastSeen(role="dcs", id=f.subject, incarnation="i", host=f"h{f.subject[-1]}", first_seen=1, dead_at=2)
                for f in self.faults if f.present and not f.reported]
        try:
            leader.controller.update(
                ClusterSnapshot("j", registry={s.name: s for s in dead}, members=[_ACTOR],
                                status=JobStatus(phase="finished" if self.finished else "rl")), reports, over, write)
            leader.controller.deliver()
        except Fenced:
            assert not self.leads(leader)
            self.counts["write of a leader that was replaced"] += 1
        for alert in self.stored(self._alerts, KEYS.alerts_prefix()):
            if alert.phase is not Phase.PENDING:
                self.opened.setdefault(alert.id, alert)

    def stored(self, decoder: RangeDecoder[R], prefix: str) -> list[R]:
        """The records under a prefix. Each of them can be read."""
        unreadable: dict[str, str] = {}
        found = decoder.decode(self.etcd.range(prefix)[0], unreadable)
        assert not unreadable, unreadable
        return found

    def tick(self) -> None:
        self.t += TICK_S
        self.counts["steps"] += 1
        for leader in list(self.leaders):
            leader.sender.work(stopped=leader.stopped)
            if not leader.stopped:
                try:
                    self.reconcile(leader)
                except Died:
                    self.kill(leader)

    def kill(self, leader: SimulatedLeader) -> None:
        """kill -9. What it had started to send may still arrive, as after a delay of the network."""
        if self.rng.random() < 0.5:
            for name, attempt in leader.sender.attempts.items():
                if attempt.starts < 0 and attempt.arrives:
                    self.counts["arrived after its sender had died"] += 1
                    self.deliver(name, attempt.notification)
        self.leaders.remove(leader)

    @property
    def settled(self) -> bool:
        """Whether no alert and no notification is left."""
        queues = self.stored(self._queues, KEYS.receivers_prefix())
        return not self.etcd.range(KEYS.alerts_prefix())[0] and not any(q.in_flight for q in queues)

    def run_until_settled(self, seconds: float) -> None:
        end = self.t + seconds
        while self.t < end and not self.settled:
            self.run(5.0)

    def run(self, seconds: float) -> None:
        end = self.t + seconds
        while self.t < end:
            if self.leaderless:
                self.elect()
            self.tick()


# -- a run -------------------------------------------------------------------------------------------------------------
KINDS = frozenset({
    "answer of the receiver lost", "arrived after its sender had died", "elected",
    "elected beside one that believes it leads", "fault began", "fault ended", "leader died after a write",
    "leader died before a write", "leader stopped", "leader went on", "not sent by a leader that was replaced",
    "nothing reaches the receiver", "notification firing", "notification of several alerts", "notification resolved",
    "reported fault began", "reported fault ended", "sent by a leader that is stopped",
    "write of a leader that was replaced", "write of several records", "write refused since etcd has changed"})
LONGEST_SILENCE_S = 60.0
_LEADERLESS_S = 3.0
_EPISODE_S = 14.0
"""A fault lasts longer than any time without a leader and its clock's error, and so does the time between two."""


def run(seed: int) -> AlertSimulation:
    """Faults come and go while leaders and receivers fail; raises RuleViolated where a notice is missing, comes in a
    wrong order, or passes the rate limit."""
    sim = make(seed)
    play(sim, sim.rng.choice([60, 200]))
    check_order_and_rate(sim)
    check_all_delivered(sim)
    return sim


def make(seed: int) -> AlertSimulation:
    rng = random.Random(seed)
    sim = AlertSimulation(rng, per_minute=rng.choice([2, 5, 10]), group_wait_s=rng.choice([0.0, 2.0]))
    sim.faults = [Fault(f"f{n}", reported=n % 3 == 0, severity=rng.choice([Severity.ERROR, Severity.WARNING]))
                    for n in range(rng.choice([1, 4, 12]))]
    return sim


def play(sim: AlertSimulation, seconds: float, *, crashes: bool = True, unhealthy: bool = True,
         silences: bool = False) -> None:
    """Faults come and go while leaders and receivers fail; then nothing fails until everything is delivered."""
    rng, end = sim.rng, sim.t + seconds
    toggles = {f.subject: sim.t + rng.uniform(0, 30) for f in sim.faults}
    stopped: list[SimulatedLeader] = []
    while sim.t < end:
        for fault in sim.faults:
            if sim.t >= toggles[fault.subject]:
                sim.toggle(fault)
                toggles[fault.subject] = sim.t + _EPISODE_S + rng.expovariate(1 / 30)
        if crashes and rng.random() < 0.05:
            sim.etcd.die_at = sim.etcd.writes + rng.randrange(1, 8)
        if crashes and not sim.leaderless and rng.random() < 0.02:
            sim.counts["leader stopped"] += 1
            stopped.append(sim.leaders[-1])
            sim.leaders[-1].stopped = True
        if sim.leaderless:
            wait = rng.uniform(0, _LEADERLESS_S)
            while wait > 0:
                sim.tick()
                wait -= TICK_S
            sim.elect()
        if stopped and rng.random() < 0.1:
            sim.counts["leader went on"] += 1
            stopped.pop().stopped = False
        if unhealthy and rng.random() < 0.03:
            sim.unhealthy[rng.choice(sim.receivers).name] = rng.choice(["dead", "mute", "healthy", "healthy"])
        if silences and rng.random() < 0.01:
            sim.silence(rng.choice(sim.faults).subject, rng.uniform(5, LONGEST_SILENCE_S))
        sim.tick()
    sim.unhealthy.clear()
    sim.etcd.die_at = 0
    for fault in sim.faults:
        if fault.present:
            sim.run(_EPISODE_S)
            sim.toggle(fault)
    sim.run(5.0)  # for the last events and silences
    sim.run_until_settled(60.0 * (4 + 60 / sim.per_minute))


def audience(sim: AlertSimulation, alert: Alert) -> set[str]:
    return {r.name for r in sim.receivers if r.accepts({alert.severity.value})}


def check_order_and_rate(sim: AlertSimulation) -> None:
    first: dict[tuple[str, str, Phase], float] = {}
    for n, delivered in enumerate(sim.delivered):
        for i in delivered.alerts:
            first.setdefault((i, delivered.receiver, delivered.phase), n)
    for (i, receiver, phase), at in first.items():
        if phase is Phase.RESOLVED:
            _require(first.get((i, receiver, Phase.FIRING), at) < at, f"{receiver} got the end of {i} before its start")
    window = WINDOW_S - 2 * SKEW_S
    for times in sim.attempts.values():
        for k in range(len(times) - sim.per_minute):
            _require(times[k + sim.per_minute] - times[k] > window - 1.0, "the rate limit was exceeded")


def check_all_delivered(sim: AlertSimulation) -> None:
    """Each episode of each fault is one alert, and its audience got the start and the end of each alert: once, and once
    more only where the answer of the receiver was lost."""
    _require(sim.settled, "something is still pending")
    _require(not sim.repeated, f"what was delivered is sent again: {sim.repeated}")
    kinds = Counter(a.subject for a in sim.opened.values())
    faults = {f.subject: f.episodes for f in sim.faults if f.episodes}
    _require(kinds == faults, f"alerts of {dict(kinds)} for faults of {faults}")
    delivered = {(i, d.receiver, d.phase) for d in sim.delivered for i in d.alerts}
    wanted = {(a.id, r, p) for a in sim.opened.values() for r in audience(sim, a)
              for p in (Phase.FIRING, Phase.RESOLVED)}
    _require(delivered == wanted, f"delivered and not wanted, or the reverse: {sorted(delivered ^ wanted)[:3]}")


def _require(holds: bool, otherwise: str) -> None:
    """Every rule of this world is that of alerts, I9."""
    if not holds:
        raise RuleViolated("I9", otherwise)
