"""metrics: numbers over steps from the files of a job whose cluster is down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_rl.cli import main
from elastic_rl.cli.exit_codes import Exit


def run(folder: Path, command: str, *args: str) -> int:
    try:
        main.main([command, *args, f"--run_dir={folder}", "--job=j"])
    except SystemExit as e:
        return int(e.code or 0)
    return 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "j").mkdir()
    records = [{"kind": "sft", "step": 9, "loss": 3.0}, *(
        {"kind": "step", "step": n, "reward_mean": n / 4, "reward_parts": {"format": 2e9}} for n in (1, 2, 3))]
    (tmp_path / "j" / "steps.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def test_one_metric_is_shown_over_the_last_steps(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "metrics", "reward_mean", "--last", "2") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["phase", "step", "reward", "mean"], ["rl", "2", "0.5"], ["rl", "3", "0.75"]]
    assert run(folder, "metrics", "--since=3", "format", "-o", "json") == 0
    assert json.loads(capsys.readouterr().out) == [
        {"phase": "rl", "step": 3, "values": {"reward_parts/format": 2e9}}]
    assert run(folder, "metrics", "format", "--since", "3") == 0
    assert "2e+09" in capsys.readouterr().out, "a number, though its column ends as those of moments do"
    assert run(folder, "metrics", "-o", "json") == 0
    assert [row["phase"] for row in json.loads(capsys.readouterr().out)] == ["sft", "rl", "rl", "rl"]


def test_metric_or_job_that_is_not_there_is_a_usage_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "metrics", "reward_men") == Exit.USAGE
    assert "did you mean 'reward_mean'" in capsys.readouterr().err
    assert run(folder / "none", "metrics") == Exit.USAGE
    assert "--run_dir" in capsys.readouterr().err


def test_samples_without_a_cluster_say_where_samples_are(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "samples") != 0
    said = capsys.readouterr().err
    assert "kept in etcd" in said and "`elastic-rl metrics" in said and "`elastic-rl up" in said
