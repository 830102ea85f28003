"""A real SGLang engine behind a real router, fed by a real DCS node: it serves what was published until it is killed.
Another one hangs in an update beside it. The tests share the engine, in their order."""

from __future__ import annotations

import copy
import itertools
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import torch
import transformers
from support.engine_testbed import PROMPT, EngineTestbed, await_gone, scheduler_of, sglang_files, suspended
from support.otlp_collector import Collector, Span, collecting
from support.tiers import full
from support.waiting import PATIENCE_S, wait_until

from elastic_rl.dcs.fetch.puller import Puller
from elastic_rl.engine import packed_answers
from elastic_rl.engine.client import Sample, Sampling, parse_sample
from elastic_rl.engine.server.sglang_server import SGLangServer
from elastic_rl.errors import DiskFull, StagingFailed
from elastic_rl.etcd.records import EngineState, Member
from elastic_rl.host.paths import JobPaths
from elastic_rl.net.engine_key import EngineAccess
from elastic_rl.telemetry import traces


def test_engine_serves_the_published_version_and_follows_the_next_one_in_place(testbed: EngineTestbed) -> None:
    engine_id = testbed.serving_engine()
    engine = testbed.wait_ready(engine_id)
    assert testbed.workers()[engine.url]
    testbed.assert_serves()
    told = wait_until(lambda: record if (record := testbed.record(engine_id)).load_known else None,
                      what="its record of what its probe says")
    assert told.token_usage is not None and 0.0 <= told.token_usage <= 1.0

    # One sequence alone, and a batch of many that differ in length, which takes another way through attention.
    testbed.assert_logprobs(testbed.ask(n=1, temperature=1.0))
    testbed.assert_logprobs(testbed.ask(n=64, temperature=1.0, tokens=40))

    # The same seed samples the same, and each sample of a request differs from the others.
    drawn = testbed.ask(n=8, temperature=1.0, seed=5)
    assert [s.response_ids for s in testbed.ask(n=8, temperature=1.0, seed=5)] == [s.response_ids for s in drawn]
    assert len({s.response_ids for s in drawn}) > 1
    assert [s.response_ids for s in testbed.ask(n=8, temperature=1.0, seed=6)] != [s.response_ids for s in drawn]

    # Through the router it packs the answers of requests that ask for it, which are the same as those in JSON.
    body = {"input_ids": [PROMPT] * 8, "return_logprob": True, "sampling_params": Sampling(8, seed=5).params()}
    as_json, packed = (httpx.post(f"{testbed.router.url}/generate", json=body | more, headers=testbed.access.headers,
                                  timeout=PATIENCE_S) for more in ({}, {packed_answers.REQUEST_FIELD: True}))
    assert packed.headers["Content-Type"] == packed_answers.MEDIA_TYPE
    unpacked = [parse_sample(one) for one in packed_answers.unpack(packed.content)]
    assert [s.response_ids for s in unpacked] == [parse_sample(one).response_ids for one in as_json.json()]
    assert [s.response_ids for s in unpacked] == [s.response_ids for s in drawn]

    testbed.publish(seed=2)
    updated = testbed.wait_ready(engine_id)
    testbed.assert_serves()
    assert updated.pid == engine.pid and 0 < updated.pause_s < updated.pull_apply_s
    print("pull+apply s:", engine.pull_apply_s, updated.pull_apply_s)


def test_engine_and_router_answer_no_request_without_the_key_of_the_job(testbed: EngineTestbed) -> None:
    """The endpoint for weights takes a pickle, and a router lists whatever server it is told of."""
    engine = testbed.wait_ready(testbed.serving_engine())
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
    for url, asked in ((engine.url, (("GET", "/model_info"), ("GET", "/v1/loads"), ("POST", "/generate"),
                                     ("POST", "/pause_generation"), ("POST", "/update_weights_from_tensor"))),
                       (testbed.router.url, (("GET", "/workers"), ("POST", "/workers"), ("POST", "/generate")))):
        for method, path in asked:
            for headers in ({}, EngineAccess("another").headers, {"Authorization": f"Basic {testbed.key}"}):
                answer = httpx.request(method, url + path, json=body, headers=headers, timeout=20)
                assert answer.status_code == 401, (url, path, headers)
        assert httpx.post(f"{url}/generate", json=body, headers=testbed.access.headers,
                          timeout=20).is_success
    assert testbed.workers() == {engine.url: True}
    server = psutil.Process(engine.pid)
    assert testbed.key not in " ".join(testbed.runners[engine.id]._server._process.args)
    for process in (server, *server.children(recursive=True), psutil.Process(testbed.router.pid)):
        assert not any(testbed.key in argument for argument in process.cmdline()), "every user can see it"
    log = JobPaths.of(testbed.ctx.config).logs / f"engine-{engine.id}.log"
    assert testbed.key not in log.read_text()


