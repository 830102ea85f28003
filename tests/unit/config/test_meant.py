"""Which setting is meant by a key that there is not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_rl.algorithms.registry import ALGOS
from elastic_rl.config import load, reference
from elastic_rl.config.meant import BY_NAME, OPTIONS, meant, suggestion
from elastic_rl.data.text_options import FileOptions
from elastic_rl.errors import ConfigError
from tests.support.budget import seeds

KEYS = [one.key for one in reference.settings()]
FIELDS = {"data.options": set(FileOptions.model_fields),
          "algorithm.options": {name for spec in ALGOS.values() for name in spec.options.model_fields}}
PAGE = Path(__file__).parents[3] / "docs" / "coming-from.md"


def test_every_name_of_others_stands_for_a_setting_or_an_option_that_there_is() -> None:
    there = {*KEYS, *(f"{setting}.{field}" for setting, fields in FIELDS.items() for field in fields)}
    assert {key for keys in BY_NAME.values() for key in keys} <= there
    assert {f"{setting}.{name}" for setting, names in OPTIONS.items() for name in names} <= there
    assert all(name == name.lower() and "-" not in name for name in BY_NAME)


def _pairs() -> Iterator[tuple[str, str]]:
    """Names of verl and slime in the page's table, each with what its row has of ours."""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 4:
            for code in re.findall(r"`([^`]+)`", f"{cells[1]} {cells[2]}"):
                name = re.split(r"[=\s]", code.removeprefix("--"))[0].rpartition(".")[2].replace("-", "_")
                if re.fullmatch(r"\w+", name):
                    yield name, cells[3]


NO_SETTING = {"py", "sglang", "kl_coef", "enable", "save", "save_hf", "default_local_dir", "megatron_config_path",
              "over_sampling_batch_size", "use_fault_tolerance"}
"""Parts of names that say nothing alone, what is no setting here, and what is one by its own name."""


def test_names_of_others_in_the_page_lead_to_what_one_of_their_rows_says() -> None:
    rows: dict[str, str] = {}
    for name, ours in _pairs():
        rows[name] = f"{rows.get(name, '')} {ours}"
    found = {name: [key.rpartition(".")[2] for key in meant(name, KEYS, most=1, cutoff=0.9)] for name in rows}
    assert len(rows) > 90
    assert {name for name, keys in found.items() if not any(key in rows[name] for key in keys)} == NO_SETTING


@pytest.mark.parametrize(("key", "first"), [
    ("train.learning_rate", "train.lr"), ("sft.learning_rate", "sft.lr"), ("learning-rate", "train.lr"),
    ("batch_size", "train.prompts_per_step"), ("sft.batch_sizes", "sft.batch_size"),
    ("temperature", "rollout.temperature"), ("max_new_tokens", "data.options.max_response_tokens"),
    ("clip_high", "algorithm.options.clip_high"), ("algorithm.clip_high", "algorithm.options.clip_high"),
    ("rolout.top_p", "rollout.top_p"), ("prompt_key", "data.options.prompt_key")])
def test_key_that_is_meant_comes_first(key: str, first: str) -> None:
    found = meant(key, KEYS, most=3, cutoff=0.6)
    assert found[0] == first and len(found) <= 4
    with pytest.raises(ConfigError) as e:
        reference.explain(key)
    assert f"did you mean {first}" in e.value.hint


@settings(max_examples=seeds(100))
@given(st.text(), st.text())
def test_any_key_gets_keys_that_there_are_or_none(section: str, name: str) -> None:
    found = meant(f"{section}.{name}", KEYS, most=3, cutoff=0.6)
    assert len(found) == len(set(found)) <= 4
    assert set(found) <= {*KEYS, *(key for keys in BY_NAME.values() for key in keys)}


def test_names_of_others_are_answered_in_settings_and_in_options() -> None:
    with pytest.raises(ConfigError, match="unknown key 'train.learning_rate'; did you mean 'train.lr'"):
        load(overrides=["--train.learning_rate=1"])
    with pytest.raises(ConfigError, match="unknown key 'learning_rate'; did you mean 'train.lr' or 'sft.lr'"):
        load(overrides=["--learning_rate=1"])
    assert suggestion("max_new_tokens", FileOptions.model_fields) == "; did you mean 'max_response_tokens'?"
    assert suggestion("learning_rate", ["lr", "steps"]) == "; did you mean 'lr'?"
    assert suggestion("learning_rate", ["steps"]) == ""


@pytest.mark.parametrize(("key", "setting", "where"), [
    ("data.options.prompt_key", "data.options", "docs/data.md"), ("data.options.*", "data.options", "docs/data.md"),
    ("algorithm.options.clip_high", "algorithm.options", "docs/algorithms.md"),
    ("rollout.reward_options.timeout_s", "rollout.reward_options", "docs/rewards.md"),
    ("critic.train.lr", "critic.train", "config explain train")])
def test_option_is_explained_by_its_setting_and_its_page(key: str, setting: str, where: str) -> None:
    said = reference.explain(key)
    assert said.startswith(f"{setting}\n") and f"{key} is an option of" in said and where in said
    assert where in reference.explain(setting)
    if where.startswith("docs"):
        assert (PAGE.parents[1] / where).is_file()
