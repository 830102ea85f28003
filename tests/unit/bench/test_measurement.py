"""One form for every measurement."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError
from rich.console import Console
from support.synthetic_run import records

from elastic_rl.bench import BENCHES
from elastic_rl.bench.loop import rows
from elastic_rl.bench.measurement import Row, result, table

FORM = {"id", "name", "value", "unit", "goal", "op", "met", "alternatives", "limit", "samples", "low", "high"}


@pytest.mark.parametrize(("value", "op", "met"), [(1.0, "<=", True), (3.0, "<=", False), (3.0, ">=", True)])
def test_met_follows_from_value_and_goal(value: float, op: str, met: bool) -> None:
    assert Row(id="a", name="a", value=value, goal=2.0, op=op).met is met  # type: ignore[arg-type]


def test_without_a_goal_nothing_is_met_or_missed() -> None:
    assert Row(id="a", name="a", value=1.0).met is None


def test_a_row_without_a_value_says_why() -> None:
    with pytest.raises(ValidationError, match="says why"):
        Row(id="a", name="a")
    assert Row.of("a", "a", [], "s").why
    assert Row.unmeasured("a", "a", "no device").value is None


def test_samples_become_a_median_with_a_spread() -> None:
    row = Row.of("a", "a", [1, 2, 3, 4, 100], "s")
    assert (row.value, row.samples) == (3, 5)
    assert row.low is not None and row.high is not None
    assert row.low < 3 < row.high


def test_the_result_has_the_documented_form() -> None:
    shown = json.loads(json.dumps(result("loop", [Row(id="a", name="a", value=1.0), Row.of("b", "b", [], "s")])))
    assert set(shown) == {"bench", "machine", "versions", "rows"}
    assert set(shown["rows"][0]) == FORM
    assert set(shown["rows"][1]) == FORM | {"why"}
    assert shown["versions"]["python"]


def test_the_loop_is_measured_from_its_records() -> None:
    measured = {r.id: r for r in rows(records(20, faults=False))}
    assert {"samples-per-s", "step-s", "step-s-generate", "publish-stall-s", "pull-apply-s"} <= set(measured)
    assert measured["samples-per-s"].value == pytest.approx(512 / 1.5, rel=0.2)
    assert measured["step-s"].samples == 18
    assert all(r.value is not None for r in measured.values())
    assert "loop" in BENCHES


def test_a_table_shows_what_could_not_be_measured() -> None:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table("loop", [Row.unmeasured("a", "speed", "no device"), Row(id="b", name="b", value=1, goal=2)]))
    shown = console.export_text()
    assert "no device" in shown
    assert "<= 2" in shown
