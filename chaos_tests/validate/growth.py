"""Whether something grows with the steps of a run, by the trends of its samples (``trends``). Pure."""

from __future__ import annotations

import math

from chaos_tests.event_log import Event, Kind
from chaos_tests.validate.trends import Samples, Trend
from chaos_tests.validate.verdict import GROWTH, Checker

FEWEST_STEPS = 5_000
"""Over fewer steps caches, and what etcd keeps of the newest steps and events, still fill."""
MIN_RESOLVED = 0.75
"""Part of the series that has to be told to stay within its limit; else the run was too short for what it was judged
by."""
MAX_SLOWDOWN = 3.0
"""By this factor a recovery may take longer after the steps than before them: the machine is not always as fast."""


class NothingGrows(Checker):
    """Judges the first steps in a row, many enough, without a fault: after one, processes begin again. Where the same
    fault struck before and after them, the recovery from it takes as long after them as before."""

    rule = GROWTH
    reads = frozenset({Kind.STEP, Kind.PROCESS, Kind.STORE, Kind.FAULT})
    lacks = (f"it needs {FEWEST_STEPS:,} steps without a fault, such as in the scenario growth, and so many that "
             f"{MIN_RESOLVED:.0%} of what was sampled can be told from what grows")

    def __init__(self) -> None:
        super().__init__()
        self._samples, self._trends, self._sampled = Samples(), list[Trend](), False
        self._since, self._steps = 0, 0
        """The steps that are judged: from and to."""
        self._before, self._after = dict[str, float](), dict[str, float]()
        """Seconds of the recovery from each fault before these steps, and after them."""

    def see(self, event: Event) -> None:
        if event["kind"] == Kind.FAULT:
            self._struck(event)
        elif not self._after:
            self._sampled |= event["kind"] != Kind.STEP
            if event["kind"] == Kind.STEP:
                self._steps = max(self._steps, int(event["step"]))
            self._samples.see(event)

    def _struck(self, fault: Event) -> None:
        healed_s = float(fault["healed_at"]) - float(fault["injected_at"]) if fault.get("healed_at") else math.inf
        if self._long_enough:
            self._after[str(fault["name"])] = healed_s
        else:
            self._before[str(fault["name"])] = healed_s
            self._samples, self._since = Samples(), self._steps

    @property
    def _long_enough(self) -> bool:
        return self._steps - self._since >= FEWEST_STEPS

    def finish(self, end: Event | None) -> None:
        super().finish(end)
        if self._long_enough and self._sampled:  # the time of steps alone depends on what the job has learned
            self._trends = self._samples.trends()
        for trend in self._trends:
            if trend.grows:
                self.violated(str(trend))
        for name, (before, after) in self._recoveries():
            if after > MAX_SLOWDOWN * before:
                self.violated(f"the recovery from {name} took {after:.1f} s at the end and {before:.1f} s "
                              f"before {self._steps - self._since:,} steps: at most {MAX_SLOWDOWN:g} times as long")

    def _recoveries(self) -> list[tuple[str, tuple[float, float]]]:
        return [(name, (self._before[name], self._after[name])) for name in self._before.keys() & self._after.keys()
                if self._trends]

    def evidence(self) -> str:
        told = sum(trend.resolved for trend in self._trends)
        if not self._trends or told < MIN_RESOLVED * len(self._trends):
            return ""
        back = "".join(f"; back from {name} after {after:.1f} s, and after {before:.1f} s before them"
                       for name, (before, after) in self._recoveries())
        return (f"{len(self._trends)} series over {self._steps - self._since:,} steps, of {told} of which it was long "
                f"enough to tell{back}")


CHECKERS: tuple[type[Checker], ...] = (NothingGrows,)
