"""Keeps the router running, and its list of workers equal to the engines that etcd calls ready."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from elastic_rl.driver import routing
from elastic_rl.driver.routing import Routes, Unconfirmed
from elastic_rl.driver.service_supervisor import ServiceSupervisor
from elastic_rl.engine.router import RouterClient, RouterProcess
from elastic_rl.etcd.records import Engine
from elastic_rl.net.engine_key import EngineAccess

log = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_START_TIMEOUT_S = 60.0
"""Time after its start without an answer after which the router is started again."""
_FROZEN_S = 20.0
"""Time without an answer after which a router that has answered before is killed and started again."""
_FOREIGN = 16
"""URLs of foreign workers that are kept for a report."""


class RouterSupervisor(ServiceSupervisor):
    """Level-triggered: each pass compares the router with the newest ``observe``. Requests wait for a router that is
    restarted. An adopted one keeps its workers."""

    def __init__(self, process: RouterProcess, *, epoch: int, interval_s: float = _INTERVAL_S,
                 start_timeout_s: float = _START_TIMEOUT_S, frozen_s: float = _FROZEN_S,
                 access: EngineAccess = EngineAccess(), require: Callable[[], None] = lambda: None) -> None:
        """``epoch``: the epoch of the engines that may be routed. ``access``: to the router and its engines.
        ``require``: as of ``ServiceSupervisor``, and called before each change of the list, too."""
        super().__init__(process, interval_s=interval_s, start_timeout_s=start_timeout_s, frozen_s=frozen_s,
                         require=require)
        self._epoch, self._access = epoch, access
        self._is_new = True
        """Whether this object has launched the router's process and has not compared its list yet. The list of an
        adopted one may lack an engine because that has just removed itself."""
        self._unconfirmed = Unconfirmed()
        self._compared = 0
        self._routes, self._observed = Routes(), 0  # under the lock, as all of the following
        self._ended: set[str] = set()
        self._left: Mapping[str, float] = {}
        """The part of ``Routes.behind`` that the router did not have at the last check."""
        self._engines: set[str] = set()
        """URLs of all engines that there have been."""
        self._foreign: list[str] = []

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

    def foreign(self) -> list[str]:
        """URLs that were taken out of the router and have never been those of an engine of the pool, since the last
        call. Who reaches the router can list any server in it, which then answers for the pool until it is taken out.
        """
        with self._lock:
            found, self._foreign = self._foreign, []
            return found

    def has_left(self, engine: Engine) -> bool:
        """Whether the router has been seen without this engine, which is behind, since it is."""
        with self._lock:
            return engine.straggler is not None and self._left.get(engine.url) == engine.straggler.since

    # -- its thread ---------------------------------------------------------------------------------------------
    def _began(self, *, is_new: bool) -> None:
        self._client = RouterClient(self.url, access=self._access, timeout_s=min(5.0, self._frozen_s))
        self._is_new, self._unconfirmed = is_new, Unconfirmed()

    def _check(self) -> None:
        """Makes the list of workers more like the newest observation."""
        with self._lock:
            behind = self._routes.behind  # before the list is read: none of these joins the router from here on
        listed = self._client.worker_ids()
        with self._lock:
            self._left = {url: since for url, since in behind.items() if url not in listed}
            routes, observed, ended = self._routes, self._observed, frozenset(self._ended)
        if observed and observed != self._compared:  # suspicion needs two readings of etcd, not the same one twice
            changes, self._unconfirmed = routing.compare(routes, listed.keys(), self._unconfirmed, is_new=self._is_new)
            self._compared, self._is_new = observed, False
        elif observed and self._is_new:  # etcd is away: what was known last is the best there is
            changes, self._is_new = routing.WorkerChanges(add=routes.routable - listed.keys()), False
        else:
            changes = routing.WorkerChanges()
        remove = changes.remove | (ended & listed.keys())
        if changes.add or remove:
            self._require()
        for url in sorted(changes.add):
            log.info("adding %s to the router", url)
            self._client.request_add(url)
        for url in sorted(remove):
            log.info("removing %s from the router", url)
            self._client.request_remove(listed[url])
        with self._lock:
            self._ended -= ended - listed.keys()
            self._foreign = [*self._foreign, *sorted(changes.remove - self._engines)][-_FOREIGN:]
