"""The metrics of a step: their names, in one place and in the docs; how a record stays small."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.algorithms.registry import ALGOS, RESERVED_STATS
from elastic_rl.data.queue.step_groups import StepGroups
from elastic_rl.data.samples import Group, Prompt, Sample, Segment
from elastic_rl.etcd.records import StepMetrics
from elastic_rl.pipeline.records.reporting import log_step, step_metrics, with_measured
from elastic_rl.pipeline.records.run_log import LineFile, RunLog
from elastic_rl.report.build import read_records
from elastic_rl.telemetry.training_metrics import PUBLISH, THROUGHPUT, UPDATE, of_throughput, of_update

DOCS = Path(__file__).resolve().parents[3] / "docs" / "operating" / "training-metrics.md"
ANSWER: dict[str, Any] = {
    "loss": -0.0123456789, "kl": 0.001, "clip_fraction": 0.1, "grad_norm": None, "lr": 1e-3, "entropy": 1.25,
    "tokens": 64.0, "train_s": 0.5, "my_stat": 7.0, "train_tokens_per_s": 1000.0, "tflops_per_rank": 0.25,
    "peak_memory_bytes": 4e8, "publish_stall_s": 0.01, "policy_version": 5, "state_version": None,
    "reference_version": 3, "committed": None}
"""What a trainer answers. None: a number that is not finite, or not there."""


def documented(section: str) -> list[list[str]]:
    """The rows of a section's table."""
    rows = re.findall(r"^\| (`.*) \|$", DOCS.read_text().partition(f"## {section}\n")[2].partition("\n## ")[0], re.M)
    return [[cell.strip() for cell in row.split("|")] for row in rows]


def test_docs_list_every_metric_with_its_unit_and_meaning() -> None:
    for section, table in (("Of the updates", UPDATE), ("Throughput", THROUGHPUT)):
        assert documented(section) == [[f"`{n}`", q.unit, q.meaning] for n, q in table.items()]


def test_docs_list_every_field_of_a_step() -> None:
    named = {name for row in documented("Of the samples") for name in re.findall(r"`(\w+)`", row[0])}
    assert named - {"steps", "reward_mean"} == StepMetrics.model_fields.keys() - {
        "step", "at", "policy_version", "update", "throughput"}


def test_everything_that_a_built_in_algorithm_reports_has_an_entry() -> None:
    reported = RESERVED_STATS | {stat for spec in ALGOS.values() for stat in spec.stats}
    assert reported - PUBLISH - {"tokens", "train_s"} <= UPDATE.keys() | THROUGHPUT.keys()
    assert not UPDATE.keys() & THROUGHPUT.keys()


@given(st.dictionaries(st.text(max_size=80), st.one_of(st.floats(), st.none(), st.integers(-9, 9)), max_size=60))
def test_record_of_an_update_stays_small_whatever_an_algorithm_reports(own: dict[str, Any]) -> None:
    found = of_update({**own, **ANSWER})
    assert len(found) <= len(UPDATE) + 16 and all(math.isfinite(v) for v in found.values())
    assert found.items() >= {"loss": -0.0123457, "kl": 0.001, "entropy": 1.25}.items()
    assert "grad_norm" not in found and not found.keys() & (PUBLISH | THROUGHPUT.keys())
    assert all(len(name) <= 64 for name in found)


def test_measured_step_has_the_rates_of_both_stages(tmp_path: Path) -> None:
    samples = tuple(Sample((Segment((1,) * n, (-0.5,) * n, version=3),), reward=1.0) for n in (10, 30))
    metrics = step_metrics(1, StepGroups.from_groups([Group(0, Prompt((1, 2)), samples)]), policy_version=3, dropped={})
    measured = with_measured(metrics, ANSWER, {"generate": 0.5, "total": 2.0})
    assert measured.throughput == {"train_tokens_per_s": 1000.0, "generate_tokens_per_s": 80.0,
                                   "tflops_per_rank": 0.25, "peak_memory_bytes": 4e8}
    assert measured.update["my_stat"] == 7.0 and measured.seconds["total"] == 2.0
    assert StepMetrics.decode(measured.encode()) == measured
    assert "generate_tokens_per_s" not in with_measured(metrics, ANSWER, {"generate": 0.0}).throughput

    log = RunLog(LineFile(path := tmp_path / "steps.jsonl"))
    log_step(log, measured, [0], [3], [], ANSWER)
    [record] = read_records(path)
    assert record["throughput"] == measured.throughput and record["kl"] == 0.001 and record["grad_norm"] is None
    assert record["algorithm"] == {"entropy": 1.25, "my_stat": 7.0}


def test_answer_without_throughput_of_an_older_trainer_is_read() -> None:
    assert of_throughput({"loss": 1.0, "mfu": float("nan")}) == {}
