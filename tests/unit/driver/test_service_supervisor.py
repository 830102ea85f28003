"""When a service of the compute plane is started again. The service is a stub, whose process the test ends."""

from __future__ import annotations

import pytest
from support.stub_service import StubService

from elastic_rl.driver import service_supervisor
from elastic_rl.driver.service_supervisor import ServiceSupervisor
from elastic_rl.errors import EngineFailed, Fenced


class Supervisor(ServiceSupervisor):
    """One whose passes the test makes, at times of its own."""

    def __init__(self, service: StubService) -> None:
        super().__init__(service, interval_s=3600.0, start_timeout_s=60.0, frozen_s=10.0,  # type: ignore[arg-type]
                         require=self._check_token)
        self.is_replaced = False
        self.answers, self.began = True, list[bool]()

    def _check(self) -> None:
        if not self.answers:
            raise EngineFailed("no answer")

    def _check_token(self) -> None:
        if self.is_replaced:
            raise Fenced("driver 1 has been replaced by driver 2")

    def _began(self, *, is_new: bool) -> None:
        self.began.append(is_new)

    def start(self) -> None:
        self._thread.run = lambda: None  # type: ignore[method-assign]
        super().start()


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [1000.0]
    monkeypatch.setattr(service_supervisor.time, "monotonic", lambda: clock[0])
    return clock


def test_service_that_runs_is_adopted_which_is_no_restart(now: list[float]) -> None:
    service = StubService(runs=True)
    supervisor = Supervisor(service)
    supervisor.start()
    assert not supervisor.is_up, "it has not answered yet"
    supervisor._pass()
    assert supervisor.is_up and supervisor.began == [False]
    assert not service.launched and not supervisor.restarts() and not supervisor.fault


def test_service_that_ended_while_no_driver_ran_is_a_restart(now: list[float]) -> None:
    supervisor = Supervisor(service := StubService(was_known=True))
    supervisor.start()
    assert service.launched == 1 and supervisor.fault == "it ended while no driver ran"
    assert supervisor.restarts() == ["it ended while no driver ran"]
    supervisor._pass()
    assert supervisor.is_up and not supervisor.fault


def test_first_start_is_neither_a_fault_nor_a_restart(now: list[float]) -> None:
    supervisor = Supervisor(service := StubService())
    supervisor.answers = False
    supervisor.start()
    supervisor._pass()
    assert service.launched == 1 and not supervisor.fault and not supervisor.restarts() and not supervisor.is_up


def test_service_that_ends_is_started_again_and_again(now: list[float]) -> None:
    supervisor = Supervisor(service := StubService())
    supervisor.start()
    supervisor._pass()
    supervisor.answers, failing_since = False, now[0]
    for _ in range(20):
        service.runs = False
        supervisor._pass()
        assert not supervisor.is_up and supervisor.fault == "it ended"
        before = service.launched
        now[0] += 61.0  # more than the longest pause
        supervisor._pass()
        assert service.launched == before + 1
        assert supervisor.failing_s == now[0] - failing_since, "it has not answered in between"


def test_service_has_recovered_once_it_has_answered_for_a_while(now: list[float]) -> None:
    supervisor = Supervisor(service := StubService())
    supervisor.start()
    supervisor._pass()
    now[0] += 21.0
    supervisor._pass()
    service.runs, began = False, now[0]
    supervisor._pass()
    for _ in range(9):  # it comes up and ends soon
        now[0] += 61.0
        supervisor._pass()
        supervisor._pass()
        assert supervisor.is_up and supervisor.failing_s == now[0] - began
        now[0] += 10.0
        service.runs = False
        supervisor._pass()
    now[0] += 61.0
    supervisor._pass()
    supervisor._pass()
    now[0] += 21.0
    assert supervisor.is_up and not supervisor.failing_s
    service.runs, before = False, service.launched
    supervisor._pass()
    now[0] += 1.0
    assert supervisor.failing_s == 1.0, "counted from the first end since"
    supervisor._pass()
    assert service.launched == before + 1, "after the first of the pauses"


def test_time_in_which_the_supervisor_was_suspended_is_no_silence(now: list[float]) -> None:
    supervisor = Supervisor(service := StubService())
    supervisor._interval_s = 1.0
    supervisor.start()
    supervisor._pass()
    supervisor.answers = False
    now[0] += 3600.0
    supervisor._pass()
    assert not service.ended
    for _ in range(11):
        now[0] += 1.0
        supervisor._pass()
    assert service.ended == 1


def test_service_is_not_started_again_once_it_was_stopped(now: list[float]) -> None:
    supervisor = Supervisor(service := StubService())
    supervisor.start()
    supervisor.stop()
    now[0] += 61.0
    supervisor._pass()
    assert not service.runs and service.launched == 1
    supervisor._state = service_supervisor._State.DOWN  # as a pass that was under way has it
    supervisor._pass()
    assert service.launched == 1


def test_start_that_is_refused_is_tried_again_and_is_no_end(now: list[float]) -> None:
    supervisor = Supervisor(service := StubService())
    service.refuses = True
    supervisor.start()
    assert "the disk is full" in supervisor.fault and not supervisor.failing_s
    service.refuses = False
    supervisor._pass()
    assert not service.launched, "the pause is not over"
    now[0] += 61.0
    supervisor._pass()
    supervisor._pass()
    assert service.launched == 1 and not supervisor.fault


@pytest.mark.parametrize(("was_up", "silent_s", "is_ended"), [
    (True, 10.0, False), (True, 11.0, True), (False, 60.0, False), (False, 61.0, True)])
def test_service_without_an_answer_is_ended_after_a_while(now: list[float], was_up: bool, silent_s: float,
                                                          is_ended: bool) -> None:
    supervisor = Supervisor(service := StubService())
    supervisor.answers = was_up
    supervisor.start()
    supervisor._pass()
    supervisor.answers = False
    for _ in range(int(silent_s)):
        now[0] += 1.0
        supervisor._pass()
    assert service.ended == is_ended
    assert bool(supervisor.restarts()) == is_ended
    assert bool(supervisor.fault) == (was_up or is_ended)


@pytest.mark.parametrize("runs", [False, True])
def test_supervisor_of_a_replaced_driver_starts_and_ends_nothing(now: list[float], runs: bool) -> None:
    supervisor = Supervisor(service := StubService())
    supervisor.start()
    supervisor._pass()
    supervisor.is_replaced, supervisor.answers, service.runs = True, False, runs
    now[0] += 3600.0
    with pytest.raises(Fenced):
        supervisor._pass()
    assert service.launched == 1 and not service.ended and service.runs == runs
    supervisor._run()  # ends by itself
