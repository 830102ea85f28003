"""How an engine that has left the router ends the requests that it still has. Pure, with the time passed in.

A request that an engine aborts is answered with the tokens that it has, their log-probs and the versions that made
them, and its client goes on from there on another engine (``client.GenerateClient``). So nothing that was sampled is
sampled again, and an engine leaves at once instead of after its longest request.

That is of use only while another engine can go on: with none, requests are finished here for as long as the limit
allows. At the limit those that are left are aborted too, so that their tokens are kept: an engine that just ended would
take them with it.
"""

from __future__ import annotations

from enum import Enum

ABORT_GRACE_S = 10.0
"""Time for aborted requests to end, after the limit of a drain."""
SETTLE_S = 0.5
"""An engine without requests ends when it has had none for so long: the answers of the last ones are still being sent,
and the router may have sent another one just before it forgot the engine."""
_ABORT_AGAIN_S = 1.0


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
        self._abort_again_at = float("-inf")
        self._idle_since: float | None = None
        self.handed_over = 0
        """Requests that were in flight when they were aborted, at most at once."""

    def step(self, now: float, in_flight: int, *, can_hand_over: bool) -> LeaveStep:
        """What to do now. ``in_flight``: requests that run or wait in the engine. ``can_hand_over``: whether their
        clients go on from the tokens that they are given, and another engine serves."""
        if not in_flight:
            self._idle_since = now if self._idle_since is None else self._idle_since
            return LeaveStep.DONE if now - self._idle_since >= SETTLE_S else LeaveStep.WAIT
        self._idle_since = None
        if now >= self._abort_at + (ABORT_GRACE_S if self._may_abort else 0.0):
            return LeaveStep.GIVE_UP
        if not self._may_abort:
            return LeaveStep.WAIT
        if now < self._abort_again_at or not (can_hand_over or now >= self._abort_at):
            return LeaveStep.WAIT
        self._abort_again_at = now + _ABORT_AGAIN_S
        self.handed_over = max(self.handed_over, in_flight)
        return LeaveStep.ABORT
