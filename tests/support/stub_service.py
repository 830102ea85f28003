"""A service of the compute plane without a process, for tests of its supervision."""

from __future__ import annotations

from elastic_rl.errors import PreflightFailed


class StubService:
    """Runs from its launch until a test ends it."""

    name, url = "stub", "127.0.0.2:1"

    def __init__(self, *, runs: bool = False, was_known: bool = False) -> None:
        self.runs, self.was_known, self.refuses = runs, was_known or runs, False
        self.launched = self.ended = 0

    def launch(self) -> bool:
        if self.refuses:
            raise PreflightFailed("the disk is full")
        self.launched, self.runs = self.launched + 1, True
        return True

    def alive(self) -> bool:
        return self.runs

    def end(self) -> None:
        self.ended, self.runs = self.ended + 1, False

    def stop(self) -> None:
        self.end()
