"""Whether something grows with the steps of a run (``chaos_tests.growth``). Pure."""

from __future__ import annotations

from chaos_tests.event_log import Event, Kind
from chaos_tests.growth.check import Samples, Trend
from chaos_tests.validate.verdict import GROWTH, Checker

FEWEST_STEPS = 5_000
"""In a shorter run caches, and what etcd keeps of the newest steps and events, still fill."""


class NothingGrows(Checker):
    """Judges a run without faults: after one, processes begin again."""

    rule = GROWTH
    reads = frozenset({Kind.STEP, Kind.PROCESS, Kind.STORE})
    lacks = f"it needs a run of at least {FEWEST_STEPS:,} steps without faults, such as the scenario growth"

    def __init__(self) -> None:
        super().__init__()
        self._samples, self._steps, self._trends = Samples(), 0, list[Trend]()

    def see(self, event: Event) -> None:
        if self.run.get("schedule", {}).get("strikes"):
            return
        if event["kind"] == Kind.STEP:
            self._steps = max(self._steps, int(event["step"]))
        self._samples.see(event)

    def finish(self, end: Event | None) -> None:
        super().finish(end)
        if self._steps >= FEWEST_STEPS:
            self._trends = self._samples.trends()
        for trend in self._trends:
            if trend.grows:
                self.violated(str(trend))

    def evidence(self) -> str:
        if not self._trends:
            return ""
        told = sum(trend.resolved for trend in self._trends)
        return f"{len(self._trends)} series over {self._steps:,} steps, of {told} of which it was long enough to tell"


CHECKERS: tuple[type[Checker], ...] = (NothingGrows,)
