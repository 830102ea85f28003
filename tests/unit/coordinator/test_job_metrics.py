"""The job's metrics as they follow from one snapshot."""

from __future__ import annotations

from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from elastic_rl.coordinator.failure.statistics import FaultStatistics, count
from elastic_rl.coordinator.metrics.job_metrics import JobCounters, families, merged
from elastic_rl.coordinator.snapshot import ClusterSnapshot
from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.records import (
    Engine,
    EngineState,
    GenerationCap,
    JobStatus,
    Member,
    StepMetrics,
    Version,
    VersionState,
)


def samples(snapshot: ClusterSnapshot, **counters: Any) -> dict[str, float]:
    """Name with labels, as in the text form → value."""
    def key(name: str, labels: dict[str, str]) -> str:
        inside = ",".join(f"{k}={v}" for k, v in labels.items())
        return name.removeprefix("elastic_rl_") + (f"{{{inside}}}" if inside else "")

    found: list[Metric] = families(snapshot, JobCounters(**counters))
    assert len({f.name for f in found}) == len(found), "a family twice"
    assert all(f.documentation for f in found)
    return {key(s.name, s.labels): s.value for f in found for s in f.samples}


def engine(name: str, version: int, **more: object) -> Engine:
    return Engine(id=name, pool="rollout", state=EngineState.READY, epoch=1, version=version, **more)


def head(number: int) -> Version:
    return Version(stream="policy", number=number, state=VersionState.COMMITTED, epoch=1, nbytes=10, committed_at=90.0)


def test_unknown_values_have_no_sample() -> None:
    found = samples(ClusterSnapshot(job="j", now=100.0))
    assert found["job_info"] == 1 and found["leader_elections_total"] == 0
    for name in ("job_step", "job_reward", "job_effective_time_ratio", "step_seconds", "leader_lease_left_seconds",
                 "rollout_groups_in_flight"):
        assert name not in found


def test_effective_time_ratio_stops_with_the_run() -> None:
    status = JobStatus(phase="rl", started_at=1000.0, updated_at=1200.0, productive_s=150.0)
    assert samples(ClusterSnapshot(job="j", now=1300.0, status=status))["job_effective_time_ratio"] == 0.5
    over = status.replace(phase="finished")
    assert samples(ClusterSnapshot(job="j", now=9999.0, status=over))["job_effective_time_ratio"] == 0.75
    assert samples(ClusterSnapshot(job="j", now=9999.0, status=over))["job_phase{phase=finished}"] == 1


def test_step_time_is_split_by_stage_with_the_stall_apart() -> None:
    point = StepMetrics(step=3, at=1.0, reward=0.5, samples=512, tokens=9000,
                      seconds={"total": 2.0, "generate": 1.0, "train": 0.75, "publish_stall": 0.125, "other": 0.125})
    found = samples(ClusterSnapshot(job="j", now=1.0), last_step=point)
    assert found["step_seconds"] == 2.0 and found["step_publish_stall_seconds"] == 0.125
    assert {k: v for k, v in found.items() if k.startswith("step_stage_seconds")} == {
        "step_stage_seconds{stage=generate}": 1.0, "step_stage_seconds{stage=train}": 0.75,
        "step_stage_seconds{stage=other}": 0.125}
    assert (found["step_samples"], found["step_tokens"]) == (512, 9000)


def test_engine_metrics_show_lag_and_cost_of_the_last_update() -> None:
    engines = [engine("e0", 7, pull_apply_s=0.5, pause_s=0.125, running=3, waiting=2), engine("e1", 9),
               engine("new", 0).replace(state=EngineState.STARTING), engine("dead", 4).replace(state=EngineState.DEAD)]
    found = samples(ClusterSnapshot(job="j", now=100.0, engines={e.id: e for e in engines}, heads={"policy": head(9)}),
                    durable={"policy": 6})
    lag = {k: v for k, v in found.items() if k.startswith("engine_version_lag")}
    assert lag == {"engine_version_lag{engine=e0}": 2, "engine_version_lag{engine=e1}": 0}
    assert found["engine_update_seconds{engine=e0}"] == 0.5 and found["engine_pull_seconds{engine=e0}"] == 0.375
    assert found["engine_pause_seconds{engine=e0}"] == 0.125 and found["engine_requests_waiting{engine=e0}"] == 2
    assert found["engines{state=dead}"] == 1 and found["engines{state=draining}"] == 0
    assert found["version_age_seconds{stream=policy}"] == 10.0 and found["durable_lag_versions{stream=policy}"] == 3


