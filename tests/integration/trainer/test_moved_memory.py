"""Steps between which all that a rank keeps is moved to the host and back are the same bits: real ranks over gloo."""

from __future__ import annotations

import pytest
import torch
from support.rank_processes import Scenario, Tensors, run_ranks
from support.tiers import parametrize, selected

from elastic_rl import config
from elastic_rl.config import Config
from elastic_rl.data.tiny_model import make_model_dir

pytestmark = pytest.mark.timeout(1800)  # the first test waits for all groups

GROUPS = [(dtype, distributed) for dtype in ("bfloat16", "float32") for distributed in (True, False)]
"""With the distributed optimizer fp32 masters are views of the parameters' buffer; without it they are the parameters.
"""


def make_config(dtype: str, distributed: bool) -> Config:
    return config.parse({"seed": 3, "device": {"type": "cpu", "dtype": dtype}, "train": {"lr_warmup_steps": 0},
                         "trainer": {"data_parallel": 2, "distributed_optimizer": distributed}})


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
            ) -> dict[tuple[str, bool], dict[str, Tensors]]:
    folder = tmp_path_factory.mktemp("moved")
    model = make_model_dir(folder / "model", make_config("float32", False))
    return {group: run_ranks(folder / f"{group[0]}-{group[1]}", make_config(*group),
                             [Scenario("train", "train", model), Scenario("moved", "moved", model)])
            for group in selected(request, "group")}


@parametrize("group", GROUPS, proved_in="tests/integration/trainer/test_moved_memory.py",
             why="each further dtype and optimizer")
def test_steps_with_moves_in_between_are_the_same_bits(
        results: dict[tuple[str, bool], dict[str, Tensors]], group: tuple[str, bool]) -> None:
    expected, found = results[group]["train"], results[group]["moved"]
    assert found.keys() == expected.keys() and any("exp_avg" in name for name in expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
