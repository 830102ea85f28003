"""The arithmetic of the loop's rows, and what the others are given to do. Nothing here is timed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import psutil
import pytest
from support.synthetic_run import records

from benchmarks import LOOP
from benchmarks.loop import trl_program, vs_trl
from elastic_rl.bench import loop
from elastic_rl.bench.loop import (
    SUITE,
    async_vs_sync,
    bare_engines,
    bare_trainer,
    outages,
    overhead,
    own_cores,
    rollout_rate,
    scripted_engine,
    step_cost,
    steps,
    straggler,
    unequal,
)
from elastic_rl.bench.loop.bare_engines import requests_of_step
from elastic_rl.bench.loop.outages import Outage
from elastic_rl.bench.options import Unmeasurable
from elastic_rl.config import parse
from elastic_rl.data.samples import Sample
from elastic_rl.data.sources import make_source
from elastic_rl.engine.client import GenerateClient, Sampling
from elastic_rl.errors import ElasticRLError
from elastic_rl.models.flops import SequenceCost


def step(number: int, at: float) -> dict[str, Any]:
    return {"kind": "step", "step": number, "at": at, "seconds": {"total": 1.0}}


def of_predecessor(number: int, at: float) -> dict[str, Any]:
    """The record of a step that a successor found done."""
    return {"kind": "step", "step": number, "at": at, "seconds": {}, "samples": 8}


# -- the run ----------------------------------------------------------------------------------------------------------
def test_rows_come_from_the_records_of_a_run() -> None:
    measured = {r.id: r for r in steps.rows(records(20, faults=False))}
    assert set(measured) == set(SUITE.rows["steps"])
    assert measured["samples-per-s"].value == pytest.approx(512 / 1.5, rel=0.2)
    assert measured["step-s"].samples == 18
    assert all(r.value is not None for r in measured.values())
    assert measured["step-s-between"].value == pytest.approx(0.0, abs=1e-6)
    assert measured["idle-s-sync"].value > 0 and measured["idle-s-train"].value == 0  # type: ignore[operator]


# -- one response, or one engine, that is unlike the others -----------------------------------------------------------
def test_long_response_is_so_much_longer_than_the_mean_of_all() -> None:
    for count in (32, 128):
        long, *others = responses = unequal.unequal_responses(count)
        assert len(responses) == count and max(others) < long
        assert long == pytest.approx(unequal.LONGER * sum(responses) / count, rel=0.01)


def test_bound_of_unequal_work_is_an_equal_part_of_it_or_its_longest_sample() -> None:
    by_square = SequenceCost(0.0, 1.0)
    assert unequal.bound_over_alike([3, 3, 3, 3], [3] * 4, by_square, 2) == 1.0
    assert unequal.bound_over_alike([5, 1, 5, 1], [3] * 4, by_square, 2) == (16 + 16 + 1 + 1) / 16
    assert unequal.bound_over_alike([9, 1], [3] * 4, by_square, 2) == 64 / 8, "one replica has it alone"


def test_rows_of_unequal_work_are_times_over_its_bound() -> None:
    found = {row.id: row for row in unequal.rows([2.0, 2.0, 2.0], [6.0, 5.0, 5.0], [9.0] * 3, 2.0)}
    assert set(found) == set(SUITE.rows["unequal"])
    assert found["unequal"].value == 5.0 / 4.0 and found["unequal"].met
    assert found["unequal"].alternatives == {"shares of equal tokens": 9.0 / 4.0} and found["unequal-s"].limit == 4.0


def given_up(at: float, detected_at: float | None) -> dict[str, Any]:
    return {"kind": "fault", "name": "given_up", "at": at, "injected_at": at, "detected_at": detected_at,
            "witness": "no such engine"}


def test_straggler_is_measured_by_the_steps_before_it_and_after_it_was_given_up() -> None:
    run = [*({**step(n, float(n)), "samples": 60} for n in range(1, 7)), given_up(6.5, 8.0),
           {**step(7, 9.0), "samples": 60}, *({**step(n, 9.0 + 2.0 * (n - 7)), "samples": 60} for n in range(8, 11))]
    found = {row.id: row for row in straggler.rows(run, 3)}
    assert set(found) == set(SUITE.rows["straggler"])
    assert found["straggler"].value == pytest.approx(30 / 60 * 3 / 2) and found["straggler"].samples == 3
    assert not found["straggler"].met and found["straggler-samples-per-s"].alternatives == {"with all engines": 60.0}
    for without in (run[:6], [*run[:6], given_up(6.5, None)], run[6:]):
        with pytest.raises(Unmeasurable):
            straggler.rows(without, 3)


OWN_CORES = {"kind": "fault", "name": "own_cores", "at": 1.5, "detected_at": 1.5, "witness": "all have theirs"}


def test_rows_of_the_asynchronous_run_compare_it_with_the_synchronous_one() -> None:
    sync = [step(n, 4.0 * n) | {"samples": 8, "response_tokens": {"mean": 10.0}} for n in range(1, 20)]
    ours = [step(n, 2.0 * n) | {
        "samples": 8, "response_tokens": {"mean": 15.0}, "idle_s": {"groups": 1.5 * (n % 3 == 0)},
        "algorithm": {"staleness_mean": 1.5, "staleness_max": n % 3, "producer_no_room_s": 0.3 * (n % 3 == 1)}}
        for n in range(1, 20)]
    found = {row.id: row for row in async_vs_sync.rows(sync, ours)}
    sync, ours = [OWN_CORES, *sync], [OWN_CORES, *ours]
    found |= {row.id: row for row in async_vs_sync.own_core_rows(sync, ours)}
    found |= {row.id: row for row in async_vs_sync.part_rows(sync, ours)}
    found |= {row.id: row for row in async_vs_sync.queue_rows(sync, ours)}
    assert {*found, "async-queue-s"} == set(SUITE.rows["async_vs_sync"])
    assert found["async-vs-sync"].value == 2.0 and found["async-step-s"].alternatives == {"sync": 4.0}
    assert found["async-tokens"].value == 3.0
    waits = [found[f"async-idle-s-{part}"].value for part in ("groups", "producer", "producer-no-room")]
    assert waits == pytest.approx([0.5, 0, 0.1]), "means: one step of three bears the wait of all"
    assert found["async-staleness"].value == 1.5 and found["async-staleness"].alternatives == {"the most": 2}
    assert found["async-parts"].value == 2.0 and found["async-parts"].limit is None


def test_speed_of_steps_in_bursts_is_that_of_all_together() -> None:
    """Groups that were generated together are trained one step after the other: three short steps and a long one take
    as long as four of a second each, and are no faster."""
    ends = [0.0]
    for n in range(80):
        ends.append(ends[-1] + (2.5 if n % 4 == 0 else 0.5))
    ours = [step(n, at) for n, at in enumerate(ends)]
    found = {row.id: row for row in async_vs_sync.rows([step(n, float(n)) for n in range(81)], ours)}
    assert found["async-vs-sync"].value == pytest.approx(1.0, rel=0.03)
    assert found["async-step-s"].value == pytest.approx(1.0, rel=0.03)
    assert found["async-vs-sync"].low < 1.0 < found["async-vs-sync"].high  # type: ignore[operator]


def test_steps_at_both_ends_of_an_asynchronous_run_do_not_count() -> None:
    slow_at_first, fast_at_last = [9.0] * 3, [0.1] * 3
    ends = [0.0]
    for seconds in (*slow_at_first, *[2.0] * 10, *fast_at_last):
        ends.append(ends[-1] + seconds)
    counted = async_vs_sync.Counted.of([step(n, at) for n, at in enumerate(ends)], 2)
    assert [seconds for _, seconds in counted.steps] == [2.0] * 10


def test_run_that_is_too_short_is_unmeasured() -> None:
    short = [step(n, float(n)) for n in range(1, 7)]
    assert all(row.why for row in async_vs_sync.rows(short, short) if row.id in ("async-vs-sync", "async-tokens"))


def test_limit_of_the_asynchronous_run_is_the_longer_of_generation_and_training() -> None:
    def of_phases(number: int, at: float) -> dict[str, Any]:
        return step(number, at) | {"seconds": {"total": 3.9, "generate": 2.5, "train": 1.0, "sync": 0.4}}

    sync = [OWN_CORES, *(of_phases(n, 4.0 * n) for n in range(1, 20))]
    times, seconds = async_vs_sync.own_core_rows(sync, [OWN_CORES, *(step(n, 3.2 * n) for n in range(1, 20))])
    assert times.value == pytest.approx(1.25) and times.limit == pytest.approx(1.6)
    assert seconds.value == pytest.approx(3.2) and seconds.limit == 2.5


@pytest.mark.parametrize("faults", [
    [], [OWN_CORES | {"detected_at": None, "witness": "psutil.NoSuchProcess"}], [OWN_CORES, OWN_CORES]])
def test_run_whose_parts_had_no_cores_of_their_own_is_unmeasured(faults: list[dict[str, Any]]) -> None:
    good = [OWN_CORES, *(step(n, 4.0 * n) for n in range(1, 20))]
    bad = [*faults, *good[1:]]
    for sync, ours in ((good, bad), (bad, good)):
        for rows in (async_vs_sync.own_core_rows, async_vs_sync.part_rows):
            with pytest.raises(Unmeasurable, match="cores of their own"):
                rows(sync, ours)


def test_steps_and_runs_on_shared_cores_do_not_count() -> None:
    engines = {"engines": [{"id": "e0"}, {"id": "e1"}]}
    found = [*(step(n, float(n)) | engines for n in range(1, 9)), OWN_CORES | {"detected_at": 4.5}]
    assert [r["step"] for r in own_cores.records_with(found) if r["kind"] == "step"] == [5, 6, 7, 8]
    for more in (step(9, 9.0) | {"engines": [{"id": "e0"}, {"id": "e2"}]}, {"kind": "rewind", "to_step": 8}):
        with pytest.raises(Unmeasurable, match="replaced"):
            own_cores.records_with([*found, more])


def test_cores_are_split_between_engines_and_ranks() -> None:
    assert own_cores.split([0, 1]) == ([0], [1])
    assert own_cores.split([2, 3, 7, 9, 11]) == ([2, 3], [7, 9, 11])
    with pytest.raises(Unmeasurable, match="only one"):
        own_cores.split([5])


def test_processes_are_kept_to_cores_with_all_threads_and_children(monkeypatch: pytest.MonkeyPatch) -> None:
    core = max(os.sched_getaffinity(0))
    child = "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start(); print('up', flush=True)"
    parent = subprocess.Popen([sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', "
                                                     f"{child!r}])"], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None and parent.stdout.readline() == b"up\n"
        own_cores.keep_to([core], [parent.pid])
        processes = [psutil.Process(parent.pid), *psutil.Process(parent.pid).children(recursive=True)]
        threads = [t.id for p in processes for t in p.threads()]
        assert len(processes) == 2 and len(threads) >= 3
        assert all(os.sched_getaffinity(t) == {core} for t in threads)
        with pytest.raises(ElasticRLError, match="do not keep to the cores"):
            monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cores: None)
            own_cores.keep_to([core, core + 1], [parent.pid])
    finally:
        for process in reversed([psutil.Process(parent.pid), *psutil.Process(parent.pid).children(recursive=True)]):
            process.kill()
        parent.wait()
    with pytest.raises(psutil.NoSuchProcess):
        own_cores.keep_to([core], [parent.pid])


def test_records_without_waits_are_idle_for_no_time() -> None:
    without = [{k: v for k, v in r.items() if k != "idle_s"} for r in records(10, faults=False)]
    assert next(r for r in steps.rows(without) if r.id == "idle-s-sync").value == 0.0


def test_other_stages_are_idle_together() -> None:
    found = records(10, faults=False)
    for record in found:
        record["idle_s"] = {"sync": 1.0, "source": 2.0, "save": 3.0}
    rows = {r.id: r for r in steps.rows(found)}
    assert (rows["idle-s-sync"].value, rows["idle-s-other"].value) == (1.0, 5.0)


def test_interval_is_all_that_a_step_takes() -> None:
    found = [step(n, 10.0 * n) for n in range(1, 6)]
    assert [(s["step"], seconds) for s, seconds in steps.intervals(found)] == [(3, 10.0), (4, 10.0), (5, 10.0)]


def test_intervals_leave_out_evaluations_and_what_was_undone() -> None:
    found = [*(step(n, float(n)) for n in range(1, 5)), {"kind": "eval", "step": 4}, step(5, 50.0), step(6, 51.0),
             step(7, 52.0), {"kind": "rewind", "to_step": 5}, step(6, 90.0), step(7, 92.0)]
    assert [(s["step"], seconds) for s, seconds in steps.intervals(found)] == [(3, 1.0), (4, 1.0), (7, 2.0)]


def test_step_of_a_predecessor_is_in_no_row() -> None:
    found = records(20, faults=False)
    alone = {r.id: r.samples for r in steps.rows(found)}
    found[-4] |= {"seconds": {}, "engines": []}
    rows = {r.id: r for r in steps.rows(found)}
    assert found[-4]["kind"] == "step" and rows["step-s"].samples == alone["step-s"] - 1
    assert [s["step"] for s, _ in steps.intervals([*(step(n, float(n)) for n in range(1, 5)), of_predecessor(5, 20.0),
                                                   step(6, 21.0), step(7, 22.0)])] == [3, 4, 7]


# -- step_cost --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("line, kind", [
    (["ray::ServeReplica:bench-1:actor"], "ServeReplica actor"), (["ray::ComponentActor.wait"], "ComponentActor.wait"),
    (["sglang::scheduler_TP0"], "sglang::scheduler"), (["sglang::detokenizer"], "sglang::detokenizer"),
    (["/venv/bin/python", "-B", "-m", "elastic_rl.host.agent", "--name", "agent-0"], "host.agent"),
    (["/venv/bin/python", "-B", "-c", "from multiprocessing.resource_tracker import main;main(10)"],
     "multiprocessing.resource_tracker"),
    (["/usr/bin/etcd", "--data-dir", "/x"], "etcd"), (["python3.11", "-u", "/ray/dashboard.py"], "dashboard.py"),
    ([""], "ended"), ([], "ended"), (["python"], "python")])
def test_kind_of_a_process_is_what_people_call_it(line: list[str], kind: str) -> None:
    assert step_cost.kind_of_process(line) == kind


@pytest.mark.parametrize("key, kind", [
    ("/elastic_rl/j/members/engine/e-1", "members/engine"), ("/elastic_rl/j/job", "job"),
    ("/elastic_rl/j/steps/0001", "steps"), ("/elastic_rl/_tokens/a/1", "_tokens"),
    ("/elastic_rl/j/dcs/streams/policy/next", "dcs"), ("/elastic_rl/_clusters/default/hosts/a", "cluster: hosts")])
def test_kind_of_a_key_leaves_out_which_one(key: str, kind: str) -> None:
    assert step_cost.kind_of_key(key, "j") == kind


def test_cost_of_a_step_is_what_does_not_compute() -> None:
    cpu_s = {"rank": 5.0, "sglang::scheduler": 4.0, "etcd": 2.0, "driver": 1.0, "raylet": 0.01}
    span = step_cost.Span(steps=10, cpu_s=cpu_s, transactions=150, writes=Counter({"_tokens": 150, "job": 10}))
    rows = {row.id: row for row in step_cost.rows(span, records(8, faults=False))}
    assert rows["cpu-a-step"].value == pytest.approx(0.301) and rows["cpu-a-step"].met is False
    assert rows["cpu-a-step"].alternatives == {"rank": 0.5, "sglang::scheduler": 0.4, "etcd": 0.2, "driver": 0.1}
    assert rows["etcd-a-step"].value == 15 and rows["etcd-a-step"].alternatives == {"_tokens": 15, "job": 1}
    assert set(rows) == {"cpu-a-step", "etcd-a-step", "sync-small"} and rows["sync-small"].samples == 6


# -- rollout_rate -----------------------------------------------------------------------------------------------------
def test_rate_of_a_replica_goes_by_its_own_cpu_seconds() -> None:
    rates = {n: rollout_rate.Rate(tokens=6_000_000 * n, seconds=2.0, replica_cpu_s=1.0 * n, caller_cpu_s=3.0)
             for n in (1, 2, 4)}
    rows = {row.id: row for row in rollout_rate.rows(
        rates, rollout_rate.Rate(3_000_000, 1.0, 1.0, 1.0), rollout_rate.Parsed(packed=60e6, json=7.5e6))}
    assert [*rows] == [*loop.SUITE.rows["rollout_rate"]]
    rate, wall, parse = rows.values()
    assert rate.value == 6e6 and rate.met is True
    assert rate.alternatives == {"2 replicas": 6e6, "4 replicas": 6e6, "responses of 1024 tokens": 3e6,
                                 "the actor's side": 2e6}
    assert wall.value == 3e6 and wall.alternatives == {"2 replicas": 6e6, "4 replicas": 12e6}
    assert parse.value == 10.0 and parse.alternatives == {"SGLang's JSON": 8.0}


def test_scripted_engine_answers_as_engines_do() -> None:
    async def ask() -> list[Sample]:
        url = scripted_engine.start()["url"]
        client = GenerateClient(url, timeout_s=60, retries=1)
        try:
            return await client.generate([5, 6], Sampling(7), 3)
        finally:
            await client.close()

    samples = asyncio.run(ask())
    assert [len(s.response_ids) for s in samples] == [7] * 3
    assert {s.versions for s in samples} == {(scripted_engine.VERSION,)}


# -- overhead ---------------------------------------------------------------------------------------------------------
def test_overhead_is_a_step_over_both_parts() -> None:
    rows = {r.id: r for r in overhead.rows([2.0, 3.0, 4.0], [1.0, 1.0, 9.0], [0.5])}
    assert rows["overhead"].value == 2.0 and rows["overhead"].met is False
    assert rows["overhead-s"].value == 3.0 and rows["overhead-s"].limit == 1.5
    assert rows["overhead-s"].alternatives == {"bare engines": 1.0, "bare trainer": 0.5}
    assert next(r for r in overhead.rows([1.7], [1.0], [0.5]) if r.id == "overhead").met is True


def test_work_of_the_bare_engines_is_compared_with_the_run() -> None:
    row = overhead.tokens_row(records(10, faults=False), 1.9)
    assert row.value == pytest.approx(0.5) and row.alternatives == {"bare engines": 1.9, "the run": 3.8}


def test_all_rows_of_a_module_are_listed() -> None:
    made = [*overhead.rows([1.0], [1.0], [1.0]), overhead.tokens_row(records(5, faults=False), 1.0)]
    assert {r.id for r in made} == set(SUITE.rows["overhead"])
    made = [*vs_trl.rows([1.0], [1.0], [1.0], "trl"), overhead.tokens_row([], 1.0, "vs-trl-small-tokens", "TRL")]
    assert {r.id for r in made} == set(LOOP.rows["vs_trl"])
    happened = {kind: [Outage(1, 1.0, 1.0)] for kind in outages.KINDS}
    made = [*outages.rows([], happened), *outages.engine_rows([], happened, 1.0)]
    assert {r.id for r in made} == set(SUITE.rows["outages"])


# -- the same work ----------------------------------------------------------------------------------------------------
def test_bare_engines_get_a_steps_prompts_in_the_products_requests() -> None:
    cfg = parse({"train": {"prompts_per_step": 40, "group_size": 8}, "rollout": {"groups_per_request": 20}})
    source = make_source(cfg)
    found = requests_of_step(cfg, source, 2)
    assert [len(request) for request in found] == [16, 4, 16, 4]  # at most 128 sequences each
    assert [ordinal for request in found for ordinal, _ in request] == list(range(80, 120))
    assert found != requests_of_step(cfg, source, 3)


def test_large_groups_have_requests_of_their_own() -> None:
    cfg = parse({"train": {"prompts_per_step": 2, "group_size": 256}})
    assert [len(request) for request in requests_of_step(cfg, make_source(cfg), 0)] == [1, 1]


def test_trl_gets_the_same_prompts_and_sizes() -> None:
    cfg = parse({"train": {"prompts_per_step": 4, "group_size": 2, "updates_per_step": 3}})
    source = make_source(cfg)
    given = vs_trl.spec(cfg, Path("policy"), 5)
    assert len(given["prompts"]) == len(given["answers"]) == 5 * 4
    assert given["prompts"][4] == list(requests_of_step(cfg, source, 1)[0][0][1].token_ids)
    assert (given["prompts_per_step"], given["group_size"], given["updates"], given["max_new_tokens"]) == (
        4, 2, 3, source.max_response_tokens)


def test_bare_engines_are_asked_for_the_whole_group_of_each_prompt() -> None:
    cfg = parse({"train": {"prompts_per_step": 4, "group_size": 6}, "rollout": {"groups_per_request": 2}})
    source, asked = make_source(cfg), []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content)["input_ids"])
        return httpx.Response(200, json=[])

    step = requests_of_step(cfg, source, 0)
    servers: Any = [SimpleNamespace(url="http://one"), SimpleNamespace(url="http://two")]
    with bare_engines._Client(servers, cfg, source) as client:
        client._http = httpx.Client(transport=httpx.MockTransport(answer))
        assert len(client.send(step)[1]) == len(step) == 2
    wanted = [[list(prompt.token_ids) for _, prompt in request for _ in range(6)] for request in step]
    assert sorted(asked) == sorted(wanted) and [len(ids) for ids in asked] == [12, 12]


class StubWorker:
    """A rank that takes as long as ``seconds`` says, by rank and step."""

    seconds: ClassVar[list[list[float]]] = []
    environments: ClassVar[list[dict[str, str]]] = []

    def __init__(self, *_: object, env: dict[str, str], **__: object) -> None:
        self.environments.append(env)
        self.rank, self.asked = int(env["RANK"]), {}  # type: ignore[var-annotated]

    def send(self, op: str, **fields: Any) -> None:
        self.asked = {"op": op, **fields}

    def answer(self, timeout_s: float) -> dict[str, float]:
        return {"seconds": self.seconds[self.rank][self.asked["number"] - 1]} if self.asked["op"] == "step" else {}

    def __enter__(self) -> StubWorker:
        return self

    def __exit__(self, *_: object) -> None:
        return None


@pytest.mark.parametrize("deterministic", [False, True])
def test_time_of_the_bare_trainer_is_that_of_its_slowest_rank(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deterministic: bool) -> None:
    monkeypatch.setattr(bare_trainer, "Worker", StubWorker)
    monkeypatch.setattr(StubWorker, "seconds", [[9.0, 9.0, 1.0, 4.0], [9.0, 9.0, 2.0, 3.0]])
    monkeypatch.setattr(StubWorker, "environments", [])
    cfg = parse({"deterministic": deterministic, "trainer": {"data_parallel": 2, "tensor_parallel": 1}})
    shares = [[tmp_path / f"{n}-0", tmp_path / f"{n}-1"] for n in range(4)]
    assert bare_trainer.measure_trainer(cfg, tmp_path, tmp_path, shares) == [2.0, 4.0]
    assert len(StubWorker.environments) == 2
    assert all(("CUBLAS_WORKSPACE_CONFIG" in env) is deterministic for env in StubWorker.environments)


@pytest.mark.parametrize("deterministic", [False, True])
def test_bare_engines_are_as_deterministic_as_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                      deterministic: bool) -> None:
    made: list[dict[str, Any]] = []

    def server(*_: object, **settings: Any) -> Any:
        made.append(settings)
        return SimpleNamespace(start=lambda: None, close=lambda: None)

    monkeypatch.setattr(bare_engines, "SGLangServer", server)
    cfg = parse({"deterministic": deterministic, "rollout": {"engines": 2}})
    with bare_engines.started(cfg, tmp_path, tmp_path) as (servers, seconds):
        assert len(servers) == len(seconds) == 2
    assert [settings["deterministic"] for settings in made] == [deterministic] * 2


# -- TRL --------------------------------------------------------------------------------------------------------------
def test_comparison_with_trl_is_bounded_by_the_bare_engines() -> None:
    ratio, seconds = vs_trl.rows([2.0, 4.0], [1.5, 1.5], [0.5], "trl 1")
    assert ratio.value == pytest.approx((1.5 / 2 + 1.5 / 4) / 2) and ratio.limit == 3.0 and ratio.met is None
    assert seconds.value == 1.5 and seconds.alternatives == {"elastic-rl": 3.0}


@pytest.mark.parametrize("python", [sys.executable + "-that-is-not-there", "/bin/false"])
def test_interpreter_without_trl_is_a_reason_with_a_remedy(python: str, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vs_trl.PYTHON_ENV, python)
    with pytest.raises(Unmeasurable, match=f"{python}.*elastic-rl\\[bench\\].*{vs_trl.PYTHON_ENV}"):
        vs_trl.interpreter(tmp_path)


def test_interpreter_is_an_absolute_path_tried_as_it_is_run_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                  ) -> None:
    seen = tmp_path / "seen"
    (tmp_path / "real").write_text(f'#!/bin/sh\necho "$PWD $HF_HUB_OFFLINE [$PYTHONPATH]" > {seen}\n')
    (tmp_path / "real").chmod(0o755)
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "python").symlink_to("../real")
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    monkeypatch.setenv(vs_trl.PYTHON_ENV, "venv/python")
    assert vs_trl.interpreter(folder) == str(tmp_path / "venv" / "python"), "the link of a venv is kept"
    assert seen.read_text() == f"{folder} 1 []\n"


@pytest.mark.parametrize(("times", "updates", "seconds"), [
    ([0.0, 1.0, 3.0, 6.0], 1, [1.0, 2.0, 3.0]), ([0.0, 1.0, 3.0, 6.0, 10.0], 2, [3.0, 7.0]),
    ([0.0, 1.0, 3.0, 6.0], 2, [3.0]), ([0.0], 1, [])])
def test_step_of_trl_is_all_its_updates(times: list[float], updates: int, seconds: list[float]) -> None:
    assert trl_program.seconds_of_steps(times, updates) == seconds
