"""What people are told of a run beside its status: events, one for each fault."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence, Set
from typing import Any, Protocol

from elastic_rl.config.groups import TRAINER_GROUPS
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.data.sources import CheckedSource
from elastic_rl.etcd import event_kinds
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable, readable_one
from elastic_rl.etcd.event_kinds import EventKind
from elastic_rl.etcd.events import build
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import members
from elastic_rl.etcd.records import Event, Formation, GroupLease, RestartRequest, Severity, StepMetrics
from elastic_rl.pipeline.records.reporting import truncated_text
from elastic_rl.pipeline.waits import Waits
from elastic_rl.runtime.words import counted

log = logging.getLogger(__name__)

PRODUCER = "actor"
_DROPPED = {"reward": event_kinds.REWARD_FAILED, "generate": event_kinds.GENERATE_FAILED,
            "filters": event_kinds.FILTER_FAILED, "train": event_kinds.TRAIN_FAILED,
            "sft": event_kinds.TRAIN_FAILED}
"""Kind of the event about dropped groups, by what failed: a setting of ``rollout``, or the trainer."""
_FAILED_GROUPS_S = 60.0
"""Shortest pause between two events about groups for which the same part failed."""
_RECENT = 200
"""Events that an actor looks through as it takes over."""
_SPANS = 16
"""Spans of ordinals that an event names."""


class Emit(Protocol):
    """Writes an event, and waits while etcd is away. Raises Fenced."""

    def __call__(self, kind: EventKind, subject: str, message: str, *, severity: Severity = Severity.INFO,
                 **data: Any) -> None: ...


class ReportLimit:
    """Lets a report through at most once in ``every_s`` seconds, and counts what it stands for."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._reported_at = float("-inf")
        self._held = 0

    def add(self, count: int, now: float) -> int:
        """Number of things that are to be reported now, all since the last report; 0: nothing is reported yet."""
        self._held += count
        if not self._held or now - self._reported_at < self._every_s:
            return 0
        held, self._held, self._reported_at = self._held, 0, now
        return held


def emitter(writer: FencedWriter, waits: Waits) -> Emit:
    """Writes events under this token, in the thread of these waits."""
    def emit(kind: EventKind, subject: str, message: str, *, severity: Severity = Severity.INFO,
             **data: Any) -> None:
        event = build(kind, subject, message, severity=severity, **data)  # once, however often it is written
        waits.retry("etcd", lambda: writer.write_event(event))

    return emit


