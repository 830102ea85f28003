"""The history of a job's records: whatever is interrupted, etcd and the stream together have what was committed."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from elastic_rl.dcs.codecs.digests import digest_of
from elastic_rl.dcs.manifest import Slice, TensorEntry
from elastic_rl.pipeline.records import history
from elastic_rl.pipeline.records.history import Block, History, record_line
from elastic_rl.pipeline.records.segments import Segment, gap_in_file, segment_name, segments_of, within

SEGMENT, TAIL, BLOCK = 64, 600, 100


def small(patch: pytest.MonkeyPatch) -> None:
    for name, value in (("SEGMENT_BYTES", SEGMENT), ("TAIL_BYTES", TAIL), ("_GAP_ROOM", 100)):
        patch.setattr(history, name, value)


def entry(start: int, data: bytes) -> TensorEntry:
    return TensorEntry(segment_name(start, start + len(data)), "uint8", (len(data),),
                       (Slice(digest_of(data), 0, len(data)),))


class Machine(RuleBasedStateMachine):
    """A history with what etcd and the stream have of it. ``lines`` is the model: what was appended, without what was
    left out for want of room."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(history, "BLOCK_BYTES", BLOCK)
        small(self.patch)
        self.etcd: dict[tuple[int, int], bytes] = {}
        self.stream = b""
        self.tail = History("h")
        self.lines: list[bytes] = []
        self.number = 0

    def teardown(self) -> None:
        self.patch.undo()

    @rule(size=st.integers(0, 250))
    def append(self, size: int) -> None:
        self.number += 1
        line = record_line("step", step=self.number, x="." * size)
        self.tail.append(line)
        if not self.tail.full:
            self.lines.append(line)

    @rule(answered=st.booleans(), applied=st.booleans())
    def write(self, answered: bool, applied: bool) -> None:
        """A transaction with a block; its answer may be lost, whether it was applied or not."""
        blocks, _ = self.tail.pending()
        assert sum(len(b.data) for b in blocks) <= BLOCK
        if applied or answered:
            self.etcd |= {(b.segment, b.offset): b.data for b in blocks}
        if answered:
            self.tail.commit(blocks)

    @rule(answered=st.booleans())
    def seal(self, answered: bool) -> None:
        """The segments are published, after what an earlier commit whose answer was lost has published."""
        self.tail.seal(len(self.stream))
        for segment in self.tail.closed():
            assert segment.start == len(self.stream)
            self.stream += segment.data
            self.etcd = {k: v for k, v in self.etcd.items() if k[0] != segment.start}
        if answered:
            self.tail.seal(len(self.stream))

    @rule()
    def restart(self) -> None:
        """What was not in etcd is lost with the process; the rest is not."""
        committed = self.tail.committed
        self.tail = self.restored()
        assert self.tail.end >= committed
        kept = (self.stream + (self.tail.read(len(self.stream)) or b"")).split(b"\n")
        self.lines = [line for line in self.lines if line[:-1] in kept]

    def restored(self) -> History:
        return History("h", len(self.stream), [Block(s, o, d) for (s, o), d in self.etcd.items()])

    @invariant()
    def every_line_is_there_in_order(self) -> None:
        again = self.restored()
        durable = self.stream + (again.read(len(self.stream)) or b"")
        assert len(durable) == again.end >= self.tail.committed
        whole = [json.loads(line) for line in durable[:durable.rfind(b"\n") + 1].splitlines() if _is_json(line)]
        steps = [r["step"] for r in whole if r["kind"] == "step"]
        wanted = [json.loads(line)["step"] for line in self.lines]
        assert steps == wanted[:len(steps)]
        assert self.tail.end - self.tail.sealed <= TAIL

    @invariant()
    def reader_sees_what_is_committed(self) -> None:
        assert self.tail.read(self.tail.sealed) is not None
        assert len(self.tail.read(self.tail.sealed) or b"") == self.tail.committed - self.tail.sealed
        assert self.tail.sealed == 0 or self.tail.read(self.tail.sealed - 1) is None


