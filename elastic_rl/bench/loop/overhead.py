"""overhead: a step of the run over bare engines and a bare trainer at the same work, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean, median

from elastic_rl.bench.loop.steps import intervals
from elastic_rl.bench.loop.testbed import Testbed
from elastic_rl.bench.measurement import Row
from elastic_rl.report.build import Record

GOAL = 1.15


def measure(testbed: Testbed) -> Iterator[Row]:
    records = testbed.run().records
    engines = testbed.engines()
    yield tokens_row(records, engines.tokens)
    yield from rows([s for _, s in intervals(records)], engines.seconds, testbed.trainer())


def rows(steps: Sequence[float], engines: Sequence[float], trainer: Sequence[float]) -> list[Row]:
    """Rows from the seconds of each step, of each round of the bare engines and of each step of the bare trainer. Pure.
    """
    parts = {"bare engines": median(engines), "bare trainer": median(trainer)}
    bare = sum(parts.values())
    return [Row.of("overhead", "a step over bare engines and a bare trainer at the same work; limit: both one after "
                   "the other, and nothing else",
                   [s / bare for s in steps], "×", goal=GOAL, limit=1.0),
            Row.of("overhead-s", "a step, from the end of the one before", steps, "s", limit=bare, alternatives=parts)]


def tokens_row(records: Sequence[Record], tokens: float, row_id: str = "overhead-tokens", who: str = "bare engines"
               ) -> Row:
    """Whether the work is the same. ``tokens``: mean length of the responses of ``who``. Pure."""
    of_run = [step["response_tokens"]["mean"] for step, _ in intervals(records)]
    return Row.of(row_id, f"tokens of a response: {who} over the run",
                  [tokens / mean(of_run)] if of_run else [], "×",
                  alternatives={who: tokens, **({"the run": mean(of_run)} if of_run else {})})
