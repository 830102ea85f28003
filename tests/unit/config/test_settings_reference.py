"""The settings in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_rl.config import reference
from elastic_rl.errors import ConfigError

PAGE = Path(__file__).parents[3] / "docs" / "settings.md"


def test_page_is_that_of_the_code() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference.page(), (
        "python -m elastic_rl.config.reference > docs/settings.md")


def test_every_setting_is_told_once_with_its_bounds_and_default() -> None:
    found = {one.key: one for one in reference.settings()}
    assert len(found) == len(reference.settings()) > 300
    top_k = found["rollout.top_k"]
    assert (top_k.kind, top_k.default) == ("whole number >= 1 and <= 2147483647 or null", "null")
    assert found["pools.NAME.model"].default == "" and found["seed"].fixed and not found["train.lr"].fixed
    assert all(one.text and "anything" not in one.kind.split(" or ") for one in found.values())


def test_setting_and_section_are_explained() -> None:
    assert reference.explain("--train.lr").startswith("train.lr\n  number > 0; default ")
    section = reference.explain("train")
    assert "train.lr\n" in section and "rollout." not in section
    assert "pools.NAME.model" in reference.explain("pools") and reference.explain("pools.judge.model").startswith(
        "pools.NAME.model\n  text; must be given")


@pytest.mark.parametrize(("key", "meant"), [("lr", "train.lr"), ("train.lrr", "train.lr"), ("", "lists its settings"),
                                            ("train.lr.x", "train.lr"), ("ZZZ", "lists its settings")])
def test_unknown_key_is_refused_with_those_that_are_near(key: str, meant: str) -> None:
    with pytest.raises(ConfigError) as e:
        reference.explain(key)
    assert meant in e.value.hint