def test_role_metrics_show_the_worst_member() -> None:
    def member(name: str, beat_at: float, in_flight: int) -> Member:
        return Member(role="rollout", id=name, pid=1, host="h", beat_at=beat_at, progress_at=beat_at - 5,
                      phase="generate" if name == "a" else "idle", in_flight=in_flight)

    found = samples(ClusterSnapshot(job="j", now=100.0, members=[member("a", 99.0, 3), member("b", 96.0, 4)]),
                    lease_s={"rollout": 2})
    assert found["members{role=rollout}"] == 2 and found["member_heartbeat_age_seconds{role=rollout}"] == 4.0
    assert found["member_progress_age_seconds{role=rollout}"] == 5.0 and found["rollout_groups_in_flight"] == 7
    assert found["member_lease_left_seconds{role=rollout}"] == 2


def test_recovery_times_are_a_histogram_by_part() -> None:
    reported = [events.build(event_kinds.ENGINE_DEAD, "e0", "", at=10.0, detect_s=0.2),
                events.build(event_kinds.ENGINE_READY, "e1", "", at=25.0, start_s=14.0),
                events.build(event_kinds.of_members("dcs").dead, "n0", "", at=30.0)]
    found = samples(ClusterSnapshot(job="j", now=40.0), statistics=count(FaultStatistics(), reported))
    assert found["faults_total{part=engine}"] == 1 and found["faults_open{part=dcs}"] == 1
    assert found["fault_recovery_seconds_bucket{part=engine,le=10}"] == 0
    assert found["fault_recovery_seconds_bucket{part=engine,le=20}"] == 1
    assert found["fault_recovery_seconds_bucket{part=engine,le=+Inf}"] == 1
    assert found["fault_recovery_seconds_sum{part=engine}"] == 15.0
    assert found["fault_detection_seconds_bucket{part=engine,le=0.25}"] == 1


def test_wait_of_the_run_has_a_kind_and_an_age() -> None:
    status = JobStatus(phase="rl", waiting_kind="engines", waiting_for="an engine", waiting_since=70.0)
    found = samples(ClusterSnapshot(job="j", now=100.0, status=status))
    assert found["run_waiting{kind=engines}"] == 1 and found["run_waiting_seconds{kind=engines}"] == 30.0
    for over in (status.replace(waiting_kind="", waiting_since=0.0), status.replace(phase="failed"), None):
        assert not [k for k in samples(ClusterSnapshot(job="j", now=100.0, status=over)) if k.startswith("run_waiting")]


def test_free_slots_of_engines_are_shown_while_a_limit_binds() -> None:
    members = [Member(role="actor", id="a", pid=1, host="h"), *(
        Member(role="engine", id=i, pid=1, host="h", progress_at=9.0, beat_at=9.0) for i in ("e0", "e1"))]
    engines = {i: engine(i, 5, running=running, slots=8, load_known=True) for i, running in (("e0", 8), ("e1", 2))}
    status = JobStatus(phase="rl", generation_cap=GenerationCap.STALENESS)

    def found(status: JobStatus) -> dict[str, float]:
        shown = samples(ClusterSnapshot(job="j", now=10.0, status=status, members=members, engines=engines))
        return {k: v for k, v in shown.items() if k.startswith(("generation_cap", "engine_slots_idle"))}

    cap = "{cap=train.max_staleness}"
    assert found(status) == {f"generation_cap{cap}": 1.0, f"engine_slots_idle_ratio{cap}": 6 / 16}
    assert found(status.replace(waiting_kind="trainer")) == {f"generation_cap{cap}": 1.0}
    assert not found(status.replace(generation_cap=GenerationCap.NONE)) and not found(status.replace(phase="finished"))


