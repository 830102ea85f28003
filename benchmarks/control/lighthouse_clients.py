"""Members of a lighthouse: one process simulates them all, as ``simulated_members`` does ours."""

from __future__ import annotations

import sys
import threading
import time
from datetime import timedelta
from typing import Any

from elastic_rl.bench.workers import serve

_TIMEOUT = timedelta(seconds=5)


class Clients:
    def __init__(self, address: str, count: int, ttl_s: int) -> None:
        from torchft.coordination import LighthouseClient
        self._client = LighthouseClient(address, connect_timeout=_TIMEOUT)
        self._names = [f"m-{n:04d}" for n in range(count)]
        self._ttl_s, self._heartbeats, self._late = ttl_s, 0, 0

    def time(self, samples: int) -> dict[str, Any]:
        """Seconds of single heartbeats."""
        out = []
        for _ in range(samples):
            began = time.monotonic()
            self._client.heartbeat("timed", timeout=_TIMEOUT)
            out.append(time.monotonic() - began)
        return {"seconds": out}

    def start(self) -> dict[str, Any]:
        threading.Thread(target=self._send, daemon=True).start()
        return {}

    def _send(self) -> None:
        """A heartbeat of each member every third of the time to live, as often as our keep-alives."""
        pause, due = self._ttl_s / 3 / len(self._names), time.monotonic()
        while True:
            for name in self._names:
                due += pause
                time.sleep(max(0.0, due - time.monotonic()))
                self._late += time.monotonic() - due > self._ttl_s / 3
                self._client.heartbeat(name, timeout=_TIMEOUT)
                self._heartbeats += 1

    def count(self) -> dict[str, Any]:
        """Heartbeats so far, and how many were late by more than their interval."""
        return {"heartbeats": self._heartbeats, "late": self._late}


def main() -> None:
    address, count, ttl_s = sys.argv[1:]
    clients = Clients(address, int(count), int(ttl_s))
    serve({"time": clients.time, "start": clients.start, "count": clients.count})


if __name__ == "__main__":
    main()
