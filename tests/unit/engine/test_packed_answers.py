"""Answers of engines as bytes."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.engine import packed_answers
from elastic_rl.engine.client import parse_sample

_TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=5)
_LOGPROBS = st.floats(max_value=0.0, allow_nan=False, allow_infinity=False)


@st.composite
def _answers(draw: st.DrawFn) -> list[dict[str, Any]]:
    found = []
    for ids in draw(st.lists(_TOKENS, max_size=4)):
        cut = draw(st.integers(0, len(ids)))
        found.append({"text": "x", "output_ids": ids, "meta_info": {
            "id": "5f", "finish_reason": {"type": draw(st.sampled_from(["stop", "length", "abort"])), "matched": 1},
            "weight_version": "7", "prompt_tokens": 3,
            "weight_versions": draw(st.sampled_from([None, [
                {"version": "6", "start": 0, "end": cut}, {"version": "7", "start": cut, "end": len(ids)}]])),
            **({"output_token_logprobs": [(draw(_LOGPROBS), t, None) for t in ids]} if ids else {})}})
    return found


@settings(max_examples=seeds(60))
@given(_answers())
def test_packed_answers_make_the_samples_that_json_makes(answers: list[dict[str, Any]]) -> None:
    """Every bit of each log-prob, too."""
    assert [parse_sample(a) for a in packed_answers.unpack(packed_answers.pack(answers))] == [
        parse_sample(a) for a in json.loads(json.dumps(answers))]


@settings(max_examples=seeds(200))
@given(_answers().map(packed_answers.pack), st.data())
def test_damaged_bytes_are_no_packed_answers(raw: bytes, data: st.DataObject) -> None:
    if data.draw(st.booleans()):
        damaged = raw[:data.draw(st.integers(0, len(raw) - 1))]
    else:
        damaged = raw + data.draw(st.binary(min_size=1, max_size=9))
    with pytest.raises(ValueError):
        packed_answers.unpack(damaged)


@pytest.mark.parametrize("change", [
    lambda raw: raw.replace(b"2,2", b"1,2", 1).replace(b"1,1", b"2,1", 1),  # the sums are the same
    lambda raw: raw.replace((3).to_bytes(4, "little"), (-3).to_bytes(4, "little", signed=True), 1),
    lambda raw: raw[:-8] + struct.pack("<d", math.nan), lambda raw: raw[:-8] + struct.pack("<d", -math.inf)])
def test_numbers_that_no_engine_means_are_no_packed_answers(change: Callable[[bytes], bytes]) -> None:
    """They are the engine's fault, and another one is asked: no prompt is to blame."""
    raw = packed_answers.pack([{"output_ids": ids, "meta_info": {
        "finish_reason": {"type": "stop"}, "weight_version": "7", "output_token_logprobs": [(-0.5, t) for t in ids]}}
        for ids in ([3, 4], [5])])
    assert len(packed_answers.unpack(raw)) == 2 and change(raw) != raw
    with pytest.raises(ValueError, match="none"):
        packed_answers.unpack(change(raw))


def test_json_of_an_engine_is_not_taken_for_a_packed_answer() -> None:
    answer = {"output_ids": ["3"], "meta_info": {"finish_reason": {"type": "stop"}, packed_answers.LOGPROBS: ["x"],
                                                 "output_token_logprobs": [["-0.5", 3]]}}
    [segment] = parse_sample(answer).segments
    assert (segment.token_ids, segment.logprobs) == ((3,), (-0.5,))


@settings(max_examples=seeds(200))
@given(st.one_of(st.binary(max_size=40), st.recursive(
    st.none() | st.integers(-1, 3) | st.text(max_size=2), lambda inner: st.lists(inner, max_size=6) | st.dictionaries(
        st.text(max_size=1), inner, max_size=2), max_leaves=8).map(lambda value: (
            len(text := json.dumps(value).encode()).to_bytes(8, "little") + text))))
def test_whatever_is_sent_is_read_or_a_value_error(raw: bytes) -> None:
    try:
        found = packed_answers.unpack(raw)
    except ValueError:
        return
    assert isinstance(found, list)
