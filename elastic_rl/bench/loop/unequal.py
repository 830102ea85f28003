"""unequal: a step of which one response is much longer than the others, over the same work in equal parts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from elastic_rl import config
from elastic_rl.bench.loop import job, long_responses
from elastic_rl.bench.loop.bare_engines import WARM_ROUNDS
from elastic_rl.bench.loop.bare_trainer import measure_trainer
from elastic_rl.bench.loop.testbed import Testbed
from elastic_rl.bench.measurement import Row
from elastic_rl.config import Config
from elastic_rl.models.arch import ModelArch
from elastic_rl.models.flops import SequenceCost

if TYPE_CHECKING:
    from elastic_rl.data.batch import Batch

GOAL = 1.3
LONGER = 16
"""Length of the long response over the mean of all."""
_GROUPS, _GROUP_SIZE, _PROMPT, _MEAN = 32, 4, 32, 64
_SHAPE = {"hidden_size": 256, "intermediate_size": 768, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2,
          "head_dim": 64, "max_positions": 2048}
_ROUNDS, _QUICK_ROUNDS = 8, 3


def measure(testbed: Testbed) -> Iterator[Row]:
    """Measures steps of the ranks alone, in the default layout, with shares as a run cuts them."""
    folder = testbed.folder / "unequal"
    folder.mkdir()
    cfg = config.load(None, [*job.place(folder, testbed.options), f"--train.prompts_per_step={_GROUPS}",
                             f"--train.group_size={_GROUP_SIZE}", *testbed.options.settings])
    model = long_responses.make_model(folder, _SHAPE)
    cost = SequenceCost.of(ModelArch.read(str(model)))
    rounds = _QUICK_ROUNDS if testbed.options.quick else _ROUNDS
    responses = unequal_responses(cfg.train.prompts_per_step * cfg.train.group_size)
    alike = [sum(responses) // len(responses)] * len(responses)
    # One after the other, so that what else the machine does meets each of them.
    kinds = [_write(cfg, _batch(alike), cost, folder / "alike"), _write(cfg, _batch(responses), cost, folder / "cut"),
             _write(cfg, _batch(responses), None, folder / "by-tokens")]
    seconds = measure_trainer(cfg, model, folder, [*kinds[:WARM_ROUNDS], *kinds * rounds])
    yield from rows(seconds[0::3], seconds[1::3], seconds[2::3],
                    bound_over_alike([_PROMPT + n for n in responses], [_PROMPT + n for n in alike], cost,
                                     cfg.trainer.data_parallel))


def unequal_responses(count: int) -> list[int]:
    """Lengths of so many responses, the first of which is ``LONGER`` times as long as their mean. Pure."""
    draw = random.Random("unequal")
    others = [draw.randint(_MEAN // 8, 2 * _MEAN - _MEAN // 8) for _ in range(count - 1)]
    return [round(LONGER * sum(others) / (count - LONGER)), *others]


def bound_over_alike(tokens: Sequence[int], alike: Sequence[int], cost: SequenceCost, replicas: int) -> float:
    """The least time of a step with samples of so many ``tokens`` over that of one with samples ``alike``, which are
    cut into equal parts: as much for each operation, and an equal part of them for each replica, or the longest sample
    alone, which passes through one. Pure."""
    costs = [cost.of_sample(n) for n in tokens]
    return max(sum(costs) / replicas, max(costs)) / (sum(cost.of_sample(n) for n in alike) / replicas)


def rows(alike: Sequence[float], unequal: Sequence[float], by_tokens: Sequence[float], ratio: float) -> list[Row]:
    """Rows from the seconds of each step: with responses of one length; with one that is much longer; with that, and
    shares of equal numbers of tokens. ``ratio``: see ``bound_over_alike``. Pure."""
    bound = ratio * median(alike)
    return [Row.of("unequal", f"a step with one response {LONGER} × longer than the mean, over the same operations in "
                   "equal parts for the replicas; limit: those",
                   [s / bound for s in unequal], "×", goal=GOAL, limit=1.0,
                   alternatives={"shares of equal tokens": median(by_tokens) / bound}),
            Row.of("unequal-s", "this step", unequal, "s", limit=bound,
                   alternatives={"responses of one length, as many tokens": median(alike)})]


def _batch(responses: Sequence[int]) -> Batch:
    """A batch of samples with responses of these lengths, of random tokens."""
    from elastic_rl.data.batch import collate  # it imports torch
    from elastic_rl.data.samples import Prompt, Sample, Segment

    draw = random.Random("tokens")

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(draw.randrange(2, 100) for _ in range(n))

    return collate([(Prompt(tokens(_PROMPT)), Sample((Segment(tokens(n), (-4.6,) * n, version=1),)))
                    for n in responses], [draw.gauss(0.0, 1.0) for _ in responses])


def _write(cfg: Config, batch: Batch, cost: SequenceCost | None, target: Path) -> list[Path]:
    """Writes the share of each replica. ``cost``: by which they are cut, as in a run; None: by tokens."""
    found = []
    for number, own in enumerate(batch.share_rows(cfg.trainer.data_parallel, cfg.train.minibatches,
                                                  float if cost is None else cost.of_sample)):
        found.append(target.with_name(f"{target.name}-{number}.safetensors"))
        found[-1].write_bytes(batch.rows(own).to_bytes())
    return found
