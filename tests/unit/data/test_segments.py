"""Segments that are made of arrays: they are those of the same numbers, whoever reads them."""

from __future__ import annotations

import pickle
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.data.queue.group_codec import decode_samples, encode_samples
from elastic_rl.data.queue.packed_group import PackedGroup
from elastic_rl.data.samples import Group, Prompt, Sample, Segment
from elastic_rl.engine.client import Sampling
from elastic_rl.engine.generation import PromptRequest, fault_of

_LOGPROB = st.floats(width=32, allow_nan=False, allow_infinity=False)
_NUMBERS = st.lists(st.tuples(st.integers(0, 2**31 - 1), _LOGPROB), max_size=5)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Segment, Segment]:
    """The same segment of tuples and of arrays."""
    numbers = draw(_NUMBERS)
    ids, logprobs = [i for i, _ in numbers], [p for _, p in numbers] if draw(st.booleans()) else []
    loss, version = draw(st.booleans()), draw(st.integers(0, 5))
    return (Segment(tuple(ids), tuple(logprobs), loss, version),
            Segment.of_arrays(np.array(ids, np.int32), np.array(logprobs, np.float64), loss, version))


@given(pairs())
def test_segment_of_arrays_is_that_of_tuples(pair: tuple[Segment, Segment]) -> None:
    plain, made = pair
    assert made.size == len(plain.token_ids) and "token_ids" not in vars(made), "nobody has asked for them"
    assert made == plain and hash(made) == hash(plain) and repr(made) == repr(plain) and asdict(made) == asdict(plain)
    assert type(made.token_ids) is tuple and {*map(type, made.token_ids)} <= {int}
    assert {*map(type, made.logprobs)} <= {float}
    assert pickle.loads(pickle.dumps(made)) == plain
    changed = replace(made, loss=not plain.loss)
    assert changed == replace(plain, loss=not plain.loss) and changed.arrays is None


@given(st.lists(pairs(), min_size=1, max_size=3), st.integers(1, 2**31), st.integers(0, 12))
def test_samples_of_arrays_are_checked_and_written_as_those_of_tuples(
        found: list[tuple[Segment, Segment]], vocabulary: int, limit: int) -> None:
    plain, made = (Sample(tuple(pair[n] for pair in found), text="x") for n in (0, 1))
    request = PromptRequest(0, Prompt((1,)), Sampling(limit), 1)
    assert fault_of([made], request, vocabulary) == fault_of([plain], request, vocabulary)
    raw = encode_samples([plain])
    assert encode_samples([made]) == raw and decode_samples(raw) == [plain]
    group = Group(0, Prompt((1,)), (made,))
    assert PackedGroup.of(group).group() == PackedGroup.of(replace(group, samples=(plain,))).group()
    assert made.turn_ends == plain.turn_ends
    assert not any("token_ids" in vars(segment) for _, segment in found), "tuples are made for people only"


def test_segment_of_arrays_has_its_names_only_and_arrays_of_one_length() -> None:
    made = Segment.of_arrays(np.zeros(2, np.int32), np.zeros(0))
    assert not hasattr(made, "tokens") and not hasattr(Segment((1,)), "tokens")
    with pytest.raises(ValueError, match="2 tokens has 1 log-probs"):
        Segment.of_arrays(np.zeros(2, np.int32), np.zeros(1))


@pytest.mark.parametrize("arrays", [
    (np.array([1.0]), np.array([-1.0])), (np.array([1], np.int32), np.array([-1], np.int32)),
    (np.array([1], np.int32), np.array([np.nan])), (np.array([1], np.int32), np.array([-np.inf])),
    (np.array([-1], np.int32), np.array([-1.0])), (np.array([1 << 40]), np.array([-1.0]))])
def test_arrays_of_other_numbers_are_refused(arrays: tuple[np.ndarray, np.ndarray]) -> None:
    assert fault_of([Sample((Segment.of_arrays(*arrays),))], PromptRequest(0, Prompt((1,)), Sampling(9), 1))
