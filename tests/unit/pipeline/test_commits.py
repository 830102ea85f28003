"""Commits that the checkpoint service does not take at once."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from elastic_rl.pipeline.records.step_timer import StepTimer
from elastic_rl.pipeline.training.commits import until_committed
from elastic_rl.pipeline.training.device_phases import OwnDevices, SharedDevices
from elastic_rl.pipeline.waits import Waits


@pytest.fixture
def shown() -> list[str]:
    return []


@pytest.fixture
def waits(shown: list[str], monkeypatch: pytest.MonkeyPatch) -> Waits:
    made = Waits(lambda stage, kind, what: shown.append(kind), threading.Event())
    monkeypatch.setattr(made, "pause", lambda seconds: None)
    return made


def test_save_is_repeated_until_it_is_committed_and_the_wait_is_shown(waits: Waits, shown: list[str]) -> None:
    results = iter([{"committed": False, "n": 1}, {"committed": None, "n": 2}, {"committed": True, "n": 3}])
    assert until_committed(waits, lambda: next(results)) == {"committed": True, "n": 3}
    assert "dcs" in shown


@pytest.mark.parametrize("colocated", [True, False])
def test_trainer_gives_its_devices_up_only_once_the_weights_are_committed_again(waits: Waits, colocated: bool) -> None:
    """Without them it repeats no commit that failed, and engines would wait for a version that nobody can fetch."""
    done: list[Any] = []
    numbers = iter([(8, False), (9, False), (10, True)])

    def save() -> dict[str, Any]:
        number, committed = next(numbers)
        done.append(number)
        return {"committed": committed, "policy_version": number}

    class Devices(SharedDevices):
        def __init__(self) -> None:
            self._waits = waits

        def to_trainer(self, timer: StepTimer) -> None:
            done.append("trainer")

        def to_engines(self, version: int, timer: StepTimer) -> None:
            done.append(("engines", version))

    (Devices() if colocated else OwnDevices()).publish_again(save)
    assert done == (["trainer", 8, 9, 10, ("engines", 10)] if colocated else [8])
