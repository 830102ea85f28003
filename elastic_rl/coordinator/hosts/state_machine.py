"""Hosts: a pure state machine over the leader's record of each one. No I/O; the time is that of the leader clock.

                        evidence            lease ends            lost_s later
    (new) ──▶ JOINING ───────────▶ READY ─────────────▶ SUSPECTED ────────────▶ LOST
                 ▲                  ▲ │ cordon           │ back, as its spec says  │
                 │         uncordon │ ▼                  ▼                         │ registers again
                 │               CORDONED      JOINING, READY, CORDONED, DRAINING  │
                 └─────────────────────────────────────────────────────────────────┘
    any registered host but a lost one ──drain──▶ DRAINING ──holds nothing──▶ LEFT ──drain is withdrawn──▶ JOINING
    any registered host ──another incarnation──▶ JOINING
    SUSPECTED, LOST ──has registered and lost that lease while nobody led──▶ SUSPECTED

The transition that must NOT exist: from registered to READY without *evidence*, the report of the agent's present
registration that it follows the assignments and that no process of an older generation is left. So there is no edge
LOST → READY. A host that was cut off for minutes may come back with the driver that it held, while the leader has
assigned the driver elsewhere. Given the next singleton at once, it would run two on the same devices and ports.

A *notice of preemption*, which the agent of a host on a spot machine reports, makes the leader ask for a drain, once a
notice. That drain names the incarnation that it is for: the next machine of the name begins without it. It stays when
the notice is withdrawn; only an operator takes it back. A drain that somebody else has asked for stays as it is, but
that no drain waits for longer than the machine has. What notices say is not always true: a proxy may answer for all
machines at once. So notices drain a share of the hosts at a time (``followed_now``), and the others wait.

There is no edge READY → LOST either. A lease ends for a stalled etcd, an agent without a core or a cable that was
pulled for a second; what the host holds would be moved, and a moved driver costs minutes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from elastic_rl.coordinator.hosts.times import LONGEST_DRAIN_S, HostTimes
from elastic_rl.etcd.cluster_records import (
    PREEMPTION,
    Drain,
    Host,
    HostPhase,
    HostSpec,
    HostState,
    HostStatus,
    PreemptionNotice,
)


@dataclass(frozen=True)
class SeenHost:
    """What etcd says about a host at one reading."""

    registered: Host | None
    """None: its lease has ended, or it has never registered."""
    status: HostStatus | None
    """The report of that registration; None while there is none."""
    spec: HostSpec
    holds: bool
    """Whether a singleton is assigned to the host, or runs there."""
    has_run: bool = False
    """Whether a singleton is assigned to the host."""
    unix_s: float = 0.0
    """Time of the reading, unix seconds: for people, and for agents of older releases (``left_s``)."""
    may_follow: bool = True
    """Whether a notice that was not followed yet may have the host drained now."""
    registered_again: bool = False
    """Whether the host has registered since its state was written. One that is not registered now has lost that lease
    too."""

    @property
    def drain(self) -> Drain | None:
        """The drain that is asked for of the incarnation that is registered."""
        drain = self.spec.drain
        void = (drain is not None and drain.incarnation and self.registered is not None
                and drain.incarnation != self.registered.incarnation)
        return None if void else drain

    @property
    def left_s(self) -> float:
        """Seconds that the machine has left by its notice, when its agent wrote that. For an agent of a release that
        does not say it: now, by the clock of the leader's host."""
        if self.status is None or self.status.preemption is None:
            return 0.0
        left_s = self.status.preemption_left_s
        return self.status.preemption.left_s(self.unix_s) if left_s is None else max(0.0, left_s)

    @property
    def ready(self) -> bool:
        """Whether there is evidence that the host can take work."""
        return self.registered is not None and self.status is not None and not self.status.not_ready


def is_fit(state: HostState | None, seen: SeenHost) -> bool:
    """Whether a singleton may be assigned to the host. ``state`` may lag behind what is seen."""
    return (state is not None and state.phase is HostPhase.READY and seen.ready
            and seen.registered is not None and seen.registered.incarnation == state.incarnation
            and not seen.spec.cordoned and seen.drain is None)


def drain_within_s(left_s: float, has_run: bool) -> float:
    """The time of a drain of a host that ends in ``left_s``, both in seconds. A run needs that time to begin elsewhere;
    engines alone have half of it to be replaced before they leave."""
    return 0.0 if has_run else min(left_s / 2, LONGEST_DRAIN_S)


def followed_notice(before: HostState | None, after: HostState) -> PreemptionNotice | None:
    """The notice of preemption that is followed by this change of a host's state."""
    return after.preemption if before is None or after.preemption != before.preemption else None


def spec_after(before: HostState | None, after: HostState, seen: SeenHost) -> HostSpec:
    """What is wanted of the host with what the leader asks for: the spec as it is but for a notice that is followed
    now, and for the drain of an earlier incarnation."""
    spec = seen.spec
    if seen.drain is None and spec.drain is not None:
        spec = spec.replace(drain=None, by=PREEMPTION, at=seen.unix_s,
                            reason="the machine that it was for is gone: another one has the name")
    notice = followed_notice(before, after)
    if notice is None or spec.drain is not None:
        return spec
    drain = Drain(within_s=drain_within_s(seen.left_s, seen.has_run), incarnation=after.incarnation)
    return spec.replace(drain=drain, by=PREEMPTION, at=seen.unix_s, reason=notice.reason)