@contextmanager
def tracing(testbed: EngineTestbed) -> Iterator[Collector]:
    """Traces the engine, whose runner is in this process, and what is started with ``traced.json``."""
    with collecting() as collector:
        telemetry = testbed.ctx.config.telemetry.model_copy(update={"otlp_endpoint": collector.endpoint})
        config = testbed.ctx.config.model_copy(update={"telemetry": telemetry})
        testbed.ctx.model_copy(update={"config": config}).save(JobPaths.of(config).folder / "traced.json")
        traces.setup(collector.endpoint, "elastic-rl.engine")
        try:
            yield collector
        finally:
            traces.shutdown()


def run_traced(testbed: EngineTestbed, command: str) -> str:
    done = subprocess.run([sys.executable, Path(__file__).with_name("traced_process.py"), command,
                           JobPaths.of(testbed.ctx.config).folder / "traced.json"], capture_output=True, text=True,
                          timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_trace_covers_a_version_from_publish_to_first_sample(testbed: EngineTestbed) -> None:
    """Published by one process, applied by a second, sampled for a third."""
    engine_id = testbed.serving_engine()
    with tracing(testbed) as collector:
        testbed.published = version = int(run_traced(testbed, "publish"))
        testbed.wait_ready(engine_id, version)
        run_traced(testbed, "ask")
        names = {"dcs.publish", "dcs.store", "dcs.commit", "engine.sync", "engine.pull", "dcs.pull", "engine.apply",
                 "rollout.first_token"}

        def complete() -> dict[str, Span]:
            found = {s.name: s for s in collector.trace_with("dcs.publish")}
            return found if names <= set(found) else {}

        spans = wait_until(complete, what="every span of the trace")
    parents = {name: next((other for other, s in spans.items() if s.id == spans[name].parent), "") for name in names}
    assert parents == {"dcs.publish": "", "dcs.store": "dcs.publish", "dcs.commit": "dcs.publish",
                       "engine.sync": "dcs.publish", "engine.pull": "engine.sync", "dcs.pull": "engine.pull",
                       "engine.apply": "engine.sync", "rollout.first_token": "dcs.publish"}
    assert len({spans[n].pid for n in ("dcs.commit", "engine.apply", "rollout.first_token")}) == 3
    assert [s.name for s in collector.spans()].count("rollout.first_token") == 1, "of the first sample only"
    assert (spans["engine.apply"].attrs["version"], spans["rollout.first_token"].attrs["version"]) == (version, version)
    order = [spans[n].ended_at for n in ("dcs.store", "dcs.commit", "engine.pull", "engine.apply",
                                         "rollout.first_token")]
    assert order == sorted(order)


def assert_complete(answers: list[Sample]) -> None:
    assert answers and all(a.finish_reason in ("length", "stop") for a in answers)


def updates_in_flight(testbed: EngineTestbed, engine_id: str, *, resume: bool = False
                      ) -> Iterator[tuple[tuple[int, int], transformers.PreTrainedModel, list[Sample]]]:
    """An update while requests are in flight, again and again: the versions before and after it, the weights before it,
    and the answers to the requests. Fails the test after 30 updates."""
    for seed in range(100, 130):
        before, weights = testbed.published, copy.deepcopy(testbed.model)
        with testbed.asked_again_and_again(engine_id, resume=resume) as answers:
            after = testbed.publish(seed=seed)
            testbed.wait_ready(engine_id)
        assert_complete(answers)
        yield (before, after), weights, answers
    pytest.fail("no request was in flight when the weights changed")


def sampled_by(sample: Sample, number: int, weights: transformers.PreTrainedModel) -> bool:
    """Whether the log-probs of a segment are those of the weights, with what is before it computed by the same weights;
    by transformers."""
    first = len(PROMPT) + sum(len(s.token_ids) for s in sample.segments[:number])
    ids = torch.tensor([[*PROMPT, *sample.response_ids]])
    with torch.no_grad():
        logprobs = weights(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    segment = sample.segments[number]
    return torch.allclose(logprobs[first - 1:][:len(segment.token_ids)], torch.tensor(segment.logprobs), atol=1e-3)


def assert_parts(testbed: EngineTestbed, before: transformers.PreTrainedModel, samples: list[Sample], *,
                 cached: bool = False) -> None:
    """The samples went on after an update, in a second segment. ``cached``: with the keys and values that they had, so
    that their log-probs are those of no version alone."""
    assert all(len(sample.segments) == 2 and sampled_by(sample, 0, before) for sample in samples)
    assert all(sampled_by(sample, 1, testbed.model) for sample in samples) is not cached


def test_request_in_flight_survives_an_update_and_names_both_versions(testbed: EngineTestbed) -> None:
    """With ``retract``, the default; the other modes have engines of their own below."""
    for versions, before, answers in updates_in_flight(testbed, testbed.serving_engine()):
        if over := [a for a in answers if a.versions == versions]:
            assert_parts(testbed, before, over)
            return


@full(proved_in="tests/unit/engine/test_departure.py tests/unit/engine/test_engine_client.py",
      why="up to three engines begin and leave under requests")
def test_drained_engine_hands_its_requests_over_with_the_tokens_that_they_have(
        testbed: EngineTestbed, monkeypatch: pytest.MonkeyPatch) -> None:
    testbed.wait_ready(testbed.serving_engine())
    for number in range(3):
        name, aborted = f"leaves-{number}", threading.Event()
        server = testbed.start_engine(name)._server
        scheduler, abort = scheduler_of(testbed.wait_ready(name).pid), server.abort_requests
        monkeypatch.setattr(server, "abort_requests", lambda: (abort(), aborted.set()))  # noqa: B023
        with testbed.asked_again_and_again(name, resume=True) as answers:
            wait_until(server.in_flight, what="a request in flight", poll_s=0.005, timeout_s=60)
            with suspended(scheduler.pid):  # so that the request is still there when the engine leaves
                testbed.runners[name].drain()
                assert aborted.wait(PATIENCE_S)
            testbed.await_end(name)
        assert_complete(answers)
        testbed.assert_logprobs(answers)
        assert {a.versions for a in answers} == {(testbed.published,)}
        stopped = testbed.events(name)[-1]
        assert stopped.kind == "engine.stopped" and testbed.record(name) is None
        if any(len(a.segments) > 1 for a in answers):
            assert stopped.data["handed_over"]
            return
    pytest.fail("no request was in flight when the engine left")


def test_engine_that_updates_waits_for_its_turn_and_takes_the_newest_version_then(testbed: EngineTestbed) -> None:
    engine_id = "turns"
    testbed.start_engine(engine_id, max_unavailable=1)
    first = testbed.wait_ready(engine_id).version
    slot = testbed.keys.update_slot("rollout", 0)
    testbed.etcd.put(slot, b"another engine")
    testbed.publish(seed=31)
    member = testbed.keys.member("engine", engine_id)
    wait_until(lambda: Member.decode(testbed.etcd.get(member).value).phase == "waiting for other engines to update",
               what="the wait for a turn")
    testbed.publish(seed=32)
    record = testbed.record(engine_id)
    assert (record.state, record.version, record.applying) == (EngineState.READY, first, 0), "it serves on meanwhile"
    testbed.etcd.delete(slot)
    engine = testbed.wait_ready(engine_id)
    wait_until(lambda: testbed.etcd.get(slot) is None, what="the end of its turn")
    assert engine.version == testbed.published > first
    testbed.runners[engine_id].stop()
    testbed.await_end(engine_id)


def test_engine_rejects_a_version_with_a_missing_tensor_and_retries_with_backoff(
        testbed: EngineTestbed, monkeypatch: pytest.MonkeyPatch) -> None:
    engine_id = testbed.serving_engine()
    engine = testbed.wait_ready(engine_id)
    tensors = dict(testbed.model.state_dict())
    tensors.pop("model.norm.weight")
    tries, pull = list[float](), Puller.pull

    def counted_pull(*args: object, **options: object) -> object:
        tries.append(time.monotonic())
        if len(tries) == 1:
            raise DiskFull("the disk of this host is full")
        return pull(*args, **options)

    monkeypatch.setattr(Puller, "pull", counted_pull)
    broken = testbed.publisher.publish(tensors.items(), meta={}).number

    def reports() -> list[str]:
        return [e.message for e in testbed.events(engine_id) if e.kind == "engine.cannot_fetch"]

    wait_until(reports, what="the event of a version that does not fit")
    assert StagingFailed.__name__ in reports()[-1] and "model.norm.weight" in reports()[-1]
    found = testbed.record(engine_id)
    assert (found.state, found.version, found.applying) == (EngineState.READY, testbed.published, 0)
    assert broken > testbed.published
    testbed.assert_serves()
    pauses = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert pauses and all(pause > 0.75 * 0.2 * 2 ** i for i, pause in enumerate(pauses)), "it retries without a backoff"

    # The next good version ends it; the tokens of its bf16 weights are those of the fp32 engine.
    testbed.publish(seed=5, dtype=torch.bfloat16)
    assert testbed.wait_ready(engine_id).pid == engine.pid
    testbed.assert_serves()
    assert testbed.events(engine_id)[-1].kind == "engine.fetch_recovered"


def test_processes_of_an_engine_listen_on_its_host_only(testbed: EngineTestbed) -> None:
    """Neither its API nor the store of its schedulers has a password."""
    pids = testbed.server_pids(testbed.serving_engine())
    found = {c.laddr.ip for pid in pids for c in psutil.Process(pid).net_connections("tcp") if c.status == "LISTEN"}
    assert found == {testbed.ctx.host}


def test_sockets_of_an_engine_are_for_its_user_alone(testbed: EngineTestbed) -> None:
    """SGLang's processes unpickle what they are sent, and have no password: who connects runs code."""
    made = sglang_files(testbed.server_pids(testbed.serving_engine()))
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in made if path.is_socket()}
    assert modes and not any(mode & 0o077 for mode in modes.values()), modes


def test_engine_that_hangs_in_an_update_is_quarantined_and_others_serve_on(testbed: EngineTestbed) -> None:
    good = testbed.serving_engine()
    testbed.start_engine("hangs", apply_timeout_s=5.0)
    testbed.wait_ready("hangs")
    second = testbed.publish(seed=2)
    engines = [testbed.wait_ready(name) for name in ("hangs", good)]
    testbed.assert_serves()

    # Staged, so the checksum is known; engines of one layout have the same.
    assert len({(e.layout, e.checksum) for e in engines}) == 1 and engines[0].checksum
    pids = testbed.server_pids("hangs")

    # The server answers nothing from the pause on: the update has begun and never ends.
    with suspended(engines[0].pid):
        third = testbed.publish(seed=3)
        torn = testbed.wait_state("hangs", EngineState.QUARANTINED)
        assert (torn.version, torn.applying) == (second, third)
    testbed.wait_ready(good)
    testbed.await_unrouted(engines[0].url)
    testbed.assert_serves()
    testbed.await_end("hangs")
    await_gone(pids)
    reports = [e for e in testbed.events("hangs") if e.kind == "engine.quarantined"]
    assert [(e.data["applying"], e.data["incarnation"]) for e in reports] == [(third, torn.incarnation)]


def test_killed_engine_is_unrouted_and_leaves_no_file(testbed: EngineTestbed) -> None:
    engine = testbed.wait_ready(testbed.serving_engine())
    pids = testbed.server_pids(engine.id)
    files = sglang_files(pids)
    assert files and all(f.exists() for f in files)
    os.kill(engine.pid, signal.SIGKILL)  # the witness: the record says what the runner saw
    assert testbed.wait_state(engine.id, EngineState.DEAD).reason == "a process of the SGLang server ended"
    testbed.await_end(engine.id)
    await_gone(pids)
    assert engine.url not in testbed.workers()
    [death] = [e for e in testbed.events(engine.id) if e.kind == "engine.dead"]
    assert death.data["incarnation"] == engine.incarnation
    assert not [f for f in files if f.exists()]


def cached_tokens(testbed: EngineTestbed, url: str, prompt: list[int], **fields: object) -> tuple[int, str]:
    """How many tokens of a prompt the engine took from its prefix cache, and the version that it answered with."""
    answer = httpx.post(f"{url}/generate", json={"input_ids": prompt, "sampling_params": {
        "max_new_tokens": 2, "temperature": 0}, **fields}, headers=testbed.access.headers, timeout=PATIENCE_S)
    meta = answer.raise_for_status().json()["meta_info"]
    return meta["cached_tokens"], meta["weight_version"]


def test_new_prompt_takes_no_keys_and_values_of_older_weights_where_the_prefix_cache_is_kept(
        testbed: EngineTestbed, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``in_place`` nothing flushes the cache. It is off on CPUs by default, and on here as it is on GPUs."""
    arguments = SGLangServer.arguments
    monkeypatch.setattr(SGLangServer, "arguments", lambda self, cuda: [
        a for a in arguments(self, cuda) if a != "--disable-radix-cache"])
    testbed.stop_engines()
    runner = testbed.start_engine("cached", pause_mode="in_place", seeded_sampling="off")
    engine, prompt = testbed.wait_ready("cached"), PROMPT[::-1] * 4  # begins otherwise than what is asked meanwhile

    def ask(**fields: object) -> tuple[int, str]:
        return cached_tokens(testbed, engine.url, prompt, **fields)

    first = str(engine.version)
    assert ask() == (0, first)
    assert ask() == ((cached := len(prompt) - 1), first), "the same weights take what they have computed"
    assert ask(extra_key="tenant") == (0, first), "a key of the caller's still keeps prompts apart"

    with testbed.asked_again_and_again("cached"):  # under requests, so that the cache could not be flushed either
        testbed.publish(seed=41)
        second = str(testbed.wait_ready("cached").version)
    assert ask() == (0, second), "the new weights have computed nothing of it"
    assert ask() == (cached, second)
    testbed.assert_serves()  # from the cache, with the tokens of these weights
    testbed.assert_serves()
    runner.stop()
    testbed.await_end("cached")


@full(proved_in="tests/unit/engine/test_stager.py tests/integration/engine/test_engine.py",
      why="two tensor-parallel ranks of a real server")
def test_tensor_parallel_ranks_stage_a_version_part_by_part(testbed: EngineTestbed) -> None:
    testbed.stop_engines()
    runner = testbed.start_engine("tp2", extra_args=["--tp-size", "2"], pause_mode="in_place")
    testbed.wait_ready("tp2")
    testbed.assert_serves()
    testbed.publish(seed=6)
    engine = testbed.wait_ready("tp2")
    testbed.assert_serves()
    assert len(set(engine.checksum.split())) == 2, "each rank has a half of its own"

    # Staged tensor by tensor, as a version arrives at a host, it is the same.
    with (Puller(testbed.etcd, testbed.keys, "test", io_timeout_s=30) as puller,
          puller.pull("policy") as pulled, runner._server.stage() as session):
        whole = pulled.reference()
        for i in reversed(range(len(pulled.manifest.tensors))):
            session.add({**whole, "tensors": [[i, i + 1]]})
        assert " ".join(session.finish(whole).checksums) == engine.checksum
    testbed.assert_serves()
    runner.stop()
    testbed.await_end("tp2")


@full(proved_in="tests/unit/engine/test_server_update.py tests/unit/engine/test_engine_client.py "
                "tests/integration/engine/test_engine.py",
      why="each further way to pause a real server")
@pytest.mark.parametrize("mode", ["in_place", "abort", "drain"])
def test_requests_in_flight_are_complete_after_an_update_in_every_pause_mode(testbed: EngineTestbed, mode: str) -> None:
    testbed.stop_engines()
    engine_id = f"pausing-{mode}"
    runner = testbed.start_engine(engine_id, pause_mode=mode)
    testbed.wait_ready(engine_id)
    for versions, before, answers in updates_in_flight(testbed, engine_id, resume=mode == "abort"):
        if mode == "drain":
            assert {a.versions for a in answers} <= {versions[:1], versions[1:]}, "none is of two versions"
            if any(a.versions == versions[:1] for a in answers):
                break
            continue
        if over := [a for a in answers if a.versions == versions]:
            if mode == "in_place" and all(sampled_by(sample, 1, testbed.model) for sample in over):
                continue  # on a busy machine the scheduler may have computed the tokens before it again
            assert_parts(testbed, before, over, cached=mode == "in_place")
            break
    assert [e.kind for e in testbed.events(engine_id)].count("engine.ready") == 1
    runner.stop()
    testbed.await_end(engine_id)
