"""An admin API for tests: replicas on an etcd, their job's keys, and readers of their streams."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx

from elastic_rl.etcd.client import EtcdClient, Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Operation, PoolSpec, Record
from elastic_rl.net import http_client
from support.coordinators import AUTH, JobClient, Replicas
from support.etcd_server import EtcdServers

_READ_S = 20.0


class ApiCluster:
    """Replicas of one job. ``settings``: parts of the config beyond the defaults; ``job``: default a random name."""

    def __init__(self, etcd_servers: EtcdServers, folder: Path, *, job: str = "", **settings: Any) -> None:
        self.keys = Keys(job or f"t-{secrets.token_hex(6)}")
        self.etcd = EtcdClient(etcd_servers.endpoints, call_timeout_s=2.0)
        self.etcd.put(self.keys.pool_spec("rollout"), PoolSpec(name="rollout", desired=2).encode())
        self.replicas = Replicas(folder, self.keys, etcd_servers.endpoints, settings)

    def start(self, *names: str) -> None:
        self.replicas.start(*names)

    def close(self) -> None:
        self.replicas.close()
        self.etcd.close()

    def client(self, name: str, **more: Any) -> JobClient:
        """An operator's client of one replica."""
        return self.replicas.client(name, **more)

    def bulk(self, records: Sequence[tuple[str, Record]]) -> None:
        for start in range(0, len(records), 100):
            self.etcd.txn([], [Op.put(key, record.encode()) for key, record in records[start:start + 100]])

    def operations(self, pool: str) -> list[Operation]:
        """Those on a pool."""
        found = [Operation.decode(kv.value) for kv in self.etcd.range(self.keys.operations_prefix())[0]]
        return [op for op in found if op.target == f"pools/{pool}"]

    def requested_changes(self) -> dict[str, bytes]:
        """The records that requests write, and that the leader does not write by itself."""
        keys = self.keys
        prefixes = (keys.pools_prefix(), keys.engines_prefix(), keys.restarts_prefix(), keys.external_engines_prefix(),
                    keys.idempotency_prefix())
        found = {kv.key: kv.value for prefix in prefixes for kv in self.etcd.range(prefix)[0]}
        return found | {"operations": str(self.etcd.count(keys.operations_prefix())).encode()}


@contextmanager
def running(etcd_servers: EtcdServers, folder: Path, *names: str, **settings: Any) -> Iterator[ApiCluster]:
    """A cluster whose replicas ``names`` run; ``settings`` as of ApiCluster."""
    cluster = ApiCluster(etcd_servers, folder, **settings)
    try:
        cluster.start(*names)
        yield cluster
    finally:
        cluster.close()


def problem(response: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    """The body of an answer, which has to be this problem."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert body["type"] == f"urn:elastic-rl:problem:{kind}" and body["status"] == status and body["detail"]
    return body


def items(api: httpx.Client, what: str) -> list[dict[str, Any]]:
    """The first page of a listing."""
    answer = api.get(what)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["items"])


def walk(api: httpx.Client, what: str, limit: int) -> list[dict[str, Any]]:
    """All items of a listing, page by page."""
    found: list[dict[str, Any]] = []
    after = ""
    for _ in range(1000):
        answer = api.get(f"{what}{'&' if '?' in what else '?'}limit={limit}" + (f"&after={after}" if after else ""))
        assert answer.status_code == 200, answer.text
        page = answer.json()
        assert len(page["items"]) <= limit
        found += page["items"]
        if page["next"] is None:
            return found
        after = page["next"]
    raise AssertionError("the pages do not end")


@dataclass(frozen=True)
class Frame:
    id: int
    event: str
    data: Any


@dataclass
class Reader:
    """Reads the changes of a job; a context manager."""

    url: str
    """URL of the job on a replica."""
    last: int | None = None
    """Last-Event-ID to resume from."""
    verify: Any = True
    seen: list[Frame] = field(default_factory=list)

    def __enter__(self) -> Self:
        headers = {**AUTH, **({} if self.last is None else {"Last-Event-ID": str(self.last)})}
        self._client = http_client.client(timeout=_READ_S, verify=self.verify)
        self._stream = self._client.stream("GET", f"{self.url}/changes", headers=headers)
        answer = self._stream.__enter__()
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        self._frames = _frames(answer.iter_lines())
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.__exit__(None, None, None)
        self._client.close()

    def next(self) -> Frame:
        frame = next(self._frames)
        self.seen.append(frame)
        return frame

    def until(self, wanted: Callable[[Frame], bool]) -> Frame:
        end = time.monotonic() + _READ_S
        while time.monotonic() < end:
            if wanted(frame := self.next()):
                return frame
        raise AssertionError(f"it did not come; seen: {[(f.id, f.event) for f in self.seen]}")


def _frames(lines: Iterator[str]) -> Iterator[Frame]:
    got: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            got[name] = value
        elif "data" in got:
            yield Frame(int(got["id"]), got["event"], json.loads(got["data"]))
            got = {}
