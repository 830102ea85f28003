"""Polls the source of a host's notices of preemption, in a thread of its own: it may be slow, or never answer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Self

from elastic_rl.etcd.cluster_records import HostStatus, PreemptionNotice
from elastic_rl.host.preemption import NoticeSource, NoticeUnreadable

log = logging.getLogger(__name__)

_EVERY_S = 5.0
_SILENT_S = 20.0
"""A poll that has not ended after so long is reported; a source that does not answer ends it much sooner."""
_FAILURES = 3
"""Polls in a row that fail before that is reported: a source that only flaps must not have every host write its status
again and again."""
_JOIN_S = 1.0


class PreemptionWatch:
    """Knows the notice that stands, from ``start`` until ``close``.

    Only an answer changes what is known. A source that is away says nothing: before the first answer there is no
    notice, and a notice that was read stands, since a machine that is taken back may lose its network first.

    When the machine ends is compared once with the clock of this machine, and from then on is a duration by its
    monotonic one.
    """

    def __init__(self, source: NoticeSource, *, every_s: float = _EVERY_S, clock: Callable[[], float] = time.time,
                 monotonic: Callable[[], float] = time.monotonic) -> None:
        """``source``: for this object alone, which closes it. ``clock``: unix seconds."""
        self._source, self._every_s, self._clock, self._monotonic = source, every_s, clock, monotonic
        self._known: tuple[PreemptionNotice | None, float] = None, 0.0
        """The notice, and when the machine ends, in monotonic seconds."""
        self._reported: tuple[PreemptionNotice | None, float] = None, 0.0
        """The notice that was reported last, and the seconds that were left."""
        self._problem, self._failures = "", 0
        self._has_answer = False
        self._asked_at = 0.0
        """Monotonic seconds at which the poll that is under way has begun; 0 between polls."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="preemption-watch", daemon=True)

    def start(self) -> Self:
        self._thread.start()
        return self

    def close(self) -> None:
        """Ends the thread after the poll that is under way, for which this does not wait long."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def added_to(self, status: HostStatus) -> HostStatus:
        """The report of the host with what is known of its notices. Never blocks."""
        asked_at, problem = self._asked_at, self._problem
        if asked_at and time.monotonic() - asked_at > _SILENT_S:
            problem = f"there is no answer for more than {_SILENT_S:.0f} s"
        notice, end_s = self._known
        left_s = max(0.0, end_s - self._monotonic())
        if self._reported[0] != notice or left_s <= self._reported[1] / 2:  # not with each report: it is written then
            self._reported = notice, left_s
        return status.replace(preemption=notice, preemption_left_s=self._reported[1] if notice is not None else None,
                              preemption_unknown=not self._has_answer, preemption_problem=problem)

    def _run(self) -> None:
        while True:
            self._asked_at = time.monotonic()
            self._poll()
            self._asked_at = 0.0
            if self._stopping.wait(self._every_s):
                break
        self._source.close()

    def _poll(self) -> None:
        (before, end_s), problem = self._known, ""
        try:
            found = self._source.read()
        except NoticeUnreadable as e:
            found, problem = before, e.message
        except Exception as e:  # the next answer may be one that this understands
            found, problem = before, f"{type(e).__name__}: {e}"
            if not self._failures:
                log.exception("the source of notices of preemption cannot be asked")
        if found is not None and before is not None and found.reason == before.reason and (
                not found.deadline_at or before.deadline_at and found.deadline_at >= before.deadline_at):
            found = before  # what has begun may have no time any more, or one that is always the same time ahead
        if found != before:
            end_s = self._monotonic() + found.left_s(self._clock()) if found is not None else 0.0
            log.warning("notice of preemption: %s", found.reason if found is not None else "it was withdrawn")
        answered = self._has_answer or not problem
        self._failures = self._failures + 1 if problem else 0
        problem = problem if self._failures >= _FAILURES else ""
        if problem and problem != self._problem:
            log.warning("whether this host is to be preempted is not known: %s", problem)
        self._known, self._problem = (found, end_s), problem
        self._has_answer = answered  # last: the other thread reports what is known then
