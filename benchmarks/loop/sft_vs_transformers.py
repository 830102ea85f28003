"""sft-vs-transformers: ``mode: sft`` beside the Trainer of transformers, with the same model, batches and updates."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.loop import sft_program
from benchmarks.loop.vs_trl import interpreter, run_program
from elastic_rl.bench.loop import job, long_responses
from elastic_rl.bench.loop.testbed import Testbed
from elastic_rl.bench.measurement import Row
from elastic_rl.config import Config
from elastic_rl.data.order import sft_order, sft_ordinals
from elastic_rl.data.sources import make_source
from elastic_rl.data.tokenizer import PAD_ID
from elastic_rl.host import inherited_model
from elastic_rl.host.paths import JobPaths
from elastic_rl.report.build import Record, read_records

GOAL = 1.0
_PASSES = 4
"""Passes in which the Trainer may take a batch: then it pads each to its own longest row."""


def measure(testbed: Testbed) -> Iterator[Row]:
    python = interpreter(testbed.folder)
    rounds, every = (3, 2) if testbed.options.quick else (6, 4)
    folder = testbed.folder / "sft"
    cfg = long_responses.configure_sft(folder, testbed.options, rounds * every, every)
    job.run(cfg)
    specs = [spec(cfg, inherited_model.began_with(cfg), passes) for passes in (1, _PASSES)]
    whole, by_length = (run_program(python, Path(sft_program.__file__), what, folder, who="the Trainer of transformers")
                        for what in specs)
    given = specs[0]["rows"]
    tokens = [sum(map(_tokens, given[i:i + cfg.sft.batch_size])) for i in range(0, len(given), cfg.sft.batch_size)]
    yield from rows(read_records(JobPaths.of(cfg).steps), tokens, whole["seconds"], by_length["seconds"],
                    whole["versions"])


def spec(cfg: Config, model: Path, passes: int) -> dict[str, Any]:
    """What the program is to do: the batches of the run, in order. ``passes``: of each batch; with more than one its
    rows are in the order of their lengths, so that a pass pads little."""
    source = make_source(cfg)
    order = sft_order(source, cfg.seed)
    prompts = [source.train[order.problem(ordinal)[0]] for step in range(1, cfg.sft.max_steps + 1)
               for ordinal in sft_ordinals(cfg.sft.batch_size, step)]
    size = cfg.sft.batch_size
    found = [{"prompt": list(p.token_ids), "answer": list(p.answer_ids or ())} for p in prompts]
    if passes > 1:
        found = [row for i in range(0, len(found), size) for row in sorted(found[i:i + size], key=_tokens)]
    return {"model": str(model), "rows": found, "batch_size": size, "passes": passes, "pad_id": PAD_ID,
            "lr": cfg.sft.lr, "seed": cfg.seed, "threads": len(os.sched_getaffinity(0))}


def _tokens(row: Mapping[str, Sequence[int]]) -> int:
    return len(row["prompt"]) + len(row["answer"])


def rows(records: Sequence[Record], tokens: Sequence[int], whole: Sequence[float], by_length: Sequence[float],
         versions: str) -> list[Row]:
    """Rows from the records of the run, the tokens of each step without padding, and the Trainer's seconds for each:
    with the batch in one pass, and in several of rows of like lengths. What comes before the first record of the run is
    not counted, on both sides. Pure."""
    found = [r for r in records if r["kind"] == "sft"]
    spans = [(before["step"], after["step"], after["at"] - before["at"])
             for before, after in zip(found, found[1:], strict=False)]
    ours = [sum(tokens[first:last]) / took for first, last, took in spans]
    theirs = {what: [sum(tokens[first:last]) / sum(seconds[first:last]) for first, last, _ in spans]
              for what, seconds in (("", whole), (f", {_PASSES} passes by length", by_length))}
    best = max(theirs.values(), key=lambda rates: median(rates) if rates else 0.0)
    return [Row.of("sft-vs-transformers", "tokens a second of mode=sft over the Trainer's of transformers, at the same "
                   "batches, in the faster of two ways", [our / their for our, their in zip(ours, best, strict=True)],
                   "×", op=">=", goal=GOAL),
            Row.of("sft-tokens-per-s", "tokens a second of mode=sft, prompts included, padding not", ours, "1/s",
                   op=">=", alternatives={f"Trainer{what} ({versions})": median(rates)
                                          for what, rates in theirs.items() if rates})]
