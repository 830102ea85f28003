"""I6, I10, I12, I13 and I15: what a job that runs has, what it has decided, and what it keeps when it has ended."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from chaos_tests.event_log import Event, Kind
from chaos_tests.streams import STREAMS
from chaos_tests.validate.replay import KeyChange, Replay, Store, Transaction, below, is_job, job_of
from chaos_tests.validate.verdict import OWN_TARGETS, Checker
from elastic_rl.etcd.job_records import ENDED_PHASES
from elastic_rl.etcd.keys import Keys

RECOVERY_S = 900.0
"""Longest that a part may be away, or an operation under way: as long as a run waits for a recovery that says no other
time (``longest_recovery_s``)."""
_JOB = Keys("j")
STATUS, SPEC, EPOCH = below(_JOB.job_status()), below(_JOB.job_spec()), below(_JOB.epoch())
MEMBERS, POOLS = below(_JOB.members_prefix()), below(_JOB.pools_prefix())
OPERATIONS, _ENGINES = below(_JOB.operations_prefix()), below(_JOB.engines_prefix())
_STREAMS, _HEAD = below(_JOB.streams_prefix()), "/head"
_SETS, _CATALOG = below(_JOB.replica_sets_prefix("")).rstrip("/") + "/", below(_JOB.dcs_catalog())
_OF_SETS = re.compile(re.escape(_SETS) + r"([^/]+)/(\d+)")
_KEPT_HEADS = {below(_JOB.stream_head(stream)): stream for stream in STREAMS}
_DAMAGES_CHUNKS = ("chunks_torn", "chunk_bits_flipped")
"""Faults that damage on purpose what is on the disk of a node: of what is lost so, another copy was used, or made."""
_LEAST_S = 30.0
"""A shortage at the end of a run that is no longer than this is none, however fast its machine is."""
_STARTS, _FOUND_S = 3.0, 140.0
"""Starts of the whole job that a recovery may take, and the time until what was lost is found: a lease, and four times
``coordinator.suspicion_s``, by which the leader stretches it where all cores are busy."""
_NONE = "there was none"
_THERE = ("ready", "released")
"""States of the engines that a pool has: released ones wait for the trainer's phase to end."""
RECOVERIES = 2
"""A time without a step, or without a part, may be as long as so many of the longest recoveries: further faults may
strike meanwhile."""


def longest_recovery_s(run: Event) -> float:
    """So long the run has waited for a recovery before it gave up, by its record: ``--recovery-minutes`` where others
    use its cluster."""
    return float(run.get("recovery_s") or RECOVERY_S)


class RecoveryBounds:
    """How long a recovery may take, and how long what is short at the end of a run may have been short. Both follow
    from what the same run took, on the same machine, to start and to come back."""

    def __init__(self) -> None:
        self._began = self._first_step = self._longest = 0.0
        self.longest_s = RECOVERY_S

    def begin(self, run: Event) -> None:
        self._began, self.longest_s = float(run.get("at", 0.0)), longest_recovery_s(run)

    def see(self, event: Event) -> None:
        """A STEP or a FAULT."""
        if event["kind"] == Kind.STEP:
            self._first_step = self._first_step or float(event["at"])
        elif event["kind"] == Kind.FAULT and event.get("healed_at") and event.get("injected_at"):
            self._longest = max(self._longest, float(event["healed_at"]) - float(event["injected_at"]))

    @property
    def seconds(self) -> float:
        """The limit in seconds; all that it would have waited for a run without a step, of which nothing is known."""
        if not self._first_step:
            return self.longest_s
        return min(self.longest_s, max(_LEAST_S, self.start_s, 2 * self._longest))

    @property
    def start_s(self) -> float:
        """The job had its first step so long after the run began: nothing that was lost needs more than all of that."""
        return max(0.0, self._first_step - self._began)

    @property
    def recovery_s(self) -> float:
        """The most that one recovery may take: others go on beside it, and what was lost is first to be found."""
        found = _FOUND_S + _STARTS * self.start_s if self._first_step else self.longest_s
        return min(self.longest_s, found)


