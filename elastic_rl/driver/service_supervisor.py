"""Keeps a service of the compute plane running, in a thread of its own: one that is frozen, slow to start or gone must
not keep the driver from its other work."""

from __future__ import annotations

import logging
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum

from elastic_rl.driver.plan import StartBudget
from elastic_rl.errors import ElasticRLError, EngineFailed, Fenced
from elastic_rl.host.compute_services import ComputeService

log = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 5.0
STABLE_S = 20.0
"""A service that has answered for so long has recovered: its next end is the first in a row."""
_FIRST_PAUSE_S = 0.5
_GAP_S = 10.0
"""A pause between two checks that is longer is one of the supervisor's own, which does not count as silence."""
_ENDED_BEFORE = "it ended while no driver ran"


class _State(Enum):
    DOWN = "down"
    """There is no process; the next one is started when the budget allows it."""
    STARTING = "starting"
    """There is a process that has not answered yet."""
    UP = "up"


class ServiceSupervisor(ABC):
    """A service that ends or is frozen is started again at the same address, with backoff and without end. One that an
    earlier driver of this epoch has left running is adopted, which is no restart."""

    def __init__(self, service: ComputeService, *, interval_s: float, start_timeout_s: float, frozen_s: float,
                 require: Callable[[], None] = lambda: None) -> None:
        """``interval_s``: time between two checks. ``start_timeout_s``: time after its start without an answer after
        which the service is started again. ``frozen_s``: time without an answer after which one that has answered
        before is killed and started again. ``require``: called before each start and end; raises Fenced once a newer
        driver has begun, which supervises the service then."""
        self._service, self._require = service, require
        self._interval_s, self._start_timeout_s, self._frozen_s = interval_s, start_timeout_s, frozen_s
        self._budget = StartBudget(base_s=_FIRST_PAUSE_S)
        self._state = _State.DOWN
        self._since = 0.0
        """Monotonic seconds of the last answer or, before the first one, of the start."""
        self._up_since = self._looked_at = 0.0
        self._failing_since: float | None = None
        """When the first of the ends was seen since which it has not recovered."""
        self._acting = threading.Lock()
        """Held while the service is started or ended."""
        self._lock = threading.Lock()
        self._restarts: list[str] = []  # under the lock, as the following
        self._fault = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=service.name, daemon=True)

    @property
    def url(self) -> str:
        """Final once ``start`` has returned, unless the launch has failed (``fault``)."""
        return self._service.url

    @property
    def is_up(self) -> bool:
        """Whether it has answered, and has not been missed since."""
        return self._state is _State.UP

    @property
    def failing_s(self) -> float:
        """For how long it has ended, or not answered, without a recovery in between; 0 for one that works, and during
        its first start."""
        return 0.0 if self._failing_since is None or self._has_recovered() else time.monotonic() - self._failing_since

    def _has_recovered(self) -> bool:
        return self._state is _State.UP and time.monotonic() - self._up_since >= STABLE_S

    def start(self) -> None:
        """Adopts the service that runs, or launches one. Returns before it serves. Raises Fenced."""
        now = self._looked_at = time.monotonic()
        if self._service.alive():
            self._begin(now, is_new=False)
        else:
            if self._service.was_known:
                self._note_restart(_ENDED_BEFORE)
            self._launch(now)  # here: another driver that launches it first decides on its address
        self._thread.start()

    def leave(self) -> None:
        """Ends the supervision, and not the service."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_TIMEOUT_S)

    def stop(self) -> None:
        """Ends the service."""
        self.leave()
        with self._acting:
            self._service.stop()

    def restarts(self) -> list[str]:
        """Why the service was restarted, once for each restart since the last call."""
        with self._lock:
            found, self._restarts = self._restarts, []
            return found

    @property
    def fault(self) -> str:
        """Why the service does not serve; empty when it does, and during its first start."""
        with self._lock:
            return self._fault

    @abstractmethod
    def _check(self) -> None:
        """Asks the service, and does what is due where it answers. Raises EngineFailed, ValueError, KeyError or
        TypeError where it does not answer, or not as such a service."""

    def _began(self, *, is_new: bool) -> None:  # noqa: B027 -- most services need nothing then
        """Called when another process of the service is supervised. ``is_new``: whether this object launched it."""

    # -- its thread ---------------------------------------------------------------------------------------------
    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._pass()
            except Fenced:  # the driver's passes find it too, and end it
                log.warning("a newer driver supervises %s", self._service.name)
                return
            except Exception as e:  # a bug must not leave the job without the service
                log.exception("a pass over %s failed", self._service.name)
                self._set_fault(f"{type(e).__name__}: {e}")
            self._stopping.wait(self._interval_s)

    def _pass(self) -> None:
        before, now = self._looked_at, time.monotonic()
        self._looked_at = now
        if now - before > _GAP_S + self._interval_s:
            self._since += now - before
        if self._state is not _State.DOWN and not self._service.alive():
            self._end("it ended", now)
        if self._state is _State.DOWN:
            if self._budget.open(now):
                self._launch(now)
            return
        try:
            self._check()
        except (EngineFailed, ValueError, KeyError, TypeError) as e:
            if self._state is _State.UP:
                self._set_fault(str(e) or type(e).__name__)
            if (silent_s := time.monotonic() - self._since) > (
                    self._frozen_s if self._state is _State.UP else self._start_timeout_s):
                self._end(f"it did not answer for {silent_s:.0f} s: {e}", time.monotonic())
            return
        self._since = time.monotonic()
        if self._state is not _State.UP:
            self._state, self._up_since = _State.UP, self._since
        self._set_fault("")

    def _launch(self, now: float) -> None:
        self._require()
        with self._acting:
            if self._stopping.is_set():
                return
            try:
                is_new = self._service.launch()
            except ElasticRLError as e:
                self._budget = self._budget.after_failure(now, jitter=random.random())
                self._set_fault(f"it could not be started: {e}")
                return
        self._begin(now, is_new=is_new)

    def _begin(self, now: float, *, is_new: bool) -> None:
        """Begins to supervise a process of the service."""
        self._state, self._since = _State.STARTING, now
        self._began(is_new=is_new)

    def _end(self, reason: str, now: float) -> None:
        """Ends what is left of the service, and allows the next start after a backoff."""
        # To a driver that was suspended, a service that the newer one is just restarting seems silent since then.
        self._require()
        log.warning("restarting %s: %s", self._service.name, reason)
        if self._failing_since is None or self._has_recovered():
            self._failing_since, self._budget = now, StartBudget(base_s=_FIRST_PAUSE_S)
        self._state, self._budget = _State.DOWN, self._budget.after_failure(now, jitter=random.random())
        self._note_restart(reason)
        with self._acting:
            if not self._stopping.is_set():
                self._service.end()

    def _note_restart(self, reason: str) -> None:
        self._set_fault(reason)
        with self._lock:
            self._restarts.append(reason)

    def _set_fault(self, fault: str) -> None:
        with self._lock:
            self._fault = fault
