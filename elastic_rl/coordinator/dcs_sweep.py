"""Runs the checkpoint service's maintenance while this replica leads. A node that does not answer makes a sweep slow:
sweeps have a thread of their own, and the leader's decisions never wait for one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from elastic_rl.coordinator.election.election import Election
from elastic_rl.dcs.catalog.under_replication import ShortVersion, UnderReplication
from elastic_rl.errors import Fenced
from elastic_rl.etcd.client import Compare

log = logging.getLogger(__name__)

Sweep = Callable[[Sequence[Compare]], list[str]]
"""One round of maintenance under the leader's fencing token; a line for each thing that was done or failed."""

Short = Callable[[Sequence[Compare]], tuple[list[ShortVersion], bool]]
"""Committed versions with fewer copies than wanted, as far as is known under that token, and whether all are known."""

_EVERY_S = 2.0
_SLOW_S = 120.0
_JOIN_S = 2.0


class DcsSweep:
    def __init__(self, sweep: Sweep, election: Election, *, short: Short = lambda guard: ([], True),
                 every_s: float = _EVERY_S) -> None:
        self._sweep, self._short, self._election, self._every_s = sweep, short, election, every_s
        self.under_replication = UnderReplication()
        """Versions with fewer copies than wanted; nothing is known of them while this replica does not lead."""
        self._stopping = threading.Event()
        self._began_at = 0.0
        """Monotonic seconds at which the sweep that runs now began; 0 between sweeps."""
        self._error = ""
        self._thread = threading.Thread(target=self._run, name="dcs-sweep", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after the sweep that it is in, for which it waits only briefly."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    @property
    def ended(self) -> bool:
        """Whether no sweep is in progress, and none will be."""
        return self._stopping.is_set() and not self._thread.is_alive()

    def problem(self) -> str:
        """What is wrong with the sweeps; empty while they succeed. Never blocks."""
        began_at = self._began_at
        if began_at and time.monotonic() - began_at > _SLOW_S:
            return f"a sweep has been running for {time.monotonic() - began_at:.0f} s"
        return self._error

    def _run(self) -> None:
        while not self._stopping.wait(self._every_s):
            if not self._election.is_leader:
                self._error = ""
                self.under_replication = UnderReplication()
                continue
            self._began_at = time.monotonic()
            try:
                guard = self._election.guard
                for line in self._sweep(guard):
                    log.info("%s", line)
                self.under_replication = self.under_replication.after(*self._short(guard), time.monotonic())
                self._error = ""
            except Fenced as e:  # another replica leads
                log.info("sweep ended: %s", e)
                self.under_replication = UnderReplication()
            except Exception as e:  # the next sweep starts over; the alert says that they fail
                error = f"{type(e).__name__}: {e}"
                if error != self._error:
                    log.warning("sweep failed: %s", error, exc_info=e)
                self._error = error
            finally:
                self._began_at = 0.0
