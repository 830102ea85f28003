"""Operations of clients beside the faults of a long run: each is judged by the faults near it, in a time that does not
grow with all of them."""

from __future__ import annotations

import random

import pytest

from chaos_tests.event_log import Kind
from chaos_tests.validate.ending import Answered
from chaos_tests.validate.judge import show
from chaos_tests.validate.times import Times


def test_overlapping_times_are_one() -> None:
    chance = random.Random(5)
    for _ in range(50):
        times = [(begin, begin + chance.choice((0, 1, 5, 40))) for begin in chance.choices(range(100), k=8)]
        away = Times(times)
        inside = [any(begin <= at < end for begin, end in times) for at in range(200)]
        for at in range(0, 150, 7):
            assert away.has(at, after_s=3.0) == any(begin <= at <= end + 3.0 for begin, end in times)
            assert away.beside(at, at + 50) == 50 - sum(inside[at:at + 50])
            for until in (at, at + 1, at + 30):
                assert away.meets(at, until) == any(begin < until and end > at for begin, end in times)
    assert Times([]).beside(2.0, 5.0) == 3.0 and not Times([]).has(2.0, after_s=9.0)
    assert Times([(3.0, float("inf"))]).beside(0.0, 9.0) == 3.0


@pytest.mark.timeout(60)
def test_long_run_is_judged_in_a_time_that_grows_with_its_length() -> None:
    """For each operation to be compared with each fault would take ten minutes."""
    count = 60_000
    faults = [{"kind": Kind.FAULT, "at": float(n), "name": "f", "injected_at": float(n), "healed_at": n + 0.5}
              for n in range(count)]
    operations = [{"kind": Kind.OPERATION, "at": 1e6 + n, "client": "c", "call": "create", "model": "created",
                   "key": "k", "began_s": 1.0, "ended_s": 2.0} for n in range(count)]
    checker = Answered()
    show([*faults, *operations], [checker])
    assert checker.evidence() == f"{count} of {count} operations answered while no fault was under way"
