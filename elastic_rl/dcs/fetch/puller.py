"""Pulling a committed version: this host's node pins it, fetches what the host lacks and verifies it, once for all
processes of the host; each of them reads it in place."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, Self

import torch

from elastic_rl.dcs.catalog import reads
from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.connection import NodeConnection, Progress
from elastic_rl.dcs.fetch import mapping
from elastic_rl.dcs.manifest import Manifest
from elastic_rl.dcs.security import Security
from elastic_rl.errors import ElasticRLError
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.mirror import Mirror
from elastic_rl.etcd.records import Version
from elastic_rl.runtime.failpoints import reach
from elastic_rl.telemetry import traces

OnPart = Callable[[dict[str, Any]], object]
"""Called with a reference (``mapping``) to some tensors of a version."""
MapAt = Sequence[Any]
"""Where the table of a version lies in the arena: offset, bytes, digest."""


class HeadWatch:
    """Follows the head of a stream. The first ``get`` returns the present head, if there is one; each later one the
    newest head that was not returned yet (those in between are skipped). For one thread."""

    def __init__(self, etcd: EtcdClient, keys: Keys, stream: str) -> None:
        self._key = key = keys.stream_head(stream)
        self._head = Mirror(etcd, key, lambda kv: readable_one(kv, Version) if kv.key == key else None)
        self._seen = 0

    def get(self, timeout_s: float) -> Version | None:
        """The next head, or None when none came in time. Raises EtcdUnavailable."""
        end = time.monotonic() + timeout_s
        while True:
            left = end - time.monotonic()
            head = self._head.read(max(left, 0.0)).get(self._key)
            if head is not None and head.number > self._seen:
                self._seen = head.number
                return head
            if left <= 0:
                return None

    def close(self) -> None:
        self._head.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Pulled:
    """A version whose every chunk lies, verified, in this host's arena, and stays there until this is closed."""

    def __init__(self, puller: Puller, version: Version, node: NodeConnection, token: str, map_at: MapAt) -> None:
        self.version = version
        self.arena_path = node.node.arena_path
        self._puller, self._node, self._token, self._map_at = puller, node, token, map_at
        self._lock = threading.Lock()

    def tensors(self, *, verify: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, read-only view) of every tensor, valid while this is open. ``verify``: check every chunk here too
        (``mapping`` says what the node has checked). Raises ChunkCorrupt and NodeUnavailable."""
        return mapping.load_tensors(self.reference(verify=verify))

    def reference(self, *, verify: bool = False) -> dict[str, Any]:
        """The reference for ``mapping.load_tensors`` in another process of this host; JSON-able, valid while this is
        open."""
        return reference(self.version.stream, self.version.number, self.arena_path, self._map_at, verify=verify)

    def confirm(self) -> None:
        """Returns if this host's node has kept every byte in place since the pull. Call it after the last byte was read
        and before the result is relied upon. Raises NodeUnavailable: what was read may be anything."""
        self._node.call({"op": "confirm", "use": self._token})

    @cached_property
    def manifest(self) -> Manifest:
        """Tensors, chunks and where they lie in them. Raises ChunkCorrupt and NodeUnavailable."""
        return mapping.read_map(self.arena_path, *self._map_at).manifest()

    def chunks(self) -> list[tuple[str, int, int]]:
        """Digest, offset in the arena, and bytes of every chunk."""
        return mapping.read_map(self.arena_path, *self._map_at).chunks_of()

    def close(self) -> None:
        """Releases the version; its views must not be used any more."""
        with self._lock:
            token, self._token = self._token, ""
        if token:
            self._puller.release(self._node, token)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def reference(stream: str, number: int, arena_path: str, map_at: MapAt, tensors: Sequence[Sequence[int]] | None = None,
              *, verify: bool = False) -> dict[str, Any]:
    """What ``mapping.load_tensors`` takes. ``tensors``: ranges of their numbers; all by default."""
    return {"format": mapping.FORMAT, "path": arena_path, "stream": stream, "version": number, "map": list(map_at),
            **({"tensors": tensors} if tensors is not None else {}), "verify": verify}


class Puller:
    """Pulls versions to this host. Thread-safe; connections are kept between pulls."""

    def __init__(self, etcd: EtcdClient, keys: Keys, name: str, *, io_timeout_s: float, node: str = "",
                 security: Security | None = None) -> None:
        """``name``: the name of the reader. ``node``: id of the node to pull to, where a host has several."""
        self._etcd, self._keys, self._name = etcd, keys, name
        self._dcs = DcsClient(etcd, keys, io_timeout_s=io_timeout_s, node=node, security=security)
        self._lock = threading.Lock()
        # Each pulled version has a connection of its own, so that releasing one never waits for the pull of another;
        # these are free.
        self._idle: list[NodeConnection] = []
        self._in_use: set[NodeConnection] = set()
        self._ids = itertools.count(1)

    def head(self, stream: str) -> Version | None:
        """The newest committed version of a stream."""
        return reads.head(self._etcd, self._keys, stream)

    def watch_head(self, stream: str) -> HeadWatch:
        """Follows the head; close it when done."""
        return HeadWatch(self._etcd, self._keys, stream)

    def pull(self, stream: str, number: int | None = None, *, on_progress: Progress | None = None,
             on_part: OnPart | None = None) -> Pulled:
        """Has this host's node pin a committed version (the head by default) and bring it to this host. A context
        manager. The node does so once, however many processes of the host pull the version.

        Chunks that are here are not fetched again, so a pull that failed continues where it ended; of a version that
        resembles the one pulled before only the difference is fetched. Each chunk is verified as it arrives.

        ``on_progress`` is called about every second with the bytes that are here and the bytes in all. ``on_part`` gets
        the version in parts while the rest is being fetched: references to tensors that are complete, each tensor once.

        Raises VersionNotFound, NodeUnavailable, ChunkMissing, ChunkCorrupt (no sound copy anywhere), ArenaFull,
        DiskFull, EtcdUnavailable, and what ``on_part`` raises.
        """
        token = f"{self._name}.{next(self._ids)}"
        request = {"op": "open", "stream": stream, "use": token, "parts": on_part is not None,
                   **({"number": number} if number is not None else {})}
        node: NodeConnection | None = None
        began_at = time.time()
        try:
            node = self._take()
            reach("pull.connected")
            answer = (self._call(node, request, on_progress, None) if on_part is None
                      else self._in_parts(node, request, on_progress, on_part))
            reach("pull.opened")
            version = Version.decode(answer["version"].encode())
            traces.record("dcs.pull", began_at, time.time(), parent=traces.current_or(version.meta.get("trace")),
                          stream=stream, version=version.number, nbytes=version.nbytes, holder=token)
            return Pulled(self, version, node, token, answer["map"])
        except BaseException:
            if node is not None:
                self.release(node, token)
            raise

    @staticmethod
    def _call(node: NodeConnection, request: dict[str, Any], on_progress: Progress | None,
              on_message: Callable[[dict[str, Any]], object] | None) -> dict[str, Any]:
        def receive(message: dict[str, Any]) -> None:
            if on_progress is not None:
                on_progress(*map(int, message["progress"]))
            if on_message is not None and message.get("tensors"):
                on_message(message)

        answer, _ = node.call(request, on_progress=receive)
        if on_progress is not None:
            on_progress(answer["nbytes"], answer["nbytes"])
        return answer

    def _in_parts(self, node: NodeConnection, request: dict[str, Any], on_progress: Progress | None, on_part: OnPart
                  ) -> dict[str, Any]:
        """Receives in another thread, since the node waits for no reader, and hands out in this one what is
        complete."""
        messages: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()  # no longer than the tensors

        def run() -> dict[str, Any]:
            try:
                return self._call(node, request, on_progress, messages.put)
            finally:
                messages.put(None)

        def hand_out(message: Mapping[str, Any], ranges: list[list[int]]) -> None:
            on_part(reference(request["stream"], int(message["number"]), node.node.arena_path, message["map"], ranges))

        with ThreadPoolExecutor(1, thread_name_prefix="pull") as pool:
            opened = pool.submit(run)
            try:
                ranges: list[list[int]] = []
                while (message := messages.get()) is not None:
                    ranges += message["tensors"]
                    if messages.empty():
                        hand_out(message, ranges)
                        ranges = []
                answer = opened.result()
                if ranges := ranges + answer["tensors"]:
                    hand_out(answer, ranges)
                return answer
            except BaseException:
                node.close()  # ends the call
                raise

    def _take(self) -> NodeConnection:
        """A connection to this host's node for one pull."""
        while True:
            with self._lock:
                kept = self._idle.pop() if self._idle else None
            if kept is None:
                kept = self._dcs.open_local()
            elif kept.stale():
                kept.close()
                continue
            with self._lock:
                self._in_use.add(kept)
            return kept

    def release(self, node: NodeConnection, token: str) -> None:
        """Ends one pull: the node may unpin the version and reuse its memory."""
        try:
            node.call({"op": "release", "use": token})
        except ElasticRLError:
            node.close()  # which releases, too
        with self._lock:
            self._in_use.discard(node)
            if not node.closed:
                self._idle.append(node)

    def close(self) -> None:
        """Releases every version of this puller."""
        self._dcs.close()
        with self._lock:
            for node in (*self._idle, *self._in_use):
                node.close()
            self._idle.clear()
            self._in_use.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
