"""What ``config check`` and a job's start say of settings, plug-ins, model and data, before anything runs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from support.text_model import make_tokenizer_folder
from typer.testing import CliRunner

from elastic_rl import config, job_check
from elastic_rl.cli.main import app
from elastic_rl.config import Config
from elastic_rl.data.tiny_model import make_model_dir
from elastic_rl.errors import ConfigError

WRONG = ["--algorithm.name=gsp", "--rollout.reward=exact_mach", "--rollout.generate=many_turns",
         "--model.path=/nowhere", "--data.options.operand_below=3"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a text tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer_folder(folder / "tokenizer")
    shape = {"family": "llama", "max_positions": 128}
    return make_model_dir(folder / "llama", config.parse({"model": shape}), tokenizer)


def text_job(tmp_path: Path, model: Path, rows: list[dict[str, str]], *more: str) -> Config:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config.load(overrides=[
        f"--run_dir={tmp_path / 'runs'}", f"--model.path={model}", "--data.source=jsonl",
        f"--data.options.paths={data}",
        "--data.options.prompt_key=question", "--data.options.answer_key=answer", "--data.options.max_prompt_tokens=64",
        "--data.options.max_response_tokens=32", "--data.eval_fraction=0.25", *more])


ROWS = [{"question": f"what is {a} and {b}?", "answer": str(a + b)} for a in range(4) for b in range(4)]


def by_part(cfg: Config) -> dict[str, job_check.Finding]:
    return {finding.part: finding for finding in job_check.check(cfg)}


def test_default_job_is_sound() -> None:
    found = by_part(config.load())
    assert not any(f.fault for f in found.values())
    assert "9000 prompts" in found["data"].detail and "get 1, 1, 1, 1" in found["reward of the answers"].detail


def test_everything_that_is_wrong_is_said_at_once() -> None:
    found = by_part(config.load(overrides=WRONG))
    assert {part for part, f in found.items() if f.fault} == {"algorithm", "reward", "generate", "model", "data"}
    assert "did you mean 'gspo'" in found["algorithm"].fault and "did you mean 'exact_match'" in found["reward"].fault
    with pytest.raises(ConfigError) as refused:
        job_check.require(config.load(overrides=WRONG))
    for part in ("gspo", "exact_match", "many_turns", "/nowhere", "operand_below"):
        assert part in str(refused.value)


def test_job_on_a_file_is_sound(tmp_path: Path, model: Path) -> None:
    found = by_part(text_job(tmp_path, model, ROWS, "--rollout.reward=math_verify"))
    assert not any(f.fault for f in found.values()), found
    assert "12 prompts to train on" in found["data"].detail and "what is" in found["prompts"].detail
    assert "get 1, 1, 1, 1" in found["reward of the answers"].detail


def test_checkpoint_service_without_room_for_the_model_is_refused(tmp_path: Path, model: Path) -> None:
    enough = by_part(text_job(tmp_path, model, ROWS))["checkpoints"]
    assert "a version of the policy has" in enough.detail and not enough.fault
    cfg = text_job(tmp_path, model, ROWS, "--dcs.arena_bytes=1048576", "--dcs.disk_bytes=0", "--dcs.keep_versions=1000")
    found = by_part(cfg)["checkpoints"]
    assert "dcs.arena_bytes=1048576" in found.fault and "--dcs.arena_bytes=" in found.hint
    with pytest.raises(ConfigError, match="has no room"):
        job_check.require(cfg)
    job_check.require(cfg, begun=True)  # it may fit after all, and to refuse it would end it


@pytest.mark.parametrize("name", ["", "x" * 65, "a\nb"])
def test_names_of_evaluation_sets_are_those_that_can_be_shown(tmp_path: Path, model: Path, name: str) -> None:
    (tmp_path / "held_out.jsonl").write_text('{"question": "what?", "answer": "7"}\n')
    cfg = text_job(tmp_path, model, ROWS, "--data.options.evals=" + json.dumps(
        {name: {"paths": str(tmp_path / "held_out.jsonl")}}))
    assert "of an evaluation set" in by_part(cfg)["evaluation sets"].fault
    with pytest.raises(ConfigError, match="64 printable characters"):
        job_check.require(cfg)
    job_check.require(cfg, begun=True)


def test_answers_that_get_nothing_are_pointed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_zero_reward.py").write_text(
        "from elastic_rl.rewards.base import Reward\n"
        "async def reward(prompt, samples):\n    return [Reward(0.0) for _ in samples]\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = by_part(config.load(overrides=["--rollout.reward=my_zero_reward:reward"]))["reward of the answers"]
    assert found.detail.endswith("get 0, 0, 0, 0") and not found.fault and "compare the data's answers" in found.hint
    sys.modules.pop("my_zero_reward", None)


def test_rewards_above_the_accuracy_at_which_rl_stops_are_pointed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                      ) -> None:
    (tmp_path / "my_large_reward.py").write_text(
        "from elastic_rl.rewards.base import Reward\n"
        "async def reward(prompt, samples):\n    return [Reward(5.0) for _ in samples]\n")
    monkeypatch.syspath_prepend(tmp_path)
    named = "--rollout.reward=my_large_reward:reward"
    found = by_part(config.load(overrides=[named]))["reward of the answers"]
    assert found.detail.endswith("get 5, 5, 5, 5") and not found.fault and "train.stop_eval_accuracy" in found.hint
    free = by_part(config.load(overrides=[named, "--train.stop_eval_accuracy=null"]))["reward of the answers"]
    assert not free.hint
    sys.modules.pop("my_large_reward", None)


def test_reward_that_raises_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_reward_check.py").write_text("async def reward(prompt, samples):\n    return 1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = by_part(config.load(overrides=["--rollout.reward=my_reward_check:reward"]))
    assert re.search(r"ZeroDivisionError.*my_reward_check.py:\d", found["reward of the answers"].fault)
    sys.modules.pop("my_reward_check", None)


def test_reward_that_blocks_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_blocking_reward.py").write_text(
        "import threading\nasync def reward(prompt, samples):\n    threading.Event().wait()\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = by_part(config.load(overrides=["--rollout.reward=my_blocking_reward:reward",
                                           "--rollout.reward_timeout_s=0.2"]))["reward of the answers"]
    assert "took longer than rollout.reward_timeout_s=0.2" in found.fault and "reward_timeout_s" in found.hint
    sys.modules.pop("my_blocking_reward", None)


def test_option_that_there_is_not_is_answered_with_the_nearest(tmp_path: Path, model: Path) -> None:
    found = by_part(text_job(tmp_path, model, ROWS, "--data.options.max_prompt_token=5"))["data"]
    assert "data.options.max_prompt_token: there is no such option; did you mean 'max_prompt_tokens'?" in found.fault


def test_reward_that_cannot_be_made_is_said_once(tmp_path: Path) -> None:
    found = by_part(config.load(overrides=["--rollout.reward=no_such_module:reward"]))
    assert "cannot be imported" in found["reward"].fault and "PYTHONPATH" in found["reward"].hint
    assert "reward of the answers" not in found


def test_module_that_fails_while_it_is_imported_is_not_looked_for_in_vain(tmp_path: Path,
                                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_broken_reward.py").write_text("import no_such_package_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = by_part(config.load(overrides=["--rollout.reward=my_broken_reward:reward"]))["reward"]
    assert "no_such_package_at_all" in found.fault and "my_broken_reward.py:1" in found.fault
    assert found.hint == "correct the module, or install what it needs"


def test_answers_that_no_response_can_have_are_pointed_out(tmp_path: Path, model: Path) -> None:
    rows = [{**row, "answer": "1" * 40} for row in ROWS]
    found = by_part(text_job(tmp_path, model, rows))["prompts"]
    assert not found.fault and "has 41 tokens" in found.hint and "max_response_tokens=32" in found.hint
    assert not by_part(text_job(tmp_path, model, ROWS))["prompts"].hint


def test_defaults_of_the_built_in_model_are_pointed_out_for_a_larger_one(tmp_path: Path, model: Path,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    assert "defaults" not in by_part(text_job(tmp_path, model, ROWS))
    monkeypatch.setattr("elastic_rl.job_check._LARGE", 1)
    found = by_part(text_job(tmp_path, model, ROWS))["defaults"]
    assert not found.fault and found.hint
    assert found.detail.startswith("train.lr=0.001, sft.lr=0.001, sft.max_steps=3000: for")
    assert "defaults" not in by_part(text_job(tmp_path, model, ROWS, "--train.lr=1e-6", "--sft.max_steps=0"))
    assert "defaults" not in by_part(text_job(tmp_path, model, ROWS, "--mode=eval"))


def test_supervised_job_needs_no_reward() -> None:
    found = by_part(config.load(overrides=["--mode=sft"]))
    assert "reward of the answers" not in found and not any(f.fault for f in found.values())


def test_names_from_a_file_cannot_steer_the_terminal(tmp_path: Path, model: Path) -> None:
    cfg = text_job(tmp_path, model, [{"\x1b]0;owned\x07\x1b[2J": "a", "\ud800": "b"}] * 8)
    settings = [f"--{key}={value}" for key, value in {
        "run_dir": cfg.run_dir, "model.path": model, "data.source": "jsonl", "data.options.prompt_key": "question",
        "data.options.paths": tmp_path / "data.jsonl", "data.options.max_prompt_tokens": 64,
        "data.options.max_response_tokens": 32}.items()]
    found = CliRunner().invoke(app, ["config", "check", *settings])
    assert found.exit_code == 2 and "has no column 'question'" in found.output and "owned" in found.output
    assert "\x1b" not in found.output and "\x07" not in found.output


def test_command_says_it_for_people_and_programs() -> None:
    shown = CliRunner().invoke(app, ["config", "check", *WRONG])
    assert shown.exit_code == 2 and shown.stdout.count("FAULT") == 5
    assert CliRunner().invoke(app, ["config", "check"]).exit_code == 0
    rows = json.loads(CliRunner().invoke(app, ["config", "check", "-o", "json"]).stdout)
    assert {row["part"] for row in rows} >= {"algorithm", "model", "data", "reward"}
