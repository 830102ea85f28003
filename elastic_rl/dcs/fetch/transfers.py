"""What transfers run on: kept connections to other nodes, and threads that are started when they are needed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from elastic_rl.dcs.connection import NodeConnection
from elastic_rl.etcd.records import DcsNode


class ConnectionPool:
    """Idle connections to nodes, ``most_idle`` of them; those used longest ago are closed first. Thread-safe."""

    def __init__(self, open_: Callable[[DcsNode], NodeConnection], most_idle: int) -> None:
        self._open, self._most_idle = open_, most_idle
        self._lock = threading.Lock()
        self._idle: deque[NodeConnection] = deque()
        self._closed = False

    def take(self, node: DcsNode) -> NodeConnection:
        """A connection to the node, as it is registered, for the caller alone. Raises NodeUnavailable and
        AccessDenied."""
        with self._lock:
            found = next((c for c in self._idle if c.node.id == node.id and c.node.arena_path == node.arena_path), None)
            if found is not None:
                self._idle.remove(found)
        if found is not None and not found.stale():
            return found
        if found is not None:
            found.close()
        return self._open(node)

    def give(self, connection: NodeConnection) -> None:
        """Takes it back; one that is closed is forgotten."""
        if connection.closed:
            return
        surplus: list[NodeConnection] = []
        with self._lock:
            self._idle.appendleft(connection)
            while len(self._idle) > (0 if self._closed else self._most_idle):
                surplus.append(self._idle.pop())
        for old in surplus:
            old.close()

    def close(self) -> None:
        with self._lock:
            idle, self._closed = list(self._idle), True
            self._idle.clear()
        for connection in idle:
            connection.close()


class WorkerPool:
    """Daemon threads that run what they are given at once; as many as there were jobs at one time. Whoever gives them
    jobs bounds their number."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = self._idle = 0

    def run(self, job: Callable[[], None]) -> None:
        """``job`` raises nothing."""
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                self._threads += 1
                threading.Thread(target=self._work, name=f"{self._name}-{self._threads}", daemon=True).start()
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            with self._lock:
                self._idle += 1

    def close(self) -> None:
        """Ends the threads, each after its job."""
        with self._lock:
            for _ in range(self._threads):
                self._jobs.put(None)
