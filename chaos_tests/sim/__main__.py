"""Runs simulated worlds with many seeds, or plants bugs into the product and shows which seed catches each.

    python -m chaos_tests.sim [--seeds 10000] [--first SEED] [--worlds NAME…] [--minutes M]
    python -m chaos_tests.sim --selftest [--seeds 600]

Exit code 1: a rule was broken, or a planted bug was not caught.
"""

from __future__ import annotations

import argparse
import sys
import time

from chaos_tests.sim.planted import PLANTED
from chaos_tests.sim.worlds import WORLDS, failures

_SHOWN = 20
"""Failures of a world that are printed; the number counts all."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos_tests.sim", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200, help="runs of each world")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--worlds", nargs="+", choices=[*WORLDS], default=[*WORLDS], metavar="NAME",
                        help=", ".join(f"{name}: {world.what}" for name, world in WORLDS.items()))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further run after so long")
    parser.add_argument("--selftest", action="store_true", help="plant bugs instead")
    given = parser.parse_args(arguments)
    return _selftest(given.seeds) if given.selftest else _runs(
        given.worlds, range(given.first, given.first + given.seeds), time.monotonic() + 60 * given.minutes)


def _runs(worlds: list[str], seeds: range, until_s: float) -> int:
    broken = 0
    for name in worlds:
        began, runs, failed = time.monotonic(), 0, 0
        for found in failures([name], seeds, until_s=until_s):
            runs += 1
            if found is not None:
                failed += 1
                if failed <= _SHOWN:
                    print(f"  {found}", f"    again: python -m chaos_tests.sim --worlds {name} --first {found.seed} "
                          "--seeds 1", sep="\n", flush=True)
        broken += failed
        left_out = "" if runs == len(seeds) else f", {len(seeds) - runs} not begun in time"
        took_s = time.monotonic() - began
        print(f"{name:<16} {runs} runs in {took_s:.0f} s, {failed} broke a rule{left_out}", flush=True)
    return int(broken > 0)


def _selftest(seeds: int) -> int:
    missed = 0
    for bug in PLANTED:
        began, found = time.monotonic(), bug.caught(seeds)
        missed += found is None
        how = f"seed {found.seed}, {time.monotonic() - began:.1f} s" if found is not None else "NOT CAUGHT"
        print(f"{bug.world:<8} {bug.rule:<4} {bug.what}: {how}", flush=True)
    print(f"{len(PLANTED) - missed} of {len(PLANTED)} planted bugs were caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