class RunEvents:
    """The events of one term of the actor. Every method raises Fenced, and EtcdUnavailable where it reads. Used by one
    thread."""

    def __init__(self, etcd: EtcdClient, keys: Keys, emit: Emit) -> None:
        self._etcd, self._keys, self._emit = etcd, keys, emit
        self._failed_groups = {part: ReportLimit(_FAILED_GROUPS_S) for part in _DROPPED}
        self._truncated = False
        """Whether all responses of the last step were."""
        self._lost: set[str] | None = None
        """Trainer groups that were lost and have not been there since; None while the events of earlier actors, which
        may have missed some, are not read."""
        self._took_over = False
        """The groups that an earlier term left behind are reported."""
        self._restart_requests: dict[str, int] = {}
        """Generation of the newest request that was known when the state was read, by trainer group."""
        self._formations: dict[str, int] = {}
        """Number of the newest formation that was known then, by trainer group."""

    def groups_failed(self, part: str, ordinals: Sequence[int], why: str) -> None:
        """The metrics of the step count them; the event is for people. ``part``: reward, generate, filters or train;
        sft, whose ordinals are of demonstrations that were left out of a supervised step."""
        if count := self._failed_groups[part].add(len(ordinals), time.monotonic()):
            thing, one = ("demonstration", "ordinal") if part == "sft" else ("prompt group", "group")
            what = "training on them" if part in ("train", "sft") else f"rollout.{part}"
            self._emit(_DROPPED[part], self._keys.job, severity=Severity.WARNING, groups=count, message=
                       f"{counted(count, thing)} dropped since {what} failed, last {one} {ordinals[-1]}: {why}")

    def responses(self, metrics: StepMetrics, source: CheckedSource) -> None:
        """Says it once when no response ends by itself: mostly the model does not know its end token."""
        if metrics.truncated >= 1.0 and not self._truncated:
            self._emit(event_kinds.RESPONSES_TRUNCATED, "actor", truncated_text(metrics, source),
                       severity=Severity.WARNING, step=metrics.step)
        self._truncated = metrics.truncated >= 1.0

    def logprob_difference(self, metrics: StepMetrics, difference: float | None, tolerance: float) -> None:
        """``difference``: largest one of a step; None where it is no number. The difference of samples that older
        weights made says nothing of engines and trainer."""
        if difference is None or (difference > tolerance and not metrics.staleness):
            self._emit(event_kinds.LOGPROB_MISMATCH, "actor", "engine and trainer log-probs differ by "
                       f"{difference or float('inf'):.2e} at step {metrics.step}", severity=Severity.WARNING,
                       step=metrics.step)

    def resumed(self, step: int, consumed: IntervalSet, term: int) -> None:
        """The committed state was read. An earlier term leaves groups behind that it had begun; the ledger leases them
        again."""
        self._restart_requests = {group: self._read_restart_request(group).generation for group in TRAINER_GROUPS}
        self._formations = {group: self._read_formation(group)[0] for group in TRAINER_GROUPS}
        lease = readable_one(self._etcd.get(self._keys.group_lease(PRODUCER)), GroupLease)
        if lease is None or lease.term == term or self._took_over:
            return
        begun = IntervalSet.from_json(lease.groups) - consumed
        if begun:
            self._emit(event_kinds.GROUPS_LEASED_AGAIN, "actor",
                       f"{counted(len(begun), 'prompt group')} begun by term {lease.term} to be generated again",
                       step=step, term=term, groups=begun.to_json()[:_SPANS])
        self._took_over = True

    def queue_replaced(self, groups: int, why: str) -> None:
        """``groups``: how many it held."""
        self._emit(event_kinds.QUEUE_REPLACED, "queue", f"the queue is replaced, with {counted(groups, 'group')} to be "
                   f"generated again: {why}", severity=Severity.WARNING, groups=groups)

    def republished(self, version: int, why: str) -> None:
        log.warning("%s: its weights are published again", why)
        self._emit(event_kinds.VERSION_REPUBLISHED, "actor", f"{why}, so its weights are published again",
                   severity=Severity.WARNING, version=version)

    def resynced(self, step: int, reason: str) -> None:
        """A command did not fit to the committed state."""
        log.warning("step %d does not fit to the committed state: %s", step, reason)
        self._emit(event_kinds.ACTOR_RESYNCED, "actor", f"goes on from the committed state: {reason}",
                   severity=Severity.WARNING, step=step)

    def trainer_lost(self, step: int, reason: str, group: str, *, reformed: bool = False) -> None:
        """``group``: name of the trainer group that was lost. ``reformed``: it has formed again since, so that the
        leader has reported it when it found the ranks replaced."""
        self._lost = {*self._missed(), group}
        log.warning("the group %s was lost at step %d: %s", group, step, reason)
        request = self._read_restart_request(group)
        formation, why_formed = self._read_formation(group)
        is_requested = request.generation > self._restart_requests.get(group, 0)
        if is_requested or (formation > self._formations.get(group, 0) and why_formed):
            # It was ended on purpose, so this is no fault; the loss of a host has events of its own.
            self._emit(event_kinds.TRAINER_GROUP_EVENTS[group].restarting, group, f"the group {group} restarts: "
                       f"{request.reason or request.by if is_requested else why_formed}", step=step)
            return
        beats = [m.beat_at for m in members(self._etcd, self._keys, group)]  # a dead rank's until its lease ends
        self._emit(event_kinds.TRAINER_GROUP_EVENTS[group].failed, group, reason, severity=Severity.ERROR, step=step,
                   **({event_kinds.ALREADY_REPORTED: True} if reformed else {}),
                   **({"detect_s": round(max(0.0, time.time() - min(beats)), 3)} if beats else {}))

    def trainers_recovered(self, reformed: Set[str], at_step: int, step: int, version: int) -> None:
        """Every group is there, at this step. ``reformed``: those that have re-formed since step ``at_step``; one that
        nobody had missed was lost too."""
        for group in sorted(reformed - self._missed()):
            self.trainer_lost(at_step, f"the {group} group re-formed", group, reformed=True)
        for group in sorted(self._missed()):
            self._emit(event_kinds.TRAINER_GROUP_EVENTS[group].recovered, group,
                       f"resumed at step {step}, version {version}", step=step)
        self._lost = set()

    def _missed(self) -> set[str]:
        if self._lost is None:
            kvs, _ = self._etcd.range(self._keys.events_prefix(), limit=_RECENT, newest_first=True)
            signs: dict[str, set[EventKind]] = {group: set() for group in TRAINER_GROUPS}
            """The signs of each group's fault, while it lasts. A rank that makes progress again ends no other sign than
            that it was hung."""
            for event, _ in reversed([*readable(kvs, Event)]):
                kind = event_kinds.find(event.kind)
                if kind is None or kind.component not in TRAINER_GROUPS:
                    continue
                if kind == event_kinds.of_members(kind.component).resumed:
                    signs[kind.component].discard(event_kinds.of_members(kind.component).hung)
                elif kind.ends:
                    signs[kind.component].clear()
                elif kind.begins:
                    signs[kind.component].add(kind)
            self._lost = {group for group, of_group in signs.items() if of_group}
        return self._lost

    def _read_formation(self, group: str) -> tuple[int, str]:
        """Number of a trainer group's newest formation, 0 for none, and why it took the place of the one before."""
        found = self._etcd.get(self._keys.formation(group))
        record = readable_one(found, Formation)
        return found.version if found else 0, record.reason if record else ""

    def _read_restart_request(self, group: str) -> RestartRequest:
        """The newest request to restart a trainer group, carried out or not."""
        found = self._etcd.get(self._keys.restart(group))
        return readable_one(found, RestartRequest) or RestartRequest(target=group, generation=0)
