"""Trains from a step's file again: ranks of Megatron on this host alone, without engines, etcd and a cluster.

    python -m elastic_rl.trainer.replay PLAN    one rank, in the environment that torch.distributed reads

The weights are those of a model folder, and the optimizer has no moments: the loss and the gradient of a step's first
update are those of the run where the weights are, later updates of the same step differ.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_rl.algorithms.registry import algorithm_of, required_tensors
from elastic_rl.config import Config, parse
from elastic_rl.data.batch import Batch
from elastic_rl.errors import ConfigError, DeadlineExceeded, TrainerFailed
from elastic_rl.host import processes
from elastic_rl.host.address import own_address
from elastic_rl.net.addresses import free_port
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


def run(cfg: Config, file: Path, step: int, model: Path, folder: Path, *, timeout_s: float) -> dict[str, float]:
    """Makes the step once with all ranks of ``cfg.trainer``, and returns its metrics. ``folder``: an empty one for the
    plan and the ranks' logs. Raises TrainerFailed with the end of the log of a rank that failed, and DeadlineExceeded.
    """
    plan, result = folder / "plan.json", folder / "metrics.json"
    plan.write_text(json.dumps({"config": cfg.model_dump(mode="json"), "file": str(file), "step": step,
                                "model": str(model), "result": str(result)}), encoding="utf-8")
    address = own_address()
    group = {"MASTER_ADDR": address, "MASTER_PORT": str(free_port(address)), "WORLD_SIZE": str(cfg.trainer.ranks),
             "OMP_NUM_THREADS": str(cfg.trainer.cpu_threads), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    logs = [folder / f"rank-{rank}.log" for rank in range(cfg.trainer.ranks)]
    ranks = [processes.spawn(processes.python("elastic_rl.trainer.replay", str(plan)), log=log,
                             env={**group, "RANK": str(rank), "LOCAL_RANK": str(rank)})
             for rank, log in enumerate(logs)]
    end = time.monotonic() + timeout_s
    try:
        while None in (codes := [rank.poll() for rank in ranks]) or any(codes):
            # The others would wait for it in a collective.
            if failed := [n for n, code in enumerate(codes) if code]:
                raise TrainerFailed(f"rank {failed[0]} has failed; its log ends with:\n{tail(logs[failed[0]], _TAIL)}")
            if time.monotonic() > end:
                raise DeadlineExceeded(f"the step was not made within {timeout_s:g} s", hint="give more with --timeout")
            time.sleep(_POLL_S)
        return dict(json.loads(result.read_bytes()))
    finally:
        processes.stop_all([rank.pid for rank in ranks], grace_s=0.0)


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
    batch = Batch.from_bytes(Path(plan["file"]).read_bytes())
    batch.require_tokens_below(policy.arch.vocab)
    share = batch.rows(batch.share_rows(par.dp, cfg.train.minibatches)[par.dp_rank])
    metrics = TrainStep(policy, adam, cfg, par).train(share, "rl", plan["step"])
    if par.rank == 0:
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        Path(plan["result"]).write_text(json.dumps(finite), encoding="utf-8")
    parallel.barrier(par)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_bytes()))
