"""When a watch asks a member of etcd for a sign of life, and when it leaves the member. Pure, but for the registry of
the members: the time is passed in.

A member that is stopped or cut off keeps its connections and says nothing, so silence is the only sign of it. Whatever
a process hears of a member, on whichever of its streams and calls, is a sign of life for all its watches there. When
the member is silent, one of them asks, and the others ask too if no answer comes soon. A stream may also be dead while
its member lives, so each watch asks on its own stream now and then.

The limits, for a process that is not held up itself:

- a watch has left a member within ``ASK_AFTER_S + ANSWER_S`` of the last sign of its life, or of the opening;
- a watch has left a stream within ``STREAM_S + ANSWER_S`` of the last answer on it;
- a watch leaves a stream only if a request of its own has been unanswered there for ``SECOND_S``.
"""

from __future__ import annotations

import threading
from weakref import WeakValueDictionary

ASK_AFTER_S = 0.75
"""Seconds without a sign of life of a member after which one watch asks it."""
SECOND_S = 0.5
"""Seconds after that at which every other watch asks too: the one that asked may have been closed, or its stream dead.
"""
ANSWER_S = 1.0
"""Seconds that a request may be unanswered."""
STREAM_S = 3.0
"""Seconds without an answer on its own stream after which a watch asks there, whatever else the member answers."""


class MemberLife:
    """What this process has heard of one member. Thread-safe. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.heard_at = self._asked_at = float("-inf")
        self._lock = threading.Lock()

    def heard(self, now: float) -> None:
        """The member has answered anything."""
        self.heard_at = now

    @property
    def is_asked(self) -> bool:
        """Whether a watch has asked since the last sign of life."""
        return self._asked_at > self.heard_at

    def ask(self, now: float, *, alone: bool) -> bool:
        """Whether a watch is to ask, which is noted. ``alone``: only if none has."""
        with self._lock:
            if alone and self.is_asked:
                return False
            self._asked_at = now
            return True


class StreamLife:
    """One open stream of a watch. ``answered`` may be called by another thread than the rest."""

    def __init__(self, member: MemberLife, now: float) -> None:
        self._member = member
        self._opened_at = self._answered_at = now
        self._asked_at = float("-inf")

    def answered(self, now: float) -> None:
        """The member has answered on this stream."""
        self._answered_at = now
        self._member.heard(now)

    @property
    def _is_asked(self) -> bool:
        return self._asked_at > self._answered_at

    @property
    def _sign_at(self) -> float:
        """From when on the member's silence counts."""
        return max(self._member.heard_at, self._opened_at)

    @property
    def _left_at(self) -> float:
        """When the stream is over, if nothing is heard."""
        return min(self._asked_at + ANSWER_S,
                   max(self._asked_at + SECOND_S, self._sign_at + ASK_AFTER_S + ANSWER_S))

    @property
    def _checked_at(self) -> float:
        """When the stream itself is asked. One that was never answered on has only its member's time."""
        return self._answered_at + (STREAM_S if self._answered_at > self._opened_at else ASK_AFTER_S)

    def is_over(self, now: float) -> bool:
        """Whether the watch is to leave the member, or this stream."""
        return self._is_asked and now >= self._left_at

    def asks(self, now: float) -> bool:
        """Whether the watch is to send a progress request now, which is noted."""
        if self._is_asked:
            return False
        own = now >= min(self._checked_at, self._sign_at + ASK_AFTER_S + SECOND_S)
        if not own and now < self._sign_at + ASK_AFTER_S or not self._member.ask(now, alone=not own):
            return False
        self._asked_at = now
        return True

    def due_s(self, now: float) -> float:
        """Seconds until ``is_over`` or ``asks`` may be true, if nothing is heard; 0 if one may be now."""
        if self._is_asked:
            return max(0.0, self._left_at - now)
        asked_s = ASK_AFTER_S + (SECOND_S if self._member.is_asked else 0.0)
        return max(0.0, min(self._checked_at, self._sign_at + asked_s) - now)


_shared: WeakValueDictionary[str, MemberLife] = WeakValueDictionary()
_sharing = threading.Lock()


def member_life(address: str) -> MemberLife:
    """What this process has heard of the member at ``host:port``; its clients share it for as long as one keeps it."""
    with _sharing:
        found = _shared.get(address)
        if found is None:
            found = _shared[address] = MemberLife()
        return found
