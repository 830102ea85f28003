"""trainer-vs-megatron: the trainer as the run uses it, through its service, beside the same Megatron ranks alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from elastic_rl.bench.loop.bare_engines import WARM_ROUNDS
from elastic_rl.bench.loop.steps import WARM_STEPS, timed_steps
from elastic_rl.bench.loop.testbed import Testbed
from elastic_rl.bench.measurement import Row
from elastic_rl.report.build import Record

GOAL = 0.9


def measure(testbed: Testbed) -> Iterator[Row]:
    records = testbed.long_run().records
    shares = testbed.long_engines().shares[WARM_ROUNDS:]
    updates = testbed.long_run().cfg.train.updates_per_step
    yield from rows(records, [updates * sequence_tokens(paths) for paths in shares], testbed.long_trainer())


def rows(records: Sequence[Record], tokens: Sequence[int], seconds: Sequence[float]) -> list[Row]:
    """Rows from the records of the run, and the tokens of all updates and seconds of each step of the bare ranks. Pure.
    """
    steps = [s for s in timed_steps(records)[WARM_STEPS:] if s.get("train_s") and "train_tokens_per_s" in
             (s.get("throughput") or {})]
    ranks = [s["throughput"]["train_tokens_per_s"] for s in steps]
    service = [rate * s["train_s"] / s["seconds"]["train"] for rate, s in zip(ranks, steps, strict=True)]
    bare = median(n / s for n, s in zip(tokens, seconds, strict=True))
    others = {"the same ranks alone": bare} | ({"the ranks' own step, in the run": median(ranks)} if ranks else {})
    return [Row.of("trainer-vs-megatron", "tokens trained a second, over those of the same ranks alone; limit: those",
                   [rate / bare for rate in service], "×", op=">=", goal=GOAL, limit=1.0),
            Row.of("trainer-tokens-per-s", "tokens trained a second, prompts included, by all updates of a step",
                   service, "1/s", op=">=", limit=bare, alternatives=others)]


def sequence_tokens(shares: Sequence[Path]) -> int:
    """Tokens of a batch, prompts included and padding not. ``shares``: the files of the data-parallel ranks."""
    from elastic_rl.data.batch import Batch  # it imports torch
    return sum(int(Batch.from_bytes(path.read_bytes())["lengths"].sum()) for path in shares)
