"""The configuration: every way of setting a key, and what a person is told about a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_rl import config
from elastic_rl.cli.common import overrides
from elastic_rl.errors import ConfigError


@pytest.mark.parametrize(("written", "read"), [
    (["--train.steps=7"], 7), (["train.steps=7"], 7), (["--train.steps=3", "--train.steps=7"], 7),
    (["--train={steps: 7}"], 7),
])
def test_an_override_wins_in_every_form(written: list[str], read: int, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("train: {steps: 5}\n")
    assert config.load(file, written).train.steps == read


def test_command_line_settings_may_stand_apart_from_their_values() -> None:
    assert overrides(["--train.steps", "7", "--job=a"]) == ["--train.steps=7", "--job=a"]
    assert config.load(None, overrides(["--coordinator.ports", "[1, 2]"])).coordinator.ports == [1, 2]


@pytest.mark.parametrize("args", [["stray"], ["--train.steps"], ["--train.steps", "--job=a"]])
def test_a_setting_without_a_value_is_refused(args: list[str]) -> None:
    with pytest.raises(ConfigError):
        overrides(args)


@pytest.mark.parametrize(("key", "near"), [
    ("train.stepz", "train.steps"), ("trainer.tensorparallel", "trainer.tensor_"), ("rolout.engines", "rollout"),
    ("jbo", "job")])
def test_an_unknown_key_names_the_nearest_one(key: str, near: str) -> None:
    with pytest.raises(ConfigError) as e:
        config.load(None, [f"{key}=1"])
    assert "unknown key" in e.value.message
    assert near in e.value.message


@pytest.mark.parametrize(("override", "said"), [
    ("train.steps=many", "train.steps"), ("train.steps=0", "train.steps"), ("job=Not_A_Name", "job"),
    ("trainer.tensor_parallel=3", "multiple of trainer.tensor_parallel=3"),
    ("trainer.pipeline_parallel=7", "multiple of trainer.pipeline_parallel=7"),
    ("dcs.host=0.0.0.0", "set dcs.advertise_host"), ("coordinator.ports=[1]", "1 ports for 2"),
    ("train.steps.deeper=1", "train.steps"), ("train.steps=[", "not YAML"),
])
def test_a_wrong_value_is_told_with_its_key(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as e:
        config.load(None, [override])
    assert said in str(e.value)


@pytest.mark.parametrize("text", ["- a list", "a: [", "just words"])
def test_a_file_that_is_no_mapping_is_refused_by_name(text: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        config.load(file)


def test_a_missing_file_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        config.load("nowhere.yaml")


def test_what_is_shown_can_be_loaded_again() -> None:
    first = config.load(None, ["--train.steps=9", "--rollout.engines=3"])
    assert config.parse(first.model_dump(mode="json")) == first


@pytest.mark.parametrize(("accuracy", "steps"), [(None, 2), (0.0, 20), (0.09, 20), (0.1, 2), (0.39, 2), (0.7, 2)])
def test_sft_evaluates_often_only_near_its_target(accuracy: float | None, steps: int) -> None:
    assert config.parse({"sft": {"target_eval_accuracy": 0.4}}).sft.steps_to_next_eval(accuracy) == steps
