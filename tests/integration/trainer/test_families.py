"""Every model family in Megatron against transformers, at several parallel sizes: real ranks over gloo."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.rank_processes import Scenario, Tensors, assert_reference_is, run_ranks
from support.tiers import parametrize, selected

from elastic_rl import config
from elastic_rl.config import Config
from elastic_rl.data.tiny_model import make_model_dir

pytestmark = pytest.mark.timeout(900)  # the first test waits for all groups

Sizes = tuple[int, int, int, int]
"""TP, PP, DP, EP."""
ALONE: Sizes = (1, 1, 1, 1)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"family": "llama"}, {"rope_parameters": LLAMA3}),
    "qwen2": ({"family": "qwen2", "tied_embeddings": True}, {}),
    "qwen3": ({"tied_embeddings": True}, {}),
    "moe": ({"family": "qwen3_moe"}, {}),
    "moe-unnormalised": ({"family": "qwen3_moe", "tied_embeddings": True}, {"norm_topk_prob": False}),
}
"""Settings of the small model, and what is changed in its config.json."""
DENSE, EXPERTS = ["llama", "qwen2", "qwen3"], ["moe", "moe-unnormalised"]
GROUPS: dict[Sizes, list[str]] = {
    (2, 1, 2, 2): EXPERTS, (2, 2, 1, 1): DENSE + EXPERTS, (1, 2, 2, 2): EXPERTS, ALONE: DENSE + EXPERTS,
    (1, 2, 1, 1): DENSE + EXPERTS}
"""Groups with the models that they run. Those of ``SAVED`` come before those that restore their state."""
SAVED: dict[Sizes, list[str]] = {(2, 1, 2, 2): EXPERTS, (2, 2, 1, 1): DENSE + EXPERTS}
RESTORED: list[Sizes] = [ALONE, (1, 2, 2, 2), (1, 2, 1, 1)]
FIRST = ((2, 1, 2, 2), "moe")
"""The group and its model that the default tier compares with one rank."""
BALANCED, TWICE = (ALONE, 0.05), (ALONE, 0.1)
SPLIT_BALANCED: list[tuple[Sizes, float]] = [((2, 1, 1, 1), 0.05), ((1, 2, 1, 1), 0.05), ((2, 2, 1, 1), 0.05)]
"""Groups with a coefficient of the load-balancing loss."""
FEW: list[Sizes] = [(1, 1, 2, 1), (1, 2, 2, 1)]
"""Groups with a load-balancing loss that get a batch of one sample, which is less than they have replicas."""
MORE_SIZES = {"proved_in": "tests/integration/trainer/test_families.py tests/integration/trainer/test_megatron.py",
              "why": "each model at further parallel sizes"}


def make_config(sizes: Sizes, model: dict[str, Any] | None = None, aux: float = 0.0) -> Config:
    tp, pp, dp, ep = sizes
    return config.parse({"seed": 3, "device": {"type": "cpu"}, "train": {"max_grad_norm": 0.05},
                         "model": {**(model or {}), **({} if model else {"family": "qwen3_moe"})}, "trainer": {
                             "tensor_parallel": tp, "pipeline_parallel": pp, "data_parallel": dp,
                             "expert_parallel": ep, "micro_batch_tokens": 200, "moe_aux_loss_coef": aux}})


def make_reference(folder: Path, name: str) -> torch.nn.Module:
    """A model whose norms are not all ones and whose biases are not zero, which would hide a skipped one."""
    settings, changes = MODELS[name]
    made = make_model_dir(folder / f"made-{name}", make_config(ALONE, settings))
    raw = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**raw, **changes}))
    model = transformers.AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter, p in model.named_parameters():
            if "norm" in parameter or "bias" in parameter:
                p.copy_(torch.rand(p.shape, generator=torch.Generator().manual_seed(len(parameter))) + 0.5)
            elif "mlp.gate.weight" in parameter:
                p.mul_(20)  # so that tokens go to different experts with different weights
    model.save_pretrained(folder / name)
    return model


@dataclass
class Runs:
    """Results of every group. Each group starts once and performs all its scenarios."""

    folder: Path
    tokens: torch.Tensor
    references: dict[str, torch.nn.Module]
    results: dict[Sizes, dict[str, Tensors]] = field(default_factory=dict)
    balanced: dict[tuple[Sizes, float], Tensors] = field(default_factory=dict)
    recomputed: dict[tuple[Sizes, float], Tensors] = field(default_factory=dict)
    few: dict[Sizes, Tensors] = field(default_factory=dict)

    def metrics(self, sizes: Sizes, name: str) -> list[dict[str, float]]:
        return json.loads((self.folder / str(sizes) / f"metrics-train {name}-0.json").read_text())


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("families")
    references = {name: make_reference(folder, name) for name in MODELS}
    # An odd length: with sequence parallelism sequences are padded.
    tokens = torch.randint(0, 16, (7, 11), generator=torch.Generator().manual_seed(1))
    save_file({"tokens": tokens}, folder / "tokens.safetensors")
    runs = Runs(folder, tokens, references)
    asked = selected(request, "sizes", "name") | {(ALONE, name) for name in MODELS}
    compared = {name for sizes, name in asked if sizes != ALONE}
    for sizes, models in GROUPS.items():
        chosen = [name for name in models if (sizes, name) in asked]
        scenarios = [Scenario(f"{kind} {name}", kind, folder / name) for name in chosen
                     for kind in ("logits", "gradients", "packed", *["train"] * (name in compared))]
        scenarios += [Scenario(f"restore {saved} {name}", "restore", folder / name,
                               str(folder / f"{saved}-{name}.safetensors"))
                      for saved in SAVED if sizes in RESTORED for name in chosen if (saved, name) in asked]
        if scenarios:
            runs.results[sizes] = run_ranks(folder / str(sizes), make_config(sizes), scenarios)
        for name in chosen if sizes in SAVED else ():
            save_file(runs.results[sizes][f"train {name}"], folder / f"{sizes}-{name}.safetensors")
    recomputed = selected(request, "recomputed")
    for group in (BALANCED, TWICE, *SPLIT_BALANCED):
        if group in {BALANCED, TWICE} | selected(request, "balanced") | recomputed:
            kinds = ["gradients", *["recompute"] * (group in recomputed)]
            found = run_ranks(folder / str(group), make_config(group[0], aux=group[1]),
                              [Scenario(kind, kind, folder / "moe") for kind in kinds])
            runs.balanced[group] = found["gradients"]
            runs.recomputed[group] = found.get("recompute", {})
    one = Scenario("one sample", "one sample", folder / "moe")
    for sizes in {ALONE} | selected(request, "few"):
        runs.few[sizes] = run_ranks(folder / f"{sizes} few", make_config(sizes, aux=0.01), [one])["one sample"]
    return runs


CASES = [FIRST, *((sizes, name) for sizes, models in GROUPS.items() for name in models
                  if sizes != ALONE and (sizes, name) != FIRST)]
ON_CASES = parametrize(("sizes", "name"), CASES, **MORE_SIZES)
ALONE_FIRST = parametrize(("sizes", "name"), [*((ALONE, name) for name in MODELS), *CASES],
                          by_default=len(MODELS) + 1, **MORE_SIZES)


@ALONE_FIRST
def test_logits_equal_transformers_and_exported_weights_equal_imported_ones(runs: Runs, sizes: Sizes, name: str
                                                                            ) -> None:
    result = runs.results[sizes][f"logits {name}"]
    with torch.no_grad():
        expected = runs.references[name](runs.tokens).logits
    assert (result["logits"] - expected).abs().max() < 1e-5
    weights = load_file(runs.folder / name / "model.safetensors")
    assert set(weights) == set(result) - {"logits"}
    assert all(torch.equal(result[tensor], weights[tensor]) for tensor in weights)
    assert ("lm_head.weight" in weights) == (not MODELS[name][0].get("tied_embeddings", False))


@ON_CASES
def test_loss_and_gradients_do_not_depend_on_the_parallel_sizes(runs: Runs, sizes: Sizes, name: str) -> None:
    alone, found = (runs.results[s][f"gradients {name}"] for s in (ALONE, sizes))
    for tensor, expected in alone.items():
        torch.testing.assert_close(found[tensor], expected, rtol=1e-4, atol=1e-6,
                                   msg=lambda m, n=tensor: f"{n}: {m}")


@ALONE_FIRST
def test_packed_sequences_give_the_gradients_of_padded_ones(runs: Runs, sizes: Sizes, name: str) -> None:
    """Replicas have different numbers of micro-batches, and with sequence parallelism rows are filled up."""
    expected, found = runs.results[ALONE][f"gradients {name}"], runs.results[sizes][f"packed {name}"]
    assert all(float(g.abs().max()) > 0 for g in expected.values()), "a parameter got no gradient"
    for tensor in expected:
        torch.testing.assert_close(found[tensor], expected[tensor], rtol=1e-4, atol=1e-6,
                                   msg=lambda m, n=tensor: f"{n}: {m}")


@ON_CASES
def test_two_steps_give_the_same_weights_at_all_parallel_sizes(runs: Runs, sizes: Sizes, name: str) -> None:
    """Adam, the norm of the gradient and its clipping see each parameter once: copies of tied embeddings and experts on
    other ranks included."""
    expected, found = (runs.metrics(s, name) for s in (ALONE, sizes))
    for mine, others in zip(found, expected, strict=True):
        assert mine["loss"] == pytest.approx(others["loss"], abs=1e-5)
        assert mine["grad_norm"] == pytest.approx(others["grad_norm"], rel=1e-3)
    alone = runs.results[ALONE][f"train {name}"]
    for tensor, value in runs.results[sizes][f"train {name}"].items():
        if not tensor.startswith(("rng.", "exp_avg")):
            assert (value - alone[tensor]).abs().max() < 1e-4, tensor


@parametrize(("sizes", "name"), [(sizes, name) for sizes, name in CASES if sizes in SAVED], **MORE_SIZES)
def test_state_saved_by_one_group_is_restored_bit_for_bit_at_other_sizes(runs: Runs, sizes: Sizes, name: str) -> None:
    state = runs.results[sizes][f"train {name}"]
    names = [n for n in state if not n.startswith("rng.")]
    assert len(names) == 4 * len([n for n in state if n.startswith("exp_avg.")])
    assert_reference_is(runs.folder / name, state)
    assert all(float(state[n].abs().max()) > 0 for n in names if n.startswith("exp_avg_sq."))
    restored = [runs.results[other][f"restore {sizes} {name}"] for other in RESTORED
                if f"restore {sizes} {name}" in runs.results.get(other, {})]
    assert restored
    for found in restored:
        assert set(names) <= set(found) and all(torch.equal(state[n], found[n]) for n in names)


def test_load_balancing_loss_is_proportional_to_its_coefficient(runs: Runs) -> None:
    plain, once, twice = runs.results[ALONE]["gradients moe"], runs.balanced[BALANCED], runs.balanced[TWICE]
    router = "model.layers.0.mlp.gate.weight"
    assert (once[router] - plain[router]).abs().max() > 1e-4
    for name in plain:
        torch.testing.assert_close(twice[name] - plain[name], 2 * (once[name] - plain[name]), rtol=1e-3, atol=1e-6)


@parametrize("balanced", SPLIT_BALANCED, **MORE_SIZES)
def test_load_balancing_loss_does_not_depend_on_tp_and_pp(runs: Runs, balanced: tuple[Sizes, float]) -> None:
    for name, expected in runs.balanced[BALANCED].items():
        torch.testing.assert_close(runs.balanced[balanced][name], expected, rtol=1e-4, atol=1e-6)


@parametrize("few", FEW, **MORE_SIZES)
def test_replica_without_samples_takes_part_in_a_step_with_a_load_balancing_loss(runs: Runs, few: Sizes) -> None:
    expected, found = runs.few[ALONE], runs.few[few]
    assert found.keys() == expected.keys() and expected["logprobs"].any()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-4 if name.startswith("trained ") else 1e-6,
                                   msg=lambda m, n=name: f"{n}: {m}")


@parametrize("recomputed", [BALANCED, TWICE, *SPLIT_BALANCED], **MORE_SIZES)
@pytest.mark.parametrize("packed", ["", ", packed"])
def test_load_balancing_loss_counts_once_when_activations_are_recomputed(runs: Runs, recomputed: tuple[Sizes, float],
                                                                         packed: str) -> None:
    found = runs.recomputed[recomputed]
    names = [n.removeprefix(f"none{packed}/") for n in found if n.startswith(f"none{packed}/") and "/saved" not in n]
    assert any("mlp.gate" in name for name in names)
    for name in names:
        for mode in ("selective", "full"):
            assert torch.equal(found[f"{mode}{packed}/{name}"], found[f"none{packed}/{name}"]), name
