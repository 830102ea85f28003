"""Checkers of what the independent observer saw in etcd: fencing, versions, engines, pools, singletons, decisions.

They replay the changes transaction by transaction: those of one revision belong together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

from chaos_tests.event_log import Event, Kind
from chaos_tests.observation import Change
from chaos_tests.validate import leadership
from chaos_tests.validate.verdict import Fold, Violation
from elastic_rl.etcd.job_records import ENDED_PHASES
from elastic_rl.etcd.keys import ROOT, Keys
from elastic_rl.etcd.records import EngineState, OperationState, VersionState

RECOVERY_S = 900.0
"""Longest that a part may be away, or an operation under way: as long as the injector waits for a recovery."""
_FIRST_REVISION = 100
"""A history that begins before this revision is that of a cluster from its start."""
_JOB = Keys("")
_NO_CHANGES = "the log has no changes of etcd"


def _of_job(key: str) -> str:
    """A key of a job without the job."""
    return key.removeprefix(_JOB.root)


EPOCH, DRIVER, TERM, STATUS, SPEC, LEADERSHIP, LEADER_HEARTBEAT = map(_of_job, (
    _JOB.epoch(), _JOB.driver(), _JOB.actor_term(), _JOB.job_status(), _JOB.job_spec(), _JOB.leadership(),
    _JOB.leader_heartbeat()))
ENGINES, MEMBERS, POOLS, OPERATIONS = map(_of_job, (
    _JOB.engines_prefix(), _JOB.members_prefix(), _JOB.pools_prefix(), _JOB.operations_prefix()))
_STREAMS, _VERSIONS, _HEAD, _REPLICAS = "dcs/streams/", "versions", "head", "/dcs/replica_sets/"


def split(key: str) -> tuple[str, str]:
    """The job of a key, and the rest of the key; ("", "") for one that is of no job."""
    job, _, rest = key.removeprefix(f"{ROOT}/").partition("/")
    return ("", "") if job.startswith("_") else (job, rest)


@lru_cache(maxsize=16)
def _decoded(value: str) -> Any:
    return json.loads(value)


def value_of(change: Event) -> Mapping[str, Any]:
    """The record that a change has put; {} where it is none, or was deleted."""
    try:
        found = _decoded(change["value"]) if change["put"] else {}
    except ValueError:
        return {}
    return found if isinstance(found, Mapping) else {}


def number_of(change: Event) -> int | None:
    """The number of the record that a change has put: a fencing token."""
    found = value_of(change).get("number")
    return found if isinstance(found, int) else None


class StoreFold(Fold):
    """Sees the changes in transactions."""

    reads: ClassVar[frozenset[Kind]] = frozenset({Kind.CHANGE})
    lacks: ClassVar[str] = _NO_CHANGES

    def __init__(self) -> None:
        super().__init__()
        self.changes, self.first_revision = 0, 0
        self._batch = list[Event]()

    def see(self, event: Event) -> None:
        if self._batch and self._batch[0]["revision"] != event["revision"]:
            self._apply()
        self._batch.append(event)

    def finish(self, end: Event | None) -> None:
        self._apply()
        super().finish(end)

    @property
    def from_the_start(self) -> bool:
        """Whether the history is that of a cluster from its start."""
        return 0 < self.first_revision < _FIRST_REVISION

    def _apply(self) -> None:
        if not self._batch:
            return
        batch, self._batch = self._batch, []
        self.first_revision = self.first_revision or batch[0]["revision"]
        self.changes += len(batch)
        self.transaction(batch)

    def transaction(self, batch: Sequence[Event]) -> None:
        raise NotImplementedError


# -- I1 ----------------------------------------------------------------------------------------------------------------
class FencingNumbers(StoreFold):
    """Fencing tokens only grow, and what says by which it was written has the newest."""

    rule = "I1"

    def __init__(self) -> None:
        super().__init__()
        self._newest = dict[tuple[str, str], tuple[int, Event]]()
        self._taken = self._guarded = 0

    def transaction(self, batch: Sequence[Event]) -> None:
        for change in batch:
            job, rest = split(change["key"])
            if rest in (EPOCH, DRIVER, TERM):
                self._token(job, rest, number_of(change), change)
            elif rest == LEADERSHIP and change["put"]:
                self._token(job, rest, value_of(change).get("term"), change)
        for change in batch:
            job, rest = split(change["key"])
            if rest == LEADER_HEARTBEAT and change["put"]:
                self._written_by(job, LEADERSHIP, value_of(change).get("term"), change)
            elif rest.startswith(_STREAMS) and f"/{_VERSIONS}/" in rest and _is_new(change):
                self._written_by(job, EPOCH, value_of(change).get("epoch"), change)

    def _token(self, job: str, name: str, number: int | None, change: Event) -> None:
        before, proof = self._newest.get((job, name), (0, change))
        if number is None:
            if not change["put"] and before:
                self.violated(f"{change['revision']}: {change['key']} was deleted: its numbers begin again", change)
            return
        self._taken += number > before
        if number < before:
            self.violated(f"{change['revision']}: {change['key']} went from {before} back to {number}", proof, change)
        self._newest[job, name] = max(number, before), change

    def _written_by(self, job: str, name: str, number: int | None, change: Event) -> None:
        newest, proof = self._newest.get((job, name), (0, change))
        if not newest or number is None:
            return
        self._guarded += 1
        if number < newest:
            self.violated(f"{change['revision']}: {change['key']} was written by {name} {number}, when {newest} had "
                          "begun", proof, change)

    def evidence(self) -> str:
        return f"{self._taken} fencing tokens taken, {self._guarded} writes that name theirs" if self._taken else ""


def _is_new(change: Event) -> bool:
    return bool(change["put"]) and change["create"] == change["revision"]


def stale_leaders(events: Iterable[Event]) -> Iterator[Violation]:
    """I1 by the replay of the election: what was written as the leader, was written while it led. Of a history that
    does not begin with its cluster the leader at its begin is not known, and nothing is said."""
    cluster, by_job = "", dict[str, list[Change]]()
    of_cluster, proofs, first = list[Change](), dict[int, Event](), 0
    for event in events:
        if event["kind"] == Kind.RUN:
            cluster = str((event.get("settings") or {}).get("cluster") or "")
        if event["kind"] != Kind.CHANGE:
            continue
        first = first or event["revision"]
        job, rest = split(event["key"])
        elected = not job and "/leader/" in event["key"]
        if not elected and rest != LEADERSHIP and not rest.startswith(("events/", POOLS)):
            continue
        change = Change(*(event[name] for name in ("revision", "put", "key", "create", "value")))
        proofs[change.revision] = event
        if elected:
            cluster = cluster or event["key"].removeprefix(f"{ROOT}/_clusters/").partition("/")[0]
            of_cluster.append(change)
        else:
            by_job.setdefault(job, []).append(change)
    if not 0 < first < _FIRST_REVISION:
        return
    for job, changes in by_job.items():
        together = sorted([*changes, *of_cluster], key=lambda change: change.revision)
        for fault in leadership.check(together, Keys(job), cluster=cluster).faults:
            proof = proofs.get(int(fault.partition(":")[0])) if fault.partition(":")[0].isdigit() else None
            yield Violation("I1", fault, (proof,) if proof is not None else ())


# -- I2, I3 ------------------------------------------------------------------------------------------------------------
@dataclass
class _Stream:
    head: int = 0
    numbers: int = 0
    """The highest that was taken."""
    states: dict[int, str] = field(default_factory=dict)
    manifests: dict[int, str] = field(default_factory=dict)
    """Of those that are committed."""


class _Streams(StoreFold):
    """The catalog of versions, as it is after each transaction."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = dict[tuple[str, str], _Stream]()

    def of(self, change: Event) -> tuple[_Stream, str, int] | None:
        """The stream of a change, which of its keys it is, and the number of the version where it is one's."""
        job, rest = split(change["key"])
        if not rest.startswith(_STREAMS):
            return None
        stream, _, what = rest.removeprefix(_STREAMS).partition("/")
        kind, _, number = what.partition("/")
        found = self.streams.setdefault((job, stream), _Stream())
        return found, kind, int(number) if number.isdigit() else 0


