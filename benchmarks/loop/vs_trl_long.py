"""vs-trl-long: the same as ``vs_trl`` with a model of 22 million parameters and responses of widely different lengths;
and the trainer of that run beside its ranks alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from benchmarks.loop.vs_trl import interpreter, run_trl, spec
from elastic_rl.bench.loop.job import WARM_STEPS
from elastic_rl.bench.loop.overhead import tokens_row
from elastic_rl.bench.loop.steps import intervals
from elastic_rl.bench.loop.testbed import Testbed
from elastic_rl.bench.measurement import Row
from elastic_rl.report.build import Record

GOAL = 1.5
_STAGES = ("sync", "generate", "train", "between")


@dataclass(frozen=True)
class Bare:
    """The parts alone."""

    engines: Sequence[float]
    """Seconds of each round."""
    trainer: Sequence[float]
    """Seconds of each step."""
    tokens: float
    """Tokens of a response, in the mean."""


@dataclass(frozen=True)
class Trl:
    """Steps of TRL."""

    seconds: Sequence[float]
    generate: Sequence[float]
    """Seconds of the generation of each."""
    tokens: Sequence[float]
    """Tokens of a response of each step, in the mean."""


def measure(testbed: Testbed) -> Iterator[Row]:
    python = interpreter(testbed.folder)
    run = testbed.long_run()
    trl = run_trl(python, spec(run.cfg, run.policy, testbed.long_rounds + WARM_STEPS, "even_tokens"), testbed.folder)
    yield tokens_row(run.records, mean(trl["tokens"][WARM_STEPS:]), "vs-trl-long-tokens", "TRL")
    engines = testbed.long_engines()
    bare = Bare(engines.seconds, testbed.long_trainer(), engines.tokens)
    yield from rows(run.records, Trl(*(trl[name][WARM_STEPS:] for name in ("seconds", "generate_s", "tokens"))), bare,
                    trl["versions"])


def rows(records: Sequence[Record], trl: Trl, bare: Bare, versions: str) -> list[Row]:
    """Rows from the records of the run, the steps of TRL, and the parts alone. ``versions``: what TRL ran on. Pure.

    Responses are drawn on both sides and differ in length by chance, so the tokens of responses are compared, of as
    many samples: by the second, ours of each step, TRL's in the median.
    """
    steps = intervals(records)
    theirs = median(tokens / seconds for tokens, seconds in zip(trl.tokens, trl.seconds, strict=True))
    alone = {"bare engines": median(bare.engines), "bare trainer": median(bare.trainer)}
    return [Row.of("vs-trl-long", "tokens of responses a second over TRL's, 22 million parameters, responses of up to "
                   "256 tokens; limit: of bare engines and a bare trainer, one after the other",
                   [step["response_tokens"]["mean"] / seconds / theirs for step, seconds in steps], "×", op=">=",
                   goal=GOAL, limit=bare.tokens / sum(alone.values()) / theirs),
            Row.of("vs-trl-long-s", "a step of it", [seconds for _, seconds in steps], "s", limit=sum(alone.values()),
                   alternatives={**{f"its {stage}": seconds for stage, seconds in stages(records).items()}, **alone,
                                 f"TRL ({versions})": median(trl.seconds), "TRL's generation": median(trl.generate)})]


def stages(records: Sequence[Record]) -> Mapping[str, float]:
    """Median seconds of the stages of a step, as far as they were measured. Pure."""
    parts = [{**step["seconds"], "between": took - step["seconds"]["total"]} for step, took in intervals(records)]
    return {stage: median(values) for stage in _STAGES if (values := [p[stage] for p in parts if stage in p])}
