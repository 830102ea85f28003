"""Takes the place of the driver's Ray actors, for tests of what the driver's parts do in each pass."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from types import ModuleType
from typing import Any

import pytest


class StandInActor:
    """Stands in for a ``PlacedActor``: the test says when it is placed, ends, and has used up its time to end."""

    made: list[StandInActor] = []
    has_room = True

    def __init__(self, name: str, cpus: float, host: str, args: Sequence[Any]) -> None:
        self.name, self.bundle, self.host, self.args = name, {"CPU": cpus}, host, args
        self.kind = ""
        self.created_at = time.monotonic()
        self.result: tuple[Any, str] = (None, "its process was killed")
        self.placed_at, self.node = float("inf"), "here"  # it is never late
        self.stopping = self.is_over = self.is_removed = self.grace_is_over = False
        self.grace_s: float | None = None
        """The time to end by itself that it was given last."""
        self.asked: list[str] = []
        self.ended_by = ""
        """The method that was to end it, or ``kill``."""
        self.told_before = False
        """Whether an earlier driver has told it to stop."""
        self.made.append(self)

    def is_placed(self) -> bool:
        return self.has_room

    def lacks_room(self) -> bool:
        return not self.has_room

    def ask(self, method: str) -> None:
        self.asked.append(method)

    def end(self, *, grace_s: float, method: str = "stop") -> None:
        self.stopping, self.is_over, self.grace_s, self.ended_by = True, not self.has_room, grace_s, method

    def kill(self) -> None:
        self.stopping, self.is_over, self.ended_by = True, True, "kill"

    def kill_after(self, seconds: float) -> None:
        self.grace_s = seconds

    def enforce(self) -> None:
        self.is_over |= self.grace_s is not None and self.grace_is_over

    def outcome(self) -> tuple[Any, str]:
        return self.result

    def remove(self) -> None:
        self.is_removed = True


class StandInPlacer:
    """Stands in for a ``Placer``; what was placed is ``StandInActor.made``."""

    @classmethod
    def of(cls, *args: object) -> StandInPlacer:
        return cls()

    def place(self, kind: str, name: str, body: type, *args: Any, cpus: float, gpus: int, any_host: bool = False,
              avoid: Collection[str] = (), among: Collection[str] = ()) -> StandInActor:
        made = StandInActor(name, cpus, next(iter(among), ""), args)
        made.kind, made.bundle["GPU"] = kind, gpus
        return made

    def adopt(self, kind: str) -> list[StandInActor]:
        return []


def stand_in_for_ray(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Has these modules of the driver place a ``StandInActor`` for each actor."""
    def ended(actors: Iterable[StandInActor]) -> list[StandInActor]:
        return [actor for actor in actors if actor.is_over]

    monkeypatch.setattr(StandInActor, "made", [])
    for module in modules:
        monkeypatch.setattr(module, "Placer", StandInPlacer)
        monkeypatch.setattr(module, "ended", ended)
        monkeypatch.setattr(module, "told_to_stop", lambda actors: any(actor.told_before for actor in actors),
                            raising=False)
