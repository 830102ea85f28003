"""Keeps the router running, and its list of workers equal to the engines that etcd calls ready.

All but the first launch happens in a thread of its own: a router that is frozen, slow to start or gone must not keep
the driver from its other work.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterable
from enum import Enum

from elastic_rl.driver import routing
from elastic_rl.driver.plan import StartBudget
from elastic_rl.driver.routing import Routes, Unconfirmed
from elastic_rl.engine.router import RouterClient, RouterProcess
from elastic_rl.errors import ElasticRLError, EngineFailed
from elastic_rl.etcd.records import Engine

log = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_START_TIMEOUT_S = 60.0
"""Time after its start without an answer after which the router is started again."""
_FROZEN_S = 20.0
"""Time without an answer after which a router that has answered before is killed and started again."""
_JOIN_TIMEOUT_S = 5.0
_FOREIGN = 16
"""URLs of foreign workers that are kept for a report."""


class _State(Enum):
    DOWN = "down"
    """There is no process; the next one is started when the budget allows it."""
    STARTING = "starting"
    """There is a process that has not answered yet."""
    UP = "up"


class RouterSupervisor:
    """Level-triggered: each pass compares the router with the newest ``observe``. A router that ends or is frozen is
    started again on the same port, with backoff; requests wait for it meanwhile. One that an earlier driver of this
    epoch has left running is adopted with its workers, which is no restart."""

    def __init__(self, process: RouterProcess, *, epoch: int, interval_s: float = _INTERVAL_S,
                 start_timeout_s: float = _START_TIMEOUT_S, frozen_s: float = _FROZEN_S, key: str = "") -> None:
        """``epoch``: the epoch of the engines that may be routed. ``key``: the key of the router and its engines."""
        self._process, self._epoch, self._key = process, epoch, key
        self._interval_s, self._start_timeout_s, self._frozen_s = interval_s, start_timeout_s, frozen_s
        self._budget = StartBudget(base_s=0.5)
        self._state = _State.DOWN
        self._since = 0.0
        """Monotonic seconds of the last answer or, before the first one, of the start."""
        self._is_new = True
        """Whether this object has launched the router's process and has not compared its list yet. The list of an
        adopted one may lack an engine because that has just removed itself."""
        self._unconfirmed = Unconfirmed()
        self._compared = 0
        self._lock = threading.Lock()
        self._routes, self._observed = Routes(), 0  # under the lock, as all of the following
        self._ended: set[str] = set()
        self._restarts: list[str] = []
        self._engines: set[str] = set()
        """URLs of all engines that there have been."""
        self._foreign: list[str] = []
        self._fault = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="router-supervisor", daemon=True)

    @property
    def url(self) -> str:
        """Final once ``start`` has returned, unless the launch has failed (``fault``)."""
        return self._process.url

    def start(self) -> None:
        """Adopts the router that runs, or launches one. Returns before it takes requests."""
        now = time.monotonic()
        if self._process.alive():
            self._begin(now, is_new=False)
        else:
            self._launch(now)  # here: another driver that launches it first decides on its address
        self._thread.start()

    def leave(self) -> None:
        """Ends the supervision, and not the router."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_TIMEOUT_S)

    def stop(self) -> None:
        """Ends the router; requests in flight through it fail."""
        self.leave()
        self._process.stop()

    def observe(self, engines: Iterable[Engine]) -> None:
        """Takes the engines' records as they are in etcd now."""
        routes = Routes.from_engines(engines, self._epoch)
        with self._lock:
            self._routes, self._observed = routes, self._observed + 1
            self._ended -= routes.owned  # another engine serves at that address
            self._engines |= routes.named

    def unroute(self, url: str) -> None:
        """Has a worker removed without a second look: its engine has certainly ended."""
        if url:
            with self._lock:
                self._ended.add(url)
                self._engines.add(url)

    def restarts(self) -> list[str]:
        """Why the router was restarted, once for each restart since the last call."""
        with self._lock:
            found, self._restarts = self._restarts, []
            return found

    def foreign(self) -> list[str]:
        """URLs that were taken out of the router and have never been those of an engine of the pool, since the last
        call. Who reaches the router can list any server in it, which then answers for the pool until it is taken out.
        """
        with self._lock:
            found, self._foreign = self._foreign, []
            return found

    @property
    def fault(self) -> str:
        """Why the router takes no requests; empty when it does, and during its first start."""
        with self._lock:
            return self._fault

    # -- its thread ---------------------------------------------------------------------------------------------
    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._pass()
            except Exception as e:  # a bug must not leave the pool without a router
                log.exception("a pass over the router failed")
                self._set_fault(f"{type(e).__name__}: {e}")
            self._stopping.wait(self._interval_s)

    def _pass(self) -> None:
        now = time.monotonic()
        if self._state is not _State.DOWN and not self._process.alive():
            self._end("it ended", now)
        if self._state is _State.DOWN:
            if self._budget.open(now):
                self._launch(now)
            return
        try:
            self._compare()
        except (EngineFailed, ValueError, KeyError, TypeError) as e:  # the latter: an answer that is none of a router
            if self._state is _State.UP:
                self._set_fault(str(e) or type(e).__name__)
            if (silent_s := time.monotonic() - self._since) > (
                    self._frozen_s if self._state is _State.UP else self._start_timeout_s):
                self._end(f"it did not answer for {silent_s:.0f} s: {e}", time.monotonic())
            return
        self._state, self._since = _State.UP, time.monotonic()
        self._set_fault("")

    def _launch(self, now: float) -> None:
        try:
            is_new = self._process.launch()
        except ElasticRLError as e:
            self._budget = self._budget.after_failure(now, jitter=random.random())
            self._set_fault(f"it could not be started: {e}")
            return
        self._begin(now, is_new=is_new)

    def _begin(self, now: float, *, is_new: bool) -> None:
        """Begins to supervise a process of the router."""
        self._client = RouterClient(self._process.url, key=self._key, timeout_s=min(5.0, self._frozen_s))
        self._state, self._since, self._is_new, self._unconfirmed = _State.STARTING, now, is_new, Unconfirmed()

    def _end(self, reason: str, now: float) -> None:
        """Ends what is left of the router, and allows the next start after a backoff."""
        log.warning("restarting the router: %s", reason)
        self._process.end()
        self._state, self._budget = _State.DOWN, self._budget.after_failure(now, jitter=random.random())
        self._set_fault(reason)
        with self._lock:
            self._restarts.append(reason)

    def _compare(self) -> None:
        """Makes the list of workers more like the newest observation."""
        listed = self._client.worker_ids()
        with self._lock:
            routes, observed, ended = self._routes, self._observed, frozenset(self._ended)
        if observed and observed != self._compared:  # suspicion needs two readings of etcd, not the same one twice
            changes, self._unconfirmed = routing.compare(routes, listed.keys(), self._unconfirmed, is_new=self._is_new)
            self._compared, self._is_new = observed, False
        elif observed and self._is_new:  # etcd is away: what was known last is the best there is
            changes, self._is_new = routing.WorkerChanges(add=routes.routable - listed.keys()), False
        else:
            changes = routing.WorkerChanges()
        for url in sorted(changes.add):
            log.info("adding %s to the router", url)
            self._client.request_add(url)
        for url in sorted(changes.remove | (ended & listed.keys())):
            log.info("removing %s from the router", url)
            self._client.request_remove(listed[url])
        with self._lock:
            self._ended -= ended - listed.keys()
            self._foreign = [*self._foreign, *sorted(changes.remove - self._engines)][-_FOREIGN:]

    def _set_fault(self, fault: str) -> None:
        with self._lock:
            self._fault = fault