class CompleteVersions(_Streams):
    """What is visible, as the head of a stream or as the version that a ready engine serves, is committed."""

    rule = "I2"

    def __init__(self) -> None:
        super().__init__()
        self._visible = self._served = 0
        self._engines = dict[str, int]()

    def transaction(self, batch: Sequence[Event]) -> None:
        heads, stored = list[tuple[_Stream, Event]](), self._stored(batch)
        for change in batch:
            if (of := self.of(change)) is None:
                continue
            stream, kind, number = of
            if kind == _VERSIONS and change["put"]:
                before = stream.states.get(number)
                stream.states[number] = state = str(value_of(change).get("state"))
                name = change["key"].rpartition(f"/{_STREAMS}")[2].replace(f"/{_VERSIONS}/", "/")
                if before == VersionState.STAGING and state == VersionState.COMMITTED and name not in stored:
                    self.violated(f"{change['revision']}: {change['key']} was committed without a replica of each of "
                                  "its parts", change)
            elif kind == _VERSIONS:
                stream.states.pop(number, None)
            elif kind == _HEAD and change["put"]:
                heads.append((stream, change))
        for stream, change in heads:
            record = value_of(change)
            number, known = int(record.get("number", 0)), self.from_the_start
            self._visible += 1
            state = stream.states.get(number, VersionState.COMMITTED if not known else "absent")
            if not record.get("manifest") or record.get("state") != VersionState.COMMITTED or (
                    state != VersionState.COMMITTED):
                self.violated(f"{change['revision']}: {change['key']} shows version {number}, which is {state}"
                              f"{'' if record.get('manifest') else ' and has no manifest'}", change)
            stream.head = max(stream.head, number)
        for change in batch:
            self._engine(change)

    @staticmethod
    def _stored(batch: Sequence[Event]) -> set[str]:
        """Versions whose parts each have a node that holds them, as ``stream/number``."""
        return {change["key"].rpartition(_REPLICAS)[2] for change in batch if _REPLICAS in change["key"]
                and (parts := value_of(change).get("parts")) and all(parts)}

    def _engine(self, change: Event) -> None:
        job, rest = split(change["key"])
        record = value_of(change)
        if not rest.startswith(ENGINES) or record.get("state") != EngineState.READY or not record.get("version"):
            return
        version = int(record["version"])
        if self._engines.get(change["key"]) == version:
            return
        self._engines[change["key"]] = version
        stream = self.streams.get((job, "policy"))
        if stream is None or not stream.head:
            return  # it serves a folder, or the history begins later
        self._served += 1
        if version > stream.head:
            self.violated(f"{change['revision']}: engine {record.get('id')} serves version {version}, and the newest "
                          f"one is {stream.head}", change)

    def evidence(self) -> str:
        return f"{self._visible} versions became visible, {self._served} were served" if self._visible else ""


