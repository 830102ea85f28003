"""bf16 parameters with fp32 masters, and Megatron's distributed optimizer: real ranks over gloo."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.rank_processes import Scenario, Tensors, run_ranks
from support.tiers import parametrize, selected

from elastic_rl import config
from elastic_rl.config import Config
from elastic_rl.data.tiny_model import make_model_dir

pytestmark = pytest.mark.timeout(1800)  # the first test waits for all groups

KINDS = ("master.", "exp_avg.", "exp_avg_sq.")
GRADIENT, REFERENCE = "grad.", "reference."
NO_CLIPPING, CLIPPING, LR = 1e9, 0.05, 1e-2


@dataclass(frozen=True)
class Group:
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    distributed: bool = False
    dtype: str = "bfloat16"
    max_grad_norm: float = NO_CLIPPING

    def config(self, **model: Any) -> Config:
        return config.parse({
            "seed": 3, "device": {"type": "cpu", "dtype": self.dtype}, "model": model,
            "train": {"max_grad_norm": self.max_grad_norm, "lr": LR, "lr_warmup_steps": 0}, "trainer": {
                "tensor_parallel": self.tp, "pipeline_parallel": self.pp, "data_parallel": self.dp,
                "expert_parallel": self.ep, "distributed_optimizer": self.distributed, "micro_batch_tokens": 200}})


SHARDED, WHOLE = Group(dp=2, distributed=True), Group(dp=2)
FP32_SHARDED, FP32_WHOLE = (Group(dp=2, distributed=d, dtype="float32", max_grad_norm=CLIPPING) for d in (True, False))
ALONE, ALONE_FP32 = Group(max_grad_norm=CLIPPING), Group(dtype="float32")
_SIZES = [Group(tp, pp, dp, distributed=distributed)
          for tp, pp, dp, distributed in product((1, 2), (1, 2), (1, 2), (True, False))]
SOME = [Group(), Group(pp=2)]
RESTORED = [*SOME, *(group for group in _SIZES if group not in SOME)]
"""Each restores what the one before it has saved again, the first one what SHARDED has trained."""
SAVED_EXPERTS = Group(2, 1, 2, 2, distributed=True)
RESTORED_EXPERTS = [Group(1, 2, 2, 2, distributed=True), Group(1, 1, 2, 1, distributed=True), Group()]
WITH_EXPERTS = {"proved_in": "tests/integration/trainer/test_precision.py tests/integration/trainer/test_families.py",
                "why": "a mixture of experts in bf16"}
ON_CHAINS = parametrize("chain", [0, 1], ids=["dense", "experts"], **WITH_EXPERTS)
FP32_TOO = {"proved_in": "tests/integration/trainer/test_precision.py", "why": "the same in fp32"}
FILE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Runs:
    """Results of every group by scenario."""

    folder: Path
    results: dict[Group, dict[str, Tensors]] = field(default_factory=dict)
    saved: list[Tensors] = field(default_factory=list)
    """Dense, and with experts: the state that was saved,"""
    restored: list[dict[Group, Tensors]] = field(default_factory=list)
    """and what each group after it has saved again."""


def make_folder(folder: Path, name: str, dtype: torch.dtype, **model: Any) -> Path:
    """A model whose norms are not all ones, in files of this dtype."""
    made = make_model_dir(folder / f"made-{name}", Group(dtype="float32").config(**model))
    reference = transformers.AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    with torch.no_grad():
        for parameter, p in reference.named_parameters():
            if "norm" in parameter:
                p.copy_(torch.rand(p.shape, generator=torch.Generator().manual_seed(len(parameter))) + 0.5)
    reference.to(dtype).save_pretrained(folder / name)
    return folder / name


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("precision")
    dense = make_folder(folder, "dense", torch.float32, tied_embeddings=True)
    experts = make_folder(folder, "experts", torch.float32, family="qwen3_moe")
    asked = selected(request, "sharded") | selected(request, "resumed")
    halves = {dtype: make_folder(folder, f"dense-{dtype}", dtype, tied_embeddings=True) for dtype in FILE_DTYPES[1:]}
    tokens = torch.randint(0, 16, (7, 11), generator=torch.Generator().manual_seed(1))
    save_file({"tokens": tokens}, folder / "tokens.safetensors")
    runs, count = Runs(folder), 0

    def run(group: Group, *scenarios: Scenario) -> dict[str, Tensors]:
        nonlocal count
        count += 1
        model = {"family": "qwen3_moe"} if scenarios[0].model == experts else {}
        return run_ranks(folder / str(count), group.config(**model), list(scenarios))

    def save(name: str, state: Tensors) -> str:
        save_file(state, folder / f"{name}.safetensors")
        return str(folder / f"{name}.safetensors")

    undisturbed, train = Scenario("undisturbed", "undisturbed", dense), Scenario("train", "train", dense)
    for sharded, whole in ((SHARDED, WHOLE), (FP32_SHARDED, FP32_WHOLE)):
        if sharded is SHARDED or sharded in asked:
            found = run(sharded, undisturbed, train)
            file = save(f"sharded-{sharded.dtype}", found["train"])
            resume, back = (Scenario(kind, kind, dense, file) for kind in ("resume", "go back"))
            runs.results[sharded] = found | run(sharded, resume, back)
            runs.results[whole] = run(whole, undisturbed, *[resume] * (whole is WHOLE))
    runs.results[ALONE_FP32] = run(ALONE_FP32, train, Scenario(
        "refused", "refused", dense, save("bf16", runs.results[SHARDED]["train"])))
    runs.results[ALONE] = run(
        ALONE, Scenario("recorded", "recorded", dense), Scenario("logits", "logits", dense),
        Scenario("refused", "refused", dense, save("fp32", runs.results[ALONE_FP32]["train"])),
        *(Scenario(str(dtype), "load", halves.get(dtype, dense)) for dtype in FILE_DTYPES))
    runs.saved.append(runs.results[SHARDED]["train"])
    chains = [(dense, [group for group in RESTORED if group in selected(request, "restored")])]
    if selected(request, "restored_experts") or 1 in selected(request, "chain"):
        runs.saved.append(run(SAVED_EXPERTS, Scenario("train", "train", experts))["train"])
        chains.append((experts, RESTORED_EXPERTS))
    for (model, groups), state in zip(chains, runs.saved, strict=True):
        restored = dict[Group, Tensors]()
        for i, group in enumerate(groups):
            file = save(f"{model.name}-{i}", state)
            state = restored[group] = run(group, Scenario("restore", "restore", model, file))["restore"]
        runs.restored.append(restored)
    return runs


def of_kind(state: Tensors, kind: str) -> Tensors:
    return {name.removeprefix(kind): t for name, t in state.items() if name.startswith(kind)}


def weights(state: Tensors) -> Tensors:
    return {name: t for name, t in state.items() if not name.startswith((*KINDS, GRADIENT, REFERENCE, "rng."))}


def same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def without_random_states(state: Tensors) -> Tensors:
    return {name: t for name, t in state.items() if not name.startswith("rng.")}


@parametrize("restored", RESTORED, by_default=len(SOME), ids=str,
             proved_in="tests/integration/trainer/test_precision.py",
             why="every combination of sizes, with and without the distributed optimizer")
def test_state_is_restored_bit_for_bit_at_all_sizes_by_both_optimizers(runs: Runs, restored: Group) -> None:
    same(without_random_states(runs.restored[0][restored]), without_random_states(runs.saved[0]))


@parametrize("restored_experts", RESTORED_EXPERTS, by_default=0, ids=str, **WITH_EXPERTS)
def test_state_of_experts_is_restored_bit_for_bit_at_other_sizes(runs: Runs, restored_experts: Group) -> None:
    same(without_random_states(runs.restored[1][restored_experts]), without_random_states(runs.saved[1]))


@ON_CHAINS
def test_saved_state_has_a_master_and_moments_of_each_weight(runs: Runs, chain: int) -> None:
    names = weights(runs.saved[chain]).keys()
    for kind in KINDS:
        found = of_kind(runs.saved[chain], kind)
        assert found.keys() == names and all(t.dtype == torch.float32 and t.any() for t in found.values())


@parametrize("sharded", [SHARDED, FP32_SHARDED], ids=["bf16", "fp32"], **FP32_TOO)
def test_restored_rank_has_the_saved_state_and_one_set_of_moments(runs: Runs, sharded: Group) -> None:
    found, saved = dict(runs.results[sharded]["go back"]), runs.results[sharded]["train"]
    for rank in range(sharded.dp):
        before, when_allocated, moments = found.pop(f"held {rank}").tolist()
        assert (before, when_allocated) == (moments, 0) and moments > 0
    same(without_random_states(found), without_random_states(saved))


@ON_CHAINS
def test_parameters_are_the_rounded_masters(runs: Runs, chain: int) -> None:
    saved = runs.saved[chain]
    masters = of_kind(saved, "master.")
    same(weights(saved), {name: master.bfloat16() for name, master in masters.items()})
    assert any((master != master.bfloat16().float()).any() for master in masters.values())


@pytest.mark.parametrize("dtype", FILE_DTYPES, ids=str)
def test_masters_have_the_precision_of_the_files(runs: Runs, dtype: torch.dtype) -> None:
    name = "dense" if dtype == torch.float32 else f"dense-{dtype}"
    files = load_file(runs.folder / name / "model.safetensors")
    assert {t.dtype for t in files.values()} == {dtype}
    loaded = runs.results[ALONE][str(dtype)]
    same(of_kind(loaded, "master."), {n: t.float() for n, t in files.items()})
    same(weights(loaded), {n: t.bfloat16() for n, t in files.items()})
    assert not any(t.any() for kind in KINDS[1:] for t in of_kind(loaded, kind).values())


def test_distributed_optimizer_changes_no_bit(runs: Runs) -> None:
    same(runs.results[SHARDED]["undisturbed"], runs.results[WHOLE]["undisturbed"])


@parametrize("sharded", [FP32_SHARDED], by_default=0, ids=["fp32"], **FP32_TOO)
def test_clipped_steps_of_the_distributed_optimizer_differ_by_rounding_only(runs: Runs, sharded: Group) -> None:
    """It adds up the norm of the gradient in another order."""
    found, whole = (weights(runs.results[group]["undisturbed"]) for group in (sharded, FP32_WHOLE))
    for name, tensor in whole.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-4)


@parametrize("resumed", [SHARDED, WHOLE, FP32_SHARDED], by_default=2, ids=str, **FP32_TOO)
def test_resumed_training_equals_the_undisturbed_one_bit_for_bit(runs: Runs, resumed: Group) -> None:
    """WHOLE resumes what SHARDED has saved."""
    found = runs.results[resumed]
    same(found["resume"], found["undisturbed"])


def test_fp32_parameters_are_their_own_masters(runs: Runs) -> None:
    state = runs.results[ALONE_FP32]["train"]
    assert not of_kind(state, "master.") and {t.dtype for t in weights(state).values()} == {torch.float32}


@pytest.mark.parametrize(("group", "saved"), [(ALONE, "float32"), (ALONE_FP32, "bfloat16")], ids=str)
def test_state_of_another_dtype_is_refused_by_the_name_of_the_setting(runs: Runs, group: Group, saved: str) -> None:
    text = bytes(runs.results[group]["refused"]["refused 0"].tolist()).decode()
    assert f"saved with device.dtype={saved}, and device.dtype is now {group.dtype}" in text
    assert f"set device.dtype to {saved}" in text


def test_updates_are_those_of_adam_on_fp32_masters(runs: Runs) -> None:
    """Against the formulas of AdamW (arXiv 1711.05101) in float64, from the recorded gradients."""
    recorded = runs.results[ALONE]["recorded"]
    at = [{name.partition("/")[2]: t for name, t in recorded.items() if name.startswith(f"{i}/")} for i in range(4)]
    masters = {name: t.double() for name, t in of_kind(at[0], "master.").items()}
    first = {name: torch.zeros_like(t) for name, t in masters.items()}
    second = {name: torch.zeros_like(t) for name, t in masters.items()}
    for number in range(1, 4):
        grads = {name: t.double() for name, t in of_kind(at[number], GRADIENT).items()}
        norm = float(torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt())
        assert norm > 2 * CLIPPING and grads.keys() == masters.keys()
        for name, grad in grads.items():
            clipped = grad * (CLIPPING / (norm + 1e-6))
            first[name] = 0.9 * first[name] + 0.1 * clipped
            second[name] = 0.999 * second[name] + 0.001 * clipped.square()
            corrected = (second[name] / (1 - 0.999 ** number)).sqrt() + 1e-8
            masters[name] -= LR * first[name] / (1 - 0.9 ** number) / corrected
        for kind, expected in zip(KINDS, (masters, first, second), strict=True):
            for name, tensor in of_kind(at[number], kind).items():
                torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-4,
                                           atol=1e-6 * float(expected[name].abs().max()),
                                           msg=lambda m, n=name, k=kind: f"{k}{n}: {m}")
        same(weights(at[number]), {n: t.bfloat16() for n, t in of_kind(at[number], "master.").items()})


def test_logits_are_those_of_transformers_in_bf16(runs: Runs) -> None:
    tokens = load_file(runs.folder / "tokens.safetensors")["tokens"]
    load = transformers.AutoModelForCausalLM.from_pretrained
    logits = {dtype: load(runs.folder / "dense", dtype=torch.bfloat16).to(dtype)(tokens).logits.detach().float()
              for dtype in (torch.bfloat16, torch.float32)}
    rounding = (logits[torch.bfloat16] - logits[torch.float32]).abs().max()
    found = runs.results[ALONE]["logits"]["logits"]
    assert found.dtype == torch.bfloat16 and 0 < rounding < 0.1
    assert (found.float() - logits[torch.float32]).abs().max() < 3 * rounding
