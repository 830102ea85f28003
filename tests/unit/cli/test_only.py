"""train --only: which job generates steps, which kept steps are trained and from which weights, and what is refused
before anything starts. The ranks are those of tests/integration/trainer/test_replay.py, the job without a trainer that
of tests/integration/pipeline/test_sampled_jobs.py."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_rl import config
from elastic_rl.algorithms.registry import algorithm_of
from elastic_rl.cli import main, only
from elastic_rl.cli.exit_codes import Exit
from elastic_rl.data.batch import Batch
from elastic_rl.data.step_file import StepKeeper
from elastic_rl.errors import ConfigError
from elastic_rl.host.paths import JobPaths
from elastic_rl.roles.registry import ROLES
from elastic_rl.trainer import replay

BATCH = Batch({"tokens": torch.arange(3, dtype=torch.int32), "lengths": torch.tensor([3]),
               "loss_mask": torch.tensor([False, True, True]), "advantages": torch.ones(1),
               "old_logprobs": -torch.ones(2)})


def run(folder: Path, *args: str) -> int:
    try:
        main.main(["train", *args, f"--run_dir={folder}", "--job=j"])
    except SystemExit as e:
        return int(e.code or 0)
    return 0


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A job that has kept steps 2 and 10, with stand-ins for its ranks; what these were to make."""
    paths = JobPaths(tmp_path / "j")
    paths.model.mkdir(parents=True)
    (paths.model / "config.json").write_text("{}")
    for step in (10, 2):
        StepKeeper([step], paths.kept_steps, "j ").keep(step, BATCH, [7])
    calls: list[dict[str, Any]] = []

    def ranks(cfg: Any, files: dict[int, Path], model: Path, folder: Path, *, timeout_s: float,
              on_step: Callable[[int, dict[str, float]], None]) -> None:
        calls.append({"files": files, "model": model, "folder": folder, "ranks": cfg.trainer.ranks,
                      "left": [path.name for path in folder.iterdir()]})
        (folder / "rank-0.log").touch()
        for step in files:
            on_step(step, {"loss": step / 100, "grad_norm": 0.5, "kl_reference": 0.25, "logprob_diff_max": 1e-6})

    monkeypatch.setattr(replay, "run", ranks)
    return calls


def test_kept_steps_are_trained_in_their_order_and_nothing_else_of_the_job_changes(
        made: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path for path in tmp_path.rglob("*")}
    assert run(tmp_path, "--only", "train", "--trainer.data_parallel=3") == 0
    paths, (call,) = JobPaths(tmp_path / "j"), made
    assert list(call["files"]) == [2, 10] and all(file.parent == paths.kept_steps for file in call["files"].values())
    assert (call["model"], call["folder"], call["ranks"]) == (paths.model, paths.only_train, 3)
    assert {path for path in tmp_path.rglob("*")} - before == {
        paths.only_train, paths.only_train / "lock", paths.only_train / "rank-0.log"}
    said = " ".join(capsys.readouterr().out.split())
    assert "debugging run: trains 2 kept steps with 3 ranks of this host" in said
    assert "stay as they are" in said and str(paths.only_train) in said
    assert "step 10: loss 0.1, KL to reference 0.25, gradient norm 0.5, log-prob difference 1.0e-06" in said


def test_what_an_earlier_command_left_is_removed(made: list[dict[str, Any]], tmp_path: Path) -> None:
    assert run(tmp_path, "--only", "train") == run(tmp_path, "--only", "train") == 0
    assert made[1]["left"] == ["lock"]