class VersionNumbers(_Streams):
    """Numbers only grow, a committed version stays as it is, and it goes only through its release."""

    rule = "I3"
    _NEXT: ClassVar[Mapping[str, frozenset[str]]] = {
        VersionState.STAGING: frozenset({VersionState.STAGING, VersionState.COMMITTED, VersionState.ABORTED}),
        VersionState.COMMITTED: frozenset({VersionState.COMMITTED, VersionState.RELEASING, VersionState.GONE}),
        VersionState.RELEASING: frozenset({VersionState.RELEASING, VersionState.GONE, VersionState.COMMITTED}),
        VersionState.GONE: frozenset({VersionState.GONE, ""}),
        VersionState.ABORTED: frozenset({VersionState.ABORTED, ""})}
    """"": the record is deleted."""

    def __init__(self) -> None:
        super().__init__()
        self._taken = self._committed = 0

    def transaction(self, batch: Sequence[Event]) -> None:
        for change in batch:
            if (of := self.of(change)) is None:
                continue
            stream, kind, number = of
            if kind == _VERSIONS:
                self._version(stream, number, change)
            elif kind == _HEAD:
                head = int(value_of(change).get("number", 0)) if change["put"] else 0
                if head < stream.head:
                    self.violated(f"{change['revision']}: {change['key']} went from {stream.head} back to {head}",
                                  change)
                stream.head = head

    def _version(self, stream: _Stream, number: int, change: Event) -> None:
        record, at, key = value_of(change), change["revision"], change["key"]
        state, before = str(record.get("state", "")), stream.states.get(number)
        if _is_new(change):
            if number <= stream.numbers:
                self.violated(f"{at}: {key} takes a number that was used; the last one was {stream.numbers}", change)
            stream.numbers = max(stream.numbers, number)
            self._taken += 1
        elif before is not None and state not in self._NEXT.get(before, frozenset({state})):
            self.violated(f"{at}: {key} went from {before} to {state or 'nothing'}", change)
        if state == VersionState.COMMITTED:
            self._committed += before != VersionState.COMMITTED
            manifest = str(record.get("manifest", ""))
            if stream.manifests.setdefault(number, manifest) != manifest:
                self.violated(f"{at}: {key} was committed with manifest {stream.manifests[number]}, and has {manifest}",
                              change)
        else:
            stream.manifests.pop(number, None)
        if change["put"]:
            stream.states[number] = state
        else:
            stream.states.pop(number, None)

    def finish(self, end: Event | None) -> None:
        super().finish(end)
        for (job, name), stream in self.streams.items():
            if stream.head and stream.states.get(stream.head, VersionState.COMMITTED) != VersionState.COMMITTED:
                self.violated(f"version {stream.head} is the head of the stream {name} of {job}, and is "
                              f"{stream.states[stream.head]}")

    def evidence(self) -> str:
        return f"{self._taken} numbers of versions taken, {self._committed} committed" if self._taken else ""


