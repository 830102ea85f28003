"""Megatron against transformers, and groups of different parallel sizes against each other: real ranks over gloo."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.batches import in_rows
from support.megatron_ranks import NOT_IMPORTED, VARIANTS, with_reference
from support.rank_processes import Scenario, Tensors, assert_reference_is, run_ranks
from support.tiers import parametrize, selected

from elastic_rl import config
from elastic_rl.algorithms.kl import kl_estimate
from elastic_rl.algorithms.registry import ALGOS
from elastic_rl.config import Config
from elastic_rl.data.batch import Batch
from elastic_rl.data.tiny_model import make_model_dir

pytestmark = pytest.mark.timeout(1800)  # the first test waits for all groups

Sizes = tuple[int, int, int]
"""TP, PP, DP."""
ALONE: Sizes = (1, 1, 1)
SAVED: list[Sizes] = [(2, 1, 1), (2, 2, 1)]
"""Groups whose state the groups of RESTORED restore."""
RESTORED: list[Sizes] = [ALONE, (1, 2, 2)]
GROUPS: list[Sizes] = [*SAVED, *RESTORED, (1, 1, 2)]
COMPARED = ("hf16", "hf13", "gradients", "train", "algorithms", "padded", "corrected", "failing", "refusing",
            "temperature")
"""Results of every group that are compared with those of one rank, or with transformers'."""
MORE_SIZES = {"proved_in": "tests/integration/trainer/test_megatron.py tests/integration/trainer/test_critic.py "
                           "tests/integration/trainer/test_families.py", "why": "each further parallel size"}
ON_SPLIT = parametrize("split", [sizes for sizes in GROUPS if sizes != ALONE], **MORE_SIZES)
ON_ALL = parametrize("sizes", [ALONE, *(sizes for sizes in GROUPS if sizes != ALONE)], **MORE_SIZES)
FREE, HELD = "drift 0", "drift 20"
"""Scenarios of steps without and with a large coefficient of the divergence from the reference policy."""
ON_ONE_RANK = ("imports", "parts", "cuts", "reference", "signs of life", "minibatches")
"""Further results, whose rules are not about parallel sizes."""


def make_config(sizes: Sizes, **trainer: int) -> Config:
    tp, pp, dp = sizes
    return config.parse({"seed": 3, "device": {"type": "cpu"}, "train": {"max_grad_norm": 0.05}, "trainer": {
        "tensor_parallel": tp, "pipeline_parallel": pp, "data_parallel": dp, **trainer}})


def make_reference(folder: Path, source: Path, vocab: int) -> torch.nn.Module:
    """A model whose norms are not all ones (which would hide a skipped norm), with ``vocab`` tokens."""
    model = transformers.Qwen3ForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
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
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("megatron")
    model = make_model_dir(folder / "model", make_config(GROUPS[0]))
    references = {vocab: make_reference(folder, model, vocab) for vocab in (16, 13)}
    tokens = torch.randint(0, 16, (7, 11), generator=torch.Generator().manual_seed(1))
    save_file({"tokens": tokens}, folder / "tokens.safetensors")
    runs = Runs(folder, tokens, references)
    kinds = {"hf16": "logits", "hf13": "logits"}
    in_full, recomputed = {ALONE} | selected(request, "sizes"), selected(request, "recomputed")
    held = selected(request, "held")
    asked = in_full | recomputed | held | selected(request, "split")
    for sizes in GROUPS:
        if sizes not in asked:
            continue
        names = [*COMPARED, *ON_ONE_RANK] if sizes in in_full else list(COMPARED)
        names += [*["recompute"] * (sizes in recomputed), *[FREE, HELD] * (sizes in held)]
        scenarios = [Scenario(name, kinds.get(name, name), folder / ("hf13" if name in ("hf13", "padded") else "hf16"))
                     for name in names]
        scenarios += [Scenario(f"restore {saved}", "restore", folder / "hf16", str(folder / f"{saved}.safetensors"))
                      for saved in SAVED if saved in runs.results and sizes in RESTORED]
        cfg = make_config(sizes, micro_batch_tokens=200, packing=False)
        runs.results[sizes] = run_ranks(folder / str(sizes), cfg, scenarios)
        if sizes in SAVED:
            save_file(runs.results[sizes]["train"], folder / f"{sizes}.safetensors")
    return runs


