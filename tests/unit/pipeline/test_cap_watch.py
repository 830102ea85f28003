"""Which limit is said to keep the run from asking for more samples."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.etcd.records import GenerationCap
from elastic_rl.pipeline.sampling.cap_watch import GAP_S, MIN_S, CapWatch

NONE, POOL, STALENESS = GenerationCap.NONE, GenerationCap.POOL, GenerationCap.STALENESS


def said(*looks: tuple[float, GenerationCap]) -> list[GenerationCap]:
    watch = CapWatch()
    return [watch.seen(now, cap) for now, cap in looks]


def test_limit_that_lets_groups_through_now_and_then_binds() -> None:
    """As the bound of the staleness does with each step that is trained."""
    found = said(*((float(n), NONE if n % 4 == 3 else STALENESS) for n in range(60)))
    assert found[:11] == [NONE] * 10 + [STALENESS] and {*found[10:]} == {STALENESS}


def test_limit_of_the_beginning_of_a_step_is_not_said() -> None:
    short = [(float(n), POOL) for n in range(9)]
    rest = [(float(n), NONE) for n in range(9, 20)]
    assert {*said(*short, *rest, *((now + 20, cap) for now, cap in (*short, *rest)))} == {NONE}


def test_limit_ends_when_nothing_is_left_to_ask_for() -> None:
    found = said(*((float(n), POOL) for n in range(30)), *((float(n), NONE) for n in range(30, 40)))
    assert found[29:34] == [POOL] * 5 and {*found[34:]} == {NONE}


@settings(max_examples=seeds(40), deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 2 * GAP_S), st.sampled_from([NONE, POOL, STALENESS])), max_size=60))
def test_what_is_said_binds_and_changes_rarely(looks: list[tuple[float, GenerationCap]]) -> None:
    watch, now, before = CapWatch(), 0.0, NONE
    last: dict[GenerationCap, float] = {}
    since: dict[GenerationCap, float] = {}
    for pause_s, cap in looks:
        now += pause_s
        if cap:
            since[cap] = since[cap] if now - last.get(cap, float("-inf")) < GAP_S else now
            last[cap] = now
        found = watch.seen(now, cap)
        long = {known for known, at in last.items() if now - at < GAP_S and at - since[known] >= MIN_S}
        assert found in long if long else found is NONE
        if found is not before:
            assert found is NONE or last[found] - since[found] >= MIN_S
            assert before is NONE or now - last[before] >= GAP_S
            before = found
