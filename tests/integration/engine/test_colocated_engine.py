"""A real engine that shares devices with a trainer: on a CPU nothing is freed, and all else is as on a GPU. What the
release of the weights does there is done here by hand: they are overwritten. Such an engine is deterministic: what a
sample gets does not depend on the others that the engine works on."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.engine_testbed import PROMPT, EngineTestbed, await_gone
from support.tiers import full
from support.waiting import PATIENCE_S, wait_until

from elastic_rl.config import ROLLOUT_POOL
from elastic_rl.engine.client import Sampling, finish_reason
from elastic_rl.etcd.device_claims import DeviceClaims
from elastic_rl.etcd.device_phase import Side
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.records import Engine, EngineState
from elastic_rl.net.engine_key import EngineAccess

GROUP = "formation-1"
SHARED = "rollout-colocated"
"""The engine of the tests that run by default. Requests in flight at the end of its phase are not waited for."""
PROMPTS = [[5, 6, 3, 4, 7], [7, 5], [4, 4, 4, 6, 7, 3, 5, 5, 6], [3, 6], [6, 5, 4]]


class PhasesOfTest:
    """The actor and the trainer group of the testbed's job."""

    def __init__(self, testbed: EngineTestbed) -> None:
        self._claims = DeviceClaims(testbed.etcd, testbed.keys, ROLLOUT_POOL, epoch=testbed.ctx.epoch)
        self._writer = FencedWriter.of_epoch(testbed.etcd, testbed.keys, testbed.ctx.epoch)

    def begin(self, side: Side) -> bool:
        return self._claims.begin_phase(side, self._writer, 1)

    def take(self) -> str:
        return self._claims.take_for_trainer(GROUP)

    def give_up(self) -> None:
        self._claims.give_up_for_trainer(GROUP)


@contextlib.contextmanager
def phases_of(testbed: EngineTestbed) -> Iterator[PhasesOfTest]:
    """Phases of engines that start in the meantime. The first one is the trainer's."""
    testbed.stop_engines()
    try:
        yield PhasesOfTest(testbed)
    finally:
        testbed.stop_engines()
        testbed.etcd.delete_prefix(testbed.keys.device_phase())
        testbed.etcd.delete_prefix(testbed.keys.device_holder())


@pytest.fixture
def phases(testbed: EngineTestbed) -> Iterator[PhasesOfTest]:
    with phases_of(testbed) as made:
        yield made


@pytest.fixture(scope="module")
def shared_phases(testbed: EngineTestbed) -> Iterator[PhasesOfTest]:
    """The phases of the shared engine, which has not launched a server yet."""
    with phases_of(testbed) as made:
        testbed.start_colocated_engine(SHARED, drain_timeout_s=0.1)
        yield made


def serving(testbed: EngineTestbed, phases: PhasesOfTest) -> Engine:
    """The shared engine in a phase of its own."""
    phases.begin(Side.ENGINES)
    return testbed.wait_ready(SHARED)


def overwrite_weights(engine: Engine, key: str) -> None:
    httpx.post(f"{engine.url}/weights_checker", json={"action": "reset_tensors"}, timeout=60,
               headers=EngineAccess(key).headers).raise_for_status()


def released(testbed: EngineTestbed, engine_id: str) -> Engine:
    engine = testbed.wait_state(engine_id, EngineState.RELEASED)
    assert (engine.version, engine.applying, engine.holds_device) == (0, 0, False)
    return engine


def test_engine_serves_the_same_tokens_after_a_phase_of_the_trainer(
        testbed: EngineTestbed, shared_phases: PhasesOfTest) -> None:
    phases = shared_phases
    assert released(testbed, SHARED).pid == 0, "a server was launched in the trainer's phase"
    assert phases.begin(Side.ENGINES)
    first = testbed.wait_ready(SHARED)
    assert first.holds_device
    testbed.assert_serves()
    drawn = testbed.ask(n=4, temperature=1.0, tokens=24, seed=5)

    assert phases.begin(Side.TRAINER)
    engine = released(testbed, SHARED)
    assert engine.url not in testbed.workers()
    assert phases.take() == "" and not phases.begin(Side.ENGINES), "the trainer has memory"
    overwrite_weights(engine, testbed.key)
    phases.give_up()
    assert phases.begin(Side.ENGINES)
    again = testbed.wait_ready(SHARED)
    assert (again.pid, again.version) == (first.pid, first.version)
    testbed.assert_serves()
    assert testbed.ask(n=4, temperature=1.0, tokens=24, seed=5) == drawn

    # A version that is published in the trainer's phase, as in each step.
    assert phases.begin(Side.TRAINER)
    overwrite_weights(released(testbed, SHARED), testbed.key)
    newer = testbed.publish(seed=11)
    assert phases.begin(Side.ENGINES)
    assert testbed.wait_ready(SHARED, newer).pid == first.pid
    testbed.assert_serves()
    assert [e.kind for e in testbed.events(SHARED)] == ["engine.ready"], "phases are no events"


