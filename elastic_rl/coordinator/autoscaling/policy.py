"""Makes the desired number of engines from what is observed of a pool. Pure: no I/O; time is an argument.

A change needs a load that has been high, or low, for long enough (``high_s``, ``low_s``), a pool that has settled, and
a cooldown since the last change, whoever made it. The load is high above one threshold and low below another one, and
engines are removed only where those that stay would not have a high load: the number does not go up and down.

The transitions that must not exist: from an unknown load to a change, and from a number that was not reached to a
larger one. An unknown load leaves ``high_s`` and ``low_s`` as they are; after ``FORGET_S`` of it they are 0.

Engines that the policy has added, and that have no room for ``NO_ROOM_S``, are taken back: what waits for room takes it
from a trainer that could grow, too. No more are requested for ``down_cooldown_s`` then.

A number beyond the bounds is brought within them at once. A desired number that is another one than the policy knows
was set by somebody else, and stays: it is the new start, and both cooldowns begin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from elastic_rl.config.autoscale import AutoscaleFields
from elastic_rl.etcd.records import AutoscalerState

MAX_GAP_S = 5.0
"""Most seconds that one observation counts for, however long ago the one before was."""
FORGET_S = 900.0
"""Seconds without a known load after which nothing is known of the time before."""
NO_ROOM_S = 120.0
"""Seconds for which the hosts have no room for engines that were added, before these are taken back."""
_STEPS = 2
"""Steps of the run for which the load must be low: within a step it is low while the trainer computes."""
_LOW_QUEUE = 0.1
"""Share of ``queue_high`` up to which next to no request waits."""


@dataclass(frozen=True)
class PoolLoad:
    """Load of the engines of a pool that serve."""

    engines: int
    """Engines that it is the mean of, external ones included."""
    queued: float
    """Requests that wait in an engine, as the mean over the engines."""
    token_usage: float | None = None
    """Used share of the KV caches, 0 to 1; None if unknown."""
    trainer_idle: float | None = None
    """Share of the last step, 0 to 1, in which the trainer waited for samples; None where the pool does not go by it.
    """
    step_s: float = 0.0
    """Seconds of the last step; 0 where there are no steps."""
    asks: bool = True
    """Whether the run may ask for samples now. While it does not, a load that is not high says nothing."""
    waits: bool = False
    """Whether the run waits for a part that is away. While it does, a low load says nothing."""


@dataclass(frozen=True)
class Observation:
    """What the leader sees of a pool in one pass."""

    desired: int
    load: PoolLoad | str
    """Load, or why it is unknown."""
    missing: str = ""
    """What is missing to the desired number; empty once it is reached."""
    busy: str = ""
    """What runs on the pool, such as an operation; empty for nothing."""
    no_room: int = 0
    """Engines that wait for room on the hosts."""
    all_ready: bool = False
    """Whether all desired engines are ready."""


@dataclass(frozen=True)
class Decision:
    state: AutoscalerState
    """What is known from now on. Where ``target`` is set: once that is set."""
    target: int | None = None
    """Desired number to be set, or to be recommended with ``mode`` dry_run; None: it stays."""
    reason: str = ""
    """Why, for people."""


def decide(cfg: AutoscaleFields, pool: str, before: AutoscalerState | None, seen: Observation, now: float) -> Decision:
    """What follows for a pool that is autoscaled. ``before``: what was known; ``now``: seconds of the leader clock."""
    if before is None or before.desired != seen.desired:
        state = AutoscalerState(pool=pool, desired=seen.desired, changed_s=now, observed_s=now,
                                message=f"{seen.desired} engines are the start")
    else:
        # The clock of a new leader may be some seconds behind.
        state = before.replace(changed_s=min(before.changed_s, now), observed_s=min(before.observed_s, now))
    state = _with_room(state, seen, now)
    bound = min(max(seen.desired, cfg.min_engines), cfg.max_engines)
    if bound != seen.desired and cfg.mode != "dry_run":
        return _changed(cfg, state, bound, f"{seen.desired} engines are beyond the bounds {cfg.min_engines} to "
                        f"{cfg.max_engines}", now)
    if cfg.mode == "external":
        return _stays(state, f"a scaler of yours sets the number, from {cfg.min_engines} to {cfg.max_engines}")
    excess = min(seen.no_room, state.added, seen.desired - cfg.min_engines)
    if (excess > 0 and cfg.mode == "automatic" and state.no_room_since_s
            and now - state.no_room_since_s >= NO_ROOM_S):
        state = state.replace(no_room_since_s=0.0, no_room_until_s=now + cfg.down_cooldown_s)
        return _changed(cfg, state, seen.desired - excess, f"the hosts have no room for {excess} of {state.added} that "
                        "were added", now)
    if isinstance(seen.load, str):
        return _stays(state, f"the load is unknown: {seen.load}")
    state = _counted(cfg, state, seen.load, now)
    if state.high_s >= cfg.up_after_s and is_high(cfg, seen.load):  # it may be a time in which nothing is asked
        return _up(cfg, state, seen, seen.load, now)
    if state.low_s >= max(cfg.down_after_s, _STEPS * seen.load.step_s):
        return _down(cfg, state, seen, seen.load, now)
    return _stays(state, _described(cfg, state, seen.load))


def refused(pool: str, before: AutoscalerState | None, seen: Observation, decision: Decision, why_not: str, now: float
            ) -> AutoscalerState:
    """What is known once the number of a decision was refused: as before it, with the reason."""
    state = before if before is not None and before.desired == seen.desired else AutoscalerState(
        pool=pool, desired=seen.desired, changed_s=now, observed_s=now)
    return state.replace(message=f"{decision.target} engines were refused: {why_not}")


def _with_room(state: AutoscalerState, seen: Observation, now: float) -> AutoscalerState:
    """The state with what is seen of the room for the engines that were added."""
    until_s = state.no_room_until_s if now < state.no_room_until_s else 0.0
    if not (seen.no_room and state.added):
        return state.replace(no_room_since_s=0.0, no_room_until_s=until_s, added=0 if seen.all_ready else state.added)
    return state.replace(no_room_since_s=min(state.no_room_since_s, now) or now, no_room_until_s=until_s)


def is_high(cfg: AutoscaleFields, load: PoolLoad) -> bool:
    """Whether engines are missing, and more of them would help."""
    helps = load.trainer_idle is None or load.trainer_idle >= cfg.min_trainer_idle
    return helps and (load.queued >= cfg.queue_high
                      or load.token_usage is not None and load.token_usage >= cfg.token_usage_high)


def is_low(cfg: AutoscaleFields, load: PoolLoad) -> bool:
    return (load.queued <= _LOW_QUEUE * cfg.queue_high and load.token_usage is not None
            and load.token_usage <= cfg.token_usage_low)


def _counted(cfg: AutoscaleFields, state: AutoscalerState, load: PoolLoad, now: float) -> AutoscalerState:
    """The state with one more observation of the load."""
    gap = now - state.observed_s
    if gap > FORGET_S:
        state = state.replace(high_s=0.0, low_s=0.0)
    passed = min(gap, MAX_GAP_S)
    high_s, low_s = state.high_s, state.low_s
    if is_high(cfg, load):
        high_s += passed
    elif load.asks:
        high_s = 0.0
    if not is_low(cfg, load):
        low_s = 0.0
    elif not load.waits:
        low_s += passed
    return state.replace(high_s=high_s, low_s=low_s, observed_s=now)


def _up(cfg: AutoscaleFields, state: AutoscalerState, seen: Observation, load: PoolLoad, now: float) -> Decision:
    why = f"{_load(load)} for {state.high_s:.0f} s"
    if seen.desired >= cfg.max_engines:
        return _stays(state, f"{why}; {cfg.max_engines} engines are the most")
    if blocked := seen.busy or seen.missing:
        return _stays(state, f"{why}; {blocked}")
    if (left_s := state.changed_s + cfg.up_cooldown_s - now) > 0:
        return _stays(state, f"{why}; the cooldown lasts {left_s:.0f} s more")
    if (left_s := state.no_room_until_s - now) > 0:
        return _stays(state, f"{why}; the hosts had no room for more engines, which is tried again in {left_s:.0f} s")
    factor = max(load.queued / cfg.queue_high, (load.token_usage or 0.0) / cfg.token_usage_high)
    # In integers: a queue of millions may not become an infinite number of engines.
    more = math.ceil(seen.desired * (min(factor, 1.0 + cfg.max_step_up) - 1.0))
    return _changed(cfg, state, seen.desired + max(1, min(more, cfg.max_step_up)), why, now)


def _down(cfg: AutoscaleFields, state: AutoscalerState, seen: Observation, load: PoolLoad, now: float) -> Decision:
    why = f"{_load(load)} for {state.low_s:.0f} s"
    if seen.desired <= cfg.min_engines:
        return _stays(state, f"{why}; {cfg.min_engines} engines are the fewest")
    if seen.busy:
        return _stays(state, f"{why}; {seen.busy}")
    if (left_s := state.changed_s + cfg.down_cooldown_s - now) > 0:
        return _stays(state, f"{why}; the cooldown lasts {left_s:.0f} s more")
    most = min(cfg.max_step_down, seen.desired - cfg.min_engines, load.engines - 1)
    less = next((n for n in range(most, 0, -1) if not is_high(cfg, _without(load, n))), 0)
    if not less:
        return _stays(state, f"{why}; one engine less would have a high load")
    return _changed(cfg, state, seen.desired - less, why, now)


def _without(load: PoolLoad, engines: int) -> PoolLoad:
    """The load once so many engines are gone: those that are left share it."""
    factor = load.engines / (load.engines - engines)
    return replace(load, engines=load.engines - engines, queued=load.queued * factor, trainer_idle=None,
                   token_usage=None if load.token_usage is None else load.token_usage * factor)


def _changed(cfg: AutoscaleFields, state: AutoscalerState, target: int, reason: str, now: float) -> Decision:
    """``target``, or the nearest number within the bounds, is to be set: a dry run begins where they were not yet kept.
    It takes the number for set, so that its cooldowns are those of the real one."""
    target = min(max(target, cfg.min_engines), cfg.max_engines)
    known = {"recommended": target} if cfg.mode == "dry_run" else {
        "desired": target, "recommended": 0, "added": max(0, target - state.desired)}
    after = state.replace(**known, changed_s=now, high_s=0.0, low_s=0.0, message=f"{target} engines: {reason}")
    return Decision(after, target, reason)


def _stays(state: AutoscalerState, message: str) -> Decision:
    return Decision(state.replace(message=message))


def _described(cfg: AutoscaleFields, state: AutoscalerState, load: PoolLoad) -> str:
    if state.high_s:
        return f"{_load(load)}; high for {state.high_s:.0f} of {cfg.up_after_s:g} s"
    if state.low_s:
        return (f"{_load(load)}; low for {state.low_s:.0f} of {max(cfg.down_after_s, _STEPS * load.step_s):.0f} s")
    return _load(load)


def _load(load: PoolLoad) -> str:
    usage = "" if load.token_usage is None else f", {load.token_usage:.0%} of the KV cache is used"
    idle = "" if load.trainer_idle is None else f", the trainer waits {load.trainer_idle:.0%} of a step"
    return f"{load.queued:.1f} requests wait in an engine{usage}{idle}"
