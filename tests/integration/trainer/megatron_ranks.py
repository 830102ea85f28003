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
from safetensors.torch import load_file, save_file

from elastic_rl.config import Config
from elastic_rl.data.tasks import Addition
from elastic_rl.runtime import die_with_parent
from elastic_rl.trainer import megatron_cpu, parallel
from elastic_rl.trainer.batch import TrainBatch
from elastic_rl.trainer.model import ModelArch, Policy
from elastic_rl.trainer.optimizer import Adam
from elastic_rl.trainer.pipeline import run
from elastic_rl.trainer.snapshot import extras, owned_tensors, restore, weights
from elastic_rl.trainer.step import TrainStep

BUCKET = 1 << 16


def synthetic(cfg: Config, samples: int) -> TrainBatch:
    """Right and wrong answers of several lengths, with advantages of both signs; the same on every rank."""
    problems = (Addition(cfg.data, 0).train * 2)[:samples]
    prompt, width = len(problems[0].prompt_ids), len(problems[0].answer_ids)
    tokens = torch.tensor([p.prompt_ids + p.answer_ids for p in problems])
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, width + 1, (samples,), generator=generator)
    tokens[torch.arange(tokens.shape[1])[None] >= (prompt + lengths)[:, None]] = 0
    mask = torch.arange(width)[None] < lengths[:, None]
    return TrainBatch(tokens=tokens, prompt_len=torch.full((samples,), prompt), response_len=lengths,
                      engine_logprobs=torch.randn(samples, width, generator=generator).mul(0.1).sub(2.7) * mask,
                      advantages=torch.randn(samples, generator=generator), groups=torch.arange(8),
                      policy_versions=torch.ones(samples, dtype=torch.int64))


def logits(policy: Policy, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """The whole logits, on one of the ranks that have them; nothing on the others."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region as gather

    out: dict[str, torch.Tensor] = {}

    def finish(number: int, part: torch.Tensor) -> torch.Tensor:
        full = gather(part.contiguous())
        if policy.par.tp_rank == policy.par.dp_rank == 0:
            out["logits"] = full
        return part.new_zeros(())

    with torch.no_grad():
        run(policy, [tokens], finish, train=False)
    return out


def state(policy: Policy, adam: Adam) -> dict[str, torch.Tensor]:
    """The tensors of a trainer_state that this rank owns."""
    return {name: t.clone() for _, name, t in (*weights(policy, BUCKET), *extras(policy, adam, BUCKET))}


def perform(scenario: str, model: Path, state_file: str, folder: Path, cfg: Config, par: parallel.ParallelDims
            ) -> dict[str, torch.Tensor]:
    """Performs a scenario on a new model; returns the tensors of its result that this rank owns."""
    policy = Policy(ModelArch.read(model), cfg, par)
    adam = Adam(policy, cfg)
    train_step = TrainStep(policy, adam, cfg, par)
    if scenario == "restore":
        restore(policy, adam, load_file(state_file), updates=2)
        return state(policy, adam)
    policy.load_folder(model)
    if scenario == "logits":
        tokens = load_file(folder.parent / "tokens.safetensors")["tokens"].clamp(max=policy.arch.vocab - 1)
        return logits(policy, tokens) | {name: t for _, name, t in weights(policy, BUCKET)}
    if scenario == "gradients":
        from megatron.core.distributed import finalize_model_grads
        metrics = train_step.gradients(synthetic(cfg, 64))
        finalize_model_grads([policy.ddp])
        grads = owned_tensors(policy, {n: p.main_grad for n, p in policy.parameters()}, BUCKET)
        loss = {"loss": torch.tensor([metrics["loss"]])} if par.rank == 0 else {}
        return loss | {name: t for _, name, t in grads}
    if scenario == "train":
        batch = synthetic(cfg, 64)
        metrics_of_steps = [train_step.train(batch, step) for step in (1, 2)]
        (folder / f"metrics-{par.rank}.json").write_text(json.dumps(metrics_of_steps))
        return state(policy, adam)
    raise ValueError(scenario)


def run_rank(folder: Path, cfg: Config, scenarios: list[list[str]]) -> None:
    par = parallel.init(cfg)
    for name, scenario, model, state_file in scenarios:
        out = perform(scenario, Path(model), state_file, folder, cfg, par)
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
    megatron_cpu.install()
    import megatron.core.distributed
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer  # noqa: F401

    for line in sys.stdin:
        folder = Path(line.rstrip("\n"))
        world = Config.model_validate(json.loads((folder / "plan.json").read_text())["config"]).trainer.ranks
        print(*wait_all([fork_rank(folder, rank) for rank in range(world)]), flush=True)


if __name__ == "__main__":
    die_with_parent()
    main()
