"""Runs simulated worlds with many seeds, or plants bugs into the product and says which seed catches each: the commands
``elastic-rl chaos sim`` and ``selftest``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from chaos_tests.sim.planted import PLANTED
from chaos_tests.sim.worlds import failures

_SHOWN = 20
"""Failures of a world that are said; the number counts all."""


def run_worlds(worlds: Sequence[str], seeds: Sequence[int], minutes: float, say: Callable[[str], None]) -> int:
    """Runs each world with each seed, and begins no further run after so many minutes. Returns how many broke a rule.
    """
    until_s, broken = time.monotonic() + 60 * minutes, 0
    for name in worlds:
        began, runs, failed = time.monotonic(), 0, 0
        for found in failures([name], seeds, until_s=until_s):
            runs += 1
            if found is not None:
                failed += 1
                if failed <= _SHOWN:
                    say(f"  {found}")
                    say(f"    again: elastic-rl chaos sim --worlds {name} --first {found.seed} --seeds 1")
        broken += failed
        left_out = "" if runs == len(seeds) else f", {len(seeds) - runs} not begun in time"
        say(f"{name:<16} {runs} runs in {time.monotonic() - began:.0f} s, {failed} broke a rule{left_out}")
    return broken


def selftest(seeds: int, say: Callable[[str], None]) -> int:
    """Plants one bug after the other. Returns how many no run of so many seeds has caught."""
    missed = 0
    for bug in PLANTED:
        began, found = time.monotonic(), bug.caught(seeds)
        missed += found is None
        how = f"seed {found.seed}, {time.monotonic() - began:.1f} s" if found is not None else "NOT CAUGHT"
        say(f"{bug.world:<8} {bug.rule:<4} {bug.what}: {how}")
    say(f"{len(PLANTED) - missed} of {len(PLANTED)} planted bugs were caught")
    return missed
