"""The loop that waits for what is away."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from elastic_rl.errors import ConfigError, Conflict, ElasticRLError, EtcdUnavailable, Fenced
from elastic_rl.runtime.patience import patiently


class Ended(Exception):
    """The caller was told to stop."""


def failing(*errors: Exception) -> Callable[[], str]:
    """Raises these errors, one a call, and then succeeds."""
    left = iter(errors)

    def call() -> str:
        for error in left:
            raise error
        return "done"

    return call


def test_call_is_repeated_while_its_service_is_away_and_errors_are_reported() -> None:
    errors: list[Exception] = [EtcdUnavailable("a"), Conflict("b"), EtcdUnavailable("c")]
    said, paused = list[ElasticRLError](), list[float]()
    found = patiently(failing(*errors), away=(EtcdUnavailable, Conflict), pauses_s=(1.0, 2.0), pause=paused.append,
                      waiting=said.append)
    assert found == "done" and said == errors
    assert 0.7 < paused[0] < 1.3 and all(1.4 < p < 2.6 for p in paused[1:])


@pytest.mark.parametrize("error", [ConfigError("x"), Fenced("x"), ValueError("x")])
def test_error_that_is_not_waited_for_ends_the_call_without_a_pause(error: Exception) -> None:
    paused: list[float] = []
    with pytest.raises(type(error)):
        patiently(failing(EtcdUnavailable("a"), error), away=EtcdUnavailable, pauses_s=(0.0, 0.0), pause=paused.append,
                  waiting=lambda e: None)
    assert len(paused) == 1


def test_exception_of_what_is_waited_for_ends_the_call_all_the_same() -> None:
    with pytest.raises(Fenced):
        patiently(failing(Conflict("a"), Fenced("b")), away=ElasticRLError, unless=(Fenced,), pauses_s=(0.0, 0.0),
                  pause=lambda s: None, waiting=lambda e: None)


@pytest.mark.parametrize("ending", ["pause", "waiting"])
def test_wait_ends_with_what_its_pause_or_its_report_raises(ending: str) -> None:
    def end(_: object) -> None:
        raise Ended

    ways = {"pause": lambda s: None, "waiting": lambda e: None, ending: end}
    with pytest.raises(Ended):
        patiently(failing(EtcdUnavailable("a")), away=EtcdUnavailable, pauses_s=(0.0, 0.0), **ways)
