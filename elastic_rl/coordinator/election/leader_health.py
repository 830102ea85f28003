"""Health of the leader: whether its reconcile passes succeed, and when a leader whose passes fail resigns. No I/O.

A leader that renews its lease but whose passes fail (a bug, an etcd user without the right role, a pass that never
returns) would keep every other replica from trying. It has a loop of passes for each live job, and resigns when one of
them has not had a successful pass for the loop's *tolerance*. After that it tolerates twice as long of this loop, up to
``MAX_TOLERANCE_S``, until a pass of it succeeds: where every replica fails alike, the leadership changes less and less
often, whatever the other loops do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

MAX_TOLERANCE_S = 900.0


@dataclass
class _Loop:
    """The passes of one loop."""

    good_at: float
    """When a pass succeeded last, or the term or the loop began."""
    tolerance_s: float
    essential: bool
    in_pass: bool = False
    stuck: bool = False
    """Whether the replica resigned during a pass that has not returned since."""
    error: str = ""
    stays: bool = False

    def returned(self, error: str, *, stays: bool = False) -> None:
        self.in_pass, self.stuck, self.error, self.stays = False, False, error, stays

    def problem(self, name: str, now: float, limit_s: float) -> str:
        if now - self.good_at <= limit_s:
            return ""
        return f"no reconcile pass of {name} has succeeded for {now - self.good_at:.0f} s: {self.error or self.silence}"

    @property
    def silence(self) -> str:
        """Why no pass succeeds where none has failed."""
        return "a pass does not return" if self.in_pass else "no pass has run"


class LeaderHealth:
    """Thread-safe. ``deadline_s``: seconds without a successful pass after which a leader is not healthy."""

    def __init__(self, deadline_s: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: seconds that never go back."""
        self._deadline_s, self._clock = deadline_s, clock
        self._lock = threading.Lock()
        self._leads = False
        self._loops: dict[str, _Loop] = {}

    # -- reported by the loops; each has a name ---------------------------------------------------------------------
    def expect(self, loop: str, *, essential: bool = False) -> None:
        """Says that a loop makes passes from now on, if it did not before. ``essential``: a leader is of no use without
        it."""
        with self._lock:
            self._loops.setdefault(loop, _Loop(self._clock(), self._deadline_s, essential))

    def ended(self, loop: str) -> None:
        """A loop makes no further pass."""
        with self._lock:
            self._loops.pop(loop, None)

    def pass_began(self, loop: str) -> None:
        with self._lock:
            if found := self._loops.get(loop):
                found.in_pass = True

    def pass_succeeded(self, loop: str) -> None:
        with self._lock:
            if found := self._loops.get(loop):
                found.returned("")
                found.good_at, found.tolerance_s = self._clock(), self._deadline_s

    def pass_failed(self, loop: str, error: str, *, stays: bool = False) -> None:
        """``stays``: the cause is not this replica's, so no other one could do better (etcd is full)."""
        with self._lock:
            if found := self._loops.get(loop):
                found.returned(error, stays=stays)

    # -- used by the election and the API -----------------------------------------------------------------------
    def leading(self, leads: bool) -> None:
        """A term of this replica begins or ends. It begins healthy."""
        with self._lock:
            if leads and not self._leads:
                for loop in self._loops.values():
                    loop.good_at, loop.error, loop.stays = self._clock(), "", False
            self._leads = leads

    def problem(self) -> str:
        """Why a leader is of no use: all of its loops fail, or one that is essential. Empty for a healthy one, and for
        a replica that does not lead. A loop that fails beside others is a problem of its job (``problem_of``)."""
        with self._lock:
            problems = {name: loop.problem(name, self._clock(), self._deadline_s) for name, loop in self._loops.items()}
            useless = all(problems.values()) or any(problems[n] for n, loop in self._loops.items() if loop.essential)
            return "; ".join(filter(None, problems.values())) if self._leads and useless else ""

    def problem_of(self, loop: str) -> str:
        """Why the last pass of a loop failed, or that none returns; empty for a loop whose passes succeed, and for a
        replica that does not lead. The text stays the same while the problem does."""
        with self._lock:
            found = self._loops.get(loop)
            if found is None or not self._leads:
                return ""
            return found.error or (found.silence if self._clock() - found.good_at > self._deadline_s else "")

    def reason_to_resign(self) -> str:
        """Why the leader is to resign now; empty while it is to stay."""
        with self._lock:
            return "; ".join(problem for _, problem in self._intolerable()) if self._leads else ""

    def resigned(self) -> None:
        with self._lock:
            for loop, _ in self._intolerable():
                loop.tolerance_s = min(2 * loop.tolerance_s, MAX_TOLERANCE_S)
            for loop in self._loops.values():
                loop.stuck = loop.in_pass
            self._leads = False

    def may_lead(self) -> bool:
        """False while the pass in which it resigned does not return: it could only hold the leadership, not use it."""
        with self._lock:
            return not any(loop.stuck for loop in self._loops.values())

    def _intolerable(self) -> list[tuple[_Loop, str]]:
        """The loops for which the leader is to resign, and why."""
        now = self._clock()
        found = ((loop, loop.problem(name, now, loop.tolerance_s)) for name, loop in self._loops.items()
                 if loop.in_pass or not loop.stays)
        return [(loop, problem) for loop, problem in found if problem]
