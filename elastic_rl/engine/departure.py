"""How an engine that has left the router ends the requests that it still has. Pure, with the time passed in.

A request that an engine aborts is answered with the tokens that it has, their log-probs and the versions that made
them, and its client goes on from there on another engine (``client.GenerateClient``). So nothing that was sampled is
sampled again, and an engine leaves at once instead of after its longest request.

That is of use only while another engine can go on: with none, requests are finished here for as long as the limit
allows. At the limit those that are left are aborted too, so that their tokens are kept: an engine that just ended would
take them with it. An engine has one limit: ``engine.drain_timeout_s``, or the end of its host's drain where that comes
first, which the leader alone computes, from what the operator and the notice of preemption allow
(``HostState.drain_overdue``); the host ends what is left ``ABORT_GRACE_S`` later.
"""

from __future__ import annotations

from enum import Enum

ABORT_GRACE_S = 10.0
"""Time for aborted requests to end, after the limit of a drain."""
SETTLE_S = 0.5
"""An engine without requests ends when it has had none for so long: the answers of the last ones are still being sent,
and the router may have sent another one just before it forgot the engine."""
_ABORT_AGAIN_S = 1.0


class Quiet:
    """Whether an engine has had no request for ``SETTLE_S``. One look says less: the load that a server reports is that
    of its last batch, and a request is in none while it is on its way or its prompt is computed."""

    def __init__(self) -> None:
        self._idle_since: float | None = None

    def observe(self, now: float, in_flight: int) -> bool:
        """``now``: monotonic seconds of a look that found ``in_flight`` requests."""
        if in_flight:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        return self._idle_since is not None and now - self._idle_since >= SETTLE_S


class LeaveStep(Enum):
    WAIT = "wait"
    ABORT = "abort"
    """Abort what is in flight, and go on asking."""
    DONE = "done"
    """Nothing is in flight any more."""
    GIVE_UP = "give up"
    """What is in flight does not end."""


class Departure:
    """One engine's. All times are monotonic seconds."""

    def __init__(self, now: float, limit_s: float, *, may_abort: bool = True) -> None:
        """``limit_s``: how long requests may be finished here. ``may_abort``: false for a server that may serve others,
        too, and lives on: what it has in flight may be theirs."""
        self._abort_at, self._may_abort = now + limit_s, may_abort
        self._has_aborted, self._abort_again_at = False, float("-inf")
        self._quiet = Quiet()
        self.handed_over = 0
        """Requests that were in flight when they were aborted, at most at once."""

    def hurry(self, now: float) -> None:
        """The engine's host ends in a moment: the limit is now, if it is not over. Call it as often as you like."""
        self._abort_at = min(self._abort_at, now)

    def left_s(self, now: float) -> float:
        """Seconds for which requests may still be finished."""
        return max(0.0, self._abort_at - now)

    def step(self, now: float, in_flight: int, *, can_hand_over: bool) -> LeaveStep:
        """What to do now. ``in_flight``: requests that run or wait in the engine. ``can_hand_over``: whether their
        clients go on from the tokens that they are given, and another engine serves."""
        if self._quiet.observe(now, in_flight):
            return LeaveStep.DONE
        if not in_flight:
            return LeaveStep.WAIT
        is_over = now >= self._abort_at
        if not self._may_abort:
            return LeaveStep.GIVE_UP if is_over else LeaveStep.WAIT
        if is_over and not self._has_aborted:  # what came before this step may have taken longer than the grace
            self._abort_at = now
        if now >= self._abort_at + ABORT_GRACE_S:
            return LeaveStep.GIVE_UP
        if now < self._abort_again_at or not (can_hand_over or is_over):
            return LeaveStep.WAIT
        self._has_aborted, self._abort_again_at = True, now + _ABORT_AGAIN_S
        self.handed_over = max(self.handed_over, in_flight)
        return LeaveStep.ABORT