@dataclass
class _Shortage:
    scope: str
    what: str
    how: str
    proof: Event
    since: float
    revision: int
    """The one with which it began."""
    until: float = 0.0
    ended: int | None = None
    """The revision with which it ended, if by a change of what is short; None: with its job, or not in the log."""


class _Shortages(Checker, ABC):
    """Times in which something is short, while its job runs. On a cluster of its own that is no longer than recoveries
    may take; and a run asks its job to stop when nothing is short, or when it would give up a recovery: what is short
    then has not come back."""

    reads = frozenset({Kind.FAULT, Kind.STEP, Kind.STOP})

    def __init__(self) -> None:
        super().__init__()
        self._open, self._ended = dict[tuple[str, str], _Shortage](), list[_Shortage]()
        self._over = set[str]()
        self._at, self._revision = 0.0, 0
        self._bounds, self._stop = RecoveryBounds(), dict[str, Any]()

    def begin(self, run: Event) -> None:
        super().begin(run)
        self._bounds.begin(run)

    def see(self, event: Event) -> None:
        if event["kind"] == Kind.STOP:
            self._stop = dict(event)
        else:
            self._bounds.see(event)

    def gap(self, first: int, last: int) -> None:
        self._open.clear()

    def transaction(self, found: Transaction) -> None:
        self._at, self._revision = found.at, found.revision
        for change in filter(is_job, found.changes):
            self._show(change)

    def present(self, change: KeyChange) -> None:
        self._at, self._revision = float(change.event["at"]), max(self._revision, change.revision)
        if is_job(change):
            self._show(change)

    def _show(self, change: KeyChange) -> None:
        if change.name == STATUS and change.new:
            if change.new.get("phase") in ENDED_PHASES:
                self._over.add(change.scope)
                for one in [one for one in self._open.values() if one.scope == change.scope]:
                    self._close(one)
            else:
                self._over.discard(change.scope)
        elif change.scope not in self._over:
            self.of_job(change)

    @abstractmethod
    def of_job(self, change: KeyChange) -> None:
        """A change in a job that is not over."""

    def short(self) -> list[str]:
        """What is short now."""
        return [f"{one.what}: {one.how}" for one in self._open.values()]

    def _is(self, change: KeyChange, what: str, how: str) -> None:
        self._is_in(change.scope, change.event, what, how)

    def _is_in(self, scope: str, proof: Event, what: str, how: str) -> None:
        """``how``: how it is short; "" where it is not."""
        one = self._open.get((scope, what))
        if how and one is None:
            self._open[scope, what] = _Shortage(scope, what, how, proof, self._at, self._revision)
        elif one is not None and not how:
            one.ended = self._revision
            self._close(one)

    def _close(self, one: _Shortage) -> None:
        one.until = self._at
        del self._open[one.scope, one.what]
        if one.ended is None or self._gave_up(one) or self.run.get("target") in OWN_TARGETS:
            self._ended.append(one)

    def finish(self, end: Event | None) -> None:
        super().finish(end)
        for one in [*self._open.values()]:
            self._close(one)
        for one in self._ended:
            if (why := self._why_violated(one)) is not None:
                self.violated(f"{one.what} was short for {one.until - one.since:.0f} s{why}: {one.how}", one.proof)

    def _gave_up(self, one: _Shortage) -> bool:
        """Whether it lasted longer than a run waits for a recovery."""
        return one.until - one.since > self._bounds.longest_s

    def _why_violated(self, one: _Shortage) -> str | None:
        """How the sentence about its duration goes on, where it breaks the rule; else None."""
        if self._gave_up(one):
            return ""
        if self.run.get("target") not in OWN_TARGETS:
            return None
        if one.until - one.since > RECOVERIES * self._bounds.recovery_s:
            return f", and the whole job had its first step after {self._bounds.start_s:.0f} s"
        if self.end is None or self.end.get("aborted"):
            return None
        if self._stop:
            asked = int(self._stop["revision"])
            if one.revision <= asked and (one.ended is None or one.ended > asked):
                return ", when the run asked the job to stop"
        elif one.ended is None and one.until - one.since > self._bounds.seconds:
            return f", until the job ended, and it took {self._bounds.seconds:.0f} s at most before"
        return None