def test_rank_on_a_cpu_imports_neither_a_compiler_nor_loggers(runs: Runs) -> None:
    """Megatron imports them where they are installed, and has wrapped functions by torch.compile before it can be told.
    """
    found = runs.results[ALONE]["imports"]
    assert found.keys() == set(NOT_IMPORTED) and not [name for name, imported in found.items() if imported]


@ON_SPLIT
@pytest.mark.parametrize("vocab", [16, 13])
def test_logits_equal_transformers_and_exported_weights_equal_imported_ones(runs: Runs, vocab: int, split: Sizes
                                                                            ) -> None:
    """With 13 tokens the vocabulary is padded at TP=2."""
    reference, result = runs.references[vocab], runs.results[split][f"hf{vocab}"]
    with torch.no_grad():
        expected = reference(runs.tokens.clamp(max=vocab - 1)).logits
    assert (result["logits"][..., :vocab] - expected).abs().max() < 1e-5
    weights = dict(reference.named_parameters())
    assert set(weights) == set(result) - {"logits"}
    assert all(torch.equal(result[name], weights[name]) for name in weights)


@ON_SPLIT
def test_log_probs_use_the_samplers_temperature_except_in_the_supervised_phase(runs: Runs, split: Sizes) -> None:
    found = runs.results[split]["temperature"]
    for replica in range(split[2]):
        share = Batch({name: found[f"{name} {replica}"] for name in ("tokens", "lengths", "loss_mask")})
        tokens, mask = in_rows(share, share["tokens"]), in_rows(share, share["loss_mask"])
        with torch.no_grad():
            logits = runs.references[16](tokens).logits[:, :-1]
        for phase, temperature in (("rl", 0.5), ("sft", 1.0)):
            expected = (logits / temperature).log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
            assert share.loss_tokens
            torch.testing.assert_close(found[f"{phase} {replica}"], expected[mask[:, 1:]], rtol=1e-4, atol=1e-5)


@ON_SPLIT
def test_loss_and_gradients_do_not_depend_on_the_parallel_sizes(runs: Runs, split: Sizes) -> None:
    alone = runs.results[ALONE]["gradients"]
    for name, expected in alone.items():
        torch.testing.assert_close(runs.results[split]["gradients"][name], expected, rtol=1e-4, atol=1e-6,
                                   msg=lambda m, n=name: f"{n} at TP, PP, DP = {split}: {m}")
    assert all(float(g.abs().max()) > 0 for g in alone.values()), "a parameter got no gradient"


def assert_equal(runs: Runs, scenario: str, tensors: Tensors, sizes: Sizes) -> None:
    """The tensors of a group of these sizes are the expected ones, up to rounding."""
    for name, expected in tensors.items():
        torch.testing.assert_close(runs.results[sizes][scenario][name], expected, rtol=2e-4, atol=2e-6,
                                   msg=lambda m, n=name: f"{n} at TP, PP, DP = {sizes}: {m}")


def variants(runs: Runs) -> set[str]:
    return {name.partition("/")[0] for name in runs.results[ALONE]["algorithms"]}


@pytest.mark.parametrize("scenario", ["algorithms", "padded"])
@ON_SPLIT
def test_gradients_and_metrics_of_every_algorithm_do_not_depend_on_the_parallel_sizes(
        runs: Runs, scenario: str, split: Sizes) -> None:
    """With 13 tokens the vocabulary is padded at TP=2."""
    if scenario == "algorithms":
        assert variants(runs) >= {name for name, spec in ALGOS.items() if spec.advantages is not None}
    assert_equal(runs, scenario, runs.results[ALONE][scenario], split)


