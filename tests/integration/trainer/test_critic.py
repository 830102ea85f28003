"""The critic's model: its values and gradients against transformers in float64, and groups of different parallel sizes
against each other: real Megatron ranks over gloo."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.batches import in_rows
from support.critic_ranks import with_values
from support.rank_processes import Scenario, Sizes, Tensors, assert_close, run_ranks
from support.tiers import full, parametrize, selected

from elastic_rl import config
from elastic_rl.algorithms.loss_batch import LossBatch
from elastic_rl.algorithms.ppo import clipped_value_loss
from elastic_rl.config import Config
from elastic_rl.data.tiny_model import make_model_dir
from elastic_rl.models.arch import VALUE_HEAD

pytestmark = pytest.mark.timeout(900)  # the first test waits for all groups

ALONE: Sizes = (1, 1, 1, 1)
SAVED: Sizes = (2, 1, 2, 1)
SPLIT: list[Sizes] = [SAVED, (2, 1, 1, 1), (1, 1, 2, 2), (1, 2, 1, 1)]
EXPERTS: list[Sizes] = [ALONE, (2, 1, 1, 1)]
"""With tensor parallelism the layers of a mixture of experts split the positions too."""
MORE_SIZES = {"proved_in": "tests/integration/trainer/test_critic.py tests/integration/trainer/test_megatron.py",
              "why": "a critic at each further parallel size"}


def make_config(sizes: Sizes, family: str = "qwen3") -> Config:
    tp, cp, pp, dp = sizes
    return config.parse({
        "seed": 3, "device": {"type": "cpu"}, "model": {"family": family}, "critic": {"value_clip": 0.5},
        "trainer": {"tensor_parallel": tp, "context_parallel": cp, "pipeline_parallel": pp, "data_parallel": dp,
                    "micro_batch_tokens": 60}})


def with_head(folder: Path, cfg: Config) -> Path:
    """A model with a value head that is not zero, beside the output layer that a critic has no use for."""
    made = make_model_dir(folder, cfg)
    tensors = load_file(made / "model.safetensors")
    hidden = tensors["model.norm.weight"].shape[0]
    head = torch.randn(1, hidden, generator=torch.Generator().manual_seed(5)) * 0.1
    save_file({**tensors, VALUE_HEAD: head}, made / "model.safetensors", {"format": "pt"})
    return made


@dataclass
class Runs:
    model: Path
    bare: Path
    dense: dict[Sizes, dict[str, Tensors]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("critic")
    runs = Runs(with_head(folder / "model", make_config(ALONE)), make_model_dir(folder / "bare", make_config(ALONE)))
    saved, asked = folder / "state.safetensors", {SAVED, ALONE} | selected(request, "sizes")
    for sizes in (SAVED, ALONE, *SPLIT[1:]):
        if sizes in asked:
            scenarios = [Scenario(kind, kind, runs.model) for kind in ("critic", "critic with one sample")]
            scenarios.append(Scenario("train", "critic train", runs.model) if sizes == SAVED else
                             Scenario("restore", "critic restore", runs.model, str(saved)))
            if sizes == ALONE:
                scenarios.append(Scenario("bare", "critic", runs.bare))
            runs.dense[sizes] = run_ranks(folder / str(sizes), make_config(sizes), scenarios)
            if sizes == SAVED:
                save_file(runs.dense[sizes]["train"], saved)
    return runs


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> dict[Sizes, Tensors]:
    folder = tmp_path_factory.mktemp("critic of experts")
    model = with_head(folder / "model", make_config(ALONE, "qwen3_moe"))
    return {sizes: run_ranks(folder / str(sizes), make_config(sizes, "qwen3_moe"),
                             [Scenario("critic", "critic", model)])["critic"] for sizes in EXPERTS}


@pytest.mark.parametrize("scenario", ["critic", "critic with one sample"])
@parametrize("sizes", SPLIT, **MORE_SIZES)
def test_values_and_gradients_do_not_depend_on_the_parallel_sizes(runs: Runs, sizes: Sizes, scenario: str) -> None:
    assert_close(runs.dense[sizes][scenario], runs.dense[ALONE][scenario], sizes)


@full(proved_in="tests/integration/trainer/test_critic.py tests/integration/trainer/test_families.py",
      why="a critic that is a mixture of experts")
def test_mixture_of_experts_gives_the_same_values_at_all_parallel_sizes(experts: dict[Sizes, Tensors]) -> None:
    for sizes in EXPERTS[1:]:
        assert_close(experts[sizes], experts[ALONE], sizes)


def test_values_and_gradients_equal_those_of_transformers_in_float64(runs: Runs) -> None:
    cfg, found = make_config(ALONE), runs.dense[ALONE]["critic"]
    trunk = transformers.AutoModel.from_pretrained(runs.model, dtype=torch.float64).eval()
    head = load_file(runs.model / "model.safetensors")[VALUE_HEAD].double().requires_grad_()
    batch = with_values(cfg, 64)
    mask = in_rows(batch, batch["loss_mask"])[:, 1:]
    # At a position the value is that of the state in which the next token is chosen.
    values = (trunk(in_rows(batch, batch["tokens"])[:, :-1]).last_hidden_state @ head[0])[mask]
    tensors = {name: batch[name].double() for name in ("values", "returns")}
    loss, stats = clipped_value_loss(values, LossBatch(tensors, torch.zeros(len(values), dtype=torch.int64), 1),
                                     cfg.critic)
    loss.mean().backward()
    rows = torch.cat([found[f"values {row}"] for row in range(64)])
    torch.testing.assert_close(rows.double(), values.detach(), rtol=1e-4, atol=1e-5)
    assert float(found["loss"]) == pytest.approx(float(loss.mean()), rel=1e-4)
    assert 0 < float(found["value_clip_fraction"]) == pytest.approx(float(stats["value_clip_fraction"].mean()))
    gradients = {VALUE_HEAD: head.grad, **{f"model.{name}": p.grad for name, p in trunk.named_parameters()}}
    assert {name for name in found if "." in name} == set(gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name].double(), gradient, rtol=1e-3, atol=2e-6,
                                   msg=lambda m, n=name: f"{n}: {m}")


def test_critic_of_a_folder_without_a_head_begins_with_values_of_zero_and_learns(runs: Runs) -> None:
    found = runs.dense[ALONE]["bare"]
    assert not any(found[name].any() for name in found if name.startswith("values "))
    assert found[VALUE_HEAD].any(), "its head gets a gradient"


def test_state_of_a_critic_is_restored_bit_for_bit_at_other_sizes(runs: Runs) -> None:
    state = runs.dense[SAVED]["train"]
    names = [name for name in state if not name.startswith("rng.")]
    assert VALUE_HEAD in names and f"exp_avg.{VALUE_HEAD}" in names and "lm_head.weight" not in names
    for sizes in runs.dense.keys() - {SAVED}:
        restored = runs.dense[sizes]["restore"]
        assert all(torch.equal(state[name], restored[name]) for name in names)
