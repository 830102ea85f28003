"""What the agent of a host keeps right, by a clock of the test's own."""

from __future__ import annotations

import pytest

from elastic_rl.errors import ConfigError, EtcdUnavailable
from elastic_rl.host.agent.upkeep import Upkeep


class Kept:
    """Does what the test says, and counts."""

    def __init__(self) -> None:
        self.now, self.calls, self.outcome = 0.0, 0, True
        self.error: Exception | None = None
        self.upkeep = Upkeep(self._keep, "it cannot be kept", every_s=10.0, clock=lambda: self.now)

    def _keep(self) -> bool:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return self.outcome


def test_what_is_kept_is_looked_at_at_once_and_then_from_time_to_time() -> None:
    kept = Kept()
    for kept.now in (0.0, 0.5, 9.5, 10.0, 10.5):
        assert kept.upkeep.run_if_due() == ""
    assert kept.calls == 2


def test_look_that_another_command_is_in_the_way_of_is_repeated_with_the_next_pass() -> None:
    kept = Kept()
    kept.outcome = False
    for kept.now in (0.0, 0.5, 1.0):
        assert kept.upkeep.run_if_due() == ""
    assert kept.calls == 3


@pytest.mark.parametrize("error", [ConfigError("no key"), OSError("no key")])
def test_reason_is_said_until_it_is_kept_again_and_logged_once(error: Exception,
                                                                caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept()
    kept.error = error
    for kept.now in (0.0, 0.5, 10.0):
        assert kept.upkeep.run_if_due() == "it cannot be kept: no key"
    assert kept.calls == 2 and len(caplog.records) == 1
    kept.error, kept.now = None, 20.0
    assert kept.upkeep.run_if_due() == ""


def test_etcd_that_does_not_answer_says_nothing_new() -> None:
    kept = Kept()
    kept.error = EtcdUnavailable("away")
    assert kept.upkeep.run_if_due() == ""
    kept.error, kept.now = ConfigError("no key"), 10.0
    assert kept.upkeep.run_if_due()
    kept.error, kept.now = EtcdUnavailable("away"), 20.0
    assert kept.upkeep.run_if_due() == "it cannot be kept: no key"
