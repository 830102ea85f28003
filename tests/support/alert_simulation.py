"""A job's alerting under a virtual clock: the leader's real code, on a store in memory that can die at any write, with
receivers that fail in every way. For thousands of seeds; the real etcd and real services have tests of their own."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from elastic_rl.config import AlertConfig, Config
from elastic_rl.coordinator.alerts.controller import AlertController
from elastic_rl.coordinator.alerts.delivery import Outcome, ReceiverQueue
from elastic_rl.coordinator.alerts.notifier import NOT_LEADING, Notification
from elastic_rl.coordinator.alerts.receivers import Receiver
from elastic_rl.coordinator.alerts.state_machine import Alert, Condition, Phase
from elastic_rl.coordinator.records import LastSeen
from elastic_rl.coordinator.snapshot import ClusterSnapshot
from elastic_rl.errors import Fenced
from elastic_rl.etcd.client import Compare, KeyValue, Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Record, Severity, Silence

KEYS = Keys("j")
GUARD = KEYS.leader("it")
TICK_S = 1.0
SKEW_S = 3.0
LATENCY_S = 4.0


class Died(Exception):
    """The leader's process ended."""


class MemoryStore:
    """What ``AlertController`` needs of etcd. The process that calls dies at write number ``die_at``: before the
    write when that is odd, else after it and before the answer."""

    def __init__(self) -> None:
        self.kvs: dict[str, KeyValue] = {}
        self.revision, self.writes, self.die_at = 1, 0, 0
        self.parcels: dict[str, ReceiverQueue] = {}
        """By id, the mailbox as it was when its parcel was first written."""
        self.silenced: set[tuple[str, str]] = set()
        """Parcel and alert, of alerts that were silenced when the parcel was first written."""

    def get(self, key: str) -> KeyValue | None:
        return self.kvs.get(key)

    def range(self, prefix: str, *, limit: int = 0, newest_first: bool = False) -> tuple[list[KeyValue], int]:
        found = sorted((kv for k, kv in self.kvs.items() if k.startswith(prefix)), key=lambda kv: kv.key)
        return found, self.revision

    def txn(self, compares: Sequence[Compare], then: Sequence[Op]) -> bool:
        if then:
            self.writes += 1
            if self.writes == self.die_at and self.writes % 2:
                raise Died
        held = all(self._holds(c) for c in compares)
        if held and then:
            self.revision += 1
            for op in then:
                self._apply(op)
        if then and self.writes == self.die_at:
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
            box = ReceiverQueue.decode(op.data)
            if box.parcel is not None and box.parcel.id not in self.parcels:
                self.parcels[box.parcel.id] = box
                for alert in (Alert.decode(kv.value) for kv in self.range(KEYS.alerts_prefix())[0]):
                    if alert.silenced_by and alert.id in box.parcel.alerts:
                        self.silenced.add((box.parcel.id, alert.id))


@dataclass
class Heard:
    """A letter that arrived."""

    at: float
    receiver: str
    parcel: str
    phase: Phase
    alerts: list[str]


@dataclass
class _Sent:
    letter: Notification
    begins: float
    ends: float
    arrives: bool
    ok: bool


class SlowPost:
    """A process's notifier. Each receiver takes a letter, refuses it, or takes it while its answer is lost."""

    job = "j"

    def __init__(self, house: House) -> None:
        self._house, self._out = house, dict[str, _Sent]()
        self._outcomes: dict[str, Outcome] = {}
        self.receivers = house.receivers
        self.alive = True

    def send(self, receiver: str, letter: Notification) -> bool:
        house, rng = self._house, self._house.rng
        begins = house.t + rng.choice([0.0, 0.0, TICK_S])
        fate = house.health(receiver)
        ends = begins + rng.uniform(0.1, LATENCY_S)
        self._out[receiver] = _Sent(letter, begins, ends, fate != "dead", fate == "well")
        self._outcomes.pop(receiver, None)
        return True

    def busy(self, receiver: str) -> bool:
        return receiver in self._out

    def outcome(self, receiver: str) -> Outcome | None:
        return self._outcomes.get(receiver)

    def work(self, *, stopped: bool) -> None:
        """Time goes on. A process that is stopped gives what it began to the network, and begins nothing."""
        for name, sent in list(self._out.items()):
            letter = sent.letter
            if sent.begins >= 0 and self._house.t >= sent.begins and not stopped:
                if not letter.may_send():
                    del self._out[name]
                    self._outcomes[name] = Outcome(letter.parcel, letter.attempt, False, NOT_LEADING)
                    continue
                self._house.attempts[name].append(self._house.t)
                sent.begins = -1.0
            if sent.begins < 0 and self._house.t >= sent.ends:
                if sent.arrives:
                    self._house.hear(name, letter)
                del self._out[name]
                self._outcomes[name] = Outcome(letter.parcel, letter.attempt, sent.ok, "" if sent.ok else "no")


@dataclass
class _Leader:
    """A process that leads, or believes it does."""

    term: int
    skew_s: float
    post: SlowPost
    alerting: AlertController
    stopped: bool = False


class Cursor(Record):
    revision: int


@dataclass
class Fault:
    """One fault, that comes and goes. A reported one is told by events, the other seen in the roster."""

    subject: str
    reported: bool
    severity: Severity
    there: bool = False
    episodes: int = 0


