"""The holder of shared GPUs: what becomes of one whose process ends."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from elastic_rl.driver.shared_gpus import SharedGpus


@dataclass
class Held:
    """A holder as Ray would run it."""

    answer: tuple[str, ...] = ()
    reason: str = ""
    removed: bool = False
    room: str = "GPU 2"

    def ended(self) -> str:
        return self.reason

    def gpus(self) -> tuple[str, ...]:
        return self.answer

    def remove(self) -> None:
        self.removed = True

    def close(self) -> None:
        self.reason = "it returned"


@dataclass
class Machine:
    """Makes holders, at times of the test's own."""

    now: float = 0.0
    holders: list[Held] = field(default_factory=list)
    refuses: bool = False

    def __post_init__(self) -> None:
        self.shared = SharedGpus(2, self._hold, clock=lambda: self.now)  # type: ignore[arg-type]

    def _hold(self, _count: int) -> Held:
        if self.refuses:
            raise RuntimeError("Ray is away")
        self.holders.append(Held())
        return self.holders[-1]

    def holds(self, *gpus: str) -> None:
        """The first holder gets its GPUs at once."""
        self.passes(1)
        self.holders[0].answer = gpus
        self.passes(1)

    def passes(self, seconds: int = 120) -> None:
        for _ in range(seconds):
            self.now += 1
            self.shared.reconcile()


def test_holder_that_ends_before_it_answers_is_replaced() -> None:
    machine = Machine()
    machine.passes()
    assert len(machine.holders) == 1 and "no room on the host of the run for GPU 2" in machine.shared.waiting
    machine.holders[0].reason = "killed"
    machine.passes()
    assert machine.holders[0].removed and len(machine.holders) == 2
    machine.holders[1].answer = ("4", "5")
    machine.passes(1)
    assert machine.shared.gpus() == ("4", "5") and not machine.shared.waiting


def test_holder_that_ends_later_is_replaced_and_the_gpus_stay() -> None:
    machine = Machine()
    machine.holds("4", "5")
    machine.holders[0].reason = "killed"
    machine.passes()
    assert len(machine.holders) == 2 and machine.shared.gpus() == ("4", "5")
    machine.holders[1].answer = ("5", "4")
    machine.passes()
    assert machine.shared.gpus() == ("4", "5") and not machine.shared.moved


def test_other_gpus_than_those_in_use_are_reported() -> None:
    machine = Machine()
    machine.holds("4", "5")
    machine.holders[0].reason = "killed"
    machine.passes()
    machine.holders[1].answer = ("4", "6")
    machine.passes()
    assert "4,6 in place of 4,5" in machine.shared.moved


def test_holders_that_end_at_once_are_replaced_ever_more_slowly() -> None:
    machine = Machine()
    for _ in range(600):
        machine.passes(1)
        for held in machine.holders:
            held.reason = "killed"
    assert 6 <= len(machine.holders) <= 40


def test_holder_that_cannot_be_made_is_tried_again() -> None:
    machine = Machine(refuses=True)
    with pytest.raises(RuntimeError, match="Ray is away"):
        machine.passes(1)
    machine.refuses = False
    machine.passes()
    assert len(machine.holders) == 1
