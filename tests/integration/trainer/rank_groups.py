"""Runs groups of ranks for the Megatron tests: one group for each folder that it reads from stdin. Then prints a line
with the exit codes of the ranks.

A rank performs the scenarios of FOLDER/plan.json and writes the tensors of each result that it owns to
FOLDER/<name>-<rank>.safetensors, and its output to FOLDER/rank<rank>.log. Ranks are forked, so that what takes longest,
to import Megatron, is done once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path

import torch
from megatron_ranks import perform
from safetensors.torch import save_file

from elastic_rl.config import Config
from elastic_rl.runtime.process import die_with_parent
from elastic_rl.trainer.megatron import parallel


def run_rank(folder: Path, cfg: Config, scenarios: list[list[str]]) -> None:
    par = parallel.init(cfg)
    for name, scenario, model, state_file in scenarios:
        out = perform(name, scenario, Path(model), state_file, folder, cfg, par)
        save_file({k: v.contiguous() for k, v in out.items()}, folder / f"{name}-{par.rank}.safetensors")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def fork_rank(folder: Path, rank: int) -> int:
    """The pid of the rank's process, which never returns."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        die_with_parent()
        log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        plan = json.loads((folder / "plan.json").read_text())
        cfg = Config.model_validate(plan["config"])
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(plan["port"]), WORLD_SIZE=str(cfg.trainer.ranks),
                          RANK=str(rank), LOCAL_RANK=str(rank))
        run_rank(folder, cfg, plan["scenarios"])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait_all(ranks: list[int]) -> list[int]:
    """The exit codes. When a rank fails the others are killed, which would wait for it in a collective."""
    codes: dict[int, int] = {}
    while len(codes) < len(ranks):
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        for other in ranks if codes[pid] > 0 else ():
            if other not in codes:
                os.kill(other, signal.SIGKILL)
    return [codes[pid] for pid in ranks]


def main() -> None:
    from elastic_rl.trainer.group import preload  # noqa: F401  # as the server does that ranks are forked from

    for line in sys.stdin:
        folder = Path(line.rstrip("\n"))
        world = Config.model_validate(json.loads((folder / "plan.json").read_text())["config"]).trainer.ranks
        print(*wait_all([fork_rank(folder, rank) for rank in range(world)]), flush=True)


if __name__ == "__main__":
    die_with_parent()
    main()
