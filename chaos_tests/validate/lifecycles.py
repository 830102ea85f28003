"""I1, I4, I9, I10 and I11 of what has states: engines, operations, jobs and alerts go through them in the ways that
there are."""

from __future__ import annotations

from typing import ClassVar

from chaos_tests.validate.replay import KeyChange, Lifecycle, Transaction, below
from chaos_tests.validate.verdict import Checker
from elastic_rl.etcd.keys import ClusterKeys, Keys

_JOB, _CLUSTER = Keys("j"), ClusterKeys("c")
_ENGINES, _OPERATIONS = below(_JOB.engines_prefix()), below(_JOB.operations_prefix())
_IDEMPOTENCY, _ALERTS = below(_JOB.idempotency_prefix()), below(_JOB.alerts_prefix())
_POOLS, _STREAMS, _EPOCH = below(_JOB.pools_prefix()), below(_JOB.streams_prefix()), below(_JOB.epoch())
_JOB_STATES = below(_CLUSTER.job_states_prefix())

_ENDS = frozenset({"quarantined", "dead"})
ENGINE = {
    "starting": frozenset({"syncing", "released", "draining"}) | _ENDS,
    "syncing": frozenset({"ready", "released", "draining"}) | _ENDS,
    "ready": frozenset({"syncing", "draining"}) | _ENDS,
    "released": frozenset({"starting", "syncing", "draining"}) | _ENDS,
    "draining": _ENDS,
    "quarantined": frozenset({"dead"}),
}
"""States of an engine; the leader and the driver ask for DRAINING and QUARANTINED in any state. There is no way into
READY but from SYNCING, and none out of an end into work."""
_ENDED = frozenset({"finished", "failed", "stopped"})


class Engines(Lifecycle):
    """An engine goes through its states in the ways that there are; of each runner anew."""

    rule, keys, judges = "I4", (_ENGINES,), "states of engines"
    state, allowed = "state", ENGINE
    first = frozenset({"starting", "syncing", "released", "draining"}) | _ENDS

    def same(self, change: KeyChange) -> bool:
        return _same_runner(change)


def _same_runner(change: KeyChange) -> bool:
    return change.old.get("incarnation") == change.new.get("incarnation")


class Routable(Checker):
    """An engine becomes READY only with a version that was verified in it and while none is being applied, in the
    present epoch; what it has is a version that was committed, and that its record said before was being applied; and
    it never goes back to an older one."""

    rule = "I4"
    keys = (_ENGINES, _STREAMS)
    judges = "versions in engines"

    def __init__(self) -> None:
        super().__init__()
        self._newest, self._heads = dict[str, tuple[str, int]](), dict[str, int]()
        """By the engine's key: its runner, and the newest version that it had. By the head's key: the newest one."""
        self._doubted = set[str]()
        """Keys of engines whose version broke a rule: the next change of it may be a consequence."""

    def gap(self, first: int, last: int) -> None:
        self._heads.clear()

    def transaction(self, found: Transaction) -> None:
        for change in found.changes:
            if change.name.startswith(_STREAMS) and change.name.endswith("/head") and change.new:
                self._heads[change.key] = max(int(change.new.get("number", 0)), self._heads.get(change.key, 0))
        for change in found.changes:
            if not change.name.startswith(_ENGINES):
                continue
            if not change.put:
                self._newest.pop(change.key, None)
            elif change.new:
                self._engine(found, change)

    def _engine(self, found: Transaction, change: KeyChange) -> None:
        new, version, runner = change.new, int(change.new.get("version", 0)), change.new.get("incarnation", "")
        before, newest = self._newest.get(change.key, (runner, 0))
        newest = newest if before == runner else 0
        self.judged += bool(version)
        spec = found.after.get(f"{change.scope}{_POOLS}{new.get('pool', '')}/spec")
        stream = spec.get("stream", "policy")
        head = self._heads.get(f"{change.scope}{_STREAMS}{stream}/head") if spec and stream else None
        ahead = head is not None and version > max(head, newest)
        if change.old.get("version") == version and before == runner:
            pass  # it was judged when it came
        elif why := self._why_wrong(change, version, newest, head if ahead else None):
            if change.key not in self._doubted:
                self.violated(f"{change.at()} {why}", change.event)
            self._doubted ^= {change.key}
        else:
            self._doubted.discard(change.key)
        self._newest[change.key] = (runner, newest if ahead else max(version, newest))
        self._becomes_ready(found, change, version)

    def _why_wrong(self, change: KeyChange, version: int, newest: int, head: int | None) -> str:
        """Why an engine may not have a version that it had not before; "" where it may. ``head``: that of the stream,
        where the version is ahead of it."""
        if not version:
            return ""
        if version < newest:
            return f"went back from version {newest} to {version}"
        if head is not None:
            return f"has version {version}, and the head is {head}"
        applying = change.old.get("applying", 0)
        if change.old and _same_runner(change) and not change.new.get("external") and applying != version:
            return f"has version {version}, and version {applying} was being applied"
        return ""

    def _becomes_ready(self, found: Transaction, change: KeyChange, version: int) -> None:
        new = change.new
        if new.get("state") != "ready" or not change.created and change.old.get("state") != "syncing":
            return  # from another state it does not become ready, which ``Engines`` judges
        epoch = found.before(change.scope + _EPOCH).get("number")
        if not version or new.get("applying"):
            self.violated(f"{change.at()} became ready with version {version} while version "
                          f"{new.get('applying', 0)} was being applied", change.event)
        if epoch is not None and new["epoch"] != epoch:
            self.violated(f"{change.at()} of epoch {new['epoch']} became ready in epoch {epoch}",
                          change.event, rule="I1")


