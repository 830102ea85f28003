"""Events as Server-Sent Events: what is kept, then what comes, each with its store revision as id to resume from."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator

import anyio
import anyio.to_thread

from elastic_rl.coordinator.keys import Keys
from elastic_rl.coordinator.problems import Problem
from elastic_rl.coordinator.records import Event
from elastic_rl.coordinator.store import KeyValue, Store
from elastic_rl.coordinator.watch import Watch
from elastic_rl.errors import Compacted, StoreUnavailable

_POLL_S = 0.5
_KEEPALIVE_S = 10.0
MAX_STREAMS = 32


def frame(kv: KeyValue) -> bytes:
    """One event in the SSE form."""
    event = Event.decode(kv.value)
    return f"id: {kv.mod_revision}\nevent: {event.kind}\ndata: {event.model_dump_json()}\n\n".encode()


class EventStreams:
    """Every open stream of this replica; they share a bounded number of threads and end when the replica stops."""

    def __init__(self, store: Store, keys: Keys, stopping: threading.Event) -> None:
        self._store, self._keys, self._stopping = store, keys, stopping
        self._open = 0
        self._limiter: anyio.CapacityLimiter | None = None

    async def follow(self, after: int | None, backlog: int) -> AsyncIterator[bytes]:
        """``after``: revision of the last event the client has, None for a fresh client, which gets the newest
        ``backlog`` events first. Raises a 503 problem when too many streams are open."""
        if self._open >= MAX_STREAMS:
            raise Problem(503, "too-many-streams", "Too many event streams are open", headers={"Retry-After": "10"})
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(MAX_STREAMS)
        kept, revision = await anyio.to_thread.run_sync(self._kept, limiter=self._limiter)
        first = kept[len(kept) - min(backlog, len(kept)):]
        if after is not None:
            first = [kv for kv in kept if kv.mod_revision > after]
        return self._frames(first, max(revision, after or 0))

    async def _frames(self, first: list[KeyValue], revision: int) -> AsyncIterator[bytes]:
        self._open += 1
        watch: Watch | None = None
        last_sent = time.monotonic()
        try:
            yield b"retry: 1000\n\n"
            for kv in first:
                yield frame(kv)
            while not self._stopping.is_set():
                if watch is None:
                    watch = self._store.watch(self._keys.events_prefix(), start_revision=revision + 1)
                try:
                    change = await anyio.to_thread.run_sync(watch.get, _POLL_S, limiter=self._limiter)
                except (Compacted, StoreUnavailable):
                    return  # the client comes again with its last id and gets what is kept
                if change is not None and change.type == "put":
                    revision = change.kv.mod_revision
                    yield frame(change.kv)
                    last_sent = time.monotonic()
                elif time.monotonic() - last_sent > _KEEPALIVE_S:
                    yield b": still here\n\n"
                    last_sent = time.monotonic()
        finally:
            self._open -= 1
            if watch is not None:
                watch.close()

    def _kept(self) -> tuple[list[KeyValue], int]:
        items, revision = self._store.range(self._keys.events_prefix())
        return sorted(items, key=lambda kv: kv.mod_revision), revision
