"""The numbers of a run's steps by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_rl.errors import ConfigError
from elastic_rl.report.numbers import chosen, numbers
from tests.support.budget import seeds

RECORDS: list[dict[str, Any]] = [
    {"kind": "history", "id": "x"}, {"kind": "sft", "step": 2, "loss": 3.0, "eval_accuracy": 0.1},
    {"kind": "eval", "step": 0, "eval_accuracy": 0.25},
    {"kind": "step", "step": 1, "reward_mean": 0.5, "algorithm": {"kl": 0.1}, "seconds": {"total": 2.0, "train": 1.0}},
    {"kind": "step", "step": 2, "reward_mean": 9.0}, {"kind": "eval", "step": 2, "eval_accuracy": 0.9},
    {"kind": "rewind", "to_step": 1}, {"kind": "step", "step": 2, "reward_mean": 0.75, "groups": [1, 2]}]


def test_steps_are_those_that_were_not_undone_with_their_evaluations() -> None:
    found = numbers(RECORDS)
    assert [(s.phase, s.step) for s in found] == [("sft", 2), ("rl", 0), ("rl", 1), ("rl", 2)]
    assert found[0].values == {"loss": 3.0, "eval_accuracy": 0.1} and found[1].values == {"eval_accuracy": 0.25}
    assert found[2].values == {"reward_mean": 0.5, "algorithm/kl": 0.1, "seconds/total": 2.0, "seconds/train": 1.0}
    assert found[3].values == {"reward_mean": 0.75}


def test_names_are_whole_last_parts_or_patterns() -> None:
    steps = numbers(RECORDS)
    assert chosen(steps, ["kl", "reward_mean", "seconds/*", "kl"]) == [
        "algorithm/kl", "reward_mean", "seconds/total", "seconds/train"]
    assert chosen(steps, []) == ["reward_mean", "eval_accuracy", "loss", "algorithm/kl", "seconds/total"]
    with pytest.raises(ConfigError, match="no step has a metric 'reward_maen'; did you mean 'reward_mean'") as e:
        chosen(steps, ["loss", "reward_maen"])
    assert "algorithm/kl, eval_accuracy" in e.value.hint
    assert chosen([], []) == []


_VALUE = st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=2) | st.dictionaries(
    st.text(max_size=2), st.none() | st.floats() | st.text(max_size=1), max_size=2)


@settings(max_examples=seeds(60))
@given(st.lists(st.fixed_dictionaries(
    {"kind": st.sampled_from(["sft", "step", "eval", "sampled"]), "step": st.integers(0, 3)},
    optional={name: _VALUE for name in ("loss", "eval_sets", "eval_reward_parts", "engines", "seconds")}), max_size=6))
def test_records_of_other_forms_end_nothing(records: list[dict[str, Any]]) -> None:
    found = numbers(records)
    assert len({(s.phase, s.step) for s in found}) == len(found)
    assert all(isinstance(value, float) for s in found for value in s.values.values())
    chosen(found, [])