# -- I6, I12 -----------------------------------------------------------------------------------------------------------
class _Running(StoreFold):
    """Times in which something is short, while its job runs."""

    def __init__(self) -> None:
        super().__init__()
        self._since = dict[tuple[str, str], Event]()
        self._short = dict[tuple[str, str], str]()
        self._over = set[str]()
        self._last: Event = {}

    def transaction(self, batch: Sequence[Event]) -> None:
        self._last = batch[-1]
        for change in batch:
            job, rest = split(change["key"])
            if rest == STATUS and change["put"]:
                if value_of(change).get("phase") in ENDED_PHASES:
                    self._over.add(job)
                    for one in [key for key in self._since if key[0] == job]:
                        self._whole(*one, change)
                else:
                    self._over.discard(job)
            elif job and job not in self._over:
                self.job_change(job, rest, change)

    def job_change(self, job: str, rest: str, change: Event) -> None:
        raise NotImplementedError

    def _is(self, job: str, what: str, short: str, change: Event) -> None:
        """``short``: how it is short; "" where it is not."""
        if not short:
            self._whole(job, what, change)
        elif (job, what) not in self._since:
            self._since[job, what], self._short[job, what] = change, short

    def _whole(self, job: str, what: str, change: Event) -> None:
        since = self._since.pop((job, what), None)
        if since is not None and change["at"] - since["at"] > RECOVERY_S:
            self.violated(f"{what} was short for {change['at'] - since['at']:.0f} s: {self._short[job, what]}", since,
                          change)

    def finish(self, end: Event | None) -> None:
        super().finish(end)
        for job, what in [*self._since]:
            self._whole(job, what, self._last)


class PoolSizes(_Running):
    rule = "I6"

    def __init__(self) -> None:
        super().__init__()
        self._desired, self._ready = dict[tuple[str, str], int](), dict[tuple[str, str], int]()
        self._shortages = 0

    def job_change(self, job: str, rest: str, change: Event) -> None:
        if not rest.startswith(POOLS) or not change["put"]:
            return
        pool, _, what = rest.removeprefix(POOLS).partition("/")
        record = value_of(change)
        if what == "spec":
            self._desired[job, pool] = int(record.get("desired", 0))
        elif what == "status":  # released engines are there, and wait for the trainer's phase to end
            self._ready[job, pool] = int(record.get("ready", 0)) + int(record.get("released", 0))
        if (job, pool) in self._desired and (job, pool) in self._ready:
            desired, ready = self._desired[job, pool], self._ready[job, pool]
            before = len(self._since)
            self._is(job, f"pool {pool}", f"{ready} of {desired} engines" if ready < desired else "", change)
            self._shortages += len(self._since) > before

    def evidence(self) -> str:
        return f"{len(self._ready)} pools, short of engines {self._shortages} times" if self._ready else ""