@dataclass
class House:
    rng: random.Random
    per_minute: int = 10
    group_wait_s: float = 2.0
    etcd: MemoryStore = field(default_factory=MemoryStore)
    t: float = 10_000.0

    def __post_init__(self) -> None:
        self.receivers = [Receiver("pager", frozenset({"error"})), Receiver("chat")]
        self.cfg = Config(job="j", alerts=AlertConfig(messages_per_minute=self.per_minute,
                                                      group_wait_s=self.group_wait_s))
        self.leaders: list[_Leader] = []
        self.faults: list[Fault] = []
        self.events: list[tuple[int, Condition | None, str]] = []
        self.heard: list[Heard] = []
        self.attempts: dict[str, list[float]] = defaultdict(list)
        self.opened: dict[str, Alert] = {}
        self.sick: dict[str, str] = {}

    # -- the outside -------------------------------------------------------------------------------------------
    def health(self, receiver: str) -> str:
        """well, dead (nothing arrives) or mute (it arrives, and the answer is lost)."""
        return self.sick.get(receiver, "well")

    def hear(self, receiver: str, letter: Notification) -> None:
        box = self.etcd.parcels[letter.parcel]
        assert box.parcel is not None
        self.heard.append(Heard(self.t, receiver, letter.parcel, box.parcel.phase, box.parcel.alerts))

    def turn(self, fault: Fault) -> None:
        fault.there = not fault.there
        fault.episodes += fault.there
        if fault.reported:
            revision = self.etcd.put(KEYS.event(f"{len(self.events):06}"), Cursor(revision=0))
            self.events.append((revision, Condition("publish.failed", fault.subject, "m", fault.severity,
                                                    revision=revision), "") if fault.there else
                               (revision, None, f"publish.failed/{fault.subject}"))

    def silence(self, subject: str, for_s: float) -> None:
        self.etcd.put(KEYS.silence(f"s{self.etcd.revision}"), Silence(
            id=f"s{self.etcd.revision}", subject=subject, created_at=self.t, until=self.t + for_s))

    # -- leaders -----------------------------------------------------------------------------------------------
    def elect(self) -> _Leader:
        """A new process leads from now on, whatever the old ones believe."""
        self.etcd.die_at = 0
        self.etcd.kvs.pop(GUARD, None)
        self.etcd.txn([], [Op.put(GUARD, b"")])
        leader = _Leader(self.etcd.revision, self.rng.uniform(-SKEW_S, SKEW_S), SlowPost(self), None)  # type: ignore

        def guarded(compares: Sequence[Compare], then: Sequence[Op]) -> bool:
            mine = Compare.create(GUARD, "==", leader.term)
            if self.etcd.txn([mine, *compares], then):
                return True
            if not self.etcd.txn([mine], []):
                raise Fenced("over")
            return False

        leader.alerting = AlertController(self.etcd, KEYS, self.cfg, leader.post, guarded,  # type: ignore
                                   leads=lambda: self.leads(leader), clock=lambda: self.t + leader.skew_s)
        self.leaders.append(leader)
        return leader

    def leads(self, leader: _Leader) -> bool:
        guard = self.etcd.get(GUARD)
        return guard is not None and guard.create_revision == leader.term

    @property
    def leaderless(self) -> bool:
        return not any(self.leads(x) and not x.stopped for x in self.leaders)

    def look(self, leader: _Leader) -> None:
        """One look of a process that believes it leads. Raises Died."""
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
                for f in self.faults if f.there and not f.reported]
        try:
            leader.alerting.update(ClusterSnapshot("j", registry={s.name: s for s in dead}), reports, over, write)
            leader.alerting.deliver()
        except Fenced:
            assert not self.leads(leader)
        for kv in self.etcd.range(KEYS.alerts_prefix())[0]:
            alert = Alert.decode(kv.value)
            if alert.phase is not Phase.PENDING:
                self.opened.setdefault(alert.id, alert)

    def tick(self) -> None:
        self.t += TICK_S
        for leader in list(self.leaders):
            leader.post.work(stopped=leader.stopped)
            if not leader.stopped:
                try:
                    self.look(leader)
                except Died:
                    self.die(leader)

    def die(self, leader: _Leader) -> None:
        """kill -9. What its threads had begun to send may still arrive; it is like the network's delay."""
        if self.rng.random() < 0.5:
            for name, sent in leader.post._out.items():
                if sent.begins < 0 and sent.arrives:
                    self.hear(name, sent.letter)
        self.leaders.remove(leader)

    @property
    def quiet(self) -> bool:
        """Nothing is left to tell."""
        boxes = [ReceiverQueue.decode(kv.value) for kv in self.etcd.range(KEYS.receivers_prefix())[0]]
        return not self.etcd.range(KEYS.alerts_prefix())[0] and not any(b.parcel for b in boxes)

    def run_until_quiet(self, seconds: float) -> None:
        end = self.t + seconds
        while self.t < end and not self.quiet:
            self.run(5.0)

    def run(self, seconds: float) -> None:
        end = self.t + seconds
        while self.t < end:
            if self.leaderless:
                self.elect()
            self.tick()
