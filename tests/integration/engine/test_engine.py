"""A real SGLang engine behind a real router, fed by a real checkpoint node: what is published is what is served."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.engine_testbed import PROMPT, EngineTestbed
from support.otlp_collector import Collector, Span, collecting

from elastic_rl.engine.router import RouterClient
from elastic_rl.etcd import events
from elastic_rl.etcd.records import EngineState
from elastic_rl.runtime import wait_until
from elastic_rl.telemetry import traces

pytestmark = pytest.mark.timeout(240)

@pytest.fixture(scope="module")
def rig(etcd_servers, tmp_path_factory):
    rig = EngineTestbed(etcd_servers, tmp_path_factory.mktemp("engine"))
    try:
        yield rig
    finally:
        rig.close()


@contextmanager
def tracing(rig: EngineTestbed) -> Iterator[Collector]:
    """The engine, whose runner is in this process, traces, and so does what is started with ``traced.json``."""
    with collecting() as collector:
        telemetry = rig.ctx.config.telemetry.model_copy(update={"otlp_endpoint": collector.endpoint})
        config = rig.ctx.config.model_copy(update={"telemetry": telemetry})
        rig.ctx.model_copy(update={"config": config}).save(config.job_dir / "traced.json")
        traces.setup(collector.endpoint, "elastic-rl.engine")
        try:
            yield collector
        finally:
            traces.shutdown()


def run_traced(rig: EngineTestbed, what: str) -> str:
    done = subprocess.run([sys.executable, Path(__file__).with_name("traced.py"), what,
                           rig.ctx.config.job_dir / "traced.json"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_one_trace_to_the_first_token(rig: EngineTestbed, collector: Collector, engine_id: str) -> None:
    """Publishes in one process, applies in another one, asks for samples in a third."""
    version = int(run_traced(rig, "publish"))
    rig.wait_ready(engine_id, version)
    run_traced(rig, "ask")
    wanted = {"dcs.publish", "dcs.store", "dcs.commit", "engine.sync", "engine.pull", "dcs.pull", "engine.apply",
              "rollout.first_token"}

    def whole() -> dict[str, Span]:
        found = {s.name: s for s in collector.trace_with("dcs.publish")}
        return found if wanted <= set(found) else {}

    spans = wait_until(whole, timeout_s=20, what="every span of the trace")
    parents = {name: next((other for other, s in spans.items() if s.id == spans[name].parent), "") for name in wanted}
    assert parents == {"dcs.publish": "", "dcs.store": "dcs.publish", "dcs.commit": "dcs.publish",
                       "engine.sync": "dcs.publish", "engine.pull": "engine.sync", "dcs.pull": "engine.pull",
                       "engine.apply": "engine.sync", "rollout.first_token": "dcs.publish"}
    assert len({spans[n].pid for n in ("dcs.commit", "engine.apply", "rollout.first_token")}) == 3
    assert [s.name for s in collector.spans()].count("rollout.first_token") == 1, "one, of the first sample"
    assert (spans["engine.apply"].attrs["version"], spans["rollout.first_token"].attrs["version"]) == (version, version)
    order = [spans[n].ended_at for n in ("dcs.store", "dcs.commit", "engine.pull", "engine.apply",
                                         "rollout.first_token")]
    assert order == sorted(order)


def test_what_is_published_is_what_is_served_and_a_killed_engine_is_taken_out(rig):
    first = rig.publish(seed=1)
    thread = rig.run_engine("e0")
    ready = rig.wait_ready("e0", first)
    assert RouterClient(rig.router.url).workers() == {ready.url: True}
    [greedy] = rig.ask()
    assert (greedy.token_ids, greedy.version) == (rig.expected(), first)

    # Log-probs are those of the distribution that was sampled from.
    for sample in rig.ask(n=8, temperature=1.0):
        ids = torch.tensor([PROMPT + sample.token_ids])
        logprobs = rig.model(ids).logits[0, len(PROMPT) - 1:-1].log_softmax(-1)
        mine = logprobs.gather(1, ids[0, len(PROMPT):, None])[:, 0]
        assert torch.allclose(mine, torch.tensor(sample.logprobs), atol=1e-4)

    # A second version is followed in place, and the answers say so.
    second = rig.publish(seed=2)
    updated = rig.wait_ready("e0", second)
    assert updated.pid == ready.pid and 0 < updated.pull_apply_s < 5
    [greedy] = rig.ask()
    assert (greedy.token_ids, greedy.version) == (rig.expected(), second)
    print("pull+apply s:", ready.pull_apply_s, updated.pull_apply_s)

    with tracing(rig) as collector:
        assert_one_trace_to_the_first_token(rig, collector, "e0")
        updated = rig.record("e0")

    # Witness of the fault: the process is gone; then the record says so and the router forgets it.
    os.kill(updated.pid, signal.SIGKILL)
    killed_at = time.monotonic()
    wait_until(lambda: rig.record("e0").state is EngineState.DEAD, timeout_s=10, what="the record of the death")
    print("noticed after s:", time.monotonic() - killed_at)
    assert time.monotonic() - killed_at < 5
    thread.join(20)
    assert not thread.is_alive()
    assert RouterClient(rig.router.url).workers() == {}
    assert "engine.dead" in [e.kind for e in events.recent(rig.etcd, rig.ctx.keys)]


def test_a_drained_engine_finishes_what_it_has_and_leaves_no_record(rig):
    version = rig.publish(seed=3)
    thread = rig.run_engine("e1")
    pid = rig.wait_ready("e1", version).pid
    answers: list = []
    asking = threading.Thread(target=lambda: answers.extend(rig.ask(n=16, temperature=1.0, tokens=50)))
    asking.start()
    wait_until(lambda: rig.runners["e1"]._server.in_flight() > 0 or answers, timeout_s=20, what="a request in flight",
               poll_s=0.005)
    rig.runners["e1"].drain()
    asking.join(60)
    thread.join(60)
    assert not thread.is_alive() and len(answers) == 16 and all(a.finish_reason in ("length", "stop") for a in answers)
    assert rig.record("e1") is None and not Path(f"/proc/{pid}").exists()


def test_a_scheduler_that_is_killed_ends_the_engine(rig):
    version = rig.publish(seed=4)
    thread = rig.run_engine("e2")
    rig.wait_ready("e2", version)
    main, *children = rig.runners["e2"]._server.pids
    assert children
    os.kill(children[0], signal.SIGKILL)
    wait_until(lambda: rig.record("e2").state is EngineState.DEAD, timeout_s=10, what="the record of the death")
    thread.join(20)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (main, *children)), timeout_s=10,
               what="the end of every process of the engine")