def _is_json(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


TestHistory = Machine.TestCase


def test_records_that_found_no_room_are_counted_where_they_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    tail = History("h")
    lines = [record_line("step", step=n) for n in range(30)]
    for line in lines:
        tail.append(line)
    assert tail.full
    while (found := tail.pending())[0]:
        tail.commit(found[0])
    first = tail.closed()
    tail.seal(first[-1].end)
    tail.append(record_line("step", step=30))
    assert not tail.full
    tail.commit(tail.pending()[0])
    there = b"".join(s.data for s in first) + (tail.read(tail.sealed) or b"")
    *kept, begin, end, last = there.splitlines(keepends=True)
    assert kept == lines[:len(kept)] and json.loads(begin)["kind"] == "gap" and json.loads(last)["step"] == 30
    assert json.loads(end) == {"kind": "gap", "records": 30 - len(kept), "bytes": sum(map(len, lines[len(kept):]))}


def test_line_that_an_earlier_actor_has_written_in_part_costs_no_other_one() -> None:
    tail = History("h", 0, [Block(0, 0, b'{"kind": "step", "st')])
    tail.append(record_line("step", step=1))
    tail.commit(tail.pending()[0])
    assert [json.loads(line) for line in (tail.read(0) or b"").splitlines()[1:]] == [{"kind": "step", "step": 1}]


def test_segment_with_a_line_in_part_is_sealed_with_the_end_of_that_line(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    torn = b'{"kind": "step", "x": "' + b"." * SEGMENT
    tail = History("h", 0, [Block(0, 0, torn)])
    tail.append(record_line("step", step=1))
    assert not tail.closed(), "the end of the line is not in etcd yet"
    tail.commit(tail.pending()[0])
    sealed = tail.closed()[0]
    assert sealed.data == torn + b"\n"
    again = History("h", sealed.end)
    again.append(record_line("step", step=2))
    again.commit(again.pending()[0])
    assert again.read(sealed.end) == record_line("step", step=2)


def test_actors_that_follow_one_another_while_nothing_can_be_published_add_nothing(
        monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    blocks, ends = list[Block](), list[int]()
    for _ in range(20):
        tail = History("h", 0, blocks)
        for step in range(30):
            tail.append(record_line("step", step=step))
        while (found := tail.pending()[0]):
            tail.commit(found)
            blocks += found
        ends.append(tail.end)
    assert ends[0] <= TAIL and set(ends) == {ends[0]}
    assert b"too many records" in (tail.read(0) or b"").splitlines()[-1]


@pytest.mark.parametrize("lost", [{0}, {1}, {2, 3}, {0, 1, 2, 3, 4}, {6, 7, 8, 9, 10, 11}])
def test_segment_of_which_etcd_has_lost_blocks_is_one_segment_still(lost: set[int], monkeypatch: pytest.MonkeyPatch
                                                                    ) -> None:
    monkeypatch.setattr(history, "SEGMENT_BYTES", 256)
    tail, blocks, lines = History("h"), list[Block](), list[bytes]()
    for step in range(14):
        lines.append(record_line("step", step=step, x="." * 10))
        tail.append(lines[-1])
        found, _ = tail.pending()
        tail.commit(found)
        blocks += found
    again = History("h", 0, [b for n, b in enumerate(blocks) if n not in lost])
    assert again.end == tail.end
    segments = [(s.start, s.end) for s in tail.closed()]
    assert [(s.start, s.end) for s in again.closed()] == segments and len(segments) == 2
    whole = again.read(0) or b""
    assert [line for line in whole.splitlines(keepends=True) if line in lines] == [
        line for n, line in enumerate(lines) if n not in lost]
    assert b'"gap"' in whole


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=12), st.integers(0, 60), st.integers(0, 400))
def test_segments_cover_what_is_sealed_without_holes(parts: Sequence[tuple[int, bool]], more: int, most: int) -> None:
    tensors, at = [], 0
    for nbytes, there in parts:
        if there:
            tensors.append(entry(at, bytes(nbytes)))
        at += nbytes
    sealed = at + more
    found = segments_of(reversed(tensors), sealed)
    for segments in (found, within(found, most)):
        assert [s.start for s in segments] == [0, *(s.end for s in segments)][:len(segments)]
        assert not sealed or segments[-1].end == sealed
        assert all(a.entry is not None or b.entry is not None for a, b in zip(segments, segments[1:], strict=False))
        names = [TensorEntry(s.name, "uint8", (0,), ()) if s.entry is None else s.entry for s in segments]
        assert segments_of(names, sealed) == segments, "a version that lists them is read as it was written"
    assert [s.entry for s in found if s.entry is not None] == tensors
    kept = [s for s in within(found, most) if s.entry is not None]
    assert sum(s.end - s.start for s in kept) <= most
    assert kept == [s for s in found if s.entry][len(tensors) - len(kept):]


def test_segment_knows_its_bytes() -> None:
    data = b"0123456789"
    segment = Segment(5, 15, TensorEntry("5-15", "uint8", (10,), (
        Slice(digest_of(data[:4]), 0, 4), Slice(digest_of(data[4:]), 0, 6))))
    assert segment.has_bytes(data) and not segment.has_bytes(b"x" + data[1:]) and not segment.has_bytes(data[:-1])
    assert not Segment(5, 15, None).has_bytes(data)


def test_record_of_a_gap_is_found_in_a_copy() -> None:
    line = Segment(100, 900, None).gap_line()
    assert gap_in_file(line + b"more", 100, 900) == (len(line), 900) == gap_in_file(line, 100, 2000)
    assert gap_in_file(line, 101, 900) is None and gap_in_file(line, 100, 899) is None
    assert gap_in_file(b'{"kind": "step"}\n', 100, 900) is None and gap_in_file(line[:-1], 100, 900) is None
