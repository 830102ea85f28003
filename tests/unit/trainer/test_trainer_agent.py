"""The agent refuses what the trainer does not support before it starts a rank."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from elastic_rl import config
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.net.addresses import LOOPBACK
from elastic_rl.trainer.group import agent


@pytest.fixture(autouse=True)
def no_parent_death_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "die_with_parent", lambda: None)  # here the parent of the test run


def context(folder: Path, model: dict, **values: dict) -> str:
    (folder / "config.json").write_text(json.dumps(model))
    ctx = RunContext(config=config.parse(values), etcd_endpoints=["127.0.0.1:1"], job="j", epoch=1,
                     model_dir=str(folder), host=LOOPBACK)
    return str(ctx.save(folder / "context.json"))


def test_agents_of_many_hosts_write_their_key_once_a_second_together_at_most() -> None:
    assert agent.keep_alive_s(1) == 30 and all(hosts / agent.keep_alive_s(hosts) <= 1 for hosts in (2, 30, 31, 1000))


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


def test_ranks_have_the_configured_number_of_threads_whatever_ray_has_set(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray sets the number of CPUs of the whole group. Ranks inherit the agent's environment."""
    monkeypatch.setattr(os, "environ", os.environ | {"OMP_NUM_THREADS": "7"})
    monkeypatch.setattr(agent, "_watch_fence", lambda ctx, etcd: None)
    monkeypatch.setattr(agent, "_run", lambda *_: int(os.environ["OMP_NUM_THREADS"]))
    model = {"model_type": "qwen3", "rms_norm_eps": 1e-6, **dict.fromkeys((
        "hidden_size", "num_attention_heads", "head_dim", "num_hidden_layers", "intermediate_size",
        "num_key_value_heads", "vocab_size", "max_position_embeddings"), 8)}
    assert agent.main(["--context", context(tmp_path, model, trainer={"cpu_threads": 3})]) == 3


def test_temporary_files_of_the_agent_go_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with agent.own_temp_folder("tag."):
        made = Path(DefaultLogsSpecs().root_log_dir)
        assert made.is_dir() and made.parents[1] == tmp_path and made.parent.name.startswith("tag.")
        assert "TMPDIR" not in os.environ or os.environ["TMPDIR"] != str(made.parent), "ranks would compile anew"
    assert list(tmp_path.iterdir()) == [] and tempfile.gettempdir() == str(tmp_path)
