"""The report: numbers from records, and a page that needs nothing from anywhere."""

from __future__ import annotations

import io
import json
import re
import tempfile
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console
from support.synthetic_run import records

from elastic_rl.cli.live_view import _of_output, summary
from elastic_rl.data.ledger import Audit, ConsumedGroups
from elastic_rl.host.paths import JobPaths
from elastic_rl.pipeline.untrained.eval_summary import summarise_rows
from elastic_rl.pipeline.untrained.keeping import kept_summary
from elastic_rl.report import build, charts, curves, html
from elastic_rl.telemetry.training_metrics import THROUGHPUT, UPDATE

CLEAN = Audit()
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


def test_report_of_a_job_that_was_resumed_says_which_numbers_are_of_its_last_run(tmp_path: Path) -> None:
    def step(number: int, at: float, kind: str = "step") -> dict:
        return {"kind": kind, "step": number, "at": at, "reward_mean": 0.5}

    rows = [step(1, 10.0), step(2, 20.0), step(3, 30.0),
            {"kind": "rewind", "from_step": 3, "to_step": 2, "at": 110.0, "reason": "resumed"},
            step(3, 120.0), step(4, 130.0), step(5, 140.0)]
    report = _report(rows, wall_s=50.0, run_began_at=100.0)
    assert report["steps"] == 5 and report["last_run"] == {"resumed_at": 2, "steps": 3}
    assert "50 s in the last run, which resumed at step 2 and made 3 more" in html.render(report, rows)
    shown = io.StringIO()
    Console(file=shown, width=200).print(summary(report, tmp_path))
    assert "50 s of this run, which made 3 steps from step 2" in shown.getvalue()
    assert _report(rows, run_began_at=5.0)["last_run"] is None
    supervised = [step(10, 10.0, "sft"), step(20, 20.0, "sft"), step(30, 120.0, "sft")]
    assert _report(supervised, run_began_at=100.0)["last_run"] == {"resumed_at": 20, "steps": 10}
    begins_rl = _report([*supervised[:2], *rows[4:5]], run_began_at=100.0)
    assert begins_rl["last_run"] == {"resumed_at": 0, "steps": 3}


def test_faults_have_their_times() -> None:
    faults = {f["name"]: f for f in _report(records())["faults"]}
    assert faults["kill-engine"]["detect_s"] == pytest.approx(0.9, abs=1e-3)
    assert faults["kill-engine"]["heal_s"] == pytest.approx(24.0, abs=1e-3)


def test_report_counts_lost_and_duplicated_groups() -> None:
    report = build.build([], job="j", seed=0, versions=[], audit=Audit(lost=2, duplicated=1))
    assert (report["groups_lost"], report["groups_duplicated"]) == (2, 1)


def test_empty_run_has_a_report_and_a_page() -> None:
    report = _report([])
    assert report["steps"] == 0
    assert report["reward_last"] is None
    assert "</html>" in html.render(report, [])


def test_report_of_a_supervised_job_shows_its_own_numbers() -> None:
    rows = [r for r in records() if r["kind"] == "sft"]
    report = _report([*rows, {**rows[-1], "loss": 0.5}])  # repeated after a restart
    assert report["sft"] == {"steps": 175, "loss_first": pytest.approx(2.3 - 25 / 110), "loss_last": 0.5,
                             "eval_loss_first": pytest.approx(2.4 - 25 / 120),
                             "eval_loss_last": pytest.approx(2.4 - 175 / 120),
                             "eval_accuracy_first": pytest.approx(0.41 / 7), "eval_accuracy_last": 0.41}
    page = html.render(report, rows)
    assert "SFT step" in page and "RL step" not in page and "Version lag" not in page
    assert "Version lag" in html.render(_report(records()), records())


def test_report_of_a_job_that_trains_nothing_shows_its_result() -> None:
    rows = [{"set": name, "index": i, "reward": r, "reward_parts": {}, "finish_reason": "stop", "response_tokens": 2}
            for name, i, r in (("<b>math", 0, 1.0), ("<b>math", 0, 0.0), ("code", 0, 1.0), ("code", 0, 1.0))]
    sets = summarise_rows(rows, samples=2, pass_reward=1.0, main="<b>math", parts=())
    result = {"job": "j", "main": "<b>math", "sets": sets}
    report = _report([{"kind": "output", "at": 1.0, "step": 1, "result": result}])
    page = html.render(report, [])
    assert "pass@2" in page and "&lt;b&gt;math" in page and "<b>math" not in page and "Learning" not in page
    text = [line for name, line in _of_output(report["output"]) if name == "code"]
    assert text == ["1.000 over 1 prompt, pass@1 1.000, pass@2 1.000"]
    kept = kept_summary({"samples": 4, "kept": 1, "reward": 2.0, "kept_reward": 1.0}, ConsumedGroups(), file="k.jsonl")
    report = _report([{"kind": "output", "at": 1.0, "step": 1, "result": kept}])
    assert "kept_reward_mean" in html.render(report, []) and dict(_of_output(kept))["kept"] == "1, reward 1.000"


