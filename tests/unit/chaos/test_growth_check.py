"""What grows with the steps of a run is found, and what does not is not: over noise, sawtooths and plateaus."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos_tests.event_log import Event, Kind
from chaos_tests.validate import trends
from chaos_tests.validate.growth import FEWEST_STEPS
from chaos_tests.validate.judge import judge
from chaos_tests.validate.verdict import GROWTH, State, Verdict

STEPS, SAMPLES = 20_000, 480
LIMIT = trends.LIMITS["anonymous_bytes"]
ALLOWED = LIMIT * STEPS
"""What the memory of a process may grow over the run."""


def trends_of(events: Iterable[Event]) -> list[trends.Trend]:
    samples = trends.Samples()
    for event in events:
        samples.see(event)
    return samples.trends()


def growing(events: Iterable[Event]) -> list[trends.Trend]:
    return [trend for trend in trends_of(events) if trend.grows]


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
    found = growing(run_of(lambda step: leak * LIMIT * step, seed, noise * leak * ALLOWED))
    assert [(v.kind, v.subject) for v in found] == [("anonymous_bytes", "rank (7)")]
    assert found[0].slope == pytest.approx(leak * LIMIT, rel=0.3)
    assert "anonymous_bytes of rank (7)" in str(found[0])


@given(st.floats(4.0, 50.0), st.floats(0.0, 1.0), st.integers(20, 80), st.integers(0, 2**32))
def test_leak_below_a_sawtooth_is_found(leak: float, height: float, teeth: int, seed: int) -> None:
    found = growing(run_of(lambda step: leak * LIMIT * step + height * ALLOWED * (step * teeth / STEPS % 1.0), seed,
                               0.02 * ALLOWED))
    assert len(found) == 1


@given(st.floats(0.0, 100.0), st.integers(0, 2**32))
def test_noise_is_no_growth(noise: float, seed: int) -> None:
    assert growing(run_of(lambda step: 0.0, seed, noise * ALLOWED)) == []


@given(st.floats(0.0, 100.0), st.integers(4, 80), st.floats(0.0, 1.0), st.integers(0, 2**32))
def test_sawtooth_is_no_growth(height: float, teeth: int, phase: float, seed: int) -> None:
    assert growing(run_of(lambda step: height * ALLOWED * ((step * teeth / STEPS + phase) % 1.0), seed,
                              0.01 * height * ALLOWED)) == []


@given(st.floats(0.0, 100.0), st.floats(0.01, 0.1), st.integers(0, 2**32))
def test_plateau_is_no_growth(height: float, constant: float, seed: int) -> None:
    assert growing(run_of(lambda step: height * ALLOWED * (1 - math.exp(-step / STEPS / constant)), seed,
                              0.001 * height * ALLOWED)) == []


@given(st.floats(0.0, 100.0), st.floats(0.0, 1.0), st.integers(0, 2**32))
def test_buffer_that_is_enlarged_once_is_no_growth(height: float, when: float, seed: int) -> None:
    assert growing(run_of(lambda step: height * ALLOWED * (step > when * STEPS), seed, 0.001 * ALLOWED)) == []


@given(st.floats(0.0, 0.5), st.integers(0, 2**32))
def test_growth_within_the_limit_is_none_and_resolved(leak: float, seed: int) -> None:
    events = run_of(lambda step: leak * LIMIT * step, seed, 0.05 * ALLOWED)
    memory, = (trend for trend in trends_of(events) if trend.kind == "anonymous_bytes")
    assert not memory.grows and memory.resolved


def test_each_thread_that_stays_is_found() -> None:
    """One in 500 steps: a staircase."""
    events = samples({"role": "actor", "pid": 1}, lambda step: {"threads": 40 + step // 500})
    assert [trend.kind for trend in growing(events)] == ["threads"]


def test_step_that_takes_longer_and_longer_is_found() -> None:
    rng = random.Random(0)
    events = [{"at": float(step), "kind": Kind.STEP, "step": step,
               "seconds": {"total": 0.5 + 1e-5 * step + rng.expovariate(10.0)}} for step in range(1, STEPS)]
    assert [trend.kind for trend in growing(events)] == ["step_s"]


def test_process_that_is_started_again_begins_again() -> None:
    """Its memory is that of its predecessor, which is no trend; each has a series of its own."""
    events = samples({"role": "rank"}, lambda step: {"pid": 1 + (step > STEPS // 2),
                                                     "anonymous_bytes": 3e8 + 1e8 * (step > STEPS // 2)})
    assert growing(events) == []
    assert [trend.subject for trend in trends_of(events)] == ["rank (1)", "rank (2)"]


@given(st.integers(0, 2**32))
def test_trends_are_those_of_all_records_at_once(seed: int) -> None:
    """Steps and samples in any order of the log, of processes that come and go, without some of their fields."""
    rng, step, log = random.Random(seed), 0, list[Event]()
    for i in range(120):
        step += rng.randrange(3)
        log += [{"at": i + rng.random(), "kind": Kind.STEP, "step": step,
                 "seconds": rng.choice([{}, {"total": i / 7}])},
                {"at": float(i), "kind": Kind.STORE, "step": step, "etcd_keys": 10 + i % 5}]
        log += [{"at": i + 0.5, "kind": Kind.PROCESS, "role": "rank", "pid": pid, "threads": rng.randrange(9),
                 **rng.choice([{}, {"descriptors": i}])} for pid in (1, 1 + i // 60)]
    found = trends_of(log)
    rng.shuffle(log)
    assert trends_of(log) == found
    assert [*{trend.kind for trend in found} - {"etcd_keys", "step_s", "threads", "descriptors"}] == []
    assert {trend.subject for trend in found} == {"", "rank (1)", "rank (2)"}


@pytest.mark.parametrize("samples", (0, 1, 2, 5))
def test_few_samples_say_nothing(samples: int) -> None:
    events = [{"at": float(i), "kind": Kind.STORE, "step": 1000 * i, "etcd_keys": 50 * i} for i in range(samples)]
    assert growing(events) == [] and trends_of(events) == []


@pytest.mark.parametrize(("steps", "leak", "state"), [
    (STEPS, 0.0, State.KEPT), (STEPS, 20.0, State.VIOLATED), (FEWEST_STEPS // 2, 20.0, State.UNSEEN)])
def test_growth_is_judged_over_a_long_run_without_faults(steps: int, leak: float, state: State) -> None:
    run = {"kind": Kind.RUN, "at": 0.0, "schedule": {"strikes": []}}
    done = {"kind": Kind.STEP, "at": 500.0, "step": steps}
    log = [run, *run_of(lambda step: leak * LIMIT * step, 1, 0.0), done]
    assert {verdict.rule: verdict.state for verdict in judge(log)}[GROWTH] is state


def test_growth_is_unseen_where_noise_hides_what_was_sampled() -> None:
    log = [{"kind": Kind.RUN, "at": 0.0, "schedule": {"strikes": []}}, *run_of(lambda step: 0.0, 1, 100 * ALLOWED),
           {"kind": Kind.STEP, "at": 500.0, "step": STEPS}]
    assert verdict_of(log).state is State.UNSEEN


def fault(at: float, step: int, healed_s: float) -> Event:
    return {"kind": Kind.FAULT, "at": at, "name": "raylet_killed", "step": step, "witness": "seen", "problem": "",
            "injected_at": at - healed_s, "healed_at": at, "detected_at": at}


def verdict_of(log: list[Event]) -> Verdict:
    return next(verdict for verdict in judge(log) if verdict.rule == GROWTH)


@pytest.mark.parametrize(("struck_at", "state"), [(300, State.VIOLATED), (STEPS // 2, State.VIOLATED),
                                                  (STEPS - 300, State.VIOLATED), (0, State.UNSEEN)])
def test_growth_is_judged_between_faults_where_there_are_steps_enough(struck_at: int, state: State) -> None:
    log: list[Event] = [{"kind": Kind.RUN, "at": 0.0, "schedule": {"strikes": []}}]
    for event in run_of(lambda step: 20.0 * LIMIT * step, 1, 0.0):
        log.append(event)
        if event["kind"] == Kind.STORE:
            log.append({"kind": Kind.STEP, "at": event["at"], "step": int(event["step"])})
            if event["step"] >= struck_at and struck_at and not any(e["kind"] == Kind.FAULT for e in log):
                log.append(fault(event["at"], struck_at, 5.0))
            elif not struck_at and len(log) % 100 == 0:
                log.append(fault(event["at"], int(event["step"]), 5.0))
    assert verdict_of(log).state is state


@pytest.mark.parametrize(("late_s", "state"), [(14.0, State.KEPT), (16.0, State.VIOLATED)])
def test_recovery_that_takes_much_longer_after_many_steps_is_growth(late_s: float, state: State) -> None:
    log = [{"kind": Kind.RUN, "at": 0.0, "schedule": {"strikes": []}}, fault(0.5, 1, 5.0),
           *run_of(lambda step: 0.0, 1, 0.0), {"kind": Kind.STEP, "at": 500.0, "step": STEPS},
           fault(600.0, STEPS, late_s)]
    found = verdict_of(log)
    assert found.state is state and f"back from raylet_killed after {late_s:.1f} s, and after 5.0 s" in found.evidence
