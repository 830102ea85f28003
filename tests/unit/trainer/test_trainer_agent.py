"""The agent refuses what the trainer does not support before it starts a rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_rl import config
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.trainer.group import agent


@pytest.fixture(autouse=True)
def no_parent_death_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "die_with_parent", lambda: None)  # here the parent of the test run


def context(folder: Path, model: dict, **values: dict) -> str:
    (folder / "config.json").write_text(json.dumps(model))
    ctx = RunContext(config=config.parse(values), etcd_endpoints=["127.0.0.1:1"], job="j", epoch=1,
                     model_dir=str(folder))
    return str(ctx.save(folder / "context.json"))


@pytest.mark.parametrize(("model", "named"), [
    ({"model_type": "gpt2"}, "'gpt2'"),
    ({"model_type": "qwen3", "attention_bias": True}, "attention biases"),
    ({"model_type": "qwen3", "rope_scaling": {"rope_type": "yarn"}}, "yarn")])
def test_unsupported_model_is_named_and_no_rank_is_started(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], model: dict, named: str) -> None:
    assert agent.main(["--context", context(tmp_path, model)]) == 2
    assert named in capsys.readouterr().err


def test_missing_context_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert agent.main(["--context", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