class PoolSizes(_Shortages):
    """A pool has its engines by what it says itself, and by their own records: where all of those were seen, the fewer
    of both count. Each is written a moment after the other."""

    rule = "I6"
    keys = (STATUS, POOLS, _ENGINES)
    judges = "sizes of pools"

    def __init__(self) -> None:
        super().__init__()
        self._desired, self._said = dict[tuple[str, str], int](), dict[tuple[str, str], int]()
        self._store = Store()
        self._has_records = set[tuple[str, str]]()
        """Pools with an engine that has a record. What stands in the place of a job may have none."""

    def gap(self, first: int, last: int) -> None:
        super().gap(first, last)
        self._desired.clear()
        self._said.clear()
        self._has_records.clear()
        self._store = Store()

    def transaction(self, found: Transaction) -> None:
        self._store = found.after
        super().transaction(found)

    def of_job(self, change: KeyChange) -> None:
        if change.name.startswith(_ENGINES):
            pools = {str(record["pool"]) for record in (change.old, change.new) if record.get("pool")}
            if self._store.whole:
                self._has_records.update((change.scope, pool) for pool in pools)
        elif change.name.startswith(POOLS) and change.new:
            pool, _, what = change.name.removeprefix(POOLS).partition("/")
            pools = {pool}
            if what == "spec":
                self._desired[change.scope, pool] = int(change.new.get("desired", 0))
            elif what == "status":
                self._said[change.scope, pool] = sum(int(change.new.get(state, 0)) for state in _THERE)
        else:
            return
        for pool in pools:
            self._judge(change, pool)

    def _judge(self, change: KeyChange, pool: str) -> None:
        of = (change.scope, pool)
        if of not in self._desired or of not in self._said:
            return
        desired, said = self._desired[of], self._said[of]
        self.judged += 1
        how = f"{said} of {desired} engines" if said < desired else ""
        if not how and of in self._has_records and (there := self._by_records(change.scope, pool)) < desired:
            how = f"{there} of {desired} engines by their own records, and {said} by the record of the pool"
        self._is(change, f"pool {pool}", how)

    def _by_records(self, scope: str, pool: str) -> int:
        """The engines of a pool that say themselves that they are ready, or released, without those that others run."""
        records = map(self._store.get, self._store.under(scope + _ENGINES))
        return sum(record.get("pool") == pool and record.get("state") in _THERE and not record.get("external")
                   for record in records)


class Singletons(_Shortages):
    """A job that runs has a driver, an actor and a trainer, and its cluster a coordinator."""

    rule = "I12"
    keys = (STATUS, MEMBERS)
    lacks = "the log has no members of a job"
    _ROLES: ClassVar[tuple[str, ...]] = ("driver", "actor", "trainer", "coordinator")

    def __init__(self) -> None:
        super().__init__()
        self._members = dict[tuple[str, str], set[str]]()
        self._losses = 0
        self._before_gap = set[tuple[str, str]]()
        """Roles of jobs that had members at any time before."""

    def gap(self, first: int, last: int) -> None:
        super().gap(first, last)
        self._before_gap |= self._members.keys()
        self._members.clear()

    def listed(self, listing: Event) -> None:
        self._at = float(listing["at"])
        for scope, role in sorted(self._before_gap - self._members.keys()):
            if scope not in self._over:
                self._members[scope, role] = set()
                self._is_in(scope, listing, self._what(scope, role), _NONE)

    def of_job(self, change: KeyChange) -> None:
        role, _, name = change.name.removeprefix(MEMBERS).partition("/")
        if not change.name.startswith(MEMBERS) or role not in self._ROLES:
            return
        members = self._members.setdefault((change.scope, role), set())
        if change.put:
            members.add(name)
        elif name not in members:
            return  # nothing is known of the others that were there with it
        else:
            members.discard(name)
            self._losses += 1
        self.judged += 1
        self._is(change, self._what(change.scope, role), "" if members else _NONE)

    @staticmethod
    def _what(scope: str, role: str) -> str:
        return f"the {role} of {job_of(scope)}"

    def evidence(self) -> str:
        roles = ", ".join(sorted({role for _, role in self._members}))
        return f"{roles}: {self._losses} members lost" if self.judged else ""


