"""The report: numbers from records, and a page that needs nothing from anywhere."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.synthetic_run import records

from elastic_rl.data.ledger import Audit
from elastic_rl.report import build, charts, html

CLEAN = Audit([], [])
KEYS = {"job", "seed", "steps", "reward_first", "reward_last", "eval_accuracy_first", "eval_accuracy_last",
        "versions_committed",
        "staleness_max", "logprob_diff_max", "samples_trained", "groups_lost", "groups_duplicated", "tokens_per_s",
        "step_s_p50", "publish_stall_s_p50", "pull_apply_s_p50", "pause_s_p50", "wall_s", "engines", "faults"}


def _report(rows: list[dict], **more: object) -> dict:
    return build.build(rows, job="j", seed=3, versions=[], audit=CLEAN, **more)  # type: ignore[arg-type]


def test_report_has_each_documented_key() -> None:
    report = _report(records())
    assert set(report) >= KEYS
    assert (report["steps"], report["samples_trained"], report["seed"]) == (200, 200 * 512, 3)
    assert report["eval_accuracy_first"] == 0.41
    assert report["eval_accuracy_last"] > 0.9


def test_repeated_step_counts_once_and_is_reported() -> None:
    report = _report(records())
    assert report["steps_redone"] == 4
    assert len(build.effective_steps(records())) == 200


def test_faults_have_their_times() -> None:
    faults = {f["name"]: f for f in _report(records())["faults"]}
    assert faults["kill-engine"]["detect_s"] == pytest.approx(0.9, abs=1e-3)
    assert faults["kill-engine"]["heal_s"] == pytest.approx(24.0, abs=1e-3)


def test_report_counts_lost_and_duplicated_groups() -> None:
    report = build.build([], job="j", seed=0, versions=[], audit=Audit([4, 5], [6]))
    assert (report["groups_lost"], report["groups_duplicated"]) == (2, 1)


def test_empty_run_has_a_report_and_a_page() -> None:
    report = _report([])
    assert report["steps"] == 0
    assert report["reward_last"] is None
    assert "</html>" in html.render(report, [])


def test_engine_lag_is_relative_to_the_head_at_the_start_of_its_step() -> None:
    rows = [{"kind": "step", "step": s, "policy_version": s + 1, "engines": [{"id": "a", "version": v}]}
            for s, v in ((1, 1), (2, 2), (3, 2))]
    assert build.version_lags(rows) == {"a": {1: 0, 2: 0, 3: 1}}


def test_torn_last_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text('{"kind": "eval", "step": 0, "eval_accuracy": 0.5}\n{"kind": "ev')
    assert [r["step"] for r in build.read_records(path)] == [0]


def test_page_is_self_contained_and_beside_its_numbers(tmp_path: Path) -> None:
    rows = records()
    page = html.write(_report(rows, status="finished"), rows, tmp_path)
    text = page.read_text()
    assert json.loads((tmp_path / "report.json").read_text())["steps"] == 200
    assert not re.findall(r"""(?:src|href)\s*=|@import|url\(|https?://""", text)
    _Balanced().check(text)
    assert text.count("<svg") == 4
    assert "prefers-color-scheme: dark" in text


def test_names_from_a_run_cannot_become_markup() -> None:
    rows = records()
    rows[-1]["name"] = "<script>alert(1)</script>"
    assert "<script>alert" not in html.render(_report(rows), rows)


@given(st.floats(-1e6, 1e6), st.floats(0.001, 1e6), st.integers(2, 9))
def test_ticks_lie_within_their_range_and_are_few(low: float, span: float, count: int) -> None:
    ticks = charts.nice_ticks(low, low + span, count)
    assert len(ticks) <= count + 2
    assert all(low - span * 1e-6 <= t <= low + span * (1 + 1e-6) for t in ticks)


@given(st.dictionaries(st.integers(1, 60), st.integers(0, 3), max_size=40), st.lists(st.floats(0, 50), max_size=30))
@example({}, [5e-324])
def test_charts_draw_whatever_a_run_holds(lags: dict[int, int], spent: list[float]) -> None:
    for svg in (charts.engine_lanes({"e": lags}, sorted(lags), 0),
                charts.step_seconds([(i, {"train": s}) for i, s in enumerate(spent, 1)], [])):
        _Balanced().check(svg)


class _Balanced(HTMLParser):
    """Fails on a tag that is not closed."""

    _VOID = {"meta", "br", "!doctype"}

    def check(self, text: str) -> None:
        self.open: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in self._VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
