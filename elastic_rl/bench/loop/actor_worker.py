"""One measurement of the actor's memory: a worker of ``actor_bytes``."""

from __future__ import annotations

import gc
import random
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from elastic_rl import config
from elastic_rl.algorithms.registry import algorithm_of, options_of
from elastic_rl.bench.workers import serve
from elastic_rl.data.batch import Batch, collate
from elastic_rl.data.queue.step_groups import SampleRef, StepGroups
from elastic_rl.data.queue.summary import GroupSummary, SampleSummary
from elastic_rl.data.samples import Group, Prompt, Sample, Segment
from elastic_rl.pipeline.flow.group_queue import EmbeddedQueue
from elastic_rl.pipeline.records.step_timer import StepTimer
from elastic_rl.pipeline.training.training_batch import TrainingBatches
from elastic_rl.pipeline.waits import Waits

_GROUPS, _SAMPLES, _TOKENS = 64, 16, 2048
"""Groups that wait in the actor."""
_WIRE_SAMPLES, _WIRE_MEAN = 1562, 512
_STEP_GROUPS, _STEP_TOKENS, _REPLICAS = 6250, 8192, 64
_PIECE_BYTES = config.TrainerConfig().share_piece_bytes // 2


def memory(peak: bool = False) -> int:
    """Resident bytes of this process, now or at its most."""
    status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    return int(re.findall(rf"^Vm{'HWM' if peak else 'RSS'}:\s+(\d+) kB$", status, re.MULTILINE)[0]) << 10


def made(tokens: int, draw: random.Random) -> Sample:
    ids = tuple(draw.randrange(150_000) for _ in range(tokens))
    return Sample((Segment(ids, tuple(-draw.expovariate(1.0) for _ in range(tokens)), version=1),), reward=1.0,
                  text="".join(draw.choices("abcdefgh ", k=4 * tokens)))


def groups() -> Iterator[Group]:
    draw = random.Random(0)
    for ordinal in range(_GROUPS):
        yield Group(ordinal, Prompt(tuple(range(100))), tuple(made(_TOKENS, draw) for _ in range(_SAMPLES)))


def held() -> Mapping[str, float]:
    """Bytes of a token in the embedded queue, and as the groups were that were put into it."""
    tokens = _GROUPS * _SAMPLES * _TOKENS
    queue = EmbeddedQueue(_GROUPS)
    before = memory()
    for group in groups():
        queue.put(group)
    del group
    gc.collect()
    packed = memory() - before
    queue.close()
    gc.collect()
    before = memory()
    kept = list(groups())
    return {"packed": packed / tokens, "numbers": (memory() - before) * len(kept) / _GROUPS / tokens}


def wire() -> Mapping[str, float]:
    """Bytes of a token in a share of the samples of one replica, of which one is 16 times as long as the mean."""
    draw = random.Random(0)
    lengths = [16 * _WIRE_MEAN, *(draw.randrange(_WIRE_MEAN // 2, 3 * _WIRE_MEAN // 2) for _ in range(_WIRE_SAMPLES))]
    batch = collate([(Prompt((1,)), made(n - 1, draw)) for n in lengths], [0.5] * len(lengths))
    [rows] = batch.share_rows(1)
    sent = sum(len(batch.rows(piece).to_bytes()) for piece in batch.pieces(rows, _PIECE_BYTES))
    # A rectangle of int64, a mask and fp32, as most libraries of the field have it.
    return {"ragged": sent / sum(lengths), "padded": len(lengths) * max(lengths) * 13 / sum(lengths)}


class _Elsewhere:
    """The samples of a step whose tokens nobody reads here. A ``StepReader``."""

    is_local = False
    address: Mapping[str, object] = {"at": "bench"}

    def read(self, refs: Sequence[SampleRef]) -> list[tuple[Prompt, Sample]]:
        raise AssertionError("the actor reads tokens")

    def require(self, refs: Sequence[SampleRef]) -> None:
        """All are there."""


class _Roles:
    """The advantages of the algorithm, as the role makes them."""

    def __init__(self, cfg: config.Config) -> None:
        self._cfg = cfg

    def advantages(self, rewards: list[list[float]]) -> list[list[float]]:
        import torch
        spec = algorithm_of(self._cfg)
        assert spec.advantages is not None
        found = spec.advantages(torch.tensor(rewards), options_of(spec, self._cfg.algorithm))
        return found.tolist()  # type: ignore[no-any-return]


def step() -> Mapping[str, float]:
    """GiB that the actor takes for a step from the summaries of its groups to the bytes of all shares."""
    draw = random.Random(0)
    cfg = config.Config()
    before = memory()
    summaries = tuple(GroupSummary(ordinal, tuple(SampleSummary(
        256, (length := int(draw.uniform(0.5, 1.5) * _STEP_TOKENS) - 256), length, (1,), 1,
        reward=float(draw.random() < 0.5)) for _ in range(_SAMPLES)), (1,)) for ordinal in range(_STEP_GROUPS))
    batches = TrainingBatches(cfg, _Roles(cfg), Waits(lambda *_: None, threading.Event()),  # type: ignore[arg-type]
                              _STEP_TOKENS, passes=None)  # type: ignore[arg-type]
    batch: Batch = batches.make(StepGroups(summaries, _Elsewhere()), 1, StepTimer()).batch
    for rows in batch.share_rows(_REPLICAS):
        for piece in batch.pieces(rows, _PIECE_BYTES):
            batch.rows(piece).to_bytes()
    return {"gib": (memory(peak=True) - before) / (1 << 30)}


if __name__ == "__main__":
    serve({"held": held, "wire": wire, "step": step})
