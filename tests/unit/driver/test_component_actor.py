"""Which drivers a component obeys. No Ray: threads call the actor's object."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.waiting import PATIENCE_S

from elastic_rl.driver.component_actor import ComponentActor
from elastic_rl.errors import EngineFailed, Fenced


class Body:
    """Works until it is stopped."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error, self._stop = error, threading.Event()

    def run(self) -> str:
        self._stop.wait()
        if self._error is not None:
            raise self._error
        return "done"

    def stop(self) -> str:
        self._stop.set()
        return "stopping"


def test_each_driver_that_waits_learns_of_the_end_and_of_the_result() -> None:
    component = ComponentActor(Body)
    assert component.wait(1, 0.0) == (False, None)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(component.wait, 1, PATIENCE_S)
        assert component.call(1, "stop") == "stopping"
        assert waiting.result(PATIENCE_S) == (True, "done")
    assert component.wait(2, PATIENCE_S) == (True, "done"), "also when no driver waited at the end"


def test_error_of_the_work_reaches_every_driver() -> None:
    component = ComponentActor(Body, EngineFailed("no memory"))
    component.call(1, "stop")
    for generation in (1, 2):
        with pytest.raises(EngineFailed, match="no memory"):
            component.wait(generation, PATIENCE_S)


def test_older_driver_is_refused_once_a_newer_one_has_called() -> None:
    component = ComponentActor(Body)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(component.wait, 1, PATIENCE_S)
        while not component._generation:
            threading.Event().wait(0.01)
        assert component.wait(2, 0.0) == (False, None)
        assert waiting.result(PATIENCE_S) == (None, None)
    assert component.wait(1, PATIENCE_S) == (None, None)
    with pytest.raises(Fenced, match="driver 1 has been replaced by driver 2"):
        component.call(1, "stop")
    assert component.wait(2, 0.0) == (False, None), "nothing has stopped it"
    component.call(2, "stop")
