"""The logs and stacks of all hosts of a cluster, for a command on any of them: which host has which, and how they are
read.

What a host has written stays on its disk; its agent serves it, as it does the stacks of its processes
(``agent.log_server``). Which host to ask for a part
follows from etcd: the parts of a run are on the host that holds it, but for its engines; a search of all hosts finds
what is elsewhere, such as the log of an engine that has ended.
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import ValidationError

from elastic_rl.coordinator.api import tls
from elastic_rl.coordinator.hosts import view
from elastic_rl.coordinator.hosts.view import HostView
from elastic_rl.errors import ConfigError, ElasticRLError, HostUnavailable
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.cluster_records import Assignment, Host, HostPhase, driver_of
from elastic_rl.etcd.decoding import readable, readable_one
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.record import Record
from elastic_rl.etcd.records import Engine
from elastic_rl.host.agent.log_server import BLOCK_BYTES, MAX_LINES, MAX_WAIT_S, POSITION, STACKS_S
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.log_folders import LogPart
from elastic_rl.host.paths import ClusterPaths, JobPaths
from elastic_rl.host.stacks import ProcessStacks
from elastic_rl.net import http_client
from elastic_rl.net.addresses import host_port, is_ip_address
from elastic_rl.net.cluster_secret import ClusterSecret
from elastic_rl.runtime.abandonable import AbandonableCalls, CallRefused, CallTookTooLong

T = TypeVar("T")

_TIMEOUT_S = 5.0
"""Longest wait for a connection, and for the next bytes of an answer."""
_ANSWER_S = 20.0
"""Longest time for a whole answer, besides what it was asked to wait for: a host may send a byte now and then."""
_ASKED_AT_ONCE = 32
"""Hosts that a search asks at the same time."""
_SEARCH_S = 20.0
"""A search begins to ask no further host after so long."""
_PAGE = 500
_ENGINES = 50
"""Engines whose names begin as the part that is looked for; of more it is not known where to look first."""
_LISTING_BYTES = 16 << 20
"""Longest listing of a host: some 100,000 logs."""
_STACKS_BYTES = 64 << 20
"""Longest answer with stacks: those of ``MAX_PROCESSES`` processes have less."""
_ENGINE_PARTS = ("engine-", "runner-")
_OF_HOSTS = ("agent-", "coordinator-", "dcs-", "etcd-", "ray-worker-")
"""Starts of the names of what each host runs, or several do, for the cluster."""
_ABSENT = (HostPhase.SUSPECTED, HostPhase.LOST, HostPhase.LEFT)


# -- which host ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Places:
    """Where the parts of a cluster and of one of its jobs are, by the records of etcd."""

    here: str
    """This host."""
    run: str = ""
    """The host that the job's run is assigned to; empty where there is none."""
    engines: Mapping[str, str] = field(default_factory=dict)
    """Hosts of the engines, by id; empty where that is not known."""


def host_of(part: str, places: Places) -> str:
    """The host that has the log of a part, or of those that begin so; empty where the records do not say. Pure."""
    for prefix in _ENGINE_PARTS:
        if part.startswith(prefix):
            start = part.removeprefix(prefix)
            ids = [start] if start in places.engines else [i for i in places.engines if i.startswith(start)]
            hosts = {places.engines[engine] for engine in ids}
            return hosts.pop() if len(hosts) == 1 else ""
    if part.startswith(_OF_HOSTS):
        return places.here
    return "" if any(name.startswith(part) for name in _ENGINE_PARTS) else places.run


def is_on_several_hosts(part: str) -> bool:
    """Whether several hosts may run a part of this name at the same time, so that one of them has to be meant."""
    return part.startswith(_OF_HOSTS)


@dataclass(frozen=True)
class LogHost:
    """A host of the cluster, as far as its logs go."""

    name: str
    phase: str = ""
    since: float | None = None
    """When the phase began, unix seconds, or a little later; None where that is not known."""
    registered: bool = False
    """Whether its agent is there."""
    url: str = ""
    """Where its agent serves its logs; empty where it serves none."""
    run_dir: str = ""
    release: str = ""

    @classmethod
    def of(cls, host: HostView, registration: Host | None, now: float) -> Self:
        """Pure. ``now``: unix seconds."""
        since = now - host.phase_age_s if host.phase_age_s is not None else None
        name, phase = host.id, str(host.phase or "")
        if registration is None:
            return cls(name, phase, since, host.registered)
        scheme = "http" if _is_loopback(registration.address) else "https"
        url = f"{scheme}://{host_port(registration.address, registration.log_port)}" if registration.log_port else ""
        return cls(name, phase, since, host.registered, url, registration.run_dir, registration.release)

    def why_away(self, on_its_disk: str) -> str:
        """Why its logs cannot be asked for; empty where they can. ``on_its_disk``: text that says where they are."""
        if self.registered and self.url:
            return ""  # also of a host that has left: it may run on
        if self.registered:
            return (f"the agent of host {self.name} (release {self.release or 'unknown'}) serves no logs; they are on "
                    f"its disk{on_its_disk}")
        if self.phase not in _ABSENT:
            return f"host {self.name} is away: its agent is not registered; its logs are on its disk{on_its_disk}"
        since = f" since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.since))}" if self.since else ""
        return f"host {self.name} is {self.phase.upper()}{since}; its logs are on its disk{on_its_disk}"


