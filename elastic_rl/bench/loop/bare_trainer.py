"""The trainer's ranks alone: the run's parallel layout, model, loss and optimizer, without agent, etcd and publish."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from elastic_rl.bench.loop.bare_engines import WARM_ROUNDS
from elastic_rl.bench.workers import Worker
from elastic_rl.config import Config
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.address import own_address
from elastic_rl.net.addresses import free_port
from elastic_rl.trainer.group.agent import DETERMINISTIC_CUDA

_SETUP_S, _STEP_S = 300.0, 300.0


def measure_trainer(cfg: Config, model: Path, folder: Path, shares: Sequence[Sequence[Path]]) -> list[float]:
    """Seconds of a step on each batch, of the slowest rank; the first ones do not count. ``shares``: the shares of each
    batch the files of the data-parallel ranks. Raises WorkerFailed and DeadlineExceeded."""
    # The ranks read settings and model from a context; there is no etcd.
    context = RunContext(config=cfg, etcd_endpoints=["none"], job=cfg.job, epoch=0, model_dir=str(model),
                         host=own_address()).save(folder / "context.json")
    common = {"MASTER_ADDR": own_address(), "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(cfg.trainer.ranks),
              "OMP_NUM_THREADS": str(cfg.trainer.cpu_threads), "CUDA_DEVICE_MAX_CONNECTIONS": "1",
              **(DETERMINISTIC_CUDA if cfg.deterministic else {})}
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(Worker(
            "elastic_rl.bench.loop.bare_rank", str(context), log=folder / f"rank-{rank}.log",
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})) for rank in range(cfg.trainer.ranks)]
        _all(ranks, "setup", _SETUP_S)
        took = [max(_all(ranks, "step", _STEP_S, number=number, shares=[str(path) for path in paths]))
                for number, paths in enumerate(shares, 1)]
    return took[WARM_ROUNDS:]


def _all(ranks: Sequence[Worker], op: str, timeout_s: float, **fields: object) -> list[float]:
    """Seconds of each rank."""
    for rank in ranks:
        rank.send(op, **fields)
    return [float(rank.answer(timeout_s).get("seconds", 0.0)) for rank in ranks]
