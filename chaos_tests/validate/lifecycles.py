"""I4, I9 and I11 of what has states: engines, operations, jobs and alerts go through them in the ways that there are.
Replay checks of what etcd held."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from chaos_tests.event_log import Event, Kind
from chaos_tests.validate.replay import Checker, Step, below, lifecycle, replay
from chaos_tests.validate.verdict import Violation
from elastic_rl.etcd.keys import ClusterKeys, Keys

_JOB, _CLUSTER = Keys("j"), ClusterKeys("c")
_ENGINES, _OPERATIONS = below(_JOB.engines_prefix()), below(_JOB.operations_prefix())
_IDEMPOTENCY, _ALERTS = below(_JOB.idempotency_prefix()), below(_JOB.alerts_prefix())
_POOLS, _STREAMS, _EPOCH = below(_JOB.pools_prefix()), below(_JOB.streams_prefix()), below(_JOB.epoch())
_JOB_STATES = below(_CLUSTER.job_states_prefix())

_ENDS = frozenset({"quarantined", "dead"})
_ENGINE = {
    "starting": frozenset({"syncing", "released", "draining"}) | _ENDS,
    "syncing": frozenset({"ready", "released", "draining"}) | _ENDS,
    "ready": frozenset({"syncing", "draining"}) | _ENDS,
    "released": frozenset({"starting", "syncing", "draining"}) | _ENDS,
    "draining": _ENDS,
    "quarantined": frozenset({"dead"}),
}
"""States of an engine; the leader and the driver ask for DRAINING and QUARANTINED in any state. There is no way into
READY but from SYNCING, and none out of an end into work."""
_ENGINE_BEGINS = frozenset({"starting", "syncing", "released", "draining"}) | _ENDS
_ENDED = frozenset({"finished", "failed", "stopped"})
_JOB_PHASES = {"queued": frozenset({"starting"}) | _ENDED, "starting": frozenset({"running"}) | _ENDED,
               "running": _ENDED}
_OPERATION = {"running": frozenset({"succeeded", "failed", "cancelled"})}
_ALERT = {"pending": frozenset({"firing"}), "firing": frozenset({"resolved"})}


def _about(events: Iterable[Event], prefix: str) -> list[Event]:
    """The changes below a prefix, and the gaps."""
    return [event for event in events if event["kind"] == Kind.GAP
            or event["kind"] == Kind.CHANGE and below(event["key"]).startswith(prefix)]


def engines(events: Iterable[Event]) -> Iterator[Violation]:
    """An engine goes through its states in the ways that there are; of each runner anew."""
    return lifecycle("I4", _ENGINES, "state", _ENGINE, _ENGINE_BEGINS, events, same=_same_runner)


def _same_runner(step: Step) -> bool:
    return step.old.get("incarnation") == step.new.get("incarnation")


def routable(events: Iterable[Event]) -> Iterator[Violation]:
    """An engine becomes READY only with a version that was verified in it and while none is being applied, in the
    present epoch; what it has is a version that was committed; and it never goes back to an older one."""
    newest = dict[tuple[str, str], int]()
    names = (_ENGINES, _POOLS, _STREAMS, _EPOCH)
    for found in replay(events, lambda key: below(key).startswith(names)):
        epochs = {step.scope: found.before(step.scope + _EPOCH).get("number") for step in found.steps}
        for step in found.steps:
            new = step.new
            if not step.name.startswith(_ENGINES) or not new:
                continue
            version, runner = int(new.get("version", 0)), (step.change.key, new.get("incarnation", ""))
            if version and version < newest.get(runner, 0):
                yield Violation("I4", f"{step.at()} went back from version {newest[runner]} to {version}")
            newest[runner] = max(version, newest.get(runner, 0))
            spec = found.after.get(f"{step.scope}{_POOLS}{new.get('pool', '')}/spec")
            head = found.after.get(f"{step.scope}{_STREAMS}{spec.get('stream', 'policy')}/head") if spec else {}
            if head and spec.get("stream", "policy") and version > head["number"]:
                yield Violation("I4", f"{step.at()} has version {version}, and the head is {head['number']}")
            if new["state"] != "ready" or step.past_unseen or step.old.get("state") == "ready" and _same_runner(step):
                continue
            if not version or new.get("applying"):
                yield Violation("I4", f"{step.at()} became ready with version {version} while version "
                                      f"{new.get('applying', 0)} was being applied")
            epoch = epochs[step.scope]
            if epoch is not None and new["epoch"] != epoch:
                yield Violation("I1", f"{step.at()} of epoch {new['epoch']} became ready in epoch {epoch}")


def operations(events: Iterable[Event]) -> Iterator[Violation]:
    """An operation runs until it has ended, an end is final, and none is deleted before."""
    seen = _about(events, _OPERATIONS)
    yield from lifecycle("I10", _OPERATIONS, "state", _OPERATION, frozenset({"running"}), seen)
    for found in replay(seen, lambda key: below(key).startswith(_OPERATIONS)):
        for step in found.steps:
            if not step.change.put and step.old.get("state") == "running":
                yield Violation("I10", f"{step.at()} was deleted while it ran")


def idempotency(events: Iterable[Event]) -> Iterator[Violation]:
    """What a request with an Idempotency-Key has created stays its answer."""
    for found in replay(events, lambda key: below(key).startswith(_IDEMPOTENCY)):
        for step in found.steps:
            if step.change.put and not step.created:
                yield Violation("I1", f"{step.at()} was written twice")


def jobs(events: Iterable[Event]) -> Iterator[Violation]:
    """A submission is queued, has its turn, runs and ends. An end is final: only a new submission is queued again."""
    seen = _about(events, _JOB_STATES)
    yield from lifecycle("I11", _JOB_STATES, "phase", _JOB_PHASES, frozenset({"queued"}), seen,
                         same=lambda step: step.old.get("submission") == step.new.get("submission"))
    for found in replay(seen, lambda key: below(key).startswith(_JOB_STATES)):
        for step in found.steps:
            old, new = step.old, step.new
            if old and new and new["submission"] != old["submission"]:
                if new["submission"] < old["submission"]:
                    yield Violation("I11", f"{step.at()} is about submission {new['submission']} after "
                                           f"{old['submission']}")
                if old["phase"] in ("starting", "running"):
                    yield Violation("I11", f"{step.at()}: submission {old['submission']} was {old['phase']} when "
                                           f"{new['submission']} was taken up")


def alerts(events: Iterable[Event]) -> Iterator[Violation]:
    """An alert is pending, fires and is resolved, once: its id is never used again, one thing has one open alert at a
    time, the same report opens one alert only, whoever leads, and a notice that was delivered stays recorded."""
    seen = _about(events, _ALERTS)
    yield from lifecycle("I9", _ALERTS, "phase", _ALERT, frozenset({"pending", "firing", "resolved"}), seen)
    ids, reports = dict[str, str](), dict[tuple[str, int], str]()
    open_alerts = dict[str, str]()
    for found in replay(seen, lambda key: below(key).startswith(_ALERTS)):
        if found.after_gap:
            open_alerts = {}
        for step in found.steps:
            if not step.change.put:
                open_alerts = {about: key for about, key in open_alerts.items() if key != step.change.key}
        for step in found.steps:
            new, key = step.new, step.change.key
            if not new:
                continue
            about = f"{step.scope} {new['kind']} of {new['subject']}"
            if step.created and (before := ids.get(new["id"])) is not None:
                yield Violation("I9", f"{step.at()} has the id of an earlier alert, {before}")
            ids[new["id"]] = key
            other = reports.setdefault((about, new.get("revision", 0)), key)
            if step.created and new.get("revision", 0) and other != key:
                yield Violation("I9", f"{step.at()} repeats {other}, for the same report")
            if new["phase"] == "resolved":
                if open_alerts.get(about) == key:
                    del open_alerts[about]
            elif (other := open_alerts.setdefault(about, key)) != key:
                yield Violation("I9", f"{step.at()} is open beside {other}")
            if lost := {*step.old.get("notified", ())} - {*new.get("notified", ())}:
                yield Violation("I9", f"{step.at()} forgets that it was notified: {', '.join(sorted(lost))}")


CHECKERS: tuple[tuple[str, Checker], ...] = (
    ("I4", engines), ("I4", routable), ("I10", operations), ("I1", idempotency), ("I11", jobs), ("I9", alerts))
