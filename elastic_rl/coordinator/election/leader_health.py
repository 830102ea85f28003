"""Health of the leader: whether its reconcile passes succeed, and when a leader whose passes fail resigns. No I/O.

A leader that renews its lease but whose passes fail (a bug, an etcd user without the right role, a pass that never
returns) would keep every other replica from trying. So it resigns when no pass has succeeded for its *tolerance*. After
that it tolerates twice as long, up to ``MAX_TOLERANCE_S``, until a pass succeeds: where every replica fails alike, the
leadership changes less and less often.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

MAX_TOLERANCE_S = 900.0


class LeaderHealth:
    """Thread-safe. ``deadline_s``: seconds without a successful pass after which a leader is not healthy."""

    def __init__(self, deadline_s: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: seconds that never go back."""
        self._deadline_s, self._clock = deadline_s, clock
        self._tolerance_s = deadline_s
        self._lock = threading.Lock()
        self._leads = False
        self._good_at = 0.0
        """When a pass succeeded last, or the term began."""
        self._in_pass = False
        self._stuck = False
        """Whether it resigned during a pass that has not returned since."""
        self._error = ""
        self._stays = False

    # -- reported by the reconciler -----------------------------------------------------------------------------
    def pass_began(self) -> None:
        with self._lock:
            self._in_pass = True

    def pass_succeeded(self) -> None:
        with self._lock:
            self._in_pass, self._stuck, self._error, self._stays = False, False, "", False
            self._good_at, self._tolerance_s = self._clock(), self._deadline_s

    def pass_failed(self, error: str, *, stays: bool = False) -> None:
        """``stays``: the cause is not this replica's, so no other one could do better (etcd is full)."""
        with self._lock:
            self._in_pass, self._stuck, self._error, self._stays = False, False, error, stays

    # -- used by the election and the API -----------------------------------------------------------------------
    def leading(self, leads: bool) -> None:
        """A term of this replica begins or ends. It begins healthy."""
        with self._lock:
            if leads and not self._leads:
                self._good_at, self._error, self._stays = self._clock(), "", False
            self._leads = leads

    def problem(self) -> str:
        """Why a leader is not healthy; empty for a healthy one, and for a replica that does not lead."""
        with self._lock:
            return self._problem(self._deadline_s)

    def reason_to_resign(self) -> str:
        """Why the leader is to resign now; empty while it is to stay."""
        with self._lock:
            return "" if self._stays and not self._in_pass else self._problem(self._tolerance_s)

    def resigned(self) -> None:
        with self._lock:
            self._leads, self._stuck = False, self._in_pass
            self._tolerance_s = min(2 * self._tolerance_s, MAX_TOLERANCE_S)

    def may_lead(self) -> bool:
        """False while the pass in which it resigned does not return: it could only hold the leadership, not use it."""
        with self._lock:
            return not self._stuck

    def _problem(self, limit_s: float) -> str:
        now = self._clock()
        if not self._leads or now - self._good_at <= limit_s:
            return ""
        why = self._error or ("a pass does not return" if self._in_pass else "no pass has run")
        return f"no reconcile pass has succeeded for {now - self._good_at:.0f} s: {why}"
