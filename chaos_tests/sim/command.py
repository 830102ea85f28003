"""Runs simulated worlds with many seeds, or plants bugs into the product and says which check catches each: commands
``elastic-rl chaos sim`` and ``selftest``."""

from __future__ import annotations

import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing

from chaos_tests.sim.planted import PLANTED, Caught, Check
from chaos_tests.sim.workers import Task, results
from chaos_tests.sim.worlds import STEPS, WORLDS, Played

_SHOWN = 20
"""Failures of a world that are said; the number counts all."""
_TASK_SEEDS = 25
"""Most runs that a process makes before it says what they have found."""
NEVER_FROM = 1000
"""Runs of a world after which a kind that never happened is said to."""
_WIDTH = 140
"""Most of what a check says of a planted bug."""


def run_worlds(worlds: Sequence[str], seeds: range, minutes: float, say: Callable[[str], None], *, jobs: int = 1,
               coverage: bool = False) -> int:
    """Runs each world with each seed, in so many processes, and begins no further run after so many minutes. Returns
    how many broke a rule, and of worlds that have not run at all. ``coverage``: says how often each kind of thing
    happened. Raises WorkerDied."""
    began = time.monotonic()
    each = max(1, min(_TASK_SEEDS, len(seeds) // (4 * jobs)))
    # All worlds in turn, so that each has had as many runs where the time is over.
    tasks = [Task(name, seeds[n:n + each], began + 60 * minutes) for n in range(0, len(seeds), each) for name in worlds]
    open_tasks, played = {name: 0 for name in worlds}, defaultdict[str, Played](Played)
    for task in tasks:
        open_tasks[task.world] += 1
    with closing(results(tasks, jobs)) as found:
        for task, part in found:
            whole = played[task.world]
            for failure in part.failures[:max(0, _SHOWN - len(whole.failures))]:
                say(f"  {failure}")
                say(f"    again: elastic-rl chaos sim --worlds {task.world} --first {failure.seed} --seeds 1")
            whole.add(part)
            open_tasks[task.world] -= 1
            if not open_tasks[task.world]:
                _say_world(task.world, whole, len(seeds), time.monotonic() - began, say)
                if coverage:
                    _say_coverage(task.world, whole, say)
    broken = sum(len(whole.failures) for whole in played.values())
    say(f"{len(seeds)} seeds ({seeds[0]} to {seeds[-1]}), {len(worlds)} worlds, "
        f"{sum(whole.runs for whole in played.values())} runs, "
        f"{sum(whole.counts[STEPS] for whole in played.values())} steps, {broken} violations, "
        f"{time.monotonic() - began:.0f} s, {min(jobs, len(tasks))} processes")
    idle = [name for name in worlds if not played[name].runs]
    if idle:
        say(f"no run of {', '.join(idle)} was begun in time, which proves nothing")
    return broken + len(idle)


def _say_world(name: str, whole: Played, seeds: int, seconds: float, say: Callable[[str], None]) -> None:
    left_out = "" if whole.runs == seeds else f", {seeds - whole.runs} not begun in time"
    say(f"{name:<16} {whole.runs} runs, {whole.counts[STEPS]} steps, {len(whole.failures)} broke a rule{left_out} "
        f"({seconds:.0f} s)")


def _say_coverage(name: str, whole: Played, say: Callable[[str], None]) -> None:
    """A line a kind: how often it happened, and in how many runs; first those that never did."""
    kinds = WORLDS[name].kinds
    if not kinds:
        say("    counts nothing")
    if whole.runs >= NEVER_FROM:
        for kind in sorted(kind for kind in kinds if not whole.counts[kind]):
            say(f"    {kind:<44} NEVER HAPPENED")
    for kind, n in sorted(whole.counts.items(), key=lambda item: (item[1], item[0])):
        if kind != STEPS and n:
            say(f"    {kind:<44} {n:>10}  in {whole.seeds_with[kind]} runs")


def selftest(seeds: int, say: Callable[[str], None]) -> int:
    """Plants one bug after the other, and says which check catches it. Returns how many no run of so many seeds has
    caught."""
    missed = 0
    for bug in PLANTED:
        began, found = time.monotonic(), bug.tried(seeds)
        if isinstance(found, Caught):
            how, why = f"run {found.tries}, seed {found.seed}, {time.monotonic() - began:.1f} s", found.why
        else:
            missed += 1
            how, why = f"NOT CAUGHT in {found.tries} runs", f"what went wrong instead: {found.instead or 'nothing'}"
        say(f"{bug.world:<12} {bug.by.value:<5} {bug.rule:<4} {bug.what}: {how}")
        say(f"    {textwrap.shorten(why, _WIDTH, placeholder=' …')}")
    by_log = sum(bug.by is Check.LOG for bug in PLANTED)
    mutations = len({bug.plant for bug in PLANTED})
    say(f"{len(PLANTED) - missed} of {len(PLANTED)} planted bugs ({mutations} mutations of the product) were caught, "
        f"each by its own rule; {by_log} of all are to be caught in the event log, by the validators of runs")
    return missed
