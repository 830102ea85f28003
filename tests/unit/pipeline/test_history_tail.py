"""What a follower of a history takes from the blocks that etcd has. Pure."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.pipeline.records.history import Block
from elastic_rl.pipeline.records.history_tail import appended


@given(data=st.binary(min_size=1, max_size=60), cuts=st.lists(st.integers(0, 60), max_size=6),
       overlaps=st.lists(st.integers(0, 60), max_size=3), start=st.integers(0, 60), rnd=st.randoms())
def test_bytes_of_overlapping_blocks_are_taken_once_and_in_order(
        data: bytes, cuts: list[int], overlaps: list[int], start: int, rnd: object) -> None:
    at, blocks = 0, list[Block]()
    for end in sorted({min(cut, len(data)) for cut in cuts} | {len(data)}):
        if end > at:
            blocks.append(Block(0, at, data[at:end]))
            at = end
    blocks += [Block(0, begin, data[begin:begin + 5]) for begin in overlaps if begin < len(data)]
    rnd.shuffle(blocks)  # type: ignore[attr-defined]
    start = min(start, len(data))
    assert appended(blocks, start) == (data[start:], len(data))
    assert appended(blocks, len(data)) == (b"", len(data)), "nothing is taken twice"


def test_what_was_sealed_meanwhile_is_passed_over_at_a_line_break() -> None:
    assert appended([Block(20, 20, b"cd\n")], 10) == (b"\ncd\n", 23)
    assert appended([], 10) == (b"", 10)
