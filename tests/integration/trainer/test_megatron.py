"""Megatron against transformers, and one group size against another: real ranks over gloo."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from elastic_rl import config
from elastic_rl.config import Config
from elastic_rl.data.tiny_model import make_model_dir
from elastic_rl.host.processes import spawn, stop
from elastic_rl.runtime import free_port

RANK_MAIN = Path(__file__).with_name("megatron_rank.py")
Cut = tuple[int, int, int]
"""TP, PP, DP."""
CUTS = [(1, 1, 1), (2, 1, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2)]


def make_config(cut: Cut, **trainer: int) -> Config:
    tp, pp, dp = cut
    return config.parse({"seed": 3, "device": {"type": "cpu"}, "train": {"max_grad_norm": 0.05}, "trainer": {
        "tensor_parallel": tp, "pipeline_parallel": pp, "data_parallel": dp, **trainer}})


def run_ranks(folder: Path, cfg: Config, scenarios: list[tuple[str, str, Path]]) -> dict[str, dict[str, torch.Tensor]]:
    """Runs all ranks to their end on (name, scenario, model folder); what they wrote together, by name."""
    plan = {"config": cfg.model_dump(mode="json"), "scenarios": [(n, s, str(m)) for n, s, m in scenarios]}
    (folder / "plan.json").write_text(json.dumps(plan))
    world = cfg.trainer.ranks
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world),
              "OMP_NUM_THREADS": "1"}
    ranks = [spawn([sys.executable, str(RANK_MAIN), str(folder)], log=folder / f"rank{r}.log",
                   env={**common, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(world)]
    try:
        for r, process in enumerate(ranks):
            assert process.wait(timeout=180) == 0, (folder / f"rank{r}.log").read_text()[-3000:]
    finally:
        for process in ranks:
            stop(process.pid, grace_s=0.5)
    return {name: joined([load_file(folder / f"{name}-{r}.safetensors") for r in range(world)])
            for name, _, _ in scenarios}


def joined(shares: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The whole of what ranks divide among themselves: nothing is there twice."""
    out = {name: t for share in shares for name, t in share.items()}
    assert len(out) == sum(map(len, shares))
    return out


def make_reference(folder: Path, source: Path, vocab: int) -> torch.nn.Module:
    """A model whose norms are not all ones (that would hide one that is left out), with its vocabulary cut."""
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
    """Every group size, started once; each runs all scenarios."""

    folder: Path
    model: Path
    tokens: torch.Tensor
    references: dict[int, torch.nn.Module]
    out: dict[Cut, dict[str, dict[str, torch.Tensor]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("megatron")
    model = make_model_dir(folder / "model", make_config(CUTS[0]))
    references = {vocab: make_reference(folder, model, vocab) for vocab in (16, 13)}
    tokens = torch.randint(0, 16, (7, 11), generator=torch.Generator().manual_seed(1))
    out = {}
    for cut in CUTS:
        place = folder / str(cut)
        place.mkdir()
        save_file({"tokens": tokens}, place / "tokens.safetensors")
        out[cut] = run_ranks(place, make_config(cut, micro_batch_size=24), [
            ("hf16", "logits", folder / "hf16"), ("hf13", "logits", folder / "hf13"),
            ("gradients", "gradients", folder / "hf16"), ("train", "train", folder / "hf16")])
    return Runs(folder, folder / "hf16", tokens, references, out)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("vocab", [16, 13])
def test_logits_equal_those_of_transformers_and_the_export_what_was_imported(runs: Runs, vocab: int, cut: Cut) -> None:
    """With 13 tokens the vocabulary is padded at TP=2."""
    reference, out = runs.references[vocab], runs.out[cut][f"hf{vocab}"]
    with torch.no_grad():
        expected = reference(runs.tokens.clamp(max=vocab - 1)).logits
    assert (out["logits"][..., :vocab] - expected).abs().max() < 1e-5
    weights = dict(reference.named_parameters())
    assert set(weights) == set(out) - {"logits"}
    assert all(torch.equal(out[name], weights[name]) for name in weights)


def test_loss_and_gradients_do_not_depend_on_how_the_group_is_cut(runs: Runs) -> None:
    alone = runs.out[CUTS[0]]["gradients"]
    for cut in CUTS[1:]:
        for name, expected in alone.items():
            torch.testing.assert_close(runs.out[cut]["gradients"][name], expected, rtol=1e-4, atol=1e-6,
                                       msg=lambda m, n=name, c=cut: f"{n} at TP, PP, DP = {c}: {m}")
    assert all(float(g.abs().max()) > 0 for g in alone.values()), "a parameter got no gradient"


@pytest.mark.parametrize("saved", [(2, 1, 1), (2, 2, 1)])
def test_a_state_saved_by_one_group_is_taken_up_bit_for_bit_by_groups_of_other_sizes(runs: Runs, saved: Cut) -> None:
    state = runs.out[saved]["train"]
    world = saved[0] * saved[1] * saved[2]
    metrics = [json.loads((runs.folder / str(saved) / f"metrics-{r}.json").read_text()) for r in range(world)]
    assert len({m[0]["loss"] for m in metrics}) == 1, "the ranks disagree"
    assert metrics[0][0]["loss"] != metrics[0][1]["loss"], "nothing moved"
    names = [n for n in state if not n.startswith("rng.")]
    assert len(names) == 3 * len([n for n in state if n.startswith("exp_avg.")])
    assert len([n for n in state if n.startswith("rng.") and n.endswith(".torch")]) == saved[0] * saved[1]
    assert all(float(state[n].abs().max()) > 0 for n in names if n.startswith("exp_avg_sq."))
    for cut in ((1, 1, 1), (1, 2, 1)):
        place = runs.folder / f"restore {cut} of {saved}"
        place.mkdir()
        save_file(state, place / "state.safetensors")
        again = run_ranks(place, make_config(cut), [("again", "restore", runs.model)])["again"]
        assert all(torch.equal(state[n], again[n]) for n in names)
