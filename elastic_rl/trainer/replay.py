"""Trains from the files of steps again: ranks of Megatron on this host alone, without engines, etcd and a cluster.

    python -m elastic_rl.trainer.replay PLAN    one rank, in the environment that torch.distributed reads

The first step begins with the weights of a model folder and an optimizer without moments: the loss and the gradient of
its first update are those of the run where the weights are, later updates differ. Each further step begins with what
the one before it has made.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from elastic_rl.algorithms.registry import algorithm_of, required_tensors
from elastic_rl.config import Config, parse
from elastic_rl.data.batch import Batch
from elastic_rl.errors import ConfigError, DeadlineExceeded, TrainerFailed
from elastic_rl.host import processes
from elastic_rl.host.address import own_address
from elastic_rl.net.addresses import free_port
from elastic_rl.runtime.files import replace_file
from elastic_rl.telemetry.log_files import tail

_POLL_S = 0.1
_TAIL = 2000
"""So many bytes of the end of a log are in an error."""


def require_replayable(cfg: Config, batch: Batch) -> None:
    """Raises ConfigError for a batch that lacks what its loss reads: the reference policy is in the ranks of a run, and
    in no file."""
    lacks = [name for name in required_tensors(algorithm_of(cfg), cfg.algorithm) if name not in batch]
    if lacks:
        hint = ("leave the reference policy out: --algorithm.kl_coef=0 --algorithm.report_kl=false"
                if lacks == ["ref_logprobs"] else "use the settings of the algorithm that the step was made with")
        raise ConfigError(f"the file lacks {', '.join(lacks)}, which the loss of algorithm.name={cfg.algorithm.name} "
                          "reads", hint=hint)


def run(cfg: Config, files: Mapping[int, Path], model: Path, folder: Path, *, timeout_s: float,
        on_step: Callable[[int, dict[str, float]], None] = lambda step, metrics: None) -> list[dict[str, float]]:
    """Makes the steps of these files, in this order, with all ranks of ``cfg.trainer``; returns the metrics of each.

    ``folder``: one for the plan, the ranks' logs and the metrics (``metrics.jsonl``), without any of these.
    ``timeout_s``: longest time until the first step is made, with the start of the ranks, and between two.
    ``on_step``: called with each step and its metrics when it is made; those that are not finite are NaN. Raises
    TrainerFailed with the end of the log of a rank that failed, and DeadlineExceeded.
    """
    plan, result = folder / "plan.json", folder / "metrics.jsonl"
    replace_file(plan, json.dumps({"config": cfg.model_dump(mode="json"), "model": str(model), "result": str(result),
                                   "files": [[step, str(file)] for step, file in files.items()]}), private=True)
    result.touch()
    address = own_address()
    group = {"MASTER_ADDR": address, "MASTER_PORT": str(free_port(address)), "WORLD_SIZE": str(cfg.trainer.ranks),
             "OMP_NUM_THREADS": str(cfg.trainer.cpu_threads), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    logs = [folder / f"rank-{rank}.log" for rank in range(cfg.trainer.ranks)]
    ranks = [processes.spawn(processes.python("elastic_rl.trainer.replay", str(plan)), log=log,
                             env={**group, "RANK": str(rank), "LOCAL_RANK": str(rank)})
             for rank, log in enumerate(logs)]
    made: list[dict[str, float]] = []
    steps, end = list(files), time.monotonic() + timeout_s
    try:
        with result.open(encoding="utf-8") as lines:
            while True:
                codes = [rank.poll() for rank in ranks]  # first: what a rank that has ended wrote is read below
                for line in iter(partial(_complete_line, lines), ""):
                    metrics = {name: math.nan if value is None else value for name, value in json.loads(line).items()}
                    on_step(int(metrics.pop("step")), metrics)
                    made.append(metrics)
                    end = time.monotonic() + timeout_s
                # The others would wait for it in a collective.
                if failed := [n for n, code in enumerate(codes) if code]:
                    at = f" in step {steps[len(made)]}" if len(made) < len(steps) else ""
                    raise TrainerFailed(
                        f"rank {failed[0]} has failed{at}; its log ends with:\n{tail(logs[failed[0]], _TAIL)}")
                if None not in codes:
                    return made
                if time.monotonic() > end:
                    waits_for = f"step {steps[len(made)]} was not made" if len(made) < len(steps) else \
                        "the ranks have not ended"
                    raise DeadlineExceeded(f"{waits_for} within {timeout_s:g} s",
                                           hint="`debug step` takes a longer --timeout")
                time.sleep(_POLL_S)
    finally:
        processes.stop_all([rank.pid for rank in ranks], grace_s=0.0)


def _complete_line(file: TextIO) -> str:
    """The next line of a file that is being written; "" where there is none yet, or a part of one."""
    at = file.tell()
    if (line := file.readline()).endswith("\n"):
        return line
    file.seek(at)
    return ""


def main(plan: Mapping[str, Any]) -> None:
    """One rank."""
    from elastic_rl.trainer.group.agent import DETERMINISTIC_CUDA
    from elastic_rl.trainer.megatron import parallel
    from elastic_rl.trainer.megatron.optimizer import Adam
    from elastic_rl.trainer.megatron.policy import ModelArch, Policy
    from elastic_rl.trainer.step import TrainStep
    cfg = parse(plan["config"])
    if cfg.deterministic:
        os.environ.update(DETERMINISTIC_CUDA)
    par = parallel.init(cfg, own_address())
    policy = Policy(ModelArch.read(plan["model"]), cfg, par)
    adam = Adam(policy, cfg)
    policy.load_folder(plan["model"])
    adam.reset()
    steps = TrainStep(policy, adam, cfg, par)
    for step, file in plan["files"]:
        batch = Batch.from_bytes(Path(file).read_bytes())
        batch.require_tokens_below(policy.arch.vocab)
        share = batch.rows(batch.share_rows(par.dp, cfg.train.minibatches)[par.dp_rank])
        metrics = steps.train(share, "rl", step)
        if par.rank == 0:
            finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
            with Path(plan["result"]).open("a", encoding="utf-8") as result:
                result.write(json.dumps({"step": step, **finite}) + "\n")
    parallel.barrier(par)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_bytes()))
