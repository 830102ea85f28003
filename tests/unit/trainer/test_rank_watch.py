"""Which ranks of a host are ended by force."""

from __future__ import annotations

import multiprocessing
import signal
import time
from multiprocessing.synchronize import Event

from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.host.processes import StoppedProcesses
from elastic_rl.trainer.group.rank_watch import RankWatch

LIMIT_S = 3.0


def _rank(ready: Event, reacts: bool) -> None:
    if not reacts:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.set()
    time.sleep(600)


def test_end_of_a_rank_ends_all_others_even_unresponsive_ones() -> None:
    context = multiprocessing.get_context("spawn")
    ready = [context.Event() for _ in range(3)]
    ranks = [context.Process(target=_rank, args=(each, reacts), daemon=True)
             for each, reacts in zip(ready, (True, True, False), strict=True)]
    for rank in ranks:
        rank.start()
    assert all(each.wait(300) for each in ready)
    watch, pids = RankWatch(stopped_limit_s=LIMIT_S, grace_s=5.0), {n: rank.pid or 0 for n, rank in enumerate(ranks)}
    assert watch.look(pids) == []
    assert all(rank.is_alive() for rank in ranks)
    ranks[0].kill()
    ranks[0].join(300)
    assert watch.look(pids) == [0]
    for rank in ranks:
        rank.join(300)
    assert [rank.exitcode for rank in ranks[1:]] == [-signal.SIGTERM, -signal.SIGKILL]


def test_rank_that_stays_stopped_is_lost_after_the_limit() -> None:
    ranks = StoppedProcesses(LIMIT_S)
    assert ranks.lost(0.0, [10]) == [] and ranks.lost(2.9, [10, 11]) == []
    assert ranks.lost(3.0, [10, 11]) == [10]
    assert ranks.lost(6.0, [10, 11]) == [10, 11]


def test_rank_that_continues_in_time_is_left_alone() -> None:
    ranks = StoppedProcesses(LIMIT_S)
    assert ranks.lost(0.0, [10]) == [] and ranks.lost(2.0, []) == []
    assert ranks.lost(4.0, [10]) == [], "the time it was stopped before does not count"


@given(st.lists(st.tuples(st.floats(0.01, 2.0), st.sets(st.integers(1, 4))), max_size=30))
def test_rank_is_lost_once_every_look_found_it_stopped(looks: list[tuple[float, set[int]]]) -> None:
    ranks, now, history = StoppedProcesses(LIMIT_S), 0.0, list[tuple[float, set[int]]]()
    for pause, stopped in looks:
        now += pause
        history.append((now, stopped))
        for pid in range(1, 5):
            run = []
            for at, found in reversed(history):
                if pid not in found:
                    break
                run.append(at)
            expected = bool(run) and now - run[-1] >= LIMIT_S
            if pid == 1:
                lost = ranks.lost(now, stopped)
            assert (pid in lost) == expected
