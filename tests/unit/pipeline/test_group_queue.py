"""The embedded group queue, and groups as bytes."""

from __future__ import annotations

import datetime
import json
import math
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.data.queue.group_codec import decode_group, decode_samples, encode_group, encode_samples
from elastic_rl.data.queue.packed_group import PackedGroup
from elastic_rl.data.queue.summary import GroupSummary
from elastic_rl.data.samples import Group, Prompt, Sample, Segment
from elastic_rl.errors import IllegalTransition, PluginFailed, QueueUnavailable
from elastic_rl.net.addresses import LOOPBACK
from elastic_rl.pipeline.flow import transfer_queue
from elastic_rl.pipeline.flow.group_queue import EmbeddedQueue
from elastic_rl.pipeline.flow.queues import make_queue
from elastic_rl.pipeline.flow.transfer_queue import TransferQueueQueue

_TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=4).map(tuple)
_FLOATS = st.floats(allow_nan=False, allow_infinity=False)
_LOGPROBS = st.floats(allow_nan=False, allow_infinity=False, width=32)


@st.composite
def _segments(draw: st.DrawFn) -> Segment:
    tokens = draw(_TOKENS)
    logprobs = draw(st.just(()) | st.lists(_LOGPROBS, min_size=len(tokens), max_size=len(tokens)).map(tuple))
    return Segment(tokens, logprobs, draw(st.booleans()), draw(st.integers(0, 2**63 - 1)))


_TURNS = st.lists(_FLOATS, max_size=2).map(tuple)
_SAMPLES = st.builds(
    Sample, st.lists(_segments(), max_size=3).map(tuple), st.sampled_from(["stop", "length"]), _FLOATS,
    st.dictionaries(st.text(max_size=3), _FLOATS, max_size=2), st.dictionaries(st.text(max_size=3), st.none() | _FLOATS,
                                                                               max_size=2), st.text(max_size=5), _TURNS)
_GROUPS = st.builds(
    Group, st.integers(0, 2**53), st.builds(Prompt, _TOKENS, st.text(max_size=5), st.none() | _TOKENS,
                                            st.dictionaries(st.text(max_size=3), st.lists(st.integers()), max_size=2),
                                            st.text(max_size=5)),
    st.lists(_SAMPLES, max_size=3).map(tuple), st.text(max_size=5)).filter(lambda group: group.samples or group.failed)
_GROUP = Group(3, Prompt((1, 2), "t", (4,), {}, "q"),
               (Sample((Segment((1,), (-0.5,), True, 1),), "stop", 1.0, {"a": 1.0}, {}, "x"),))


def _taken_apart(raw: bytes) -> tuple[Any, bytes, bytes]:
    """The JSON of a group, and its arrays."""
    head, tokens, _ = struct.unpack_from("<3Q", raw)
    return json.loads(raw[24:24 + head]), raw[24 + head:24 + head + tokens], raw[24 + head + tokens:]


def _put_together(head: Any, tokens: bytes, logprobs: bytes) -> bytes:
    text = json.dumps(head).encode()
    return struct.pack("<3Q", len(text), len(tokens), len(logprobs)) + text + tokens + logprobs


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value within a JSON text."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _places(inner, (*path, key))


@given(_GROUPS)
def test_group_comes_back_from_bytes_with_every_bit(group: Group) -> None:
    assert decode_group(encode_group(group)) == group


@pytest.mark.parametrize("raw", [
    b"", b"[]", bytes(24), *(struct.pack("<3Q", len(head), 0, 0) + head for head in (
        b"{}", json.dumps({"ordinal": 1, "prompt": []}).encode(), b"[" * 100_000))])
def test_bytes_that_are_no_group_are_refused(raw: bytes) -> None:
    with pytest.raises(ValueError):
        decode_group(raw)


@given(_GROUPS, st.integers(0, 1 << 30), st.binary(max_size=9))
def test_bytes_with_others_in_them_are_refused_or_a_group(group: Group, at: int, put: bytes) -> None:
    raw = encode_group(group)
    at %= len(raw)
    for changed in (raw[:at], raw[:at] + put + raw[at + len(put):], raw + put):
        try:
            found = decode_group(changed)
        except ValueError:
            continue
        assert decode_group(encode_group(found)) == found


@given(_GROUPS)
def test_group_that_was_packed_is_the_same(group: Group) -> None:
    packed = PackedGroup.of(group)
    assert packed.group() == group
    assert not any(s.token_ids or s.logprobs for sample in packed.bare.samples for s in sample.segments)


def test_numbers_of_a_large_group_take_eight_bytes_a_token() -> None:
    tokens = tuple(range(8192))
    group = Group(1, Prompt((1, 2)), (Sample((Segment(tokens, (-0.125,) * 8192, version=3),)),) * 16)
    raw, packed = encode_group(group), PackedGroup.of(group)
    assert decode_group(raw) == group == packed.group() and len(raw) < 16 * 8192 * 8 + 4000
    assert packed.tokens.nbytes + packed.logprobs.nbytes == 16 * 8192 * 8


