"""Reads a job's history, as its actor or anybody else: from the copy on this host where that is complete, else from the
stream and from etcd. Free of torch."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from elastic_rl.config import Stream
from elastic_rl.dcs.catalog import reads
from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.fetch.chunk_reader import ChunkReader
from elastic_rl.dcs.security import Security
from elastic_rl.errors import ElasticRLError
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.pipeline.records.history import History
from elastic_rl.pipeline.records.segments import FIRST_RECORD_BYTES, HISTORY_KEY, Segment, first_record, segments_of
from elastic_rl.pipeline.records.tail_keys import read_tail

log = logging.getLogger(__name__)

_COMPARED_BYTES = 64 << 10
"""Bytes at the end of a copy with gaps by which it counts as complete."""
_PART_BYTES = 1 << 20


class HistoryReader:
    """One reading of a history: what it had when this was made. A context manager."""

    def __init__(self, etcd: EtcdClient, keys: Keys, *, io_timeout_s: float, security: Security | None) -> None:
        """Reads where the history stands. Raises EtcdUnavailable and RecordUnreadable."""
        tail = read_tail(etcd, keys)
        self._history = History(tail.head.id, tail.head.sealed, tail.blocks) if tail.head is not None else None
        self._etcd, self._keys = etcd, keys
        self._client = DcsClient(etcd, keys, io_timeout_s=io_timeout_s, security=security)
        self._reader = ChunkReader(self._client)
        self._sealed: list[Segment] | None = None

    @property
    def stands_at(self) -> tuple[str, int]:
        """The identity of the history, and the offset at which it ends; an empty one and 0 where none has begun."""
        return (self._history.identity, self._history.end) if self._history is not None else ("", 0)

    def parts(self, copy: Path) -> Iterator[bytes]:
        """The history in parts: of the copy at this path, as far as that goes, and then of etcd; or, where the copy
        does not have all that is sealed, of the stream. A line that a user has changed in the middle of a copy is not
        noticed here; its writer notices it. What cannot be had now is a record of kind ``gap``. Of a job without a
        history there is what the file has. Raises OSError."""
        if self._history is None:
            if copy.is_file():
                yield from _parts(copy, sys.maxsize)
            return
        tail = self._history.read(self._history.sealed) or b""
        if (found := self._of_copy(copy, tail)) is None:
            yield from map(self._read, self._segments())
            yield tail
            return
        nbytes, there = found
        yield from _parts(copy, nbytes)
        yield tail[there:]

    def _of_copy(self, copy: Path, tail: bytes) -> tuple[int, int] | None:
        """How many bytes to take of a file, and how much of the tail these have: its writer may append more to it
        meanwhile. None for one that is not a copy of all that is sealed."""
        assert self._history is not None
        if not copy.is_file():
            return None
        with copy.open("rb") as file:
            first = first_record(file.read(FIRST_RECORD_BYTES))
            if first.get("id") != self._history.identity and first.get("kind") != "gap":
                return None
            size = file.seek(0, os.SEEK_END)
            if (there := size - self._history.sealed) >= 0:  # a copy without gaps
                file.seek(self._history.sealed)
                if tail.startswith(found := file.read(len(tail) + 1)):
                    return self._history.sealed + len(found), len(found)
            # Where lines stand for gaps, the file is shorter or longer than that.
            end = self.end(_COMPARED_BYTES) if there < 0 or first.get("kind") == "gap" else b""
            file.seek(max(0, size - len(end)))
            return (size, len(tail)) if end and file.read() == end else None

    def end(self, most_bytes: int) -> bytes:
        """The last bytes, which may begin within a line."""
        history = self._history
        if history is None:
            return b""
        found = history.read(history.sealed) or b""
        for segment in reversed(self._segments() if len(found) < most_bytes and history.sealed else []):
            if len(found) >= most_bytes:
                break
            found = self._read(segment) + found
        return found[-most_bytes:]

    def _segments(self) -> list[Segment]:
        if self._history is None:
            return []
        if self._sealed is None:
            try:
                version = reads.head(self._etcd, self._keys, Stream.RUN_LOG)
                tensors = self._reader.manifest(version).tensors if version is not None and (
                    version.meta.get(HISTORY_KEY) == self._history.identity) else ()
            except ElasticRLError as e:
                log.warning("the records of the run before the newest ones cannot be read: %s", e)
                tensors = ()
            self._sealed = segments_of(tensors, self._history.sealed)
        return self._sealed

    def _read(self, segment: Segment) -> bytes:
        if segment.entry is not None:
            try:
                return self._reader.tensor(segment.entry)
            except ElasticRLError as e:
                log.warning("records of the run cannot be read (offset %d to %d): %s", segment.start, segment.end, e)
        return segment.gap_line()

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _parts(path: Path, most_bytes: int) -> Iterator[bytes]:
    """What a file begins with."""
    with path.open("rb") as file:
        while part := file.read(min(_PART_BYTES, most_bytes)):
            yield part
            most_bytes -= len(part)