class OpenOperations(_Shortages):
    """An operation of the API ends in a bounded time."""

    rule = "I10"
    keys = (STATUS, OPERATIONS)
    judges = "operations of the API"

    def of_job(self, change: KeyChange) -> None:
        if change.name.startswith(OPERATIONS):
            self.judged += change.created
            running = change.new.get("state") == "running"
            self._is(change, f"the operation {change.name.removeprefix(OPERATIONS)}",
                     "it is under way" if running else "")


class Presence:
    """What is short of the jobs of a cluster now, by the changes of etcd that were seen so far: for a run that waits
    for what its faults have taken to come back."""

    def __init__(self) -> None:
        self._checkers = (PoolSizes(), Singletons(), OpenOperations())
        self._keys = tuple({key for checker in self._checkers for key in checker.keys})
        self._replay = Replay(self._checkers)
        self.revision = 0
        """The newest one that was seen."""

    def see(self, change: Event) -> None:
        # By the first change of all the replay knows whether it sees a cluster from its start.
        if not self.revision or below(str(change["key"])).startswith(self._keys):
            self._replay.change(change)
        if change["revision"] > self.revision:
            self.revision = int(change["revision"])

    def gap(self, gap: Event) -> None:
        self._replay.gap(gap)

    def present(self, found: Event) -> None:
        self._replay.present(found)

    def short(self) -> list[str]:
        self._replay.flush()
        return [what for checker in self._checkers for what in checker.short()]


class Decisions(Checker):
    """What a job has decided is not changed; and, at the end of a run, it is refused to whoever would resume it with
    another seed, by an error that names it."""

    rule = "I13"
    keys = (SPEC,)
    lacks = "the log has no decision of a job that somebody tried to change"

    def __init__(self) -> None:
        super().__init__()
        self._decided = dict[str, KeyChange]()

    def transaction(self, found: Transaction) -> None:
        for change in found.changes:
            if change.name == SPEC and is_job(change):
                self.judged += 1
                before = self._decided.setdefault(change.job, change)
                if change.new.get("settings") != before.new.get("settings"):
                    self.violated(f"{change.at()}: what {change.job} had decided was changed",
                                  before.event, change.event)

    def finish(self, end: Event | None) -> None:
        super().finish(end)
        refused = (end or {}).get("refused")
        if end is not None and refused == "":
            self.violated("the job might have been resumed with another seed than it had decided", end)
        elif end is not None and refused is not None and "seed" not in refused:
            self.violated(f"an error that refused another seed does not name it: {refused}", end)

    def evidence(self) -> str:
        decisions = f"the decisions of {', '.join(sorted(self._decided))}" if self._decided else ""
        if "refused" not in (self.end or {}):
            return f"{decisions}, which nobody tried to change" if decisions else ""
        return f"{decisions or 'the job'}; another seed was refused" if (self.end or {}).get("refused") else ""


