"""New weights in running engines: staged beside the old ones, exchanged in a short pause, and whole whatever fails."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest
import torch
from support.engine_testbed import EngineTestbed

from elastic_rl.coordinator.membership.weight_outliers import outliers
from elastic_rl.dcs import failpoints
from elastic_rl.dcs.fetch.puller import Puller
from elastic_rl.engine.router import RouterClient
from elastic_rl.errors import StagingFailed
from elastic_rl.etcd import events
from elastic_rl.etcd.records import Engine, EngineState
from elastic_rl.runtime import wait_until

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def make_rig(etcd_servers, tmp_path) -> Iterator[Callable[..., EngineTestbed]]:
    rigs: list[EngineTestbed] = []

    def make(**engine: object) -> EngineTestbed:
        rigs.append(EngineTestbed(etcd_servers, tmp_path, **{"apply_timeout_s": 5.0, **engine}))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, timeout_s=5, what="the stop")
        yield
    finally:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGCONT)


def assert_serves(rig: EngineTestbed, version: int) -> None:
    [greedy] = rig.ask()
    assert (greedy.token_ids, greedy.version) == (rig.expected(), version)


def await_routed(rig: EngineTestbed, *urls: str) -> None:
    router = RouterClient(rig.router.url)
    wait_until(lambda: router.workers() == dict.fromkeys(urls, True), timeout_s=20, what=f"only {urls} in the router")


def test_of_two_engines_one_is_torn_and_quarantined_and_the_other_one_goes_on(make_rig) -> None:
    rig = make_rig()
    first = rig.publish(seed=1)
    for name in ("e0", "e1"):
        rig.run_engine(name)
    engines = [rig.wait_ready(name, first) for name in ("e0", "e1")]
    second = rig.publish(seed=2)
    engines = [rig.wait_ready(name, second) for name in ("e0", "e1")]
    assert_serves(rig, second)

    # Staged, so its checksum is known; two engines of one layout have the same.
    assert len({(e.layout, e.checksum) for e in engines}) == 1 and engines[0].checksum
    assert all(0 < e.pause_s < e.pull_apply_s for e in engines)

    # The server answers nothing from when it is to pause: an update that has begun and never ends.
    with stopped(engines[0].pid):
        third = rig.publish(seed=3)
        torn = rig.wait_state("e0", EngineState.QUARANTINED)
        assert (torn.version, torn.applying) == (second, third)
    rig.wait_ready("e1", third)
    await_routed(rig, engines[1].url)
    assert_serves(rig, third)
    rig.threads["e0"].join(30)
    assert not rig.threads["e0"].is_alive() and not psutil.pid_exists(engines[0].pid)
    told = [e for e in events.recent(rig.etcd, rig.ctx.keys) if e.kind == "engine.quarantined"]
    assert [(e.subject, e.data["applying"]) for e in told] == [("e0", third)]

    # What the leader says of an engine whose weights differ is obeyed. (That it says so: test_outliers, below.)
    def differ(raw: bytes | None) -> bytes:
        return Engine.decode(raw or b"").replace(state=EngineState.QUARANTINED, reason="its weights differ").encode()

    rig.etcd.update(rig.ctx.keys.engine("e1"), differ)
    ended = rig.wait_state("e1", EngineState.DEAD)
    assert ended.reason == "its weights differ"
    await_routed(rig)


def test_a_request_in_flight_survives_an_update_and_says_where_the_version_changed(make_rig) -> None:
    rig = make_rig()
    first = rig.publish(seed=1)
    rig.run_engine("e0")
    rig.wait_ready("e0", first)
    versions = [first]
    for seed in range(2, 30):
        answers: list = []
        asking = threading.Thread(target=lambda into=answers: into.extend(rig.ask(n=16, temperature=1.0, tokens=50)))
        asking.start()
        wait_until(lambda: rig.runners["e0"]._server.in_flight() > 0, timeout_s=20, what="a request in flight",
                   poll_s=0.005)
        versions.append(rig.publish(seed=seed))
        rig.wait_ready("e0", versions[-1])
        asking.join(60)
        assert len(answers) == 16 and all(a.finish_reason in ("length", "stop") for a in answers)
        if any(a.versions == versions[-2:] for a in answers):
            return
    pytest.fail("no answer was under way when the weights changed")


def test_a_version_that_does_not_fit_changes_nothing_and_is_told(make_rig, monkeypatch) -> None:
    rig = make_rig()
    first = rig.publish(seed=1)
    rig.run_engine("e0")
    engine = rig.wait_ready("e0", first)
    tensors = dict(rig.model.state_dict())
    tensors.pop("model.norm.weight")
    tries, pull = list[float](), Puller.pull

    def counted(*args: object, **options: object) -> object:
        tries.append(time.monotonic())
        return pull(*args, **options)

    monkeypatch.setattr(Puller, "pull", counted)
    broken = rig.publisher.publish(tensors.items(), meta={}).number

    def told() -> list:
        return [e for e in events.recent(rig.etcd, rig.ctx.keys) if e.kind == "engine.cannot_fetch"]

    wait_until(told, timeout_s=60, what="the event of a version that does not fit")
    assert StagingFailed.__name__ in told()[0].message and "model.norm.weight" in told()[0].message
    found = rig.record("e0")
    assert (found.state, found.version, found.applying) == (EngineState.READY, first, 0) and broken > first
    assert_serves(rig, first)
    pauses = [b - a for a, b in zip(tries, tries[1:], strict=False)]
    assert all(pause > 0.75 * 0.2 * 2 ** i for i, pause in enumerate(pauses)), "it is tried without a backoff"

    # The next good one ends it, and its bf16 is what the fp32 engine has.
    good = rig.publish(seed=5, dtype=torch.bfloat16)
    assert rig.wait_ready("e0", good).pid == engine.pid
    assert_serves(rig, good)
    assert events.recent(rig.etcd, rig.ctx.keys)[-1].kind == "engine.fetch_recovered"


@pytest.mark.parametrize("point", failpoints.ENGINE)
def test_a_scheduler_killed_in_an_update_never_serves_half_of_it(make_rig, monkeypatch, point: str) -> None:
    rig = make_rig()
    first = rig.publish(seed=1)
    # The first load of a process comes by `apply.torn` and `apply.applied` once for each tensor, or once.
    nth = {"apply.staged": 1, "apply.torn": len(list(rig.model.parameters())), "apply.applied": 2}[point]
    monkeypatch.setenv(failpoints.ENV, f"{point}:{nth}")
    rig.run_engine("e0")
    engine = rig.wait_ready("e0", first)
    monkeypatch.delenv(failpoints.ENV)
    second = rig.publish(seed=2)
    dead = rig.wait_state("e0", EngineState.DEAD, EngineState.QUARANTINED)
    assert dead.version == first and dead.applying == (0 if point == "apply.staged" else second)
    await_routed(rig)
    wait_until(lambda: not psutil.pid_exists(engine.pid), timeout_s=20, what="the end of the server")
    rig.run_engine("e1")
    rig.wait_ready("e1", second)
    assert_serves(rig, second)


@pytest.mark.parametrize("pause", ["retract", "in_place"])
def test_engines_of_two_tensor_parallel_ranks_take_versions_too(make_rig, pause: str) -> None:
    rig = make_rig(extra_args=["--tp-size", "2"], pause=pause)
    first = rig.publish(seed=1)
    rig.run_engine("e0")
    rig.wait_ready("e0", first)
    assert_serves(rig, first)
    second = rig.publish(seed=2)
    engine = rig.wait_ready("e0", second)
    assert_serves(rig, second)
    assert len(set(engine.checksum.split())) == 2, "each rank has a half of its own"

    # Staged bit by bit, as the tensors of a version come to a host one by one, it is the same.
    server = rig.runners["e0"]._server
    with (Puller(rig.etcd, rig.ctx.keys, "test", io_timeout_s=30) as puller,
          puller.pull("policy") as pulled, server.preparing() as preparation):
        whole = pulled.reference()
        for i in reversed(range(len(pulled.manifest.tensors))):
            preparation.add({**whole, "tensors": [[i, i + 1]]})
        assert " ".join(preparation.finish(whole).checksums) == engine.checksum
    assert_serves(rig, second)


def test_a_model_that_is_not_staged_is_loaded_in_the_pause(make_rig) -> None:
    rig = make_rig(staging_limit_bytes=0)
    first = rig.publish(seed=1)
    rig.run_engine("e0")
    rig.wait_ready("e0", first)
    second = rig.publish(seed=2)
    assert rig.wait_ready("e0", second).checksum == ""
    assert_serves(rig, second)
    assert outliers([rig.record("e0")]) == []
