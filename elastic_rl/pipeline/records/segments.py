"""The sealed part of a job's history, as the manifest of the stream ``run_log`` lists it. Pure, and free of torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_rl.dcs.codecs.digests import matches
from elastic_rl.dcs.manifest import TensorEntry
from elastic_rl.pipeline.records.history import record_line

HISTORY_KEY, END_KEY = "history", "end"
"""Keys in a version's meta: the identity of the history, and the offset at which the version ends."""
_NAME = re.compile(r"(\d+)-(\d+)(-gap)?")
FIRST_RECORD_BYTES = 4096
"""Bytes at the beginning of a copy in which its first record is looked for."""
_GAP_LINE_BYTES = 128
"""Longest line of a gap."""


@dataclass(frozen=True)
class Segment:
    """A run of the history."""

    start: int
    end: int
    entry: TensorEntry | None
    """The tensor that has its bytes; None for a gap: they are lost, or the stream has no room for them."""

    @property
    def name(self) -> str:
        """The name of its tensor, which is empty for a gap."""
        return segment_name(self.start, self.end) + ("-gap" if self.entry is None else "")

    def has_bytes(self, data: bytes) -> bool:
        """Whether these are its bytes, by the digests."""
        if self.entry is None or len(data) != self.end - self.start:
            return False
        at = 0
        for digest, _, nbytes in self.entry.slices:
            if not matches(data[at:at + nbytes], digest):
                return False
            at += nbytes
        return True

    def gap_line(self) -> bytes:
        """The record that stands for a gap."""
        return record_line("gap", start=self.start, end=self.end)


def segment_name(start: int, end: int) -> str:
    return f"{start:016d}-{end:016d}"


def segments_of(tensors: Iterable[TensorEntry], sealed: int) -> list[Segment]:
    """The segments from 0 to ``sealed``, in order and without holes: what no tensor has is a gap, and gaps that touch
    are one."""
    found: list[Segment] = []
    at = 0
    for start, end, entry in sorted(_parsed(tensors), key=lambda found: found[:2]):
        if start < at or end > sealed:
            continue
        if start > at:
            _add(found, Segment(at, start, None))
        _add(found, Segment(start, end, entry))
        at = end
    if at < sealed:
        _add(found, Segment(at, sealed, None))
    return found


def _parsed(tensors: Iterable[TensorEntry]) -> Iterable[tuple[int, int, TensorEntry | None]]:
    for tensor in tensors:
        if (match := _NAME.fullmatch(tensor.name)) is not None:
            yield int(match[1]), int(match[2]), tensor if match[3] is None else None


def _add(found: list[Segment], segment: Segment) -> None:
    if found and segment.entry is None and found[-1].entry is None:
        segment = Segment(found.pop().start, segment.end, None)
    found.append(segment)


def within(segments: Sequence[Segment], most_bytes: int) -> list[Segment]:
    """The segments, of which the oldest are gaps so that the others have no more bytes than that."""
    kept: list[Segment] = []
    room = most_bytes
    for segment in reversed(segments):
        if segment.entry is not None:
            room -= segment.end - segment.start
        kept.append(segment if room >= 0 else Segment(segment.start, segment.end, None))
    merged: list[Segment] = []
    for segment in reversed(kept):
        _add(merged, segment)
    return merged


def first_record(head: bytes) -> dict[str, Any]:
    """The record that a copy of the history begins with; {} for what begins with none. ``head``: its first bytes."""
    try:
        found = json.loads(head.partition(b"\n")[0])
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def gap_in_file(head: bytes, start: int, end: int) -> tuple[int, int] | None:
    """The bytes of the line and the end of the gap, where a copy of the history has a gap in the place of what begins
    at ``start``, which ends at ``end`` or before. ``head``: what the copy has there."""
    line, newline, _ = head[:_GAP_LINE_BYTES].partition(b"\n")
    if not newline:
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or record.get("kind") != "gap" or record.get("start") != start:
        return None
    stop = record.get("end")
    return (len(line) + 1, stop) if isinstance(stop, int) and start < stop <= end else None