def advance(before: HostState | None, seen: SeenHost, leader_s: float, times: HostTimes) -> HostState | None:
    """The host as it is now; an equal record where nothing has changed. None for one that has never registered."""
    if before is not None and not before.phase.known:  # a newer release's
        return before
    if seen.registered is None:
        return _absent(before, seen, leader_s, times)
    incarnation = seen.registered.incarnation
    if before is None:
        return HostState(phase=HostPhase.JOINING, incarnation=incarnation, since_s=leader_s, reason="has registered")
    if before.incarnation != incarnation:
        return _entered(before, HostPhase.JOINING, leader_s, "has booted").replace(
            incarnation=incarnation, preemption=None, preemption_deadline_s=0.0, preemption_pending=False)
    if before.phase is HostPhase.LOST:
        return _entered(before, HostPhase.JOINING, leader_s, "has registered again after it was lost")
    if before.phase is HostPhase.LEFT and seen.drain is None:
        return _entered(before, HostPhase.JOINING, leader_s, "its drain was withdrawn")
    return _present(before, seen, leader_s)


def _absent(before: HostState | None, seen: SeenHost, leader_s: float, times: HostTimes) -> HostState | None:
    if before is None or before.phase is HostPhase.LEFT:
        return before
    if before.phase is HostPhase.LOST and not seen.registered_again:
        return before
    if before.phase is not HostPhase.SUSPECTED or seen.registered_again:
        # Its agent may have started something under a lease that no leader has seen: the time begins with its end.
        return _entered(before, HostPhase.SUSPECTED, leader_s, "the lease of its agent has ended")
    if leader_s - before.since_s < times.lost_s:
        return before
    return _entered(before, HostPhase.LOST, leader_s, f"not heard for {times.lost_s:.0f} s after the end of its lease")


def _present(before: HostState, seen: SeenHost, leader_s: float) -> HostState:
    phase, reason = _wanted_phase(before, seen)
    since_s = before.since_s if phase is before.phase else leader_s
    after = _with_notice(before.replace(phase=phase, reason=reason, since_s=since_s), seen, leader_s)
    if seen.drain is None:
        return after.replace(drain_deadline_s=0.0, drain_at=0.0, drain_overdue=False)
    same = before.drain_deadline_s and before.drain_at == seen.spec.at
    deadline_s = before.drain_deadline_s if same else leader_s + seen.drain.within_s
    if after.preemption_deadline_s:
        deadline_s = min(deadline_s, after.preemption_deadline_s)
    return after.replace(drain_deadline_s=deadline_s, drain_at=seen.spec.at, drain_overdue=leader_s >= deadline_s)


def _with_notice(state: HostState, seen: SeenHost, leader_s: float) -> HostState:
    if seen.status is None or seen.status.preemption_unknown:
        return state
    if (notice := seen.status.preemption) is None:
        return state.replace(preemption=None, preemption_deadline_s=0.0, preemption_pending=False)
    if notice == state.preemption:
        deadline_s = state.preemption_deadline_s
        if seen.status.preemption_left_s is not None:  # it may have become less meanwhile, while nobody led
            deadline_s = min(deadline_s, leader_s + seen.left_s)
        return state.replace(preemption_deadline_s=deadline_s, preemption_pending=False)
    if seen.drain is None and not seen.may_follow:
        return state.replace(preemption_pending=True)
    within_s = drain_within_s(seen.left_s, seen.has_run)
    return state.replace(preemption=notice, preemption_deadline_s=leader_s + within_s, preemption_pending=False)


def followed_now(seen_hosts: Mapping[str, SeenHost], states: Mapping[str, HostState], share: float) -> frozenset[str]:
    """The hosts that wait with a notice and may be drained for it now, those with the least time first: notices drain
    ``share`` of the registered hosts at the same time, or one. A host counts until it is no longer registered, or an
    operator has taken its drain back."""
    registered = drained = 0
    waiting: list[tuple[float, str]] = []
    for name, seen in seen_hosts.items():
        if seen.registered is None:
            continue
        registered += 1
        if seen.drain is not None:
            drained += seen.spec.by == PREEMPTION
        elif seen.status is not None and not seen.status.preemption_unknown and seen.status.preemption is not None:
            state = states.get(name)
            if state is None or state.preemption != seen.status.preemption:
                waiting.append((seen.left_s, name))
    room = max(1, math.floor(share * registered)) - drained
    return frozenset(name for _, name in sorted(waiting)[:max(0, room)])


def _wanted_phase(before: HostState, seen: SeenHost) -> tuple[HostPhase, str]:
    """Phase and reason of a host that is registered under the incarnation of ``before``, which is not LOST."""
    if seen.drain is not None:
        if seen.holds or seen.status is None:  # without a report of its agent, what it held may still end there
            return HostPhase.DRAINING, seen.spec.described("drained")
        return HostPhase.LEFT, seen.spec.described("was drained")
    if before.phase not in (HostPhase.READY, HostPhase.CORDONED) and not seen.ready:
        waits_for = seen.status.not_ready if seen.status is not None else ""
        return HostPhase.JOINING, waits_for or "its agent has not reported yet"
    return (HostPhase.CORDONED, seen.spec.described("cordoned")) if seen.spec.cordoned else (HostPhase.READY, "")


def _entered(before: HostState, phase: HostPhase, leader_s: float, reason: str) -> HostState:
    return before.replace(phase=phase, since_s=leader_s, reason=reason)
