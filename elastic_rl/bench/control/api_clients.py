"""Clients of the admin API, or of etcd: one process with a thread and a connection for each, which send one request
after the other without a pause."""

from __future__ import annotations

import http.client
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from elastic_rl.bench.workers import WorkerFailed, serve
from elastic_rl.etcd.client import EtcdClient

_TIMEOUT_S = 30.0


class Clients:
    def __init__(self, url: str, token: str, endpoint: str, count: int) -> None:
        self._address, self._count = urlsplit(url).netloc, count
        self._headers = {"Authorization": f"Bearer {token}"}
        self._endpoint = endpoint

    def get(self, paths: list[str], seconds: float, pause_s: float = 0.0) -> dict[str, Any]:
        """Has each client request these paths in turn for so long, the first one from another place of the list than
        its neighbours. ``pause_s``: after each request. Milliseconds of every answered request, by path. Raises
        WorkerFailed for an answer that is not 200."""
        def client(n: int) -> dict[str, list[float]]:
            connection = http.client.HTTPConnection(self._address, timeout=_TIMEOUT_S)

            def request(path: str) -> None:
                connection.request("GET", path, headers=self._headers)
                answer = connection.getresponse()
                body = answer.read()
                if answer.status != 200:
                    raise WorkerFailed(f"{path}: {answer.status} {body[:200]!r}")

            return _repeat(paths[n % len(paths):] + paths[:n % len(paths)], request, seconds, pause_s)

        return {"ms": self._everywhere(client)}

    def ranges(self, prefix: str, limit: int, seconds: float) -> dict[str, Any]:
        """Milliseconds of reads of a range of etcd, as ``get`` has those of requests."""
        with EtcdClient([self._endpoint], call_timeout_s=_TIMEOUT_S) as etcd:
            return {"ms": self._everywhere(
                lambda n: _repeat([prefix], lambda prefix: etcd.page(prefix, limit=limit), seconds))}

    def _everywhere(self, client: Callable[[int], dict[str, list[float]]]) -> dict[str, list[float]]:
        with ThreadPoolExecutor(self._count) as pool:
            found = list(pool.map(client, range(self._count)))
        return {path: [t for by_path in found for t in by_path[path]] for path in found[0]}


def _repeat(arguments: list[str], call: Callable[[str], object], seconds: float, pause_s: float = 0.0
            ) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {argument: [] for argument in arguments}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for argument in arguments:
            began = time.monotonic()
            call(argument)
            times[argument].append(round((time.monotonic() - began) * 1e3, 3))
            if pause_s:
                time.sleep(pause_s)
    return times


if __name__ == "__main__":
    url, token, endpoint, count = sys.argv[1:]
    clients = Clients(url, token, endpoint, int(count))
    serve({"get": clients.get, "ranges": clients.ranges})
