"""What grows with the steps of a run is found, and what does not is not: over noise, sawtooths and plateaus."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos_tests.event_log import Event, Kind
from chaos_tests.growth import check

STEPS, SAMPLES = 20_000, 480
LIMIT = check.LIMITS["anonymous_bytes"]
ALLOWED = LIMIT * STEPS
"""What the memory of a process may grow over the run."""


def run_of(memory: Callable[[float], float], seed: int, noise: float) -> list[Event]:
    """The log of a run in which a process takes so much memory at a step, with noise on top. The time of a step
    differs over the run, so that the samples are not at equal steps."""
    rng = random.Random(seed)
    events = list[Event]()
    for i in range(SAMPLES):
        step = STEPS * (i / (SAMPLES - 1)) ** 1.3
        events += [{"at": float(i), "kind": Kind.STORE, "step": step, "etcd_keys": 100 + rng.randrange(5)},
                   {"at": i + 0.4, "kind": Kind.PROCESS, "role": "rank", "pid": 7,
                    "anonymous_bytes": 3e8 + memory(step) + rng.uniform(-noise, noise)}]
    return events


def samples(process: dict[str, Any], at: Callable[[int], dict[str, Any]]) -> list[Event]:
    """The log of a run in which a process has such samples at a step."""
    return [event for step in range(0, STEPS, 40) for event in (
        {"at": float(step), "kind": Kind.STORE, "step": step},
        {"at": float(step), "kind": Kind.PROCESS, **process, **at(step)})]


@given(st.floats(4.0, 50.0), st.floats(0.0, 0.05), st.integers(0, 2**32))
def test_leak_in_noise_is_found(leak: float, noise: float, seed: int) -> None:
    found = check.check(run_of(lambda step: leak * LIMIT * step, seed, noise * leak * ALLOWED))
    assert [(v.trend.kind, v.trend.subject) for v in found] == [("anonymous_bytes", "rank (7)")]
    assert found[0].trend.slope == pytest.approx(leak * LIMIT, rel=0.3)
    assert "anonymous_bytes of rank (7)" in str(found[0])


@given(st.floats(4.0, 50.0), st.floats(0.0, 1.0), st.integers(20, 80), st.integers(0, 2**32))
def test_leak_below_a_sawtooth_is_found(leak: float, height: float, teeth: int, seed: int) -> None:
    found = check.check(run_of(lambda step: leak * LIMIT * step + height * ALLOWED * (step * teeth / STEPS % 1.0), seed,
                               0.02 * ALLOWED))
    assert len(found) == 1


@given(st.floats(0.0, 100.0), st.integers(0, 2**32))
def test_noise_is_no_growth(noise: float, seed: int) -> None:
    assert check.check(run_of(lambda step: 0.0, seed, noise * ALLOWED)) == []


@given(st.floats(0.0, 100.0), st.integers(4, 80), st.floats(0.0, 1.0), st.integers(0, 2**32))
def test_sawtooth_is_no_growth(height: float, teeth: int, phase: float, seed: int) -> None:
    assert check.check(run_of(lambda step: height * ALLOWED * ((step * teeth / STEPS + phase) % 1.0), seed,
                              0.01 * height * ALLOWED)) == []


@given(st.floats(0.0, 100.0), st.floats(0.01, 0.1), st.integers(0, 2**32))
def test_plateau_is_no_growth(height: float, constant: float, seed: int) -> None:
    assert check.check(run_of(lambda step: height * ALLOWED * (1 - math.exp(-step / STEPS / constant)), seed,
                              0.001 * height * ALLOWED)) == []


@given(st.floats(0.0, 100.0), st.floats(0.0, 1.0), st.integers(0, 2**32))
def test_buffer_that_is_enlarged_once_is_no_growth(height: float, when: float, seed: int) -> None:
    assert check.check(run_of(lambda step: height * ALLOWED * (step > when * STEPS), seed, 0.001 * ALLOWED)) == []


@given(st.floats(0.0, 0.5), st.integers(0, 2**32))
def test_growth_within_the_limit_is_none_and_resolved(leak: float, seed: int) -> None:
    events = run_of(lambda step: leak * LIMIT * step, seed, 0.05 * ALLOWED)
    memory, = (trend for trend in check.trends(events) if trend.kind == "anonymous_bytes")
    assert not memory.grows and memory.resolved


def test_each_thread_that_stays_is_found() -> None:
    """One in 500 steps: a staircase."""
    events = samples({"role": "actor", "pid": 1}, lambda step: {"threads": 40 + step // 500})
    assert [v.trend.kind for v in check.check(events)] == ["threads"]


def test_step_that_takes_longer_and_longer_is_found() -> None:
    rng = random.Random(0)
    events = [{"at": float(step), "kind": Kind.STEP, "step": step,
               "seconds": {"total": 0.5 + 1e-5 * step + rng.expovariate(10.0)}} for step in range(1, STEPS)]
    assert [v.trend.kind for v in check.check(events)] == ["step_s"]


def test_process_that_is_started_again_begins_again() -> None:
    """Its memory is that of its predecessor, which is no trend; each has a series of its own."""
    events = samples({"role": "rank"}, lambda step: {"pid": 1 + (step > STEPS // 2),
                                                     "anonymous_bytes": 3e8 + 1e8 * (step > STEPS // 2)})
    assert check.check(events) == []
    assert [trend.subject for trend in check.trends(events)] == ["rank (1)", "rank (2)"]


@pytest.mark.parametrize("samples", (0, 1, 2, 5))
def test_few_samples_say_nothing(samples: int) -> None:
    events = [{"at": float(i), "kind": Kind.STORE, "step": 1000 * i, "etcd_keys": 50 * i} for i in range(samples)]
    assert check.check(events) == [] and check.trends(events) == []
