"""Context parallelism against one rank alone: real Megatron ranks over gloo that share the positions of sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from support.batches import in_rows
from support.megatron_ranks import ATTENDED
from support.rank_processes import Scenario, Sizes, Tensors, assert_close, run_ranks
from support.tiers import parametrize, selected

from elastic_rl import config
from elastic_rl.config import Config
from elastic_rl.data.batch import Batch
from elastic_rl.data.tiny_model import make_model_dir

pytestmark = pytest.mark.timeout(900)  # the first test waits for all groups

ALONE: Sizes = (1, 1, 1, 1)
SPLIT: list[Sizes] = [(1, 2, 1, 1), (2, 2, 1, 1), (1, 2, 2, 1), (1, 2, 1, 2), (1, 3, 1, 1)]
EXPERTS: list[Sizes] = [ALONE, (2, 2, 1, 1), (1, 2, 1, 2)]
MORE_SIZES = {"proved_in": "tests/integration/trainer/test_context_parallel.py "
                           "tests/integration/trainer/test_megatron.py tests/unit/trainer/test_context_positions.py",
              "why": "context parallelism with each further way to split"}
ON_SPLIT = parametrize("sizes", SPLIT, **MORE_SIZES)


def make_config(sizes: Sizes, family: str = "qwen3", *, distributed_optimizer: bool = False) -> Config:
    tp, cp, pp, dp = sizes
    moe = family == "qwen3_moe"
    return config.parse({"seed": 3, "device": {"type": "cpu"}, "train": {"max_grad_norm": 0.05},
                         "model": {"family": family}, "trainer": {
                             "tensor_parallel": tp, "context_parallel": cp, "pipeline_parallel": pp,
                             "data_parallel": dp, "expert_parallel": dp if moe else 1,
                             "distributed_optimizer": distributed_optimizer, "micro_batch_tokens": 100}})


@dataclass
class Runs:
    """Results of every group. Each group starts once and performs all its scenarios."""

    folder: Path
    dense: dict[Sizes, dict[str, Tensors]] = field(default_factory=dict)
    distributed: Tensors = field(default_factory=dict)
    """The state after two steps with the distributed optimizer, whose parts are spread over context-parallel ranks too.
    """
    experts: dict[Sizes, dict[str, Tensors]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("context")
    dense = make_model_dir(folder / "dense", make_config(ALONE))
    experts = make_model_dir(folder / "experts", make_config(ALONE, "qwen3_moe"))
    runs, saved = Runs(folder), folder / "state.safetensors"
    runs.distributed = run_ranks(folder / "distributed", make_config(SPLIT[0], distributed_optimizer=True),
                                 [Scenario("train", "train", dense)])["train"]
    save_file(runs.distributed, saved)
    asked, with_experts = selected(request, "sizes") | {ALONE}, selected(request, "with_experts")
    for sizes in (ALONE, *SPLIT):
        if sizes in asked:
            kinds = ["algorithms", "packed", "one sample", "train"]
            kinds += ["attention"] if sizes == ALONE else ["temperature", "failing"]
            scenarios = [Scenario(kind, kind, dense) for kind in kinds]
            if sizes != ALONE:
                scenarios.append(Scenario("restore", "restore", dense, str(saved)))
            runs.dense[sizes] = run_ranks(folder / str(sizes), make_config(sizes), scenarios)
    for sizes in EXPERTS if with_experts else ():
        if sizes in with_experts | {ALONE}:
            scenarios = [Scenario(kind, kind, experts) for kind in ("gradients", "packed", "one sample")]
            runs.experts[sizes] = run_ranks(folder / f"experts {sizes}", make_config(sizes, "qwen3_moe"), scenarios)
    return runs


@pytest.mark.parametrize("scenario", ["algorithms", "packed", "one sample"])
@ON_SPLIT
def test_gradients_and_metrics_of_every_algorithm_are_those_of_one_rank(runs: Runs, sizes: Sizes, scenario: str
                                                                        ) -> None:
    """Those of losses of whole sequences too, whose tokens are on several ranks. Sequences have several lengths, hardly
    any of which is a multiple of the chunks."""
    assert_close(runs.dense[sizes][scenario], runs.dense[ALONE][scenario], sizes)


@ON_SPLIT
def test_log_probs_are_those_of_transformers(runs: Runs, sizes: Sizes) -> None:
    found = runs.dense[sizes]["temperature"]
    reference = transformers.AutoModelForCausalLM.from_pretrained(runs.folder / "dense", dtype=torch.float32).eval()
    for replica in range(sizes[3]):
        share = Batch({name: found[f"{name} {replica}"] for name in ("tokens", "lengths", "loss_mask")})
        tokens, mask = in_rows(share, share["tokens"]), in_rows(share, share["loss_mask"])
        with torch.no_grad():
            logits = reference(tokens).logits[:, :-1]
        for phase, temperature in (("rl", 0.5), ("sft", 1.0)):
            expected = (logits / temperature).log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
            assert share.loss_tokens
            torch.testing.assert_close(found[f"{phase} {replica}"], expected[mask[:, 1:]], rtol=1e-4, atol=1e-5)


@ON_SPLIT
def test_state_equals_that_of_one_rank_and_is_restored_bit_for_bit(runs: Runs, sizes: Sizes) -> None:
    """Each tensor is saved once, though all ranks of a context-parallel group have it."""
    alone = without_random_states(runs.dense[ALONE]["train"])
    for trained in (runs.dense[sizes]["train"], runs.distributed):
        for name, tensor in alone.items():
            torch.testing.assert_close(trained[name], tensor, rtol=2e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
    saved, restored = without_random_states(runs.distributed), without_random_states(runs.dense[sizes]["restore"])
    assert saved.keys() == restored.keys()
    assert not [name for name, tensor in saved.items() if not torch.equal(restored[name], tensor)]


def without_random_states(state: Tensors) -> Tensors:
    return {name: tensor for name, tensor in state.items() if not name.startswith("rng.")}


@ON_SPLIT
def test_loss_that_fails_on_one_rank_is_raised_on_all(runs: Runs, sizes: Sizes) -> None:
    found, ranks = runs.dense[sizes]["failing"], math.prod(sizes)
    for kind in ("raises", "no_gradient", "not_finite"):
        assert {f"{kind} {rank}" for rank in range(ranks)} <= found.keys()


@pytest.mark.parametrize("scenario", ["gradients", "packed", "one sample"])
@parametrize("with_experts", EXPERTS[1:], by_default=0,
             proved_in="tests/integration/trainer/test_context_parallel.py tests/integration/trainer/test_families.py",
             why="a mixture of experts whose positions are split too")
def test_gradients_of_a_mixture_of_experts_are_those_of_one_rank(runs: Runs, with_experts: Sizes, scenario: str
                                                                 ) -> None:
    """With expert parallelism a replica without samples fills up with micro-batches of its own."""
    assert_close(runs.experts[with_experts][scenario], runs.experts[ALONE][scenario], with_experts)


@pytest.mark.parametrize(("cp", "cp_rank"), ATTENDED)
def test_memory_of_attention_grows_linearly_with_the_length(runs: Runs, cp: int, cp_rank: int) -> None:
    kept = {length: int(runs.dense[ALONE]["attention"][f"{cp} {cp_rank} {length}"]) for length in (1024, 2048)}
    assert kept[2048] <= 2.1 * kept[1024]
    assert cp > 1 or kept[1024], "of several ranks a checkpoint keeps the inputs only, which are not counted"
