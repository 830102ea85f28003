"""Groups of real Megatron ranks over gloo, and what they are to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from elastic_rl.config import Config
from elastic_rl.host.processes import stop
from elastic_rl.net.addresses import free_port

RANKS = Path(__file__).parents[1] / "integration" / "trainer" / "rank_groups.py"
Tensors = dict[str, torch.Tensor]
Sizes = tuple[int, int, int, int]
"""TP, CP, PP, DP."""


@dataclass(frozen=True)
class Scenario:
    name: str
    kind: str
    model: Path
    state_file: str = ""


class RankProcesses:
    """The process that groups of ranks are forked from."""

    def __init__(self, folder: Path) -> None:
        self._log = (folder / "ranks.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, str(RANKS)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self._log, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def run(self, folder: Path, cfg: Config, scenarios: list[Scenario]) -> dict[str, Tensors]:
        """Runs all ranks of a group to their end; the results of all ranks together, by the scenario's name."""
        folder.mkdir()
        plan = {"config": cfg.model_dump(mode="json"), "port": free_port(),
                "scenarios": [(s.name, s.kind, str(s.model), s.state_file) for s in scenarios]}
        (folder / "plan.json").write_text(json.dumps(plan))
        print(folder, file=self._process.stdin, flush=True)
        codes = self._process.stdout.readline().split()
        for rank, code in enumerate(codes):
            assert int(code) <= 0, (folder / f"rank{rank}.log").read_text()[-3000:]
        assert set(codes) <= {"0"}, f"exit codes {codes}; see {folder}"
        assert len(codes) == cfg.trainer.ranks, Path(self._log.name).read_text()[-3000:]
        return {s.name: joined([load_file(folder / f"{s.name}-{rank}.safetensors") for rank in range(len(codes))])
                for s in scenarios}

    def close(self) -> None:
        stop(self._process.pid, grace_s=0.5)
        self._process.wait(60)
        self._log.close()


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
