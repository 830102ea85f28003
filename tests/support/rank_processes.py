"""Real Megatron ranks over gloo: groups of them with what they are to do, and agents that run some."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from elastic_rl.config import Config
from elastic_rl.net.addresses import free_port
from support.forked import spawn
from support.waiting import wait_until

_LIMIT_S = 1200.0
Tensors = dict[str, torch.Tensor]
Sizes = tuple[int, int, int, int]
"""TP, CP, PP, DP."""


@dataclass(frozen=True)
class Scenario:
    name: str
    kind: str
    model: Path
    state_file: str = ""


def spawn_agent(context: Path, *arguments: str, log: Path) -> subprocess.Popen[bytes]:
    """Starts the agent of a trainer group as the driver does, but for the imports of the agent and its ranks."""
    return spawn("support.trainer_process", "agent", "--context", str(context), *arguments, log=log)


def run_ranks(folder: Path, cfg: Config, scenarios: list[Scenario]) -> dict[str, Tensors]:
    """Runs all ranks of a group to their end; the results of all ranks together, by the scenario's name. ``folder`` is
    made, and gets the output of each rank."""
    folder.mkdir()
    plan = {"config": cfg.model_dump(mode="json"),
            "scenarios": [(s.name, s.kind, str(s.model), s.state_file) for s in scenarios]}
    (folder / "plan.json").write_text(json.dumps(plan))
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(cfg.trainer.ranks)}
    ranks = [spawn("support.trainer_process", "rank", str(folder), log=folder / f"rank{rank}.log",
                   env={**group, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(cfg.trainer.ranks)]

    def over() -> bool:
        """Whether all have ended or one has failed, for which the others would wait in a collective."""
        codes = [rank.poll() for rank in ranks]
        return None not in codes or any(codes)

    try:
        wait_until(over, timeout_s=_LIMIT_S, what="the end of the ranks")
    finally:
        for process in ranks:
            process.kill()
    codes = [process.wait(60) for process in ranks]
    for rank, code in enumerate(codes):
        assert code <= 0, (folder / f"rank{rank}.log").read_text()[-3000:]
    assert not any(codes), f"exit codes {codes}; see {folder}"
    return {s.name: joined([load_file(folder / f"{s.name}-{rank}.safetensors") for rank in range(len(codes))])
            for s in scenarios}


def assert_close(found: Tensors, expected: Tensors, sizes: Sizes) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=2e-4, atol=2e-6,
                                   msg=lambda m, n=name: f"{n} at TP, CP, PP, DP = {sizes}: {m}")


def assert_reference_is(folder: Path, state: Tensors) -> None:
    """The reference policy in a state is the model of a folder, bit for bit, and the policy is not any more."""
    began_with = load_file(folder / "model.safetensors")
    kept = {name.removeprefix("reference."): t for name, t in state.items() if name.startswith("reference.")}
    assert set(kept) == set(began_with) and all(torch.equal(kept[name], began_with[name]) for name in kept)
    assert not any(torch.equal(state[name], kept[name]) for name in kept)


def joined(of_ranks: list[Tensors]) -> Tensors:
    """The tensors of all ranks. Each tensor has one owner."""
    out = {name: t for owned in of_ranks for name, t in owned.items()}
    assert len(out) == sum(map(len, of_ranks))
    return out
