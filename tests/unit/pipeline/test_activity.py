"""What a run does now: what of it is written, and how often."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.pipeline.records.activity import MIN_WAIT_S, Activity, ActivityThrottle

STEP = st.tuples(st.floats(0, 3), st.sampled_from(["generate", "train"]), st.sampled_from(["", "engines", "trainer"]),
                 st.sampled_from(["x", "y"]))


def do(throttle: ActivityThrottle, now: float, stage: str, kind: str = "", what: str = "x") -> Activity | None:
    """Says it; returns what was written, None for nothing."""
    throttle.update(now, stage, kind, what)
    if not throttle.due(now):
        return None
    shown = throttle.visible(now)
    throttle.written(shown)
    return shown


def test_short_wait_is_not_written_and_a_long_one_has_its_beginning() -> None:
    throttle = ActivityThrottle()
    assert do(throttle, 100.0, "generate") == Activity("generate")
    assert do(throttle, 100.1, "generate", "engines") is None
    assert do(throttle, 100.1 + MIN_WAIT_S, "generate", "engines") == Activity("generate", "engines", "x", 100.1)
    assert do(throttle, 200.0, "generate", "engines", "y") == Activity("generate", "engines", "y", 100.1)


def test_end_of_a_written_wait_is_written_at_once() -> None:
    throttle = ActivityThrottle()
    do(throttle, 10.0, "generate", "engines")
    do(throttle, 20.0, "generate", "engines")
    assert do(throttle, 21.0, "train", "trainer") == Activity("train")
    assert do(throttle, 22.5, "train", "trainer") == Activity("train", "trainer", "x", 21.0)
    assert do(throttle, 22.6, "train") == Activity("train")


def test_stages_of_a_slow_run_are_all_written() -> None:
    throttle = ActivityThrottle()
    for n in range(100):
        assert do(throttle, n * 2.0, f"stage {n}") == Activity(f"stage {n}")


def test_fast_run_writes_seldom() -> None:
    throttle = ActivityThrottle()
    written = [do(throttle, 50 + n / 20, f"stage {n % 7}") for n in range(20 * 60)]  # a minute
    assert 30 <= sum(w is not None for w in written) <= 45


def test_end_of_a_wait_is_written_also_after_many_changes() -> None:
    throttle = ActivityThrottle()
    for n in range(50):
        do(throttle, 50.0 + n / 1000, f"stage {n}")
    assert do(throttle, 50.1, "generate", "engines") is None
    assert do(throttle, 51.2, "generate", "engines") is not None
    assert do(throttle, 51.3, "train") == Activity("train")


@given(st.lists(STEP, max_size=200))
def test_status_never_names_a_wait_that_is_over(steps: list[tuple[float, str, str, str]]) -> None:
    throttle, now, in_etcd, began = ActivityThrottle(), 0.0, Activity(), 0.0
    writes, before = 0, ""
    for pause, stage, kind, what in steps:
        now += pause
        began = began if kind == before else now
        before = kind
        written = do(throttle, now, stage, kind, what)
        in_etcd = written or in_etcd
        writes += written is not None
        assert in_etcd.waiting_kind in ("", kind)
        if kind and now - began > MIN_WAIT_S:
            assert in_etcd.waiting_kind == kind
            assert in_etcd.waiting_since == began
        assert bool(in_etcd.waiting_kind) == bool(in_etcd.waiting_since) or began == 0.0
    assert writes <= 12 + 3 * now