class Singletons(_Running):
    """A job that runs has a driver, an actor and a trainer, and its cluster a coordinator."""

    rule = "I12"
    _ROLES = ("driver", "actor", "trainer", "coordinator")

    def __init__(self) -> None:
        super().__init__()
        self._members = dict[tuple[str, str], set[str]]()
        self._losses = 0

    def job_change(self, job: str, rest: str, change: Event) -> None:
        role, _, name = rest.removeprefix(MEMBERS).partition("/")
        if not rest.startswith(MEMBERS) or role not in self._ROLES:
            return
        members = self._members.setdefault((job, role), set())
        if change["put"]:
            members.add(name)
        else:
            members.discard(name)
            self._losses += 1
        self._is(job, f"the {role} of {job}", "" if members else "there was none", change)

    def evidence(self) -> str:
        return (f"{', '.join(sorted({role for _, role in self._members}))}: {self._losses} members lost"
                if self._members else "")


# -- I10, I13, I15 -----------------------------------------------------------------------------------------------------
class EndedOperations(StoreFold):
    """A request of the API that takes a while ends, well or not."""

    rule = "I10"

    def __init__(self) -> None:
        super().__init__()
        self._open, self._seen, self._last_at = dict[str, Event](), 0, 0.0

    def transaction(self, batch: Sequence[Event]) -> None:
        for change in batch:
            self._last_at = change["at"]
            job, rest = split(change["key"])
            if not job or not rest.startswith(OPERATIONS):
                continue
            if change["put"] and value_of(change).get("state") == OperationState.RUNNING:
                self._seen += change["key"] not in self._open
                self._open.setdefault(change["key"], change)
            else:
                self._open.pop(change["key"], None)

    def finish(self, end: Event | None) -> None:
        super().finish(end)
        for key, change in self._open.items():
            if self._last_at - change["at"] > RECOVERY_S:
                self.violated(f"{key} is under way since {self._last_at - change['at']:.0f} s", change)

    def evidence(self) -> str:
        return f"{self._seen} operations of the API" if self._seen else ""


class Decisions(StoreFold):
    rule = "I13"
    lacks = "the log has no decision of a job: it was begun before"

    def __init__(self) -> None:
        super().__init__()
        self._decided = dict[str, Event]()

    def transaction(self, batch: Sequence[Event]) -> None:
        for change in batch:
            job, rest = split(change["key"])
            if rest != SPEC:
                continue
            before = self._decided.get(job)
            if before is None:
                self._decided[job] = change
            elif value_of(change).get("settings") != value_of(before).get("settings"):
                self.violated(f"{change['revision']}: what {job} had decided was changed", before, change)

    def evidence(self) -> str:
        return f"the decisions of {', '.join(sorted(self._decided))}" if self._decided else ""


class KeptAfterStop(StoreFold):
    """A job that has ended keeps what it is resumed and exported from."""

    rule = "I15"
    lacks = "the job did not end within the log"
    _KEPT = (SPEC, STATUS, EPOCH)

    def __init__(self) -> None:
        super().__init__()
        self._ended = dict[str, Event]()

    def transaction(self, batch: Sequence[Event]) -> None:
        for change in batch:
            job, rest = split(change["key"])
            if rest == STATUS and value_of(change).get("phase") in ENDED_PHASES:
                self._ended[job] = change
            head = rest.startswith(_STREAMS) and rest.endswith(f"/{_HEAD}")
            if job in self._ended and not change["put"] and (rest in self._KEPT or head):
                self.violated(f"{change['revision']}: {change['key']} was deleted after the job had ended",
                              self._ended[job], change)

    def evidence(self) -> str:
        return f"what is kept of {', '.join(sorted(self._ended))}" if self._ended else ""


