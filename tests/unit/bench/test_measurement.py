"""The form of every measurement."""

from __future__ import annotations

import json
import re
import subprocess

import pytest
from pydantic import ValidationError

from elastic_rl.bench import measurement
from elastic_rl.bench.measurement import Row, commit, markdown, result

FORM = {"id", "name", "value", "unit", "goal", "op", "met", "alternatives", "unmeasured_alternatives", "limit",
        "samples", "low", "high"}


@pytest.mark.parametrize(("value", "op", "met"), [(1.0, "<=", True), (3.0, "<=", False), (3.0, ">=", True)])
def test_met_follows_from_value_and_goal(value: float, op: str, met: bool) -> None:
    assert Row(id="a", name="a", value=value, goal=2.0, op=op).met is met  # type: ignore[arg-type]


def test_row_without_a_goal_is_neither_met_nor_missed() -> None:
    assert Row(id="a", name="a", value=1.0).met is None


def test_row_without_a_value_needs_a_reason() -> None:
    with pytest.raises(ValidationError, match="needs a reason"):
        Row(id="a", name="a")
    assert Row.of("a", "a", [], "s").why
    assert Row.unmeasured("a", "a", "no device").value is None


def test_samples_become_a_median_with_a_spread() -> None:
    row = Row.of("a", "a", [1, 2, 3, 4, 100], "s")
    assert (row.value, row.samples) == (3, 5)
    assert row.low is not None and row.high is not None
    assert row.low < 3 < row.high


def test_result_has_the_documented_form() -> None:
    shown = json.loads(json.dumps(result("loop", [Row(id="a", name="a", value=1.0), Row.of("b", "b", [], "s")])))
    assert set(shown) == {"bench", "complete", "machine", "versions", "rows"}
    assert set(shown["rows"][0]) == FORM
    assert set(shown["rows"][1]) == FORM | {"why"}
    assert shown["versions"]["python"]


def test_section_names_the_commit_where_git_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.fullmatch(r"([0-9a-f]{12,}(\+changes)?)?", commit.__wrapped__())
    monkeypatch.setattr(measurement, "commit", lambda: "abc+changes")
    assert "; commit abc+changes\n" in markdown("loop", "elastic-rl bench loop", [], "now")
    monkeypatch.setattr(measurement, "commit", lambda: "")
    assert "commit" not in markdown("loop", "elastic-rl bench loop", [], "now")


@pytest.mark.parametrize("error", [FileNotFoundError("git"), subprocess.CalledProcessError(128, "git"),
                                   subprocess.TimeoutExpired("git", 20)])
def test_machine_without_git_is_measured_too(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(subprocess, "run", fails)
    assert commit.__wrapped__() == ""


def test_tree_with_changes_is_named_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for changes, found in ((" M elastic_rl/x.py\n", "abc+changes"), ("", "abc")):
        answers = {"ls-files": "", "rev-parse": "abc\n", "status": changes}
        monkeypatch.setattr(subprocess, "run", lambda args, answers=answers, **_: subprocess.CompletedProcess(
            args, 0, answers[args[3]]))
        assert commit.__wrapped__() == found
