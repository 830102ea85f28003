"""The history of a job: the bytes of its records, addressed by offset. Pure; no clock.

    0            sealed                    committed        end
    |  segments   |  tail: segments that are  |  not in etcd  |
    |  in the DCS |  in etcd, in blocks       |  yet          |

The actor appends lines at the end. Each of its writes of the job's status takes along what is not in etcd yet, as
blocks. A segment that is large enough is closed: the next line begins another one. Closed segments are sealed: the
stream ``run_log`` has them then, and etcd does not any more.

The transitions that must NOT exist:

- from sealed back: what is sealed is not in memory any more;
- from a line that was appended to no trace of it. Where the tail has no room for one, as when the DCS was away for
  long, a record of kind ``gap`` says that records are left out, and another one, once there is room, how many.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

SEGMENT_BYTES = 1 << 20
"""A segment is closed once it has this many bytes: by a line more, at most."""
TAIL_BYTES = 4 << 20
"""Most bytes that are not sealed. Beyond one segment they become that many only while nothing can be published."""
BLOCK_BYTES = 512 << 10
"""Most bytes that go into one transaction; etcd takes requests of 1.5 MiB."""
_GAP_ROOM = 256
"""Bytes kept free for the records that say that others are left out."""


@dataclass(frozen=True)
class Block:
    """A run of bytes of the tail, as etcd has it under a key."""

    segment: int
    """Offset at which its segment begins."""
    offset: int
    data: bytes

    @property
    def end(self) -> int:
        return self.offset + len(self.data)


@dataclass(frozen=True)
class ClosedSegment:
    """A segment that can be sealed."""

    start: int
    data: bytes

    @property
    def end(self) -> int:
        return self.start + len(self.data)


@dataclass
class _Segment:
    start: int
    data: bytearray = field(default_factory=bytearray)

    @property
    def end(self) -> int:
        return self.start + len(self.data)


def record_line(kind: str, **fields: Any) -> bytes:
    """A record as a line."""
    return json.dumps({"kind": kind, **fields}).encode() + b"\n"


_GAP_BEGINS = record_line("gap", reason="too many records were not published yet")


class History:
    """The end of a job's history, as its actor has it. Thread-safe: one thread appends and commits, another one seals
    and reads."""

    def __init__(self, identity: str, sealed: int = 0, blocks: Iterable[Block] = (), *,
                 on_commit: Callable[[], None] = lambda: None) -> None:
        """``identity``, ``sealed``: those of ``RunLogHead``. ``blocks``: what etcd has of the tail, in any order.
        ``on_commit``: called when etcd has more of it."""
        self.identity, self.on_commit = identity, on_commit
        self._sealed = self._committed = sealed
        self._segments: list[_Segment] = []  # what is not sealed, oldest first
        self._dropped_records = self._dropped_bytes = 0
        self._lock = threading.Lock()
        for block in sorted(blocks, key=lambda b: (b.offset, b.end)):
            self._restore(block)
        self._committed = self._end
        # The actor before this one may have ended between two blocks of a line.
        self._torn = bool(self._segments) and not self._segments[-1].data.endswith(b"\n")

    def _restore(self, block: Block) -> None:
        if block.end <= self._end:  # sealed by a commit that its writer did not see, or part of a longer block
            return
        if not self._segments or block.segment > self._segments[-1].start:
            if block.segment > self._end:  # etcd was damaged, or restored
                self._segments.append(_Segment(self._end, bytearray(_filler(block.segment - self._end))))
            self._segments.append(_Segment(self._end))
        if block.offset > self._end:
            self._segments[-1].data += _filler(block.offset - self._end)
        self._segments[-1].data += block.data[self._end - block.offset:]

    # -- appending and committing: the actor's loop ------------------------------------------------------------------
    def append(self, line: bytes) -> None:
        """Adds a line, with its newline, at the end."""
        with self._lock:
            self._note_dropped()
            if self._dropped_records or not self._has_room(len(line) + _GAP_ROOM):
                # Actors that follow one another while nothing can be published find the record of the one before.
                if not self._dropped_records and self._has_room(len(_GAP_BEGINS) + 1):
                    self._add(_GAP_BEGINS)
                self._dropped_records += 1
                self._dropped_bytes += len(line)
            else:
                self._add(line)

    def pending(self) -> tuple[list[Block], bool]:
        """The next bytes that etcd does not have, and whether there are more of them."""
        with self._lock:
            self._note_dropped()
            blocks, at, room = list[Block](), self._committed, BLOCK_BYTES
            for segment in self._segments:
                if segment.end > at and room:
                    data = bytes(segment.data[at - segment.start:at - segment.start + room])
                    blocks.append(Block(segment.start, at, data))
                    at, room = at + len(data), room - len(data)
            return blocks, at < self._end

    def commit(self, blocks: Sequence[Block]) -> None:
        """etcd has these blocks of ``pending``."""
        with self._lock:
            self._committed = max([self._committed, *(block.end for block in blocks)])
        if blocks:
            self.on_commit()

    def _note_dropped(self) -> None:
        if self._dropped_records and self._has_room(SEGMENT_BYTES + _GAP_ROOM):
            self._add(record_line("gap", records=self._dropped_records, bytes=self._dropped_bytes))
            self._dropped_records = self._dropped_bytes = 0

    def _has_room(self, nbytes: int) -> bool:
        return self._end - self._sealed + nbytes <= TAIL_BYTES

    def _add(self, line: bytes) -> None:
        if self._torn:  # the end of its line is of its segment, so that each segment ends with a line
            self._segments[-1].data += b"\n"
            self._torn = False
        if not self._segments or len(self._segments[-1].data) >= SEGMENT_BYTES:
            self._segments.append(_Segment(self._end))
        self._segments[-1].data += line

    # -- sealing and reading: the spool ------------------------------------------------------------------------------
    def closed(self) -> list[ClosedSegment]:
        """Segments that etcd has as a whole and that do not grow any more, oldest first."""
        with self._lock:
            return [ClosedSegment(s.start, bytes(s.data)) for s in self._segments
                    if len(s.data) >= SEGMENT_BYTES and s.end <= self._committed and not (
                        self._torn and s is self._segments[-1])]

    def seal(self, end: int) -> None:
        """The stream has the history up to this offset, the end of a segment."""
        with self._lock:
            self._sealed = max(self._sealed, end)
            self._segments = [s for s in self._segments if s.end > end]

    def read(self, offset: int) -> bytes | None:
        """Committed bytes from an offset on; None where it is sealed."""
        with self._lock:
            if offset < self._sealed:
                return None
            found = bytearray()
            for segment in self._segments:
                found += segment.data[max(0, offset - segment.start):max(0, self._committed - segment.start)]
            return bytes(found)

    @property
    def sealed(self) -> int:
        return self._sealed

    @property
    def committed(self) -> int:
        return self._committed

    @property
    def end(self) -> int:
        with self._lock:
            return self._end

    @property
    def full(self) -> bool:
        """Whether lines are left out because too much is not sealed."""
        with self._lock:
            return self._dropped_records > 0

    @property
    def _end(self) -> int:
        return self._segments[-1].end if self._segments else self._sealed


def _filler(nbytes: int) -> bytes:
    """A record of kind ``gap`` that takes the place of that many bytes, where there is room for it."""
    line = record_line("gap", bytes=nbytes)[:-1]
    return (b"\n" + line if len(line) + 2 <= nbytes else b"").ljust(nbytes - 1) + b"\n"
