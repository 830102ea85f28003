"""What transfers run on: sources of chunks, kept connections to other nodes, and threads that are started on demand."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from elastic_rl.dcs.connection import NodeConnection
from elastic_rl.etcd.records import DcsNode

log = logging.getLogger(__name__)


class PeerSource(Protocol):
    """The part of a ``DcsClient`` that is needed."""

    def nodes(self) -> list[DcsNode]: ...

    def open(self, node: DcsNode, *, as_node: str = "") -> NodeConnection: ...


class DurableChunks(Protocol):
    """Where chunks are that no node has any more."""

    def read_chunk(self, digest: str) -> bytes:
        """The chunk's bytes, verified. Raises ChunkMissing, ChunkCorrupt, and errors of the store."""
        ...


class ConnectionPool:
    """Idle connections to nodes, ``max_idle`` of them; the least recently used ones are closed first. Thread-safe."""

    def __init__(self, open_: Callable[[DcsNode], NodeConnection], max_idle: int) -> None:
        self._open, self._max_idle = open_, max_idle
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
        """Takes a connection back, unless it is closed."""
        if connection.closed:
            return
        surplus: list[NodeConnection] = []
        with self._lock:
            self._idle.appendleft(connection)
            while len(self._idle) > (0 if self._closed else self._max_idle):
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
    """Daemon threads that run jobs at once; as many as there were jobs at one time. The caller bounds their number."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = self._idle = 0

    def run(self, job: Callable[[], None]) -> None:
        """Has a thread run ``job``, whose errors are logged. Raises RuntimeError when no thread can be started."""
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                threading.Thread(target=self._work, name=f"{self._name}-{self._threads + 1}", daemon=True).start()
                self._threads += 1
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # the thread must survive: a job was promised to it
                log.exception("a job of pool %s failed", self._name)
            with self._lock:
                self._idle += 1

    def close(self) -> None:
        """Ends the threads, each after its job."""
        with self._lock:
            for _ in range(self._threads):
                self._jobs.put(None)
