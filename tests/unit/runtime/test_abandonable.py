"""Calls that may never return: who gets a thread, and what becomes of calls that nobody waits for any more."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds
from support.waiting import wait_until

from elastic_rl.runtime.abandonable import AbandonableCall, AbandonableCalls, CallRefused, CallTookTooLong


class Held:
    """A call that ends when it is told to."""

    def __init__(self) -> None:
        self.began, self.ends = threading.Event(), threading.Event()

    def __call__(self) -> int:
        self.began.set()
        assert self.ends.wait(60)
        return 7


def _until(what: Callable[[], bool]) -> None:
    wait_until(what, what="the end of a call")


def test_call_gives_what_it_returns_or_raises() -> None:
    def fails() -> int:
        raise SystemExit(3)

    calls = AbandonableCalls("test", 1)
    assert calls.begin(lambda: 7).result(every_s=60) == 7
    with pytest.raises(SystemExit):
        calls.begin(fails).result(every_s=60)
    assert calls.held_s is None


def test_call_beyond_its_limit_is_abandoned_with_its_late_result_returned() -> None:
    calls, held, late = AbandonableCalls("test", 1), Held(), list[int]()
    with pytest.raises(CallTookTooLong, match=r"0\.01 s"):
        calls.begin(held).result(every_s=60, limit_s=0.01, late=late.append)
    with pytest.raises(CallRefused, match="all 1 threads run calls that were abandoned"):
        calls.begin(lambda: 1)
    assert calls.held_s is not None and not late
    held.ends.set()
    _until(lambda: late == [7] and calls.held_s is None)
    assert calls.begin(lambda: 1).result(every_s=60) == 1


def test_caller_that_is_to_end_abandons_its_call() -> None:
    def look() -> None:
        raise InterruptedError

    calls, held, late = AbandonableCalls("test", 1), Held(), list[int]()
    with pytest.raises(InterruptedError):
        calls.begin(held).result(look, every_s=0.01, late=late.append)
    held.ends.set()
    _until(lambda: late == [7])


def test_call_that_has_finished_may_go_on_and_holds_its_thread() -> None:
    calls, held = AbandonableCalls("test", 1), Held()

    def goes_on(call: AbandonableCall[int]) -> int:
        call.finish(1)
        return held()

    assert calls.begin_with(goes_on).result(every_s=60) == 1
    with pytest.raises(CallRefused):
        calls.begin(lambda: 1)
    held.ends.set()
    _until(lambda: calls.held_s is None)


def test_call_with_news_has_its_caller_look_at_once() -> None:
    looked = threading.Event()

    def has_news(call: AbandonableCall[bool]) -> bool:
        call.notify()
        return looked.wait(60)

    assert AbandonableCalls("test", 1).begin_with(has_news).result(looked.set, every_s=60)


def test_queued_call_that_is_abandoned_is_never_made() -> None:
    calls, held, made = AbandonableCalls("test", 1), Held(), list[int]()
    first = calls.begin(held)
    waiting = [calls.begin(lambda n=n: made.append(n)) for n in range(4)]  # type: ignore[misc]
    assert first.has_begun and not any(call.has_begun for call in waiting)
    waiting[1].abandon()
    with pytest.raises(CallRefused):
        waiting[1].result(every_s=60)
    held.ends.set()
    waiting[3].result(every_s=60)
    assert made == [0, 2, 3]


def test_calls_in_line_are_refused_when_abandoned_ones_hold_all_threads() -> None:
    calls, held = AbandonableCalls("test", 2), [Held(), Held()]
    running = [calls.begin(one) for one in held]
    waits = calls.begin(lambda: 1)
    running[0].abandon()
    assert not waits.has_begun, "the other thread may be free soon"
    running[1].abandon()
    with pytest.raises(CallRefused):
        waits.result(every_s=60)
    for one in held:
        one.ends.set()


def test_close_waits_for_calls_under_way_and_makes_no_other() -> None:
    calls, held = AbandonableCalls("test", 1), Held()
    running, waits = calls.begin(held), calls.begin(lambda: 1)
    threading.Timer(0.05, held.ends.set).start()
    calls.close(60)
    assert running.future.result(0) == 7
    for refused in (lambda: waits.future.result(0), lambda: calls.begin(lambda: 1)):
        with pytest.raises(CallRefused, match="no further call"):
            refused()


def test_call_that_hangs_does_not_hold_up_the_end_of_its_process() -> None:
    program = ("import threading\nfrom elastic_rl.runtime.abandonable import AbandonableCalls\n"
               "AbandonableCalls('test', 1).begin(threading.Event().wait)\n")
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_limit_in_an_event_loop_begins_with_the_calls_thread() -> None:
    async def run() -> None:
        calls, held = AbandonableCalls("test", 1), Held()
        first, second = calls.begin(held), calls.begin(lambda: 5)
        waiting = asyncio.ensure_future(second.result_within(60.0))
        with pytest.raises(CallTookTooLong):
            await first.result_within(0.01)
        with pytest.raises(CallRefused):
            await waiting
        held.ends.set()
        await asyncio.wrap_future(first.future)
        assert await calls.begin(lambda: 5).result_within(60.0) == 5

    asyncio.run(run())


def test_waiter_that_is_cancelled_in_line_gives_up_its_place() -> None:
    async def run() -> None:
        calls, held, made = AbandonableCalls("test", 1), Held(), list[int]()
        first = calls.begin(held)
        second = asyncio.ensure_future(calls.begin(lambda: made.append(2)).result_within(60.0))
        third = asyncio.ensure_future(calls.begin(lambda: made.append(3)).result_within(60.0))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait({second})
        held.ends.set()
        assert await first.result_within(60.0) == 7
        await third
        assert made == [3] and calls.held_s is None

    asyncio.run(run())


@settings(max_examples=seeds(40), deadline=None)
@given(st.integers(1, 3), st.lists(st.tuples(st.sampled_from(["begin", "abandon", "end"]), st.integers(0, 5)),
                                   max_size=25))
def test_calls_are_made_or_refused_within_the_number_of_threads(threads: int, steps: list[tuple[str, int]]) -> None:
    calls = AbandonableCalls("test", threads)
    begun: list[tuple[Held, AbandonableCall[int]]] = []
    running, line, abandoned = list[int](), list[int](), set[int]()

    def next_in_line() -> None:
        while line and len(running) < threads:
            running.append(line.pop(0))

    def fill() -> None:
        if len(abandoned & set(running)) == threads:
            line.clear()
        next_in_line()
        for number in running:
            assert begun[number][0].began.wait(60)
        assert sum(held.began.is_set() and not call.future.done() for held, call in begun) == len(running)
        assert (calls.held_s is not None) == (len(abandoned & set(running)) == threads)

    for what, number in steps:
        if what == "begin":
            held = Held()
            if len(abandoned & set(running)) == threads:
                with pytest.raises(CallRefused):
                    calls.begin(held)
                continue
            begun.append((held, calls.begin(held)))
            line.append(len(begun) - 1)
        elif what == "abandon" and (running + line):
            chosen = (running + line)[number % len(running + line)]
            begun[chosen][1].abandon()
            abandoned.add(chosen)
            if chosen in line:
                line.remove(chosen)
        elif what == "end" and running:
            chosen = running.pop(number % len(running))
            begun[chosen][0].ends.set()
            assert begun[chosen][1].future.result(60) == 7
        fill()
    for held, _ in begun:
        held.ends.set()
    for held, call in begun:
        assert isinstance(call.future.exception(60), CallRefused) != held.began.is_set()


def test_calls_in_line_for_a_thread_that_cannot_be_started_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, in_line = AbandonableCalls("test", 1), list[AbandonableCall[int]]()

    def start(thread: threading.Thread) -> None:
        in_line.extend(calls.begin(lambda: 2) for _ in range(2))
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(CallRefused, match="no thread can be started"):
            calls.begin(lambda: 1)
    for call in in_line:
        with pytest.raises(CallRefused, match="no thread can be started"):
            call.future.result(timeout=0)
    assert calls.begin(lambda: 3).result(every_s=60) == 3
