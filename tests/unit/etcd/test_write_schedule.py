"""When a member writes its record itself: nothing is lost, and etcd is written to as seldom as can be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.etcd.write_schedule import WriteSchedule

INTERVAL_S, TICK_S = 3.0, 1.0
LOOKS = st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=60)


@given(LOOKS, st.floats(0.0, 1.0))
def test_news_are_written_soon_by_the_member_while_nobody_collects_and_by_nobody_else(
        looks: list[tuple[bool, bool, bool]], random: float) -> None:
    """Each look: whether there is news, whether the agent collects, and whether etcd takes a write."""
    schedule, now, written_at, lost_at = WriteSchedule(INTERVAL_S, 0.0), 0.0, 0.0, None
    news_at: float | None = None
    was_collected = False
    for changed, collected, takes in looks:
        now += TICK_S
        due = schedule.due(now, changed=changed, collected=collected, info_changed=False, random=random)
        if collected:
            assert not due
            news_at = lost_at = None
        else:
            lost_at = now if was_collected else lost_at
            news_at = news_at if news_at is not None else now if changed else None
            held = lost_at is not None and now < lost_at + random * INTERVAL_S
            assert due == (not held and (news_at is not None or now - written_at >= INTERVAL_S))
        was_collected = collected
        if due and takes:
            schedule.written(now)
            written_at, news_at = now, None


def test_what_only_the_record_has_is_written_at_once() -> None:
    schedule = WriteSchedule(INTERVAL_S, 0.0)
    assert schedule.due(0.1, changed=True, collected=True, info_changed=True, random=0.5)
    assert schedule.due(0.2, changed=False, collected=False, info_changed=True, random=0.5), "also within the wait"
    assert not schedule.due(0.3, changed=True, collected=False, info_changed=False, random=0.5)
    assert schedule.due(1.7, changed=False, collected=False, info_changed=False, random=0.5), "the news of before"


def test_members_that_are_collected_no_more_do_not_write_at_once() -> None:
    schedules = [WriteSchedule(INTERVAL_S, 0.0) for _ in range(10)]
    for n, schedule in enumerate(schedules):
        assert not schedule.due(100.0, changed=True, collected=True, info_changed=False, random=n / 10)
    for now, wanted in ((101.0, 1), (102.0, 4), (104.0, 10)):
        due = [schedule.due(now, changed=False, collected=False, info_changed=False, random=n / 10)
               for n, schedule in enumerate(schedules)]
        assert sum(due) == wanted