def _is_loopback(address: str) -> bool:
    return is_ip_address(address) and ip_address(address).is_loopback


# -- the hosts of a cluster --------------------------------------------------------------------------------------------
class ClusterLogs:
    """Reads etcd and asks hosts. A context manager; its methods raise EtcdUnavailable."""

    def __init__(self, cluster: Cluster, etcd: EtcdClient) -> None:
        """``etcd``: a client for this object, which closes it."""
        self._cluster, self._etcd, self.here = cluster, etcd, cluster.host.name
        self._keys, self._job = ClusterKeys(cluster.cfg.cluster_name), cluster.cfg.job

    @classmethod
    def of(cls, cluster: Cluster, *, retry_budget_s: float) -> Self:
        """Raises EtcdUnavailable where the cluster is not up, and ConfigError."""
        return cls(cluster, cluster.etcd(cluster.connect(), retry_budget_s=retry_budget_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._etcd.close()

    def hosts(self) -> dict[str, LogHost]:
        """All hosts that the cluster knows, by name."""
        prefix, now, after = self._keys.host_registrations_prefix(), time.time(), ""
        registered = {kv.key.removeprefix(prefix): host for page in self._etcd.pages(prefix)
                      for host, kv in readable(page.kvs, Host)}
        found, more = dict[str, LogHost](), True
        while more:
            views, more = view.page(self._etcd, self._keys, _PAGE, after)
            found.update({host.id: LogHost.of(host, registered.get(host.id), now) for host in views})
            after = views[-1].id if views else after
            more = more and bool(views)
        return found

    def where(self, part: str) -> str:
        """The host that has the log of a part, or of those that begin so; empty where the records do not say."""
        run = readable_one(self._etcd.get(self._keys.assignment(driver_of(self._job))), Assignment)
        engines: dict[str, str] = {}
        for prefix in _ENGINE_PARTS:
            if part.startswith(prefix):
                start = Keys(self._job).engines_prefix() + part.removeprefix(prefix)
                page = self._etcd.page(start, limit=_ENGINES)
                records = [engine for engine, _ in readable(page.kvs, Engine)]
                exact = [engine for engine in records if prefix + engine.id == part]
                # Else nothing follows from some of those that begin so.
                engines = self._by_host_name(exact or ([] if page.more else records))
        return host_of(part, Places(self.here, run.host if run is not None else "", engines))

    def _by_host_name(self, engines: Sequence[Engine]) -> dict[str, str]:
        """The hosts of engines, whose records have addresses."""
        names: dict[str, list[str]] = {}
        for host, _ in readable(self._etcd.range(self._keys.hosts_prefix())[0] if engines else [], Host):
            names.setdefault(host.address, []).append(host.id)
        return {engine.id: names[engine.host][0] if len(names.get(engine.host, ())) == 1 else "" for engine in engines}

    def open(self, host: LogHost) -> HostLogs:
        """Raises HostUnavailable for a host that is away, and ConfigError."""
        if away := host.why_away(self._on_its_disk(host)):
            raise HostUnavailable(away, hint="its agent serves them again once it is back")
        paths = self._cluster.paths
        files = self._cluster.host.tls(paths)
        return HostLogs(host, self._job, ClusterSecret.read(paths.secret).logs(),
                        str(files.ca) if files is not None else "")

    def listings(self, hosts: Iterable[LogHost]) -> tuple[dict[str, list[LogPart]], dict[str, str]]:
        """The logs of each host, and why those of the others cannot be listed, by host."""
        return self._ask_all(hosts, HostLogs.parts)

    def stacks(self, hosts: Iterable[LogHost]) -> tuple[dict[str, list[ProcessStacks]], dict[str, str]]:
        """The stacks of the job's processes on each host, and why those of the others cannot be had, by host."""
        return self._ask_all(hosts, HostLogs.stacks, first_s=STACKS_S)

    def _ask_all(self, hosts: Iterable[LogHost], what: Callable[[HostLogs], list[T]], *, first_s: float = 0.0
                 ) -> tuple[dict[str, list[T]], dict[str, str]]:
        """``first_s``: how long an ordinary answer may take; hosts that get their turn after that are asked too."""
        limit_s = first_s + _SEARCH_S
        found, away, end = dict[str, list[T]](), dict[str, str](), time.monotonic() + limit_s

        def ask(host: LogHost) -> tuple[str, list[T] | str]:
            if time.monotonic() > end:
                return host.name, f"host {host.name} was not asked: others took {limit_s:g} s to answer"
            try:
                with self.open(host) as logs:
                    return host.name, what(logs)
            except ElasticRLError as e:
                return host.name, e.message

        with ThreadPoolExecutor(_ASKED_AT_ONCE, "logs-of-hosts") as pool:
            for name, answer in pool.map(ask, hosts):
                if isinstance(answer, str):
                    away[name] = answer
                else:
                    found[name] = answer
        return found, away

    def _on_its_disk(self, host: LogHost) -> str:
        if not host.run_dir:
            return ""
        there = self._cluster.cfg.model_copy(update={"run_dir": Path(host.run_dir)})
        return f", in {ClusterPaths.of(there).logs} and {JobPaths.of(there).logs}"


# -- the logs of one host ----------------------------------------------------------------------------------------------
class HostLogs:
    """The logs of another host, by its agent. A context manager. One request is under way at a time, and one that was
    given up keeps others from being made: it may be under way for ever."""

    def __init__(self, host: LogHost, job: str, token: str, authority: str) -> None:
        """``authority``: PEM file of the cluster's authority; empty without TLS. Raises ConfigError."""
        self.host, self._job = host, job
        trust: dict[str, Any] = {"verify": tls.trust(authority)} if authority else {}
        self._client = http_client.client(base_url=host.url, timeout=_TIMEOUT_S, **trust,
                                          headers={"Authorization": f"Bearer {token}"})
        self._calls = AbandonableCalls("logs-of-host", 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def parts(self) -> list[LogPart]:
        """Raises HostUnavailable."""
        raw, _ = self._get("/v1/parts", {}, _LISTING_BYTES)
        try:
            return _Listing.decode(raw).parts
        except ValidationError as e:
            raise HostUnavailable(f"host {self.host.name} answers what is no listing of logs: {e}") from e

    def stacks(self) -> list[ProcessStacks]:
        """Raises HostUnavailable."""
        raw, _ = self._get("/v1/stacks", {}, _STACKS_BYTES, STACKS_S,
                           missing=f"the agent of host {self.host.name} (release {self.host.release or 'unknown'}) "
                                   "takes no stacks")
        try:
            return _Stacks.decode(raw).processes
        except ValidationError as e:
            raise HostUnavailable(f"host {self.host.name} answers what are no stacks: {e}") from e

    def last_lines(self, part: str, lines: int) -> tuple[bytes, str]:
        """The first block of the last lines, and the position after it. Raises HostUnavailable, and ConfigError where
        the host has no such log."""
        return self._block(part, {"lines": min(lines, MAX_LINES)}, 0.0)

    def after(self, part: str, position: str, wait_s: float) -> tuple[bytes, str]:
        """The block after a position, and the next position; nothing where nothing was written within ``wait_s``,
        ``MAX_WAIT_S`` at most. Raises as ``last_lines``."""
        return self._block(part, {"after": position}, min(wait_s, MAX_WAIT_S))

    def _block(self, part: str, query: dict[str, Any], wait_s: float) -> tuple[bytes, str]:
        path, query = f"/v1/parts/{quote(part, safe='')}", {**query, "wait_s": wait_s}
        block, headers = self._get(path, query, BLOCK_BYTES, wait_s,
                                   missing=f"host {self.host.name} has no log of {part!r}")
        return block, headers.get(POSITION, "")

    def _get(self, path: str, query: dict[str, Any], most_bytes: int, wait_s: float = 0.0, *, missing: str = ""
             ) -> tuple[bytes, httpx.Headers]:
        host, limit_s = self.host.name, _ANSWER_S + wait_s

        def ask() -> tuple[httpx.Response, bytearray]:
            body = bytearray()
            with self._client.stream("GET", path, params={**query, "job": self._job}, timeout=_TIMEOUT_S + wait_s
                                     ) as answer:
                for piece in answer.iter_bytes():
                    body += piece
                    if len(body) > most_bytes:
                        raise HostUnavailable(f"host {host} answers more than {most_bytes} bytes")
            return answer, body

        try:
            answer, body = self._calls.begin(ask).result(every_s=limit_s, limit_s=limit_s)
        except (CallTookTooLong, CallRefused) as e:
            raise HostUnavailable(f"host {host} does not answer at {self.host.url}: {e.message}",
                                  hint="`elastic-rl hosts` shows how it is") from e
        except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError) as e:
            raise HostUnavailable(f"host {host} does not answer at {self.host.url}: {str(e) or type(e).__name__}",
                                  hint="`elastic-rl hosts` shows how it is") from e
        if answer.status_code == 404 and missing:
            raise ConfigError(missing)
        if answer.status_code != 200:
            raise HostUnavailable(f"host {host} answers {answer.status_code}: {_said(body)}")
        return bytes(body), answer.headers


def _said(body: bytes | bytearray) -> str:
    """The text of an error of the server, or what another one has answered."""
    try:
        return str(json.loads(body)["error"])
    except (ValueError, TypeError, KeyError):
        return body[:500].decode(errors="replace")


class _Listing(Record):
    parts: list[LogPart]


class _Stacks(Record):
    processes: list[ProcessStacks]
