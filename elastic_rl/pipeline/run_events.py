"""What people are told of a run beside its status: events, one for each fault."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Protocol

from elastic_rl.coordinator.targets import TRAINER
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.data.sources import CheckedSource
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import members
from elastic_rl.etcd.records import GroupLease, RestartRequest, Severity, StepMetrics
from elastic_rl.pipeline.reporting import truncated_text
from elastic_rl.pipeline.reward_failures import ReportLimit

log = logging.getLogger(__name__)

PRODUCER = "actor"
_FAILED_GROUPS_S = 60.0
"""Shortest pause between two events about groups whose reward failed, or that could not be generated."""
_SPANS = 16
"""Spans of ordinals that an event names."""


class Emit(Protocol):
    """Writes an event, and waits while etcd is away. Raises Fenced."""

    def __call__(self, kind: str, subject: str, message: str, *, severity: Severity = Severity.INFO,
                 **data: Any) -> None: ...


class RunEvents:
    """Of one term of the actor. Every method raises Fenced, and EtcdUnavailable where it reads. For one thread."""

    def __init__(self, etcd: EtcdClient, keys: Keys, emit: Emit) -> None:
        self._etcd, self._keys, self._emit = etcd, keys, emit
        self._failed_groups = {part: ReportLimit(_FAILED_GROUPS_S) for part in ("reward", "generate")}
        self._truncated = False
        """Whether all responses of the last step were."""
        self._took_over = False
        """The groups that an earlier term left behind are reported."""
        self._restart_requests = 0

    def groups_failed(self, part: str, ordinals: Sequence[int], why: str) -> None:
        """The metrics of the step count them; the event is for people. ``part``: reward or generate."""
        if count := self._failed_groups[part].add(len(ordinals), time.monotonic()):
            self._emit(f"{part}.failed", self._keys.job, severity=Severity.WARNING, groups=count, message=
                       f"{count} prompt groups have been dropped since rollout.{part} failed, last group "
                       f"{ordinals[-1]}: {why}")

    def responses(self, metrics: StepMetrics, source: CheckedSource) -> None:
        """Says it once when no response ends by itself: mostly the model does not know its end token."""
        if metrics.truncated >= 1.0 and not self._truncated:
            self._emit("responses.truncated", "actor", truncated_text(metrics, source), severity=Severity.WARNING,
                       step=metrics.step)
        self._truncated = metrics.truncated >= 1.0

    def logprob_difference(self, step: int, difference: float | None, tolerance: float) -> None:
        """``difference``: largest one of a step; None where it is no number."""
        if difference is None or difference > tolerance:
            self._emit("logprob.mismatch", "actor", severity=Severity.WARNING, step=step, message=
                       f"engine and trainer log-probs differ by {difference or float('inf'):.2e} at step {step}")

    def resumed(self, step: int, consumed: IntervalSet, term: int) -> None:
        """The committed state was read. An earlier term leaves groups behind that it had begun; the ledger leases them
        again."""
        self._restart_requests = self._read_restart_request().generation
        lease = readable_one(self._etcd.get(self._keys.group_lease(PRODUCER)), GroupLease)
        if lease is None or lease.term == term or self._took_over:
            return
        begun = IntervalSet.from_json(lease.groups) - consumed
        if begun:
            self._emit("groups.leased_again", "actor", f"{len(begun)} prompt groups that term {lease.term} had begun "
                       "are generated again", step=step, term=term, groups=begun.to_json()[:_SPANS])
        self._took_over = True

    def resynced(self, step: int, reason: str) -> None:
        """A command did not fit to the committed state."""
        log.warning("step %d does not fit to the committed state: %s", step, reason)
        self._emit("actor.resynced", "actor", f"goes on from the committed state: {reason}",
                   severity=Severity.WARNING, step=step)

    def trainer_lost(self, step: int, reason: str, group: str) -> None:
        """``group``: incarnation of the trainer group that was lost."""
        log.warning("the trainer was lost at step %d: %s", step, reason)
        request = self._read_restart_request()
        if request.generation > self._restart_requests:  # it was ended on purpose, so this is no fault
            self._emit("trainer.restarting", "trainer", f"the trainer group restarts: {request.reason or request.by}",
                       step=step, incarnation=group)
            return
        beats = [m.beat_at for m in members(self._etcd, self._keys, "trainer")]  # a dead rank's until its lease ends
        self._emit("trainer.failed", "trainer", reason, severity=Severity.ERROR, step=step, incarnation=group,
                   **({"detect_s": round(max(0.0, time.time() - min(beats)), 3)} if beats else {}))

    def _read_restart_request(self) -> RestartRequest:
        """The newest request to restart the trainer group, carried out or not."""
        found = self._etcd.get(self._keys.restart(TRAINER))
        return readable_one(found, RestartRequest) or RestartRequest(target=TRAINER, generation=0)