def test_log_probs_are_held_as_they_are_trained_on() -> None:
    group = Group(1, Prompt((1,)), (Sample((Segment((1,), (-0.1,), version=3),)),))
    rounded = float(np.float32(-0.1))
    for held in (decode_group(encode_group(group)), PackedGroup.of(group).group()):
        assert held.samples[0].segments[0].logprobs == (rounded,)


@given(st.sampled_from(list(_places(_taken_apart(encode_group(_GROUP))[0]))),
       st.sampled_from([None, True, 3, -1, 1 << 400, 0.5, math.nan, math.inf, "", "9", [], [1], ["ab"], {},
                        {"a": None}]))
def test_group_with_one_altered_value_is_refused_or_can_be_written(place: tuple[Any, ...], put: Any) -> None:
    head, *arrays = _taken_apart(encode_group(_GROUP))
    wrapped = {"": head}
    at: Any = wrapped
    for key in ("", *place)[:-1]:
        at = at[key]
    at[("", *place)[-1]] = put
    try:
        group = decode_group(_put_together(wrapped[""], *arrays))
    except ValueError:
        return
    assert decode_group(encode_group(group)) == group
    assert all(math.isfinite(sample.reward) and sample.oldest_version >= 0 for sample in group.samples)
    assert group.samples or group.failed


@pytest.mark.parametrize(("key", "value"), [
    ("ordinal", math.inf), ("ordinal", "3"), ("failed", 3), ("samples", []), ("reward", "NaNx"), ("reward", math.nan),
    ("parts", [1]), ("segments", [[1, 1, True, "9"]]), ("segments", [["1", 1, True, 1]]),
    ("segments", [[2, 2, True, 1]]), ("segments", [[1, 0, True, 1]]), ("segments", [[0, 1, True, 1]])])
def test_value_of_another_kind_is_refused(key: str, value: Any) -> None:
    raw, *arrays = _taken_apart(encode_group(_GROUP))
    (raw if key in raw else raw["samples"][0])[key] = value
    with pytest.raises(ValueError, match="not a group|log-probs"):
        decode_group(_put_together(raw, *arrays))


def test_numbers_that_are_no_token_or_log_prob_are_refused() -> None:
    head, tokens, logprobs = _taken_apart(encode_group(_GROUP))
    for bad in ((struct.pack("<i", -1) + tokens[4:], logprobs), (tokens, struct.pack("<d", math.nan))):
        with pytest.raises(ValueError, match="token ids or log-probs"):
            decode_group(_put_together(head, *bad))


@pytest.mark.parametrize("value", [b"x", {1, 2}, datetime.date(2026, 1, 1)], ids=str)
def test_metadata_that_is_no_json_is_no_fault_of_the_queue(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_queue.importlib.util, "find_spec", lambda name: object())
    queue = transfer_queue.TransferQueueQueue(2, units=1, call_s=1.0, host=LOOPBACK)
    with pytest.raises(PluginFailed, match="metadata"):
        queue.put(replace(_GROUP, prompt=Prompt((1,), metadata={"own": value})))
    queue.close()


def test_embedded_queue_keeps_groups_until_dropped_within_its_capacity() -> None:
    queue = make_queue(config.parse({}), 2, LOOPBACK)
    assert isinstance(queue, EmbeddedQueue)
    first, second = (Group(ordinal, Prompt((ordinal,)), _GROUP.samples) for ordinal in (4, 7))
    queue.put(first)
    queue.put(second)
    queue.put(second)
    assert set(queue.get([7, 4, 5])) == {7, 4} and queue.get([4])[4] == GroupSummary.from_group(first)
    assert queue.reader([]).read([(7, 0)]) == [(second.prompt, second.samples[0])]
    with pytest.raises(IllegalTransition, match="full"):
        queue.put(Group(8, Prompt((1,)), ()))
    queue.drop([4, 5])
    assert set(queue.get([4, 7])) == {7}


def test_hanging_start_of_actors_is_repeated_a_bounded_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_queue.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(transfer_queue, "_SHOWN_AFTER_S", 0.01)
    monkeypatch.setattr(transfer_queue, "_GIVE_UP_START_S", 0.0)
    go_on, closed = threading.Event(), list[object]()

    class Hanging:
        def __init__(self, units: int, call_s: float, host: str) -> None:
            go_on.wait(60)

        def close(self) -> None:
            closed.append(self)

    monkeypatch.setattr(transfer_queue, "_Actors", Hanging)
    queue = TransferQueueQueue(4, units=1, call_s=1.0, host=LOOPBACK)
    group = Group(0, Prompt((1,)), (Sample((Segment((2,), (-0.5,), version=1),)),))
    for _ in range(transfer_queue._MAX_LEFT):
        with pytest.raises(QueueUnavailable, match="the actors of TransferQueue start"):
            queue.put(group)
    with pytest.raises(RuntimeError, match="4 starts of TransferQueue hang"):  # which no wait takes for an outage
        queue.put(group)
    go_on.set()
    wait_until(lambda: len(closed) == transfer_queue._MAX_LEFT, what="the end of what came too late")
    queue.close()


@given(_GROUPS)
def test_samples_travel_without_their_prompt(group: Group) -> None:
    assert tuple(decode_samples(encode_samples(group.samples))) == group.samples
