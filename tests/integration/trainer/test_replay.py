"""A step's file is trained from again by real ranks, without etcd, engines and a cluster: other parallel sizes give the
same, and what fails says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.megatron_ranks import synthetic
from support.tiers import full

from elastic_rl import config
from elastic_rl.config import Config
from elastic_rl.data.step_file import StepKeeper, path_of
from elastic_rl.data.tiny_model import make_model_dir
from elastic_rl.errors import ConfigError, TrainerFailed
from elastic_rl.trainer import replay

STEP = 4


def settings(folder: Path, **trainer: Any) -> Config:
    return config.parse({"job": "j", "run_dir": str(folder), "seed": 3, "device": {"type": "cpu"},
                         "train": {"minibatches": 2}, "trainer": {"data_parallel": 1, **trainer}})


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and the file of a step."""
    folder = tmp_path_factory.mktemp("kept")
    cfg = settings(folder)
    make_model_dir(folder / "model", cfg)
    batch = synthetic(cfg, 32)
    StepKeeper([STEP], folder, "j").keep(STEP, batch.with_tensors(numbers=torch.arange(batch.samples)), [1])
    return folder


def replayed(kept: Path, logs: Path, **trainer: Any) -> dict[str, float]:
    logs.mkdir()
    return replay.run(settings(kept, **trainer), {STEP: path_of(kept, STEP)}, kept / "model", logs, timeout_s=300)[0]


def assert_same(found: dict[str, float], other: dict[str, float]) -> None:
    assert found["tokens"] == other["tokens"] > 0 and found["grad_norm"] > 0
    for name in ("loss", "grad_norm", "logprob_diff_max", "lr"):
        assert found[name] == pytest.approx(other[name], rel=2e-4, abs=2e-6), name


def test_step_made_again_is_the_same_on_two_replicas_as_on_one(kept: Path, tmp_path: Path) -> None:
    assert_same(replayed(kept, tmp_path / "two", data_parallel=2), replayed(kept, tmp_path / "one"))


@full(proved_in="tests/integration/trainer/test_replay.py tests/integration/trainer/test_megatron.py",
      why="further parallel sizes")
@pytest.mark.parametrize("sizes", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}])
def test_step_made_again_is_the_same_on_further_sizes(kept: Path, tmp_path: Path, sizes: dict[str, int]) -> None:
    assert_same(replayed(kept, tmp_path / "split", **sizes), replayed(kept, tmp_path / "one"))


def test_each_step_begins_with_what_the_one_before_it_has_made(kept: Path, tmp_path: Path) -> None:
    """The same samples once more: the first update of the second step no longer finds the policy that made them."""
    seen = dict[int, dict[str, float]]()
    files = {STEP: path_of(kept, STEP), STEP + 5: path_of(kept, STEP)}
    made = replay.run(settings(kept), files, kept / "model", tmp_path, timeout_s=300, on_step=seen.__setitem__)
    assert list(seen) == list(files) and list(seen.values()) == made
    first, second = made
    assert_same(first, replayed(kept, tmp_path / "alone"))
    assert second["logprob_diff_max"] > 1.5 * first["logprob_diff_max"] and second["lr"] > first["lr"]


def test_rank_that_fails_is_named_with_its_error(kept: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainerFailed, match="rank 0 has failed in step 4") as error:
        replay.run(settings(kept), {STEP: path_of(kept, STEP)}, tmp_path, tmp_path, timeout_s=300)
    assert f"cannot read {tmp_path / 'config.json'}" in error.value.message


def test_batch_without_the_reference_policy_is_refused_where_the_loss_reads_it(kept: Path) -> None:
    cfg = settings(kept)
    batch = synthetic(cfg, 8)
    replay.require_replayable(cfg, batch)
    with pytest.raises(ConfigError, match="ref_logprobs"):
        replay.require_replayable(cfg.model_copy(update={
            "algorithm": cfg.algorithm.model_copy(update={"kl_coef": 0.1})}), batch)