def test_last_step_shows_idle_time_reward_parts_and_lengths() -> None:
    step = StepMetrics(step=3, at=1.0, reward=0.5, idle_s={"generate": 0.5},
                       reward_parts={"answer": -1.0, "format": 0.25}, truncated=0.25, dropped_groups=2,
                       response_tokens={"mean": 12.5, "max": 32.0, "p99": 30.0})
    status = JobStatus(phase="rl", dropped_groups={"equal rewards": 7})
    found = samples(ClusterSnapshot(job="j", now=1.0, status=status), last_step=step)
    assert found["step_idle_seconds{stage=generate}"] == 0.5 and found["step_reward_part{part=answer}"] == -1.0
    assert found["step_response_tokens{statistic=mean}"] == 12.5 and found["step_response_tokens{statistic=max}"] == 32
    assert found["step_truncated_ratio"] == 0.25 and found["step_dropped_groups"] == 2
    assert found["groups_dropped{reason=equal rewards}"] == 7
    assert "step_truncated_ratio" not in samples(ClusterSnapshot(job="j"), last_step=StepMetrics(
        step=3, at=1.0, reward=0.5)), "a step of an older release, or one whose lengths are not known"


def test_last_step_shows_its_updates_and_throughput() -> None:
    step = StepMetrics(step=3, at=1.0, reward=0.5, update={"kl": 0.01, "my_stat": -2.0},
                       throughput={"train_tokens_per_s": 9000.0, "tflops_per_rank": 1.5, "peak_memory_bytes": 4096.0})
    found = samples(ClusterSnapshot(job="j", now=1.0), last_step=step)
    assert found["step_update{metric=kl}"] == 0.01 and found["step_update{metric=my_stat}"] == -2.0
    assert found["step_tokens_per_second{stage=train}"] == 9000 and found["step_rank_flops_per_second"] == 1.5e12
    assert found["trainer_peak_memory_bytes"] == 4096
    for unknown in ("step_tokens_per_second{stage=generate}", "step_mfu_ratio"):
        assert unknown not in found, "not known is not 0"


def test_number_of_series_is_bounded_whatever_a_reward_names() -> None:
    names = {f"part {n:04d} {'x' * 100}": float(n) for n in range(1000)}
    status = JobStatus(phase="rl", waiting_kind="k" * 1000, waiting_since=1.0, dropped_groups=dict.fromkeys(names, 1))
    found = samples(ClusterSnapshot(job="j", now=9.0, status=status), last_step=StepMetrics(
        step=1, at=1.0, reward=0.0, reward_parts=names, idle_s=names, response_tokens=names, update=names))
    assert len([k for k in found if k.startswith("step_update{")]) == 64
    for family in ("step_reward_part", "step_idle_seconds", "groups_dropped"):
        assert len([k for k in found if k.startswith(family + "{")]) == 16
    assert max(map(len, found)) < 120


def test_family_of_several_jobs_is_exported_once_with_a_sample_of_each() -> None:
    engines = {name: {name: engine(name, 1)} for name in ("one", "two")}
    statistics = FaultStatistics(faults={"engine": 3})
    jobs = {job: families(ClusterSnapshot(job=job, now=1.0, engines=engines[job]), JobCounters(statistics=statistics))
            for job in engines}

    class Page:
        def collect(self) -> list[Metric]:
            return merged(jobs)

    text = generate_latest(Page()).decode()  # type: ignore[arg-type]  # it needs collect alone
    for family in ("engine_version gauge", "faults_total counter"):
        assert text.count(f"# TYPE elastic_rl_{family}\n") == 1
    found = [s for f in text_string_to_metric_families(text) for s in f.samples]
    assert {s.labels.get("job_name") for s in found} == {"one", "two"}
    assert [s.labels for s in found if s.name == "elastic_rl_engine_version"] == [
        {"job_name": "one", "engine": "one"}, {"job_name": "two", "engine": "two"}]
    assert [s.value for s in found if s.name == "elastic_rl_faults_total"] == [3, 3]