def test_steps_of_another_job_are_trained_with_this_job_s_settings(made: list[dict[str, Any]], tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    StepKeeper([5], other, "other id").keep(5, BATCH, [1])
    assert run(tmp_path, "--only", "train", f"--from-steps={other}") == 0
    assert made[0]["files"] == {5: other / "step-000005.safetensors"}
    StepKeeper([6], other, "third id").keep(6, BATCH, [1])
    assert run(tmp_path, "--only", "train", f"--from-steps={other}") == Exit.USAGE  # not of two jobs at once
    assert len(made) == 1


@pytest.mark.parametrize(("args", "said"), [
    (["--only", "train", "--from-steps=/none"], "no step is kept in /none"),
    (["--only", "train", "--model.path=/none"], "there is no model in /none"),
    (["--only", "train", "--algorithm.kl_coef=0.1"], "lacks ref_logprobs"),
    (["--only", "train", "--mode=sft"], "has mode=sft"),
    (["--only", "train", "--with-cluster", "--detach"], "no run that has --with-cluster, --detach"),
    (["--only", "other"], "other"), (["--only", "rollout", "--faults"], "--faults are for whole runs"),
    (["--only", "rollout", "--mode=eval"], "has mode=eval"), (["--only", "rollout"], "there is no cluster"),
    (["--only", "rollout", "--from-steps=/none"], "--from-steps is for"),
    (["--from-steps=/none"], "--from-steps is for")])
def test_what_cannot_be_trained_is_a_usage_error(made: list[dict[str, Any]], tmp_path: Path, args: list[str], said: str,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, *args) == Exit.USAGE
    assert said in " ".join(capsys.readouterr().err.split()) and not made


def test_second_command_at_the_same_time_is_refused(made: list[dict[str, Any]], tmp_path: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    folder = JobPaths(tmp_path / "j").only_train
    folder.mkdir()
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run(tmp_path, "--only", "train") == Exit.USAGE
    assert "another `train --only train` uses" in " ".join(capsys.readouterr().err.split()) and not made


def settings(folder: Path, **given: Any) -> config.Config:
    return config.parse({"job": "j", "run_dir": str(folder), **given})


def test_rollout_alone_is_a_job_with_a_name_that_is_free_and_the_settings_of_the_other(tmp_path: Path) -> None:
    cfg = settings(tmp_path, seed=7, placement="colocated", algorithm={"name": "rloo"}, rollout={"temperature": 0.5},
                   train={"steps": 3, "prompts_per_step": 4, "keep_steps": [2]})
    made = only.rollout(cfg, with_cluster=True)
    assert (made.job, made.seed, made.algorithm, made.rollout) == ("j-rollout-1", 7, cfg.algorithm, cfg.rollout)
    assert not made.trainer_groups and made.rejection.prompts == 12 and made.train.keep_steps == [1, 2, 3]
    assert ROLES["advantages"].is_wanted(made) and ROLES["rollout"].is_wanted(made)
    (tmp_path / "j-rollout-1").mkdir()
    assert only.rollout(cfg, with_cluster=True).job == "j-rollout-2"
    assert only.rollout(settings(tmp_path, job="j" * 40), with_cluster=True).job == "j" * 30 + "-rollout-1"


def test_rollout_alone_makes_no_more_steps_than_are_kept(tmp_path: Path) -> None:
    made = only.rollout(settings(tmp_path, train={"steps": 1000, "prompts_per_step": 2}), with_cluster=True)
    assert (made.rejection.prompts, len(made.train.keep_steps)) == (64, 32)


def test_rollout_alone_has_no_groups_of_ranks(tmp_path: Path) -> None:
    cfg = settings(tmp_path, reference={"enabled": True}, algorithm={"kl_coef": 0.1})
    assert cfg.trainer_groups and not only.rollout(cfg, with_cluster=True).trainer_groups


@pytest.mark.parametrize(("given", "said"), [
    ({"algorithm": {"name": "ppo"}}, "needs? the values of a critic"),
    ({"algorithm": {"kl_coef": 0.1, "kl_in": "reward"}}, "log-probs of the reference policy"),
    ({"algorithm": {"teacher": "t"}, "pools": {"t": {"model": "/t"}}}, "teacher's pool")])
def test_rollout_alone_is_refused_where_advantages_need_more_than_samples(tmp_path: Path, given: dict[str, Any],
                                                                          said: str) -> None:
    cfg = settings(tmp_path, **given)
    with pytest.raises(ConfigError, match=said):
        algorithm_of(only.rollout(cfg, with_cluster=True))


def test_sampling_that_keeps_no_steps_has_no_advantages(tmp_path: Path) -> None:
    assert not ROLES["advantages"].is_wanted(settings(tmp_path, mode="rejection_sampling"))
    assert not ROLES["advantages"].is_wanted(settings(tmp_path, mode="eval", train={"keep_steps": [1]}))