@ON_ALL
def test_gradients_and_metrics_of_parts_are_those_of_the_whole_step(runs: Runs, sizes: Sizes) -> None:
    assert_equal(runs, "parts", runs.results[ALONE]["algorithms"], sizes)


def test_gradients_of_every_algorithm_differ_from_those_of_grpo(runs: Runs) -> None:
    alone = runs.results[ALONE]["algorithms"]
    weight = "lm_head.weight"
    same = {variant for variant in variants(runs) if torch.equal(alone[f"{variant}/{weight}"], alone[f"grpo/{weight}"])}
    # These differ from it in their advantages only.
    assert same == {"grpo", "dapo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "grpo, token aggregate"}


@ON_ALL
def test_gradients_and_logprobs_do_not_depend_on_the_micro_batches_and_packing(runs: Runs, sizes: Sizes) -> None:
    """Up to rounding: sums are taken in another order, and the attention of packed rows is another kernel."""
    alone, cuts = runs.results[ALONE], runs.results[sizes]["cuts"]
    names = {name.partition("/")[0] for name in cuts}
    assert len(names) == 4
    for full_name, tensor in cuts.items():
        cut, _, name = full_name.partition("/")
        expected = (alone["cuts"][f"small micro-batches/{name}"] if name.startswith("logprobs")
                    else alone["algorithms"][f"gspo with all/{name}"])
        torch.testing.assert_close(tensor, expected, rtol=2e-4, atol=2e-6,
                                   msg=lambda m, n=full_name: f"{n} at TP, PP, DP = {sizes}: {m}")
    found = [{name.removeprefix(f"{cut}/") for name in cuts if name.startswith(f"{cut}/")} for cut in names]
    assert all(of_cut == found[0] for of_cut in found)
    assert len([name for name in found[0] if name.startswith("logprobs ")]) == 64
    for name in found[0]:
        assert torch.equal(cuts[f"packed again/{name}"], cuts[f"packed/{name}"]), f"{name} is not reproducible"


@ON_ALL
def test_step_with_minibatches_makes_an_update_with_each_of_them_in_every_pass(runs: Runs, sizes: Sizes) -> None:
    found = runs.results[sizes]["minibatches"]
    names = [name.removeprefix("split/") for name in found if name.startswith("split/")]
    assert len(names) * 2 == len(found)
    for name in names:
        assert torch.equal(found[f"split/{name}"], found[f"one by one/{name}"]), name
    assert not torch.equal(found["split/lm_head.weight"], load_file(runs.folder / "hf16/model.safetensors")[
        "lm_head.weight"])


@ON_ALL
def test_each_rank_reports_every_micro_batch_and_their_end(runs: Runs, sizes: Sizes) -> None:
    """On every stage: a step may take an hour, and a rank without progress counts as hung."""
    tp, pp, dp = sizes
    found = runs.results[sizes]["signs of life"]
    for rank in range(tp * pp * dp):
        count = int(found[f"micro-batches {rank}"])
        assert count > 2
        one_pass = [1, *[1] * count, 0, 0]  # before the first one too, and then that it waits, and that it goes on
        updates = make_config(sizes).train.updates_per_step
        assert found[f"reports {rank}"].tolist() == [*one_pass, -1, *one_pass * updates]


@parametrize("recomputed", [ALONE, (2, 2, 1)], **MORE_SIZES)
@pytest.mark.parametrize("packed", ["", ", packed"])
def test_recomputed_activations_are_not_kept_and_give_the_same_gradients_bit_for_bit(runs: Runs, recomputed: Sizes,
                                                                                     packed: str) -> None:
    found, (tp, pp, dp) = runs.results[recomputed]["recompute"], recomputed
    modes = {mode: {name.removeprefix(f"{mode}{packed}/"): t for name, t in found.items()
                    if name.startswith(f"{mode}{packed}/")} for mode in ("none", "selective", "full")}
    for name, expected in modes["none"].items():
        if not name.startswith("saved"):
            assert all(torch.equal(of_mode[name], expected) for of_mode in modes.values()), name
    for rank in range(tp * pp * dp):
        kept = {mode: float(of_mode[f"saved {rank}"]) for mode, of_mode in modes.items()}
        assert kept["full"] < kept["selective"] < kept["none"]
        assert kept["full"] < kept["none"] / 4


@ON_SPLIT
def test_loss_that_fails_on_one_rank_fails_the_update_on_every_rank(runs: Runs, split: Sizes) -> None:
    found, ranks = runs.results[split]["failing"], range(split[0] * split[1] * split[2])
    for loss, named in (("raises", "SystemExit: the loss of the test"), ("no_gradient", "does not require grad"),
                        ("not_finite", "not finite")):
        texts = {bytes(found[f"{loss} {rank}"].tolist()).decode() for rank in ranks}
        assert len(texts) == 1 and named in texts.pop()
    assert_equal(runs, "failing", runs.results[ALONE]["gradients"], split)


@ON_ALL
def test_step_that_cannot_be_computed_is_refused_on_every_rank_and_leaves_the_state_as_it_is(runs: Runs, sizes: Sizes
                                                                                             ) -> None:
    found, world = runs.results[sizes]["refusing"], sizes[0] * sizes[1] * sizes[2]
    expected = {"update": "StepRefused: the norm of the gradient is (inf|nan)",
                "check": "StepRefused: the norm of the gradient is (inf|nan)",
                "apply": "StepRefused: the norm of the gradient is (inf|nan)",
                "second part": "PluginFailed: .*the loss of the test"}
    if sizes[:2] == (1, 1):  # else a rank that lacks memory leaves the others in a collective
        expected |= {name: f"StepRefused: rank {world - 1} has too little memory" for name in (
            "memory", "memory of a pass")}
    for name, text in expected.items():
        told = {bytes(found[f"{name} {rank}"].tolist()).decode() for rank in range(world)}
        assert len(told) == 1 and re.match(text, told.pop()), name
        for rank in range(world):
            assert bool(found[f"same after {name} {rank}"]), f"{name} changed rank {rank}"
            assert found[f"left of {name} {rank}"].tolist() == [0, 1], "a part is left, or an update was made"
    for rank in range(world):
        assert bool(found[f"same after a good check {rank}"]) and bool(found[f"changed {rank}"])


@ON_ALL
def test_gradient_of_the_divergence_equals_that_of_transformers_in_float64(runs: Runs, sizes: Sizes) -> None:
    batch, model = with_reference(make_config(sizes), 16), copy.deepcopy(runs.references[16]).double()
    mask, tokens = in_rows(batch, batch["loss_mask"])[:, 1:], in_rows(batch, batch["tokens"])
    logprobs = model(tokens[:, :-1]).logits.log_softmax(dim=-1).gather(2, tokens[:, 1:, None]).squeeze(2)[mask]
    coefficient = VARIANTS["grpo with kl_coef"]["kl_coef"]
    (coefficient * kl_estimate(logprobs, batch["ref_logprobs"].double(), "k3").mean()).backward()
    found = runs.results[sizes]["algorithms"]
    for name, parameter in model.named_parameters():
        difference = found[f"grpo with kl_coef/{name}"].double() - found[f"grpo/{name}"].double()
        torch.testing.assert_close(difference, parameter.grad, rtol=1e-3, atol=2e-6,
                                   msg=lambda m, n=name: f"{n}: {m}")
    assert float(found["grpo with kl_coef/kl_reference"]) > 0.01


@ON_ALL
def test_gradient_of_the_divergence_from_a_teacher_equals_that_of_transformers_in_float64(runs: Runs, sizes: Sizes
                                                                                          ) -> None:
    batch, model = with_reference(make_config(sizes), 16), copy.deepcopy(runs.references[16]).double()
    mask, settings = in_rows(batch, batch["loss_mask"])[:, 1:], VARIANTS["grpo with teacher_top_k"]
    p = model(in_rows(batch, batch["tokens"])[:, :-1]).logits.softmax(dim=-1)[mask]
    ids, log_q = batch["teacher_top_ids"].long(), batch["teacher_top_logprobs"].double()
    top = torch.where(ids >= 0, p.gather(1, ids.clamp(min=0)), 0.0)
    rest, rest_q = 1 - top.sum(1), 1 - torch.where(ids >= 0, log_q.exp(), 0.0).sum(1)
    divergence = ((top * (top.clamp(min=1e-8).log() - log_q)).sum(1) + rest * (rest.log() - rest_q.log())).mean()
    (settings["teacher_coef"] * divergence).backward()
    found = runs.results[sizes]["algorithms"]
    for name, parameter in model.named_parameters():
        difference = found[f"grpo with teacher_top_k/{name}"].double() - found[f"grpo/{name}"].double()
        torch.testing.assert_close(difference, parameter.grad, rtol=1e-3, atol=2e-6,
                                   msg=lambda m, n=name: f"{n}: {m}")
    assert float(found["grpo with teacher_top_k/kl_teacher_top"]) == pytest.approx(float(divergence.detach()), rel=1e-3)


@ON_ALL
def test_pass_of_the_reference_is_bit_equal_and_changes_no_weight(runs: Runs, sizes: Sizes) -> None:
    found = runs.results[sizes]["reference"]
    for rank in range(sizes[0] * sizes[1] * sizes[2]):
        assert found[f"same bits {rank}"].all()
    assert abs(float(found["kl_reference 1"])) < 1e-9, "the policy is the reference"
    assert float(found["kl_reference 2"]) > 1e-9
    assert_equal(runs, "reference", {name: runs.results[ALONE]["reference"][name] for name in (
        "loss 1", "grad_norm 1", "loss 2", "ratio_mean 2")}, sizes)


@parametrize("held", GROUPS, by_default=0, proved_in="tests/integration/trainer/test_megatron.py",
             why="what the divergence, whose gradient is compared with transformers', does over ten steps")
def test_large_coefficient_holds_the_policy_near_its_reference(runs: Runs, held: Sizes) -> None:
    free, near = (float(runs.results[held][kind]["kl_reference"]) for kind in (FREE, HELD))
    assert 0 < near < 0.2 * free


@ON_SPLIT
def test_corrected_step_does_not_depend_on_the_parallel_sizes(runs: Runs, split: Sizes) -> None:
    alone = runs.results[ALONE]["corrected"]
    assert_equal(runs, "corrected", alone, split)  # metrics only: Adam amplifies the rounding of small gradients
    assert 0 < float(alone["tis_capped_fraction"]) < 1
    assert float(alone["ratio_mean"]) != 1, "the second update is off-policy"


@parametrize("split", SAVED, **MORE_SIZES)
def test_state_saved_by_one_group_is_restored_bit_for_bit_at_other_sizes(runs: Runs, split: Sizes) -> None:
    state = runs.results[split]["train"]
    world = split[0] * split[1] * split[2]
    metrics = [json.loads((runs.folder / str(split) / f"metrics-train-{r}.json").read_text()) for r in range(world)]
    assert len({m[0]["loss"] for m in metrics}) == 1, "the ranks disagree"
    assert metrics[0][0]["loss"] != metrics[0][1]["loss"], "the weights did not change"
    names = [n for n in state if not n.startswith("rng.")]
    assert len(names) == 4 * len([n for n in state if n.startswith("exp_avg.")])
    assert_reference_is(runs.folder / "hf16", state)
    assert len([n for n in state if n.startswith("rng.") and n.endswith(".torch")]) == split[0] * split[1]
    assert all(float(state[n].abs().max()) > 0 for n in names if n.startswith("exp_avg_sq."))
    for sizes in runs.results.keys() & set(RESTORED):
        restored = runs.results[sizes][f"restore {split}"]
        assert all(torch.equal(state[n], restored[n]) for n in names)