class Operations(Lifecycle):
    """An operation runs until it has ended; an end is final, and none is deleted before."""

    rule, keys, judges = "I10", (_OPERATIONS,), "states of operations of the API"
    state, first = "state", frozenset({"running"})
    allowed: ClassVar = {"running": frozenset({"succeeded", "failed", "cancelled"})}

    def also(self, found: Transaction, change: KeyChange) -> None:
        if not change.put and change.old.get("state") == "running":
            self.violated(f"{change.at()} was deleted while it ran", change.event)


class Idempotency(Checker):
    """What a request with an Idempotency-Key has created stays its answer."""

    rule = "I1"
    keys = (_IDEMPOTENCY,)
    judges = "answers of requests with an Idempotency-Key"

    def transaction(self, found: Transaction) -> None:
        for change in found.changes:
            if change.name.startswith(_IDEMPOTENCY) and change.put:
                self.judged += 1
                if not change.created:
                    self.violated(f"{change.at()} was written twice", change.event)


class Jobs(Lifecycle):
    """A submission is queued, has its turn, runs and ends. An end is final: only a new submission is queued again."""

    rule, keys, judges = "I11", (_JOB_STATES,), "phases of submitted jobs"
    state, first = "phase", frozenset({"queued"})
    allowed: ClassVar = {"queued": frozenset({"starting"}) | _ENDED, "starting": frozenset({"running"}) | _ENDED,
                         "running": _ENDED}

    def same(self, change: KeyChange) -> bool:
        return bool(change.old.get("submission") == change.new.get("submission"))

    def also(self, found: Transaction, change: KeyChange) -> None:
        old, new = change.old, change.new
        if old and new and new["submission"] != old["submission"]:
            if new["submission"] < old["submission"]:
                self.violated(f"{change.at()} is about submission {new['submission']} after {old['submission']}",
                              change.event)
            elif old["phase"] in ("starting", "running"):
                self.violated(f"{change.at()}: submission {old['submission']} was {old['phase']} when "
                              f"{new['submission']} was taken up", change.event)


class AlertStates(Lifecycle):
    """An alert is pending, fires and is resolved, once: its id is never used again, one thing has one open alert at a
    time, the same report opens one alert only, whoever leads, and a notice that was delivered stays recorded."""

    rule, keys, judges = "I9", (_ALERTS,), "states of alerts"
    state, first = "phase", frozenset({"pending", "firing", "resolved"})
    allowed: ClassVar = {"pending": frozenset({"firing"}), "firing": frozenset({"resolved"})}

    def __init__(self) -> None:
        super().__init__()
        self._ids, self._reports = dict[str, str](), dict[tuple[str, int], str]()
        self._open = dict[str, str]()

    def gap(self, first: int, last: int) -> None:
        self._open.clear()

    def transaction(self, found: Transaction) -> None:
        for change in found.changes:
            if change.name.startswith(_ALERTS) and not change.put:
                self._open = {about: key for about, key in self._open.items() if key != change.key}
        super().transaction(found)

    def also(self, found: Transaction, change: KeyChange) -> None:
        new, key = change.new, change.key
        if not new:
            return
        about = f"{change.scope} {new['kind']} of {new['subject']}"
        before, revision = self._ids.get(new["id"]), new.get("revision", 0)
        self._ids[new["id"]] = key
        repeated = self._reports.setdefault((about, revision), key) if revision else key
        if new["phase"] == "resolved":
            if self._open.get(about) == key:
                del self._open[about]
            other = key
        else:
            other = self._open.setdefault(about, key)
        if change.created and before is not None:
            self.violated(f"{change.at()} has the id of an earlier alert, {before}", change.event)
        elif change.created and repeated != key:
            self.violated(f"{change.at()} repeats {repeated}, for the same report", change.event)
        elif other != key:
            self.violated(f"{change.at()} is open beside {other}", change.event)
        elif lost := {*change.old.get("notified", ())} - {*new.get("notified", ())}:
            self.violated(f"{change.at()} forgets that it was notified: {', '.join(sorted(lost))}", change.event)


CHECKERS: tuple[type[Checker], ...] = (Engines, Routable, Operations, Idempotency, Jobs, AlertStates)