def test_report_has_the_further_evaluation_sets_and_the_parts_of_the_reward() -> None:
    rows = [{"kind": "eval", "at": float(s), "step": s, "eval_accuracy": 0.5, "eval_sets": {"math": s / 10},
             "eval_reward_parts": {"right": s / 20}}
            for s in (0, 5)]
    report = _report(rows)
    assert report["eval_sets"] == {"math": {"first": 0.0, "last": 0.5}}
    assert report["eval_reward_parts"] == {"right": {"first": 0.0, "last": 0.25}}
    assert "<td>right</td><td>0.000</td><td>0.250</td>" in html.render(report, rows)
    assert "<td>math</td><td>0.000</td><td>0.500</td>" in html.render(report, rows)


def test_engine_lag_is_relative_to_the_head_at_step_start() -> None:
    rows = [{"kind": "step", "step": s, "policy_version": s + 1, "engines": [{"id": "a", "version": v}]}
            for s, v in ((1, 1), (2, 2), (3, 2))]
    assert build.version_lags(rows) == {"a": {1: 0, 2: 0, 3: 1}}


def test_torn_last_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text('{"kind": "eval", "step": 0, "eval_accuracy": 0.5}\n{"kind": "ev')
    assert [r["step"] for r in build.read_records(path)] == [0]


