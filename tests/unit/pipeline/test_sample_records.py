"""Samples as they are kept for people: chosen, cut to a size, and readable again."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import SampleRecord, StepMetrics
from elastic_rl.pipeline.records.sample_ring import (
    MAX_RECORD_BYTES,
    MAX_SLOTS,
    MAX_TEXT_CHARS,
    SampleRing,
    cut_text,
    fitted,
    pick,
)

ANY_FLOAT = st.floats()
ANY_TEXT = st.text(st.characters(), max_size=50).flatmap(
    lambda text: st.sampled_from([1, 10, 300]).map(lambda times: text * times))


@given(prompt=ANY_TEXT, response=ANY_TEXT, reward=ANY_FLOAT, reason=ANY_TEXT,
       parts=st.dictionaries(ANY_TEXT, ANY_FLOAT, max_size=30), versions=st.lists(st.integers(0, 10**12), max_size=200))
def test_fitted_record_is_small_and_can_be_read(prompt: str, response: str, reward: float, reason: str,
                                                parts: dict[str, float], versions: list[int]) -> None:
    record = fitted(SampleRecord(step=1, group=2, index=3).replace(
        prompt=prompt, response=response, reward=reward, advantage=reward, finish_reason=reason, reward_parts=parts,
        versions=versions))
    raw = record.encode()
    assert len(raw) <= MAX_RECORD_BYTES
    assert SampleRecord.decode(raw) == record
    assert record.reward is None or math.isfinite(record.reward)


@pytest.mark.parametrize("character", ["a", "\0", "\ud800", "\U0001f600", '"', "\x1b"])
def test_long_text_is_cut_in_its_middle(character: str) -> None:
    record = fitted(SampleRecord(step=1, group=1, index=0, prompt="begin" + character * 50_000 + "end", response="ok"))
    assert record.cut
    assert record.prompt.startswith("begin")
    assert record.prompt.endswith("end")
    assert record.response == "ok"


def test_text_of_the_documented_length_is_kept_whole() -> None:
    record = fitted(SampleRecord(step=1, group=1, index=0, prompt="p" * MAX_TEXT_CHARS, response="r" * MAX_TEXT_CHARS))
    assert (len(record.prompt), len(record.response), record.cut) == (MAX_TEXT_CHARS, MAX_TEXT_CHARS, False)


def test_mark_says_how_many_characters_are_missing() -> None:
    assert cut_text("a" * 6 + "x" * 2000 + "b" * 3, 9) == "a" * 6 + "\n[… 2,000 characters left out …]\n" + "bbb"


@given(st.lists(st.floats(0, 1), max_size=40), st.integers(1, 6))
def test_picked_samples_include_the_best_and_the_worst(rewards: list[float], limit: int) -> None:
    found = pick(rewards, limit)
    assert len(found) == len(set(found)) == min(limit, len(rewards))
    if rewards:
        assert rewards[found[-1]] == max(rewards)
        assert limit == 1 or rewards[found[0]] == min(rewards)


@pytest.mark.parametrize("slots", [0, 3, MAX_SLOTS + 1])
def test_ring_refuses_a_size_that_no_transaction_holds(slots: int) -> None:
    with pytest.raises(ValueError, match="slots"):
        SampleRing(EtcdClient.__new__(EtcdClient), Keys("job"), slots)


def test_metrics_leave_out_what_json_cannot_hold() -> None:
    metrics = StepMetrics(step=1, at=0.0, reward=0.5, reward_parts={"format": float("nan"), "answer": 1.0},
                          idle_s={"generate": float("inf")})
    assert StepMetrics.decode(metrics.encode()).reward_parts == {"answer": 1.0}
    assert metrics.idle_s == {}


def test_records_of_an_older_release_are_read() -> None:
    metrics = StepMetrics.decode(b'{"step": 3, "at": 1.0, "reward": 0.5}')
    assert (metrics.idle_s, metrics.response_tokens, metrics.truncated, metrics.dropped_groups) == ({}, {}, 0.0, 0)
