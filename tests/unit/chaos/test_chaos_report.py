"""The report of a chaos run: its numbers, and its page."""

from __future__ import annotations

import json
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.chaos_log import STEPS, Log, Record, of_kind

from chaos_tests.event_log import Kind
from chaos_tests.report import PAGE, build, charts, write
from chaos_tests.validate.statistics import StepTime, statistics, timeline

_MOST_BYTES = 500_000


def put(folder: Path, run: list[Record], baseline: list[Record] | None = None) -> Path:
    for where, records in ((folder, run), (folder / "baseline", baseline)):
        if records is not None:
            where.mkdir(exist_ok=True)
            (where / "events.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return folder


def report_of(folder: Path) -> dict[str, object]:
    write(folder)
    return json.loads((folder / "report.json").read_text())


class Parsed(HTMLParser):
    """Tags that are open at the end, and all that a page has."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(page: str) -> Parsed:
    made = Parsed()
    made.feed(page)
    assert made.open == []
    return made


def test_statistics_of_a_run_are_those_of_its_log() -> None:
    run, base = timeline(Log().records), timeline(Log(faults=False).records)
    found = statistics(run, base)
    # 12 steps of 1 s; pauses of 10 s and of 4 s, and a step that was done again.
    assert found["wall_s"] == pytest.approx(STEPS + 10 + 4 + 1)
    assert (found["steps"], found["steps_redone"], found["samples"]) == (STEPS, 1, 32 * STEPS)
    assert found["effective_training_time_ratio"] == pytest.approx(STEPS / (STEPS + 15))
    assert found["baseline_samples_per_s"] == pytest.approx(32.0)
    assert found["throughput_kept"] == pytest.approx(STEPS / (STEPS + 15))
    assert (found["faults"], found["faults_healed"], found["alerts"], found["alerts_per_part_struck"]) == (2, 2, 2, 1.0)
    assert found["wrong_version_tokens"] == 0
    engine, rank = found["by_fault"]
    assert engine["name"] == "engine_killed" and engine["heal_s"] == {"n": 1, "median": 11.0, "p95": 11.0, "max": 11.0}
    assert (engine["redone"]["max"], rank["redone"]["max"], rank["alerts"]["max"]) == (0, 1, 1)
    assert (engine["lost_s"]["max"], rank["lost_s"]["max"]) == (pytest.approx(10.0), pytest.approx(5.0))
    assert found["training_lost_s"] == pytest.approx(15.0)


def test_training_that_is_lost_to_faults_whose_times_meet_is_none_of_one_kind() -> None:
    records = Log().records
    first = next(of_kind(records, Kind.FAULT))
    again = {**first, "name": "driver_killed", "injected_at": first["injected_at"] + 1.0}
    records.insert(records.index(first) + 1, again)
    found = statistics(timeline(records))
    assert {kind["name"]: kind["lost_s"]["n"] for kind in found["by_fault"]} == {
        "driver_killed": 0, "engine_killed": 0, "trainer_rank_killed": 1}
    assert found["training_lost_s"] == pytest.approx(15.0)


def test_fault_that_was_not_recovered_from_costs_the_rest_of_the_run() -> None:
    records = Log().records
    last = [*of_kind(records, Kind.STEP)][-1]["at"]
    never = {**next(of_kind(records, Kind.FAULT)), "injected_at": last + 0.5, "healed_at": None, "at": last + 90.0}
    end = next(of_kind(records, Kind.END))
    end["at"] = last + 100.0
    records.insert(records.index(end), never)
    found = statistics(timeline(records))
    assert found["training_lost_s"] == pytest.approx(15.0 + 100.0)
    [same] = [kind for kind in found["by_fault"] if kind["name"] == never["name"]]
    assert same["lost_s"]["n"] == 1, "the one that has an end"


def test_training_that_is_lost_is_unknown_where_no_step_was_without_a_fault() -> None:
    records = Log().records
    for fault in of_kind(records, Kind.FAULT):
        fault |= {"injected_at": 0.0, "healed_at": None}
    found = statistics(timeline(records))
    assert [kind["lost_s"]["n"] for kind in found["by_fault"]] == [0, 0]
    assert found["training_lost_s"] is None


def test_time_that_a_step_waits_for_a_recovery_is_not_effective() -> None:
    records = Log().records
    waiting = next(r for r in of_kind(records, Kind.STEP) if r["step"] == STEPS // 3 + 1)
    waiting["seconds"]["total"] = 11.0
    found = statistics(timeline(records))
    assert found["effective_training_time_ratio"] == pytest.approx(STEPS / (STEPS + 15))


def test_tokens_of_other_weights_are_counted() -> None:
    records = Log().records
    next(of_kind(records, Kind.STEP))["logprob_diff_max"] = 0.5
    assert statistics(timeline(records))["wrong_version_tokens"] == 90


def test_throughput_is_compared_over_the_steps_that_both_runs_have() -> None:
    found = statistics(timeline(Log(6, faults=False).records), timeline(Log(60, faults=False, step_s=0.5).records))
    assert found["throughput_kept"] == pytest.approx(0.5)


def test_log_without_steps_has_a_report(tmp_path: Path) -> None:
    records = [r for r in Log().records if r["kind"] in ("run", "end", "fault")]
    report = report_of(put(tmp_path, records))
    assert report["statistics"]["effective_training_time_ratio"] is None  # type: ignore[index]
    parsed((tmp_path / "report.html").read_text())


def test_samples_are_spread_over_the_time_of_their_step() -> None:
    points = charts.rate([StepTime(1, 100.0, 104.0, 40, None), StepTime(2, 106.0, 106.0, 8, None)], 100.0, 110.0, 10)
    assert [y for _, y in points] == pytest.approx([10, 10, 10, 10, 0, 0, 8, 0, 0, 0])
    assert points[0][0] == 0.5


def test_report_says_what_was_run_and_how_to_run_it_again(tmp_path: Path) -> None:
    records = Log().records
    records[0]["schedule"] |= {"settings": ["--rollout.engines=2"], "baseline": True}
    report = report_of(put(tmp_path, records, Log(faults=False).records))
    assert report["form"] == build.FORM and report["passed"] is True and report["has_baseline"] is True
    assert report["reproduce"] == "elastic-rl chaos run --scenario quick --seed 1 --steps 12 --faults 2 " \
                                  "--baseline --rollout.engines=2"
    page = parsed((tmp_path / "report.html").read_text())
    for words in (report["reproduce"], "abc1234", "elastic-rl 0.1.0", "seed 1", "passed"):
        assert str(words) in page.text


def test_line_that_runs_it_again_is_whole_and_survives_a_shell(tmp_path: Path) -> None:
    records = Log().records
    words = ["--data.path=$(touch F); y", "--data.name=a b's"]
    records[0] |= {"arguments": ["--run_dir=/r", "--job=j", "--only", "engines", "--at-once", "2"]}
    records[0]["schedule"]["settings"] = words
    line = report_of(put(tmp_path, records))["reproduce"]
    assert shlex.split(line)[-8:] == [*words, *records[0]["arguments"]]


def test_page_shows_what_was_violated_with_the_records_that_prove_it(tmp_path: Path) -> None:
    records = Log().records
    next(of_kind(records, Kind.STEP))["staleness"] = 3
    report = report_of(put(tmp_path, records))
    page = parsed((tmp_path / "report.html").read_text())
    assert report["passed"] is False and "failed" in page.text and "✗ violated" in page.text
    assert "step 1 has a staleness of 3, above 0" in page.text and '"staleness": 3' in page.text


def test_what_a_log_has_is_text_on_the_page(tmp_path: Path) -> None:
    evil = '"><script>alert(1)</script><img src=x onerror=alert(1)>'
    records = Log().records
    records[0].update(scenario=evil, commit=evil, versions={evil: evil}, target=evil, seed=evil)
    records[0]["settings"]["job"] = evil
    for one in of_kind(records, Kind.FAULT):
        one.update(name=evil, target=evil, said=evil, problem=evil, step=evil, witness=evil)
    for one in of_kind(records, Kind.EVENT):
        one.update(subject=evil, message=evil)
    records.insert(-1, {"at": 1.0, "kind": "leftover", "what": evil})
    write(put(tmp_path, records))
    page = parsed((tmp_path / PAGE).read_text())
    assert [tag for tag, _ in page.tags].count("script") == 1 and not any(tag == "img" for tag, _ in page.tags)
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)


def test_page_needs_nothing_else_and_says_what_its_charts_show(tmp_path: Path) -> None:
    folder = put(tmp_path, Log().records, Log(faults=False).records)
    write(folder)
    text = (folder / PAGE).read_text()
    page = parsed(text)
    assert not any(name in ("src", "href") for _, attributes in page.tags for name in attributes)
    assert not re.search(r"@import|url\(", text)
    drawn = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(drawn) == 2 and all(a["role"] == "img" and a["aria-label"] for a in drawn)
    assert next(attributes for tag, attributes in page.tags if tag == "html")["lang"] == "en"
    assert all(word in page.text for word in ("✓ kept", "– unseen")), "a verdict is not by its colour alone"


def test_page_of_a_long_run_stays_small(tmp_path: Path) -> None:
    """As many steps as a page of a point each would not be small with, and as many faults as a soak has."""
    log = Log(1000)
    struck = next(of_kind(log.records, Kind.FAULT))
    log.records[-1:-1] = [struck | {"injected_at": struck["injected_at"] + n * 8, "step": n,
                                    "detected_at": struck["detected_at"] + n * 8,
                                    "healed_at": struck["healed_at"] + n * 8} for n in range(1, 70)]
    write(put(tmp_path, log.records, Log(1000, faults=False).records))
    assert (tmp_path / PAGE).stat().st_size < _MOST_BYTES


def test_file_that_is_no_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"kind": "step"}\n')
    with pytest.raises(ValueError, match="no event log"):
        write(tmp_path)