def generated(testbed: EngineTestbed, engine: Engine, prompts: list[list[int]], **params: Any) -> list[dict[str, Any]]:
    """The engine's answer to one request for a sample of each prompt."""
    body = {"input_ids": prompts, "return_logprob": True, "sampling_params": params}
    return httpx.post(f"{engine.url}/generate", json=body, timeout=PATIENCE_S,
                      headers=testbed.access.headers).json()


def test_sample_has_the_same_bits_alone_and_among_others(testbed: EngineTestbed, shared_phases: PhasesOfTest) -> None:
    """On this machine a product of up to three rows differs from that of more in its last bits."""
    engine = serving(testbed, shared_phases)

    def drawn(prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        """Tokens and log-probs."""
        answers = generated(testbed, engine, prompts, **Sampling(12, 1.0, seed=3).params())
        return [(a["output_ids"], [entry[0] for entry in a["meta_info"]["output_token_logprobs"]]) for a in answers]

    together = drawn(PROMPTS)
    assert [drawn([prompt])[0] for prompt in PROMPTS] == together
    assert drawn(PROMPTS[::-1]) == together[::-1]


def test_request_that_nobody_waits_for_keeps_no_memory_from_the_trainer(
        testbed: EngineTestbed, shared_phases: PhasesOfTest) -> None:
    """As one of an actor that was replaced. The engine works on one sequence at a time, so it is there for a while."""
    engine = serving(testbed, shared_phases)
    with ThreadPoolExecutor(1) as thread:
        answers = thread.submit(generated, testbed, engine, [PROMPT] * 64, **Sampling(50).params(), ignore_eos=True)
        wait_until(lambda: answers.done() or testbed.in_flight(SHARED), what="requests in flight", poll_s=0.005)
        assert shared_phases.begin(Side.TRAINER)
        released(testbed, SHARED)
    reasons = [finish_reason(a) for a in answers.result()]
    assert len(reasons) == 64 and "abort" in reasons


def test_engine_that_is_drained_in_the_trainers_phase_leaves_no_record(
        testbed: EngineTestbed, shared_phases: PhasesOfTest) -> None:
    serving(testbed, shared_phases)
    assert shared_phases.begin(Side.TRAINER)
    released(testbed, SHARED)
    testbed.runners[SHARED].drain()
    testbed.await_end(SHARED)
    assert testbed.record(SHARED) is None


@full(proved_in="tests/integration/engine/test_released_engine.py", why="a real server that dies")
def test_engine_whose_server_dies_in_the_trainers_phase_holds_nothing(
        testbed: EngineTestbed, phases: PhasesOfTest) -> None:
    assert phases.begin(Side.ENGINES)
    testbed.start_colocated_engine("rollout-killed")
    testbed.wait_ready("rollout-killed")
    assert phases.begin(Side.TRAINER)
    released(testbed, "rollout-killed")
    pids = testbed.server_pids("rollout-killed")
    os.kill(pids[1], signal.SIGKILL)
    dead = testbed.wait_state("rollout-killed", EngineState.DEAD)
    assert not dead.holds_device and phases.take() == ""
    testbed.await_end("rollout-killed")
    await_gone(pids)
    phases.give_up()


@full(proved_in="tests/integration/engine/test_released_engine.py tests/integration/etcd/test_device_claims.py",
      why="an engine that never launched a real server")
def test_trainer_waits_until_the_record_of_a_killed_engine_is_deleted(
        testbed: EngineTestbed, phases: PhasesOfTest) -> None:
    testbed.start_colocated_engine("rollout-leaver")
    released(testbed, "rollout-leaver")
    testbed.runners["rollout-leaver"].stop()
    testbed.await_end("rollout-leaver")
    assert testbed.record("rollout-leaver") is None, "it never launched a server"
    record = Engine(id="rollout-gone", pool=ROLLOUT_POOL, state=EngineState.DEAD, epoch=testbed.ctx.epoch,
                    holds_device=True)
    key = testbed.keys.engine(record.id)
    testbed.etcd.put(key, record.encode())
    assert "rollout-gone to release memory" in phases.take()
    testbed.etcd.put(key, b"?")
    assert "rollout-gone to release memory" in phases.take(), "what it says is not known"
    testbed.etcd.delete(key)
    wait_until(lambda: phases.take() == "", what="the trainer's memory")
    phases.give_up()
