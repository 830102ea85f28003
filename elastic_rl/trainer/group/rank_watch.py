"""Which ranks of a host have to be ended by force, so that the group can re-form."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Mapping

from elastic_rl.host.processes import StoppedProcesses, is_stopped

log = logging.getLogger(__name__)


class RankWatch:
    """Looks after the processes of the ranks that this process has started."""

    def __init__(self, *, stopped_limit_s: float, grace_s: float) -> None:
        """``grace_s``: between SIGTERM and SIGKILL."""
        self._stopped = StoppedProcesses(stopped_limit_s)
        self._grace_s = grace_s

    def look(self, ranks: Mapping[int, int]) -> list[int]:
        """``ranks``: pid of each rank. Kills ranks that have been stopped for too long. Once one has ended, all others
        are ended within the grace period: torch elastic, which does so too, would wait 30 s for one that does not
        react. Returns the ranks that had ended by themselves."""
        alive = self._alive(ranks)
        if len(alive) < len(ranks):
            self._end(ranks)
            return [rank for rank, pid in ranks.items() if pid not in alive]
        for pid in self._stopped.lost(time.monotonic(), [pid for pid in alive if is_stopped(pid)]):
            log.warning("rank process %d is stopped: it is killed, so that the group re-forms without it", pid)
            _send(pid, signal.SIGKILL)
        return []

    @staticmethod
    def _alive(ranks: Mapping[int, int]) -> list[int]:
        children = {p.pid for p in multiprocessing.active_children()}
        return [pid for pid in ranks.values() if pid in children]

    def _end(self, ranks: Mapping[int, int]) -> None:
        for pid in self._alive(ranks):
            _send(pid, signal.SIGTERM)
        end = time.monotonic() + self._grace_s
        for process in multiprocessing.active_children():
            if process.pid in ranks.values():
                process.join(max(end - time.monotonic(), 0))
        for pid in self._alive(ranks):
            _send(pid, signal.SIGKILL)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
