"""The form of every measurement."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError
from support.synthetic_run import records

from elastic_rl.bench.loop import ROWS, rows
from elastic_rl.bench.measurement import Row, result

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


def test_loop_rows_come_from_the_records_of_a_run() -> None:
    measured = {r.id: r for r in rows(records(20, faults=False))}
    assert tuple(measured) == ROWS
    assert measured["samples-per-s"].value == pytest.approx(512 / 1.5, rel=0.2)
    assert measured["step-s"].samples == 18
    assert all(r.value is not None for r in measured.values())
