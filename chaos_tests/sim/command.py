"""Runs simulated worlds with many seeds, or plants bugs into the product and says which check catches each: commands
``elastic-rl chaos sim`` and ``selftest``."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Sequence

from chaos_tests.sim.planted import PLANTED, Check
from chaos_tests.sim.worlds import failures

_SHOWN = 20
"""Failures of a world that are said; the number counts all."""
_WIDTH = 140
"""Most of what a check says of a planted bug."""


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
    """Plants one bug after the other, and says which check catches it. Returns how many no run of so many seeds has
    caught."""
    missed = 0
    for bug in PLANTED:
        began, found = time.monotonic(), bug.caught(seeds)
        missed += found is None
        how = (f"run {found.tries}, seed {found.seed}, {time.monotonic() - began:.1f} s" if found is not None
               else "NOT CAUGHT")
        say(f"{bug.world:<8} {bug.by.value:<5} {bug.rule:<4} {bug.what}: {how}")
        if found is not None:
            say(f"    {textwrap.shorten(found.why, _WIDTH, placeholder=' …')}")
    by_log = sum(bug.by is Check.LOG for bug in PLANTED)
    say(f"{len(PLANTED) - missed} of {len(PLANTED)} planted bugs were caught; {by_log} of all are to be caught by the "
        "validators of real runs, in the event log")
    return missed