class KeptAfterStop(Checker):
    """A job that has ended keeps what it is resumed and exported from: its records in etcd, and on its disk its
    settings, the records of its steps and the heads of its streams, once its cluster is down."""

    rule = "I15"
    reads = frozenset({Kind.FAULT, Kind.STEP})
    keys = (SPEC, STATUS, EPOCH, _STREAMS, _SETS, _CATALOG)
    lacks = "the job did not end within the log, or nobody looked at what was kept of it"

    def __init__(self) -> None:
        super().__init__()
        self._ended, self._seen = dict[str, Event](), set[str]()
        self._steps, self._heads = set[int](), dict[str, int]()
        """Steps with a record, and the heads of the streams in etcd."""
        self._damaged_until = -math.inf
        """Of versions that were begun before, a fault has damaged chunks."""
        self._whole = 0

    def see(self, event: Event) -> None:
        if event["kind"] == Kind.STEP:
            self._steps.add(int(event["step"]))
        elif event["name"] in _DAMAGES_CHUNKS and event.get("injected_at") is not None:
            healed = event.get("healed_at")
            self._damaged_until = max(self._damaged_until, math.inf if healed is None else float(healed))

    def gap(self, first: int, last: int) -> None:
        self._ended.clear()
        self._heads.clear()

    def transaction(self, found: Transaction) -> None:
        for change in filter(is_job, found.changes):
            if change.name in _KEPT_HEADS and change.job == self.settings.get("job"):
                self._heads[_KEPT_HEADS[change.name]] = int(change.new.get("number") or 0)
            if change.name == STATUS and change.new:
                if change.new.get("phase") in ENDED_PHASES:
                    self._ended[change.job] = change.event
                    self._seen.add(change.job)
                else:
                    self._ended.pop(change.job, None)
            if change.job in self._ended and not change.put and self._is_kept(found, change):
                self.violated(f"{change.at()} was deleted after the job had ended",
                              self._ended[change.job], change.event)

    @staticmethod
    def _is_kept(found: Transaction, change: KeyChange) -> bool:
        """Whether a key is what a job is resumed and exported from. I3 is about the records of versions; of where their
        parts are, what is about a head is kept, and others may be released by what was under way."""
        name = change.name
        if name in (SPEC, STATUS, EPOCH, _CATALOG) or name.startswith(_STREAMS) and name.endswith(_HEAD):
            return True
        if (match := _OF_SETS.fullmatch(change.name)) is None:
            return False
        head = f"{change.scope}{_STREAMS}{match[1]}{_HEAD}"
        return int(match[2]) in (found.after.get(head).get("number"), found.before(head).get("number"))

    def finish(self, end: Event | None) -> None:
        super().finish(end)
        if end is None or (kept := end.get("kept")) is None:
            return
        for what in kept["lacks"]:
            self.violated(f"what the job keeps on disk: {what}", end)
        if kept["steps"] < len(self._steps):
            self.violated(f"the job has kept the records of {kept['steps']} steps, and had written those of "
                          f"{len(self._steps)}", end)
        if kept["versions"] is None:
            return
        there = {version["stream"]: version for version in kept["versions"]}
        for stream, number in self._heads.items():
            if number and stream not in there:
                self.violated(f"etcd has no head of {stream} any more, which was version {number}", end)
        for stream, version in there.items():
            if version["created_at"] <= self._damaged_until:
                continue
            self._whole += not version["lost"]
            if version["lost"]:
                self.violated(f"version {version['number']} of {stream}, the head, has {version['lost']} of "
                              f"{version['chunks']} chunks that are not whole on disk", end)

    def evidence(self) -> str:
        of_jobs = f"what is kept of {', '.join(sorted(self._seen))}" if self._seen else ""
        if not of_jobs or "kept" not in (self.end or {}):
            return of_jobs
        kept = (self.end or {})["kept"]
        return f"{of_jobs}; the records of {kept['steps']} steps and {self._whole} heads whole on disk" if kept else ""


CHECKERS: tuple[type[Checker], ...] = (PoolSizes, Singletons, OpenOperations, Decisions, KeptAfterStop)
