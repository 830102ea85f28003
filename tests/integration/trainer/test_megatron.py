"""Megatron against transformers, and groups of different parallel sizes against each other: real ranks over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from elastic_rl import config
from elastic_rl.config import Config
from elastic_rl.data.tiny_model import make_model_dir
from elastic_rl.host.processes import stop
from elastic_rl.runtime import free_port

pytestmark = pytest.mark.timeout(1800)  # the first test waits for all groups

Sizes = tuple[int, int, int]
"""TP, PP, DP."""
SAVED: list[Sizes] = [(2, 1, 1), (2, 2, 1)]
"""Groups whose state the groups of RESTORED restore."""
RESTORED: list[Sizes] = [(1, 1, 1), (1, 2, 2)]
GROUPS: list[Sizes] = [*SAVED, *RESTORED, (1, 1, 2)]
Tensors = dict[str, torch.Tensor]


def make_config(sizes: Sizes, **trainer: int) -> Config:
    tp, pp, dp = sizes
    return config.parse({"seed": 3, "device": {"type": "cpu"}, "train": {"max_grad_norm": 0.05}, "trainer": {
        "tensor_parallel": tp, "pipeline_parallel": pp, "data_parallel": dp, **trainer}})


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
            [sys.executable, str(Path(__file__).with_name("megatron_ranks.py"))], stdin=subprocess.PIPE,
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
        self._process.wait(10)
        self._log.close()


def joined(of_ranks: list[Tensors]) -> Tensors:
    """The tensors of all ranks. Each tensor has one owner."""
    out = {name: t for owned in of_ranks for name, t in owned.items()}
    assert len(out) == sum(map(len, of_ranks))
    return out


def make_reference(folder: Path, source: Path, vocab: int) -> torch.nn.Module:
    """A model whose norms are not all ones (which would hide a skipped norm), with ``vocab`` tokens."""
    model = Qwen3ForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.copy_(torch.rand(p.shape, generator=torch.Generator().manual_seed(len(name))) + 0.5)
    model.resize_token_embeddings(vocab)
    model.save_pretrained(folder / f"hf{vocab}")
    return model


@dataclass
class Runs:
    """Results of every group. Each group starts once and performs all its scenarios."""

    folder: Path
    tokens: torch.Tensor
    references: dict[int, torch.nn.Module]
    results: dict[Sizes, dict[str, Tensors]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("megatron")
    model = make_model_dir(folder / "model", make_config(GROUPS[0]))
    references = {vocab: make_reference(folder, model, vocab) for vocab in (16, 13)}
    tokens = torch.randint(0, 16, (7, 11), generator=torch.Generator().manual_seed(1))
    save_file({"tokens": tokens}, folder / "tokens.safetensors")
    runs = Runs(folder, tokens, references)
    hf16, hf13 = folder / "hf16", folder / "hf13"
    ranks = RankProcesses(folder)
    try:
        for sizes in GROUPS:
            scenarios = [Scenario("hf16", "logits", hf16), Scenario("hf13", "logits", hf13),
                         Scenario("gradients", "gradients", hf16), Scenario("train", "train", hf16)]
            if sizes in RESTORED:
                scenarios += [Scenario(f"restore {saved}", "restore", hf16, str(folder / f"{saved}.safetensors"))
                              for saved in SAVED]
            runs.results[sizes] = ranks.run(folder / str(sizes), make_config(sizes, micro_batch_size=24), scenarios)
            if sizes in SAVED:
                save_file(runs.results[sizes]["train"], folder / f"{sizes}.safetensors")
    finally:
        ranks.close()
    return runs


@pytest.mark.parametrize("sizes", GROUPS)
@pytest.mark.parametrize("vocab", [16, 13])
def test_logits_equal_transformers_and_exported_weights_equal_imported_ones(runs: Runs, vocab: int, sizes: Sizes
                                                                            ) -> None:
    """With 13 tokens the vocabulary is padded at TP=2."""
    reference, result = runs.references[vocab], runs.results[sizes][f"hf{vocab}"]
    with torch.no_grad():
        expected = reference(runs.tokens.clamp(max=vocab - 1)).logits
    assert (result["logits"][..., :vocab] - expected).abs().max() < 1e-5
    weights = dict(reference.named_parameters())
    assert set(weights) == set(result) - {"logits"}
    assert all(torch.equal(result[name], weights[name]) for name in weights)


def test_loss_and_gradients_do_not_depend_on_the_parallel_sizes(runs: Runs) -> None:
    alone = runs.results[1, 1, 1]["gradients"]
    for sizes in GROUPS:
        for name, expected in alone.items():
            torch.testing.assert_close(runs.results[sizes]["gradients"][name], expected, rtol=1e-4, atol=1e-6,
                                       msg=lambda m, n=name, s=sizes: f"{n} at TP, PP, DP = {s}: {m}")
    assert all(float(g.abs().max()) > 0 for g in alone.values()), "a parameter got no gradient"


@pytest.mark.parametrize("saved", SAVED)
def test_state_saved_by_one_group_is_restored_bit_for_bit_at_other_sizes(runs: Runs, saved: Sizes) -> None:
    state = runs.results[saved]["train"]
    world = saved[0] * saved[1] * saved[2]
    metrics = [json.loads((runs.folder / str(saved) / f"metrics-{r}.json").read_text()) for r in range(world)]
    assert len({m[0]["loss"] for m in metrics}) == 1, "the ranks disagree"
    assert metrics[0][0]["loss"] != metrics[0][1]["loss"], "the weights did not change"
    names = [n for n in state if not n.startswith("rng.")]
    assert len(names) == 3 * len([n for n in state if n.startswith("exp_avg.")])
    assert len([n for n in state if n.startswith("rng.") and n.endswith(".torch")]) == saved[0] * saved[1]
    assert all(float(state[n].abs().max()) > 0 for n in names if n.startswith("exp_avg_sq."))
    for sizes in RESTORED:
        restored = runs.results[sizes][f"restore {saved}"]
        assert all(torch.equal(state[n], restored[n]) for n in names)
