"""A real SGLang engine behind a real router, fed by a real checkpoint node: what is published is what is served."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from engine_rig import PROMPT, Rig

from elastic_rl.coordinator import events
from elastic_rl.coordinator.records import EngineState
from elastic_rl.engine.router import RouterClient
from elastic_rl.processes import wait_until

pytestmark = pytest.mark.timeout(240)

@pytest.fixture(scope="module")
def rig(etcd, tmp_path_factory):
    rig = Rig(etcd, tmp_path_factory.mktemp("engine"))
    try:
        yield rig
    finally:
        rig.close()


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

    # Witness of the fault: the process is gone; then the record says so and the router forgets it.
    os.kill(updated.pid, signal.SIGKILL)
    killed_at = time.monotonic()
    wait_until(lambda: rig.record("e0").state is EngineState.DEAD, timeout_s=10, what="the record of the death")
    print("noticed after s:", time.monotonic() - killed_at)
    assert time.monotonic() - killed_at < 5
    thread.join(20)
    assert not thread.is_alive()
    assert RouterClient(rig.router.url).workers() == {}
    assert "engine.dead" in [e.kind for e in events.recent(rig.store, rig.ctx.keys)]


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
