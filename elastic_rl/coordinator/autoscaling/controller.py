"""The leader's part of autoscaling: carries out what the policy decides, by the operation that operators begin too.

What the policy knows of a pool is in etcd. It is written with each change of the pool, and else every
``_WRITE_EVERY_S`` seconds: the next leader counts on from there, so that it changes a pool at most that much later, and
never earlier.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from elastic_rl.config import Config
from elastic_rl.config.autoscale import AutoscaleFields
from elastic_rl.coordinator import autoscalers
from elastic_rl.coordinator.autoscaling import policy, signals
from elastic_rl.coordinator.autoscaling.policy import Decision, Observation
from elastic_rl.coordinator.operations.service import OperationService
from elastic_rl.coordinator.problems import Problem
from elastic_rl.coordinator.snapshot import ClusterSnapshot
from elastic_rl.coordinator.write_set import WriteSet
from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.client import EtcdClient, Op
from elastic_rl.etcd.decoding import decode
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import AutoscalerState, Event, Operation, StepMetrics
from elastic_rl.etcd.transaction import GuardedWrite

log = logging.getLogger(__name__)

BY = "autoscaler"
"""Who asked for an operation of autoscaling."""
_WRITE_EVERY_S = 15.0
_ASK_AGAIN_S = 30.0
"""A number that was refused is not requested again before so long: as a rule the reason stays for a while."""


@dataclass(frozen=True)
class _Known:
    """What this leader knows of a pool beyond what it has written."""

    stored: AutoscalerState
    """The state that etcd had: with another one there, another leader has decided meanwhile, and ``current`` is
    void."""
    current: AutoscalerState
    written_s: float
    """Seconds of the leader clock."""


class AutoscaleController:
    """Used by the leader's loop."""

    def __init__(self, etcd: EtcdClient, keys: Keys, cfg: Config, operations: OperationService, guarded: GuardedWrite
                 ) -> None:
        self._etcd, self._keys, self._cfg, self._operations, self._guarded = etcd, keys, cfg, operations, guarded
        self._known: dict[str, _Known] = {}
        self._refused_s: dict[str, float] = {}
        """When the last number of a pool was refused, seconds of the leader clock."""
        self._step: tuple[int, float] | None = None
        """Revision of the metrics of the run's last step, and when this leader saw them first, seconds of its clock."""

    def update(self, snapshot: ClusterSnapshot) -> None:
        """One pass over the pools. Raises Fenced and EtcdUnavailable."""
        autoscaled = {pool: wanted for pool in snapshot.specs if (wanted := self._wanted(snapshot, pool)) is not None}
        self._forget(snapshot, autoscaled)
        step, age_s = self._last_step(snapshot) if autoscaled else (None, 0.0)
        for pool, wanted in autoscaled.items():
            self._update(pool, wanted, snapshot, signals.observe(snapshot, pool, step, self._cfg, step_age_s=age_s))

    def _wanted(self, snapshot: ClusterSnapshot, pool: str) -> AutoscaleFields | None:
        """What holds for a pool; None where it is not autoscaled, or this release cannot read whether it is."""
        if {self._keys.autoscaler(pool), self._keys.autoscaler_state(pool)} & snapshot.unreadable.keys():
            return None
        wanted = autoscalers.effective(snapshot.autoscalers.get(pool), self._cfg, pool)
        return None if wanted.mode == "disabled" else wanted

    def _forget(self, snapshot: ClusterSnapshot, autoscaled: dict[str, AutoscaleFields]) -> None:
        for known in (self._known, self._refused_s):
            for pool in known.keys() - autoscaled.keys():
                del known[pool]  # type: ignore[attr-defined]
        for pool in snapshot.autoscaler_states.keys() - autoscaled.keys():
            key = self._keys.autoscaler_state(pool)
            self._guarded([snapshot.unchanged(key), snapshot.unchanged(self._keys.autoscaler(pool))], [Op.delete(key)])

    def _last_step(self, snapshot: ClusterSnapshot) -> tuple[StepMetrics | None, float]:
        """The metrics of the run's last step, and for how many seconds this leader has known them: a new leader takes a
        step for new, since its clock is not that of the host that wrote when the step ended."""
        found = self._etcd.get(self._keys.step_metrics(snapshot.status.step)) if snapshot.status else None
        if found is None:
            return None, 0.0
        if self._step is None or self._step[0] != found.mod_revision:
            self._step = found.mod_revision, snapshot.leader_time
        return decode(found, StepMetrics, {}), snapshot.leader_time - self._step[1]

    def _update(self, pool: str, wanted: AutoscaleFields, snapshot: ClusterSnapshot, seen: Observation) -> None:
        now, stored, known = snapshot.leader_time, snapshot.autoscaler_states.get(pool), self._known.get(pool)
        before = known.current if known is not None and known.stored == stored else stored
        decision = policy.decide(wanted, pool, before, seen, now)
        state, why_not = decision.state.replace(updated_at=snapshot.now), ""
        if decision.target is not None and wanted.mode != "dry_run":
            refused_s = self._refused_s.get(pool)
            if refused_s is not None and 0 <= now - refused_s < _ASK_AGAIN_S:
                return
            why_not = self._scale(pool, decision.target, decision.reason, state, snapshot)
            if not why_not:
                self._refused_s.pop(pool, None)
                return
            self._refused_s[pool] = now
            state = policy.refused(pool, before, seen, decision, why_not, now).replace(updated_at=snapshot.now)
            decision = Decision(state)
        writes, event = WriteSet(), self._recommendation(pool, decision, before)
        if event is not None:
            writes.add(events.put_op(self._keys, event))
        elif (not why_not and stored is not None and known is not None and known.stored == stored
              and state.desired == stored.desired and now - known.written_s < _WRITE_EVERY_S):
            self._known[pool] = _Known(stored, state, known.written_s)
            return
        self._put(pool, state, snapshot, writes)
        if self._guarded(writes.compares, writes.ops):
            self._known[pool] = _Known(state, state, now)

    def _put(self, pool: str, state: AutoscalerState, snapshot: ClusterSnapshot, writes: WriteSet) -> None:
        key = self._keys.autoscaler_state(pool)
        writes.put(key, snapshot.revision(key), state)
        # What it was decided by: an operator may have disabled it, or changed the bounds.
        writes.require(snapshot.unchanged(self._keys.autoscaler(pool)))

    def _scale(self, pool: str, target: int, reason: str, state: AutoscalerState, snapshot: ClusterSnapshot) -> str:
        """Begins the operation, unless somebody has changed the pool, or its autoscaling, since the snapshot. Returns
        why it was not begun, else an empty text."""

        def also(_: Operation) -> WriteSet:
            writes = WriteSet()
            self._put(pool, state, snapshot, writes)
            return writes

        try:
            self._operations.scale(pool, target, by=BY, reason=reason, also=also,
                                   if_revision=snapshot.revision(self._keys.pool_spec(pool)))
        except Problem as e:
            log.info("pool %s is not scaled to %s: %s", pool, target, e)
            return e.detail or e.title
        log.info("scaling pool %s to %s: %s", pool, target, reason)
        self._known[pool] = _Known(state, state, snapshot.leader_time)
        return ""

    def _recommendation(self, pool: str, decision: Decision, before: AutoscalerState | None) -> Event | None:
        """The event of a dry run that would set another number than it would have set last."""
        if decision.target is None or (before is not None and before.recommended == decision.target):
            return None
        desired = decision.state.desired
        return events.build(event_kinds.POOL_SCALING_RECOMMENDED, pool,
                            f"{pool}: {desired} → {decision.target} engines would be set: {decision.reason}",
                            desired=desired, recommended=decision.target, by=BY)
