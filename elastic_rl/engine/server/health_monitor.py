"""Probes one server for its engine: a thread that feeds ``health.EngineHealth`` and reports when it is frozen."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

from elastic_rl.engine.server.health import Effort, EngineHealth, Health, HealthLimits

log = logging.getLogger(__name__)

SUSPECT_INTERVAL_S = 1.0
"""Pause between two probes of a server that did not answer the last one."""


class HealthMonitor:
    """Calls ``probe`` every ``interval_s`` until ``close``, and ``on_frozen`` with a reason at most once.

    ``probe``: returns whether the server has shown a sign of life, or None when it was not asked; bounded by its own
    timeout. ``effort``: what the server's processes did since its last call. Both, and ``on_frozen``, are called in the
    monitor's thread, so none of them holds up the engine's own loop.
    """

    def __init__(self, probe: Callable[[], bool | None], effort: Callable[[], Effort], *, limits: HealthLimits,
                 interval_s: float, on_frozen: Callable[[str], None], name: str = "",
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._probe, self._effort, self._on_frozen = probe, effort, on_frozen
        self._interval_s, self._clock, self._name = interval_s, clock, name
        self._health = EngineHealth(limits, clock())
        self._lock = threading.Lock()
        self._pauses = 0
        self._paused = 0
        """Pauses that have begun and not ended."""
        self._probing = threading.Lock()
        """Held from the look whether there is a pause to the end of the probe."""
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"health-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def health(self) -> EngineHealth:
        return self._health

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Marks a time in which the server cannot answer, as while its weights change: a probe that overlaps with it
        counts for nothing."""
        with self._lock:
            self._pauses += 1
            self._paused += 1
        try:
            yield
        finally:
            with self._lock:
                self._pauses += 1
                self._paused -= 1
                self._health = self._health.skip(self._clock())

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Pauses as ``paused`` does, and no probe is in flight inside: the server could not bear one."""
        with self.paused():
            with self._probing:  # one in flight ends: it is bounded
                pass
            yield

    def close(self) -> None:
        """Ends the thread before its next probe; does not wait for a probe in flight."""
        self._stopping = True
        self._wake.set()

    def join(self, timeout_s: float) -> None:
        """Waits until the thread has ended. Returns after ``timeout_s`` in any case: it is a daemon."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def observe(self) -> Health:
        """Makes one probe."""
        with self._probing:
            return self._observe()

    def _observe(self) -> Health:
        with self._lock:
            pauses = self._pauses
            if self._paused:
                self._effort()
                self._health = self._health.skip(self._clock())
                return self._health.state
        alive = self._probe()
        if alive is None:
            return self._health.state
        effort = self._effort()
        with self._lock:
            before = self._health
            if pauses != self._pauses:
                self._health = before.skip(self._clock())
            elif alive:
                self._health = before.sign_of_life(self._clock())
            else:
                self._health = before.silence(self._clock(), effort)
            after = self._health
        if after.state is not before.state:
            log.log(logging.INFO if after.state is Health.HEALTHY else logging.WARNING, "the server of %s is %s: %s",
                    self._name, after.state, before.describe() if after.state is Health.HEALTHY else after.describe())
        return after.state

    def _run(self) -> None:
        while not self._stopping:
            state = self.observe()
            if self._stopping:
                return
            if state is Health.FROZEN:
                self._on_frozen(self._health.describe())
                return
            self._wake.wait(self._interval_s if state is Health.HEALTHY
                            else min(self._interval_s, SUSPECT_INTERVAL_S))