def test_report_is_the_same_of_what_of_each_step_it_reads(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    rows = [{**r, "groups": [*range(9)]} if r["kind"] == "step" else r for r in records()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = build.read_for_build(path)
    assert _report(read) == _report(build.read_records(path)) == _report(rows)
    assert not any("groups" in record or "loss" in record for record in read if record["kind"] == "step")
    assert build.read_for_build(path.with_name("none")) == []


@given(st.lists(st.sampled_from(['{"kind": "step", "step": 1}', '{"kind": "eval"}', '{"kind": "st', "[]", "1", "",
                                 '{"kind": "a"}, {"kind": "b"}', '{"step": 2}']), max_size=12), st.integers(1, 4))
def test_lines_that_are_parsed_together_are_the_records_of_each(lines: list[str], together: int) -> None:
    def record(line: str) -> object:
        try:
            return json.loads(line)
        except json.JSONDecodeError:
            return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_TOGETHER", together)
        found = list(build.parse_lines(lines))
    assert found == [r for line in lines if isinstance(r := record(line), dict) and "kind" in r]


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(0, 60), st.integers(1, 200), st.booleans())
def test_records_since_a_time_are_all_of_them_and_few_more(gaps: list[int], since: int, block: int, torn: bool) -> None:
    times = [float(sum(gaps[:n])) for n in range(1, len(gaps) + 1)]
    lines = [json.dumps({"kind": "step", "step": n, "at": at, "note": "ä" * (n % 7)}) for n, at in enumerate(times)]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / "steps.jsonl"
        path.write_text("".join(f"{line}\n" for line in lines) + ('{"kind": "st' if torn else ""))
        patch.setattr(build, "_BLOCK_BYTES", block)
        found = build.read_records_since(path, float(since))
        whole = build.read_records(path)
        assert found == whole[len(whole) - len(found):]
        assert [r for r in found if r["at"] >= since] == [r for r in whole if r["at"] >= since]
        assert len([r for r in found if r["at"] < since]) <= 1 + block // min(map(len, lines), default=1)
        assert build.read_records_since(path.with_name("none"), 0.0) == []


def test_page_is_self_contained_and_beside_its_numbers(tmp_path: Path) -> None:
    rows = records()
    page = html.write(_report(rows, status="finished"), rows, JobPaths(tmp_path))
    text = page.read_text()
    assert json.loads((tmp_path / "report.json").read_text())["steps"] == 200
    assert not re.findall(r"""(?:src|href)\s*=|@import|url\(|https?://""", text)
    _Balanced().check(text)
    assert text.count("<svg") == 4 + text.count("<figure>")
    assert "prefers-color-scheme: dark" in text


def test_training_metrics_have_a_curve_each_and_median_numbers() -> None:
    rows = records()
    report, page = _report(rows), html.render(_report(rows), rows)
    shown = re.findall(r"<figcaption>(.*?) <b>(.*?)</b>", page)
    assert len({title for title, _ in shown}) == len(shown) > 15
    assert {"Entropy", "KL to sampler", "Clip fraction", "Gradient norm", "Generated", "my_stat", "Reward: answer",
            "Response length, max", "Memory, peak"} <= {title for title, _ in shown}
    assert dict(shown)["Clip fraction"] == "1 %" and dict(shown)["Memory, peak"] == "0.419 GiB"
    assert "MFU" not in dict(shown), "no step has one"
    assert report["tflops_per_rank_p50"] == 0.05 and report["mfu_p50"] is None
    assert report["peak_memory_bytes"] == 4.5e8 and report["generate_tokens_per_s_p50"] > 1000


def test_every_documented_metric_of_an_update_has_a_curve() -> None:
    step = {"step": 1, "algorithm": dict.fromkeys(UPDATE, 0.5), "throughput": dict.fromkeys(THROUGHPUT, 0.5)}
    drawn = curves.curves([step]).count("<figure>")
    left_out = {"advantage_mean", "advantage_min", "advantage_max", "reference_step"}
    assert drawn == len(UPDATE.keys() | THROUGHPUT.keys()) - len(left_out)


@given(st.lists(st.floats(-1e9, 1e9), max_size=900), st.integers(2, 300))
def test_thinned_curve_keeps_the_order_and_the_extremes(values: list[float], limit: int) -> None:
    points = [(float(n), value) for n, value in enumerate(values)]
    found = charts.envelope(points, limit)
    assert len(found) <= limit and set(found) <= set(points)
    assert found == sorted(found, key=lambda point: point[0])
    if points:
        assert {min(values), max(values)} <= {y for _, y in found}
    if len(points) <= limit:
        assert found == points


@given(st.lists(st.floats(-1e9, 1e9), max_size=900), st.integers(1, 300))
def test_averaged_curve_keeps_the_order_and_the_mean(values: list[float], limit: int) -> None:
    points = [(float(n), value) for n, value in enumerate(values)]
    found = charts.means(points, limit)
    assert len(found) == min(len(points), limit)
    assert [x for x, _ in found] == sorted(x for x, _ in found)
    if points and not len(points) % limit:
        assert sum(y for _, y in found) / len(found) == pytest.approx(sum(values) / len(values), abs=1e-3)


@given(st.lists(st.integers(), max_size=900), st.integers(1, 300))
def test_parts_are_all_items_in_order_and_nearly_equal(items: list[int], limit: int) -> None:
    found = charts.parts(items, limit)
    assert [item for part in found for item in part] == items
    assert len(found) == min(limit, len(items)) and len({len(part) for part in found}) <= 2


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
@example([5e-324])
@example([1e308, -1e308])
def test_curves_draw_whatever_an_algorithm_reports(values: list[float]) -> None:
    page = curves.curves([{"step": n, "algorithm": {"<b>": value}} for n, value in enumerate(values)])
    _Balanced().check(page)
    assert "nan" not in page and "inf" not in page
    assert ("<figcaption>&lt;b&gt; <b>" in page) == any(abs(value) < 1e30 for value in values)


def test_page_does_not_grow_with_the_steps() -> None:
    """Nor with engines that are replaced and lag, and with faults."""
    rows = records(2000)
    assert len(html.render(_report(rows), rows)) < 500_000
    start = rows[-1]["at"]
    for n, row in enumerate(row for row in rows if row["kind"] == "step"):
        row["engines"] = [{**engine, "version": row["policy_version"] - 1 - n % 3} for engine in row["engines"]]
        row["engines"][-1]["id"] = f"spare-{n // 10:03}"
    for n in range(300):
        rows.append({"kind": "fault", "name": "kill-rank", "step": 20 * n, "at": start, "injected_at": start - 1 - n,
                     "detected_at": start - n, "healed_at": start, "witness": "gone", "meanwhile": "", "target": "0"})
    report = _report(rows)
    page = html.render(report, rows)
    _Balanced().check(page)
    assert len(page) < 700_000
    assert "Of 304 faults the newest 50 are drawn, and the newest 200 listed" in page
    assert "Of 203 engines the newest 50 are drawn" in page and "spare-200" in page and "spare-000" not in page
    assert len(report["faults"]) == 304 and len(report["engines"]) == 203


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
