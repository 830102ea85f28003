"""Plain values of YAML: what settings make of them, and that settings are read as they were written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_rl import config
from elastic_rl.config import Config, yaml_text
from elastic_rl.config.options import Options, read_options
from elastic_rl.errors import ConfigError
from tests.support.budget import seeds

_ODD = ("42", "007", "1e5", "1e-1", "1E+5", "no", "on", "null", "~", "2024-01-01", "1:30", "0x1f", "0o17", "1_000",
        ".5", "1.", "-", ".inf", "=", "<<", "", " a", "a: b", "# x", "é", "\u2028", "'", '"')
_TEXT = st.sampled_from(_ODD) | st.text()
_FLOATS = st.floats(allow_nan=False, allow_infinity=False)
_JSON = st.recursive(st.none() | st.booleans() | st.integers() | _FLOATS | _TEXT,
                     lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner), max_leaves=12)


@pytest.mark.parametrize("text", ["42", "20261125", "007", "1e5", "1e-5", "no", "on", "true", "2024-01-01", "0x1f"])
@pytest.mark.parametrize("by", ["override", "file"])
def test_setting_for_text_takes_a_plain_value_as_it_is_written(text: str, by: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(f"job: {text}\nrun_dir: {text}\nalerts: {{urls: [{text}]}}\n", encoding="utf-8")
    found = (config.given(tmp_path / "c.yaml", ()) if by == "file" else
             config.given(None, [f"--job={text}", f"--run_dir={text}", f"--alerts.urls=[{text}]"]))
    assert found == {"job": text, "run_dir": text, "alerts": {"urls": [text]}}
    assert config.parse(found).job == text


@pytest.mark.parametrize(("text", "value"), [
    ("1e-1", 0.1), ("1E3", 1000.0), ("1.5e3", 1500.0), (".5e1", 5.0), ("-1e-6", -1e-6), ("1_000", 1000), ("0x1f", 31),
    ("0o17", 15), ("0b11", 3), ("0", 0), ("-7", -7), ("1.", 1.0), (".5", 0.5), ("yes", True), ("off", False),
    ("007", "007"), ("1:30", "1:30"), ("1e", "1e"), ("e5", "e5"), ("'42'", "42"), ("~", None)])
def test_setting_for_any_value_takes_a_plain_value_as_yaml_1_2_has_it(text: str, value: Any) -> None:
    found = config.load(None, [f"--data.options.x={text}", f"--rollout.filters=[{{name: n, x: {text}}}]"])
    for x in (found.data.options["x"], found.rollout.filters[0]["x"]):  # type: ignore[index]
        assert x == value and type(x) is type(value)


def test_number_with_an_exponent_is_one_for_settings_of_numbers() -> None:
    found = config.load(None, ["--train.lr=1e-6", "--train.steps=1e3", "--coordinator.lease_ttl_s=1e1"])
    assert (found.train.lr, found.train.steps, found.coordinator.lease_ttl_s) == (1e-6, 1000, 10.0)
    assert type(found.train.steps) is int
    with pytest.raises(ConfigError, match=r"train\.steps"):
        config.load(None, ["--train.steps=1e-1"])


def test_section_mapping_or_list_that_is_commented_out_is_left_out(tmp_path: Path) -> None:
    text = "train:\nalerts:\n  urls:\n  routes: []\ndata:\n  options:\npools:\n"
    (tmp_path / "c.yaml").write_text(text, encoding="utf-8")
    assert config.load(tmp_path / "c.yaml") == config.load()
    with pytest.raises(ConfigError, match=r"train\.lr"):
        config.load(None, ["--train.lr=null"])


@pytest.mark.parametrize("value", [0, False, 0.5, None])
def test_option_for_text_that_is_none_says_to_put_it_in_quotes(value: Any) -> None:
    class Of(Options):
        column: str = ""

    with pytest.raises(ConfigError, match="put what is meant as text in quotes"):
        read_options(Of, {"column": value}, of="x", setting="data.options")


@settings(max_examples=seeds(60))
@given(st.dictionaries(_TEXT, _JSON, max_size=4))
def test_settings_are_read_as_they_were_written(options: dict[str, Any]) -> None:
    read = yaml_text.resolve(Config, yaml_text.load(yaml_text.dump({"data": {"options": options}})))
    assert read == ({"data": {"options": options}})
    assert repr(read["data"]["options"]) == repr(options), "true is not 1"


def test_anchors_are_resolved_once() -> None:
    doubled = "a0: &a0 [1e1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 12))
    found = yaml_text.resolve(Config, yaml_text.load(doubled))
    assert found["a1"] == [[10.0], [10.0]] and found["a11"][0] is found["a11"][1]
