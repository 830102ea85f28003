"""debug step: what is compared, and what is refused before any rank starts. The ranks are those of
tests/integration/trainer/test_replay.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_rl.cli import main
from elastic_rl.cli.exit_codes import Exit
from elastic_rl.data.batch import Batch
from elastic_rl.data.step_file import StepKeeper
from elastic_rl.host.paths import JobPaths
from elastic_rl.trainer import replay

BATCH = Batch({"tokens": torch.arange(3, dtype=torch.int32), "lengths": torch.tensor([3]),
               "loss_mask": torch.tensor([False, True, True]), "advantages": torch.ones(1),
               "old_logprobs": -torch.ones(2)})


def run(folder: Path, *args: str) -> int:
    try:
        main.main(["debug", "step", *args, f"--run_dir={folder}", "--job=j"])
    except SystemExit as e:
        return int(e.code or 0)
    return 0


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobPaths:
    """A job that has kept step 2, with stand-ins for its ranks."""
    paths = JobPaths(tmp_path / "j")
    paths.model.mkdir(parents=True)
    (paths.model / "config.json").write_text("{}")
    StepKeeper([2], paths.kept_steps, "j ").keep(2, BATCH, [7])
    paths.steps.write_text("".join(json.dumps({"kind": "step", "step": step, "loss": loss}) + "\n"
                                   for step, loss in ((2, 0.5), (3, 9.0), (2, 0.25))))

    def ranks(cfg: Any, files: dict[int, Path], model: Path, folder: Path, *, timeout_s: float
              ) -> list[dict[str, float]]:
        assert all(file.exists() for file in files.values()) and model == paths.model.resolve() and folder.is_dir()
        return [{"loss": 0.2, "ranks": float(cfg.trainer.ranks)} for _ in files]

    monkeypatch.setattr(replay, "run", ranks)
    return paths


def test_step_is_compared_with_the_last_record_of_it(job: JobPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(job.folder.parent, "2", "--trainer.data_parallel=3", "-o", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metrics"] == {"loss": 0.2, "ranks": 3.0} and found["recorded"]["loss"] == 0.25
    assert (found["samples"], found["versions"]) == (1, [7])
    assert run(job.folder.parent, "2") == 0
    assert ["loss", "0.2", "0.25"] in [line.split() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(("args", "said"), [
    (["3"], "the batch of step 3 was not kept"), (["2", "--model=/none"], "there is no model in /none"),
    (["2", "--algorithm.kl_coef=0.1"], "the file lacks ref_logprobs"), (["0"], "greater than or equal to 1")])
def test_what_cannot_be_made_again_is_a_usage_error(job: JobPaths, args: list[str], said: str,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    assert run(job.folder.parent, *args) == Exit.USAGE
    assert said in " ".join(capsys.readouterr().err.split())
