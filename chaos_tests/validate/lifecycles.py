"""I1, I4, I9, I10 and I11 of what has states: engines, operations, jobs and alerts go through them in the ways that
there are."""

from __future__ import annotations

from typing import ClassVar

from chaos_tests.validate.replay import Lifecycle, Step, Transaction, below
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

    def same(self, step: Step) -> bool:
        return _same_runner(step)


def _same_runner(step: Step) -> bool:
    return step.old.get("incarnation") == step.new.get("incarnation")


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
        for step in found.steps:
            if step.name.startswith(_STREAMS) and step.name.endswith("/head") and step.new:
                self._heads[step.key] = max(int(step.new.get("number", 0)), self._heads.get(step.key, 0))
        for step in found.steps:
            if not step.name.startswith(_ENGINES):
                continue
            if not step.put:
                self._newest.pop(step.key, None)
            elif step.new:
                self._engine(found, step)

    def _engine(self, found: Transaction, step: Step) -> None:
        new, version, runner = step.new, int(step.new.get("version", 0)), step.new.get("incarnation", "")
        before, newest = self._newest.get(step.key, (runner, 0))
        newest = newest if before == runner else 0
        self.judged += bool(version)
        spec = found.after.get(f"{step.scope}{_POOLS}{new.get('pool', '')}/spec")
        stream = spec.get("stream", "policy")
        head = self._heads.get(f"{step.scope}{_STREAMS}{stream}/head") if spec and stream else None
        ahead = head is not None and version > max(head, newest)
        if step.old.get("version") == version and before == runner:
            pass  # it was judged when it came
        elif why := self._why_wrong(step, version, newest, head if ahead else None):
            if step.key not in self._doubted:
                self.violated(f"{step.at()} {why}", step.event)
            self._doubted ^= {step.key}
        else:
            self._doubted.discard(step.key)
        self._newest[step.key] = (runner, newest if ahead else max(version, newest))
        self._becomes_ready(found, step, version)

    def _why_wrong(self, step: Step, version: int, newest: int, head: int | None) -> str:
        """Why an engine may not have a version that it had not before; "" where it may. ``head``: that of the stream,
        where the version is ahead of it."""
        if not version:
            return ""
        if version < newest:
            return f"went back from version {newest} to {version}"
        if head is not None:
            return f"has version {version}, and the head is {head}"
        applying = step.old.get("applying", 0)
        if step.old and _same_runner(step) and not step.new.get("external") and applying != version:
            return f"has version {version}, and version {applying} was being applied"
        return ""

    def _becomes_ready(self, found: Transaction, step: Step, version: int) -> None:
        new = step.new
        if new.get("state") != "ready" or not step.created and step.old.get("state") != "syncing":
            return  # from another state it does not become ready, which ``Engines`` judges
        epoch = found.before(step.scope + _EPOCH).get("number")
        if not version or new.get("applying"):
            self.violated(f"{step.at()} became ready with version {version} while version {new.get('applying', 0)} was "
                          "being applied", step.event)
        if epoch is not None and new["epoch"] != epoch:
            self.violated(f"{step.at()} of epoch {new['epoch']} became ready in epoch {epoch}", step.event, rule="I1")


class Operations(Lifecycle):
    """An operation runs until it has ended; an end is final, and none is deleted before."""

    rule, keys, judges = "I10", (_OPERATIONS,), "states of operations of the API"
    state, first = "state", frozenset({"running"})
    allowed: ClassVar = {"running": frozenset({"succeeded", "failed", "cancelled"})}

    def also(self, found: Transaction, step: Step) -> None:
        if not step.put and step.old.get("state") == "running":
            self.violated(f"{step.at()} was deleted while it ran", step.event)


class Idempotency(Checker):
    """What a request with an Idempotency-Key has created stays its answer."""

    rule = "I1"
    keys = (_IDEMPOTENCY,)
    judges = "answers of requests with an Idempotency-Key"

    def transaction(self, found: Transaction) -> None:
        for step in found.steps:
            if step.name.startswith(_IDEMPOTENCY) and step.put:
                self.judged += 1
                if not step.created:
                    self.violated(f"{step.at()} was written twice", step.event)


class Jobs(Lifecycle):
    """A submission is queued, has its turn, runs and ends. An end is final: only a new submission is queued again."""

    rule, keys, judges = "I11", (_JOB_STATES,), "phases of submitted jobs"
    state, first = "phase", frozenset({"queued"})
    allowed: ClassVar = {"queued": frozenset({"starting"}) | _ENDED, "starting": frozenset({"running"}) | _ENDED,
                         "running": _ENDED}

    def same(self, step: Step) -> bool:
        return bool(step.old.get("submission") == step.new.get("submission"))

    def also(self, found: Transaction, step: Step) -> None:
        old, new = step.old, step.new
        if old and new and new["submission"] != old["submission"]:
            if new["submission"] < old["submission"]:
                self.violated(f"{step.at()} is about submission {new['submission']} after {old['submission']}",
                              step.event)
            elif old["phase"] in ("starting", "running"):
                self.violated(f"{step.at()}: submission {old['submission']} was {old['phase']} when "
                              f"{new['submission']} was taken up", step.event)


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
        for step in found.steps:
            if step.name.startswith(_ALERTS) and not step.put:
                self._open = {about: key for about, key in self._open.items() if key != step.key}
        super().transaction(found)

    def also(self, found: Transaction, step: Step) -> None:
        new, key = step.new, step.key
        if not new:
            return
        about = f"{step.scope} {new['kind']} of {new['subject']}"
        before, revision = self._ids.get(new["id"]), new.get("revision", 0)
        self._ids[new["id"]] = key
        repeated = self._reports.setdefault((about, revision), key) if revision else key
        if new["phase"] == "resolved":
            if self._open.get(about) == key:
                del self._open[about]
            other = key
        else:
            other = self._open.setdefault(about, key)
        if step.created and before is not None:
            self.violated(f"{step.at()} has the id of an earlier alert, {before}", step.event)
        elif step.created and repeated != key:
            self.violated(f"{step.at()} repeats {repeated}, for the same report", step.event)
        elif other != key:
            self.violated(f"{step.at()} is open beside {other}", step.event)
        elif lost := {*step.old.get("notified", ())} - {*new.get("notified", ())}:
            self.violated(f"{step.at()} forgets that it was notified: {', '.join(sorted(lost))}", step.event)


CHECKERS: tuple[type[Checker], ...] = (Engines, Routable, Operations, Idempotency, Jobs, AlertStates)
