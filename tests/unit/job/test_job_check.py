"""What ``config check`` and a job's start say of settings, plug-ins, model and data, before anything runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.local_plugin import local_plugins  # noqa: F401
from support.text_model import make_tokenizer_folder
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from typer.testing import CliRunner

from elastic_rl import config
from elastic_rl.cli.main import app
from elastic_rl.config import Config
from elastic_rl.config.checks import unread_settings
from elastic_rl.data.sources import make_source
from elastic_rl.data.tiny_model import make_model_dir
from elastic_rl.errors import ConfigError
from elastic_rl.job import check as job_check

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


def by_part(cfg: Config) -> dict[str, job_check.JobFinding]:
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


def test_unknown_algorithm_gets_the_name_or_setting_that_was_meant() -> None:
    found = by_part(config.load(overrides=["--algorithm.name=PPO"]))["algorithm"]
    assert "did you mean 'ppo'?" in found.fault and "sft" not in found.fault
    assert "set with sft.max_steps" in by_part(config.load(overrides=["--algorithm.name=sft"]))["algorithm"].hint


def test_prompts_whose_metadata_are_not_passed_on_are_refused() -> None:
    cfg = config.load()
    source = make_source(cfg)
    assert not job_check._of_prompts(cfg, source).fault
    bad = [replace(prompt, metadata={"own": b"x"}) for prompt in source.train[:4]]
    fault = job_check._of_prompts(cfg, replace(source, train=bad)).fault
    assert "prompt 0 with metadata that are not passed on: a value is a bytes" in fault


def test_token_ids_that_the_model_does_not_have_are_refused(tmp_path: Path, model: Path) -> None:
    """An engine that is given one ends, and so does each one that it is sent to again."""
    source = make_source(config.load())
    bad = [replace(prompt, token_ids=(1, 300000)) for prompt in source.train[:2]]
    fault = job_check._of_prompts(config.load(), replace(source, train=bad)).fault
    assert "prompt 0 with the id 300000 in its token_ids, and the model has 16 tokens" in fault
    job = text_job(tmp_path, model, ROWS)
    assert make_source(job).vocabulary == json.loads((model / "config.json").read_text())["vocab_size"]
    small = altered(tmp_path / "judge", model, "config.json", lambda raw: raw.update(vocab_size=32))
    found = by_part(text_job(tmp_path, model, ROWS, f"--pools.spare.model={small}"))["pool spare"]
    assert "the tokenizer has token id" in found.fault and "vocab_size is 32" in found.fault


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


def test_answers_that_get_nothing_are_pointed_out(local_plugins: Path) -> None:  # noqa: F811
    (local_plugins / "my_zero_reward.py").write_text(
        "from elastic_rl.rewards.base import Reward\n"
        "async def reward(prompt, samples):\n    return [Reward(0.0) for _ in samples]\n")
    found = by_part(config.load(overrides=["--rollout.reward=my_zero_reward:reward"]))["reward of the answers"]
    assert "get 0, 0, 0, 0;" in found.detail and not found.fault and "compare the data's answers" in found.hint


def _check_with(folder: Path, name: str, body: str) -> job_check.JobFinding:
    """What is said of a reward of one response's text, whose module has the name."""
    (folder / f"{name}.py").write_text(
        f"from elastic_rl.rewards.base import Reward\ndef one(text, answer):\n    {body}\n"
        "async def reward(prompt, samples):\n"
        "    return [Reward(float(one(s.text, prompt.metadata['answer']))) for s in samples]\n")
    return by_part(config.load(overrides=[f"--rollout.reward={name}:reward"]))["reward of the answers"]


def test_reward_is_tried_with_an_empty_and_with_a_wrong_response(local_plugins: Path) -> None:  # noqa: F811
    """One that raises for an empty response stopped a run in its middle."""
    found = by_part(config.load())["reward of the answers"]
    assert found.detail.endswith("get 1, 1, 1, 1; an empty response gets 0, another prompt's answer 0")
    assert not found.hint and not found.skipped
    empty = _check_with(local_plugins, "my_empty_reward", "return text[0] == answer[0]")
    assert "failed for an empty response: IndexError" in empty.fault and "also nothing" in empty.hint
    wrong = _check_with(local_plugins, "my_wrong_reward", "return {answer: 1, '': 0}[text]")
    assert "failed for another prompt's answer: KeyError" in wrong.fault
    same = _check_with(local_plugins, "my_same_reward", "return text.isdigit()")
    assert not same.fault and "another prompt's answer is worth as much as a right one" in same.hint


def test_reward_without_answers_is_tried_with_an_empty_response(tmp_path: Path, model: Path,
                                                                local_plugins: Path) -> None:  # noqa: F811
    (local_plugins / "my_length_reward.py").write_text(
        "from elastic_rl.rewards.base import Reward\n"
        "async def reward(prompt, samples):\n    return [Reward(len(s.text) / 100) for s in samples]\n")
    rows = [{"question": f"what is {n} and {n}?"} for n in range(12)]
    found = by_part(text_job(tmp_path, model, rows, "--data.options.answer_key=''", "--sft.max_steps=0",
                             "--rollout.reward=my_length_reward:reward"))["reward of the answers"]
    assert found.detail.startswith("the data have no answers; an empty response gets 0, the prompt in place of ")
    assert not found.fault and not found.hint


def test_part_that_is_not_examined_is_not_called_sound(tmp_path: Path, model: Path) -> None:
    cfg = text_job(tmp_path, tmp_path / "none", ROWS)
    assert by_part(cfg)["data"].skipped and not by_part(text_job(tmp_path, model, ROWS))["data"].skipped
    words = [f"--{key}={value}" for key, value in (("model.path", tmp_path / "none"), ("data.source", "jsonl"))]
    shown = CliRunner().invoke(app, ["config", "check", *words]).stdout.splitlines()
    assert any(line.startswith("skip   data: not examined") for line in shown)
    assert not any(line.startswith("ok     data") for line in shown)


def test_rewards_above_the_accuracy_at_which_rl_stops_are_pointed_out(local_plugins: Path) -> None:  # noqa: F811
    (local_plugins / "my_large_reward.py").write_text(
        "from elastic_rl.rewards.base import Reward\n"
        "async def reward(prompt, samples):\n"
        "    return [Reward(5.0 * (s.text == prompt.metadata['answer'])) for s in samples]\n")
    named = "--rollout.reward=my_large_reward:reward"
    found = by_part(config.load(overrides=[named]))["reward of the answers"]
    assert "get 5, 5, 5, 5;" in found.detail and not found.fault and "train.stop_eval_accuracy" in found.hint
    free = by_part(config.load(overrides=[named, "--train.stop_eval_accuracy=null"]))["reward of the answers"]
    assert not free.hint


def test_sum_of_the_limits_of_a_reward_is_said_where_it_is_more_than_that_of_a_call() -> None:
    cfg = config.load(overrides=["--rollout.reward=remote", "--rollout.reward_options.urls=[http://localhost]",
                                 "--rollout.reward_options.timeout_s=40", "--rollout.reward_options.attempts=5",
                                 "--train.group_size=4"])
    found = next(f for f in job_check.check(cfg) if f.part == "reward")
    assert found.detail.startswith("remote; by its own limits a group of 4 may take 225 s") and not found.fault


def test_reward_that_raises_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_reward_check.py").write_text("async def reward(prompt, samples):\n    return 1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = by_part(config.load(overrides=["--rollout.reward=my_reward_check:reward"]))
    assert re.search(r"ZeroDivisionError.*my_reward_check.py:\d", found["reward of the answers"].fault)
    assert "my_reward_check" not in sys.modules


def test_reward_that_blocks_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_blocking_reward.py").write_text(
        "import threading\nasync def reward(prompt, samples):\n    threading.Event().wait()\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = by_part(config.load(overrides=["--rollout.reward=my_blocking_reward:reward",
                                           "--rollout.reward_timeout_s=0.2"]))["reward of the answers"]
    assert "took longer than rollout.reward_timeout_s=0.2" in found.fault and "reward_timeout_s" in found.hint


def test_option_that_there_is_not_is_answered_with_the_nearest(tmp_path: Path, model: Path) -> None:
    found = by_part(text_job(tmp_path, model, ROWS, "--data.options.max_prompt_token=5"))["data"]
    assert "data.options.max_prompt_token: there is no such option; did you mean 'max_prompt_tokens'?" in found.fault


def test_reward_that_cannot_be_made_is_said_once(tmp_path: Path) -> None:
    found = by_part(config.load(overrides=["--rollout.reward=no_such_module:reward"]))
    assert "cannot be imported" in found["reward"].fault and "PYTHONPATH" in found["reward"].hint
    assert "reward of the answers" not in found


def test_module_that_fails_to_import_is_reported_with_its_error(local_plugins: Path) -> None:  # noqa: F811
    (local_plugins / "my_broken_reward.py").write_text("import no_such_package_at_all\n")
    found = by_part(config.load(overrides=["--rollout.reward=my_broken_reward:reward"]))["reward"]
    assert "no_such_package_at_all" in found.fault and "my_broken_reward.py:1" in found.fault
    assert found.hint == "correct the module, or install what it needs"


def test_answers_that_no_response_can_have_are_pointed_out(tmp_path: Path, model: Path) -> None:
    rows = [{**row, "answer": "1" * 40} for row in ROWS]
    found = by_part(text_job(tmp_path, model, rows))["prompts"]
    assert not found.fault and "has 41 tokens" in found.hint and "max_response_tokens=32" in found.hint
    assert not by_part(text_job(tmp_path, model, ROWS))["prompts"].hint


def test_rows_that_are_left_out_are_said(tmp_path: Path, model: Path) -> None:
    evaluated, long = ROWS[5], {"question": "x" * 500, "answer": "1"}
    path = tmp_path / "evals.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ({"question": "new", "answer": "1"}, evaluated, long)))
    options = (f"--data.options.eval_paths={path}", "--data.options.overlap=drop", "--data.options.long_prompts=drop")
    found = by_part(text_job(tmp_path, model, [*ROWS, evaluated, long, long], *options))["rows"]
    assert not found.fault and found.hint
    assert found.detail == (
        "long_prompts=drop leaves 1 of 3 prompts out of the evaluation set 'eval', which have more than "
        "max_prompt_tokens=64 tokens; overlap=drop leaves 2 of 19 rows out of the training, since their texts are "
        f"evaluated, the first in {tmp_path / 'data.jsonl'}:6; long_prompts=drop leaves 2 of 19 rows out of the "
        "training, which have more than max_prompt_tokens=64 tokens")
    assert by_part(text_job(tmp_path, model, [*ROWS, evaluated, long, long], *options))["rows"] == found, "remembered"
    mixed = config.load(overrides=[
        f"--run_dir={tmp_path / 'runs'}", f"--model.path={model}", "--data.source=mix",
        "--data.options.parts=" + json.dumps([{"source": "jsonl", "name": "sums", "options": {
            "paths": str(tmp_path / "data.jsonl"), "prompt_key": "question", "answer_key": "answer",
            "eval_paths": str(path), "overlap": "drop", "long_prompts": "drop", "max_prompt_tokens": 64,
            "max_response_tokens": 32}}])])
    assert "part sums: overlap=drop leaves 2 of 19 rows" in by_part(mixed)["rows"].detail
    assert "rows" not in by_part(text_job(tmp_path, model, ROWS))


def test_tokenizer_without_tokens_for_letters_is_named(tmp_path: Path, model: Path) -> None:
    """Each such letter is the same token to the model, so that no answer with one can be right."""
    folder = tmp_path / "letters"
    shutil.copytree(model, folder)
    known = "abcdefghijklmnoprstuvwxy? 01"
    tokens = ["<|end|>", "<unk>", *known]
    core = Tokenizer(WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="<unk>"))
    core.pre_tokenizer = Split(Regex("."), "isolated")
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "unk_token": "<unk>"}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    plain = "--data.options.apply_chat_template=false"
    rows = [{"question": f"what is {a} and {b}?", "answer": str(a + b)} for a in range(2) for b in range(2)] * 4
    options = (plain, "--data.options.overlap=unchecked")
    assert by_part(text_job(tmp_path, folder, rows, *options))["tokenizer"].detail.startswith(
        "model.path has no token for '2', in ")
    found = by_part(text_job(tmp_path, folder, [{**row, "question": "Ünder which"} for row in rows], *options,
                             "--sft.max_steps=0"))["tokenizer"]
    assert not found.fault and found.hint
    assert "'Ü', in 16 of the 16 prompts" in found.detail and "'<unk>'" in found.detail
    assert "tokenizer" not in by_part(text_job(tmp_path, model, rows, *options))


def test_start_is_refused_for_what_the_check_finds_and_says_what_it_warns_of(
        tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward that raises was seen after the whole supervised phase."""
    cfg = text_job(tmp_path, model, ROWS, "--rollout.reward=exact_match", "--train.queue_call_timeout_s=77")
    assert "settings" in {found.part for found in job_check.require(cfg)}
    (tmp_path / "raising_reward.py").write_text(
        "async def reward(prompt, samples):\n    raise ValueError('no such key')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    raises = text_job(tmp_path, model, ROWS, "--rollout.reward=raising_reward:reward")
    with pytest.raises(ConfigError, match="no such key"):
        job_check.require(raises)
    assert "reward of the answers" in {found.part for found in job_check.require(raises, begun=True)}
    assert "reward of the answers" not in {found.part for found in job_check.require(raises, goes_on=True)}


def test_built_in_models_defaults_are_pointed_out_for_larger_models(tmp_path: Path, model: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    assert "defaults" not in by_part(text_job(tmp_path, model, ROWS))
    monkeypatch.setattr("elastic_rl.job.check._LARGE", 1)
    found = by_part(text_job(tmp_path, model, ROWS))["defaults"]
    assert not found.fault and found.hint
    assert found.detail.startswith("train.lr=0.001, sft.lr=0.001, sft.max_steps=3000: for")
    assert "defaults" not in by_part(text_job(tmp_path, model, ROWS, "--train.lr=1e-6", "--sft.max_steps=0"))
    assert "defaults" not in by_part(text_job(tmp_path, model, ROWS, "--mode=eval"))


def test_settings_that_change_nothing_are_named_with_what_they_are_for(tmp_path: Path, model: Path) -> None:
    assert "settings" not in by_part(text_job(tmp_path, model, ROWS, "--train.steps=3"))
    found = by_part(text_job(tmp_path, model, ROWS, "--train.max_groups_in_flight=9", "--algorithm.kl_in=reward",
                             "--critic.warmup_steps=2", "--rollout.max_turns=3",
                             "--reference.trainer={data_parallel: 2}"))["settings"]
    assert not found.fault and found.hint
    for said in ("train.max_groups_in_flight is for train.schedule", "algorithm.kl_in is for algorithm.kl_coef above 0",
                 "critic.warmup_steps is for a critic", "reference.trainer is for reference.enabled",
                 "rollout.max_turns is for rollout.environment"):
        assert said in found.detail


def test_too_slow_requests_and_too_long_samples_are_pointed_out(tmp_path: Path, model: Path) -> None:
    assert "requests" not in by_part(text_job(tmp_path, model, ROWS))
    slow = by_part(text_job(tmp_path, model, ROWS, "--engine.request_timeout_s=1"))["requests"]
    assert not slow.fault and "engine.request_timeout_s=1: 32 tokens/s" in slow.detail and slow.hint
    full = by_part(text_job(tmp_path, model, ROWS, "--engine.max_total_tokens=40"))["data"]
    assert "engine.max_total_tokens=40" in full.fault and full.hint


def test_samples_that_a_rank_would_refuse_are_a_fault_and_a_step_that_needs_much_memory_is_pointed_out(
        tmp_path: Path, model: Path) -> None:
    small = text_job(tmp_path, model, ROWS)
    assert "memory" not in by_part(small) and not by_part(small)["data"].fault
    few = text_job(tmp_path, model, ROWS, "--trainer.share_piece_bytes=1048576")
    job_check._require_share(few, 20_000)
    with pytest.raises(ConfigError, match="trainer.share_piece_bytes=1048576: a sample of up to 40000 tokens"):
        job_check._require_share(few, 40_000)
    large = by_part(text_job(tmp_path, model, ROWS, "--train.prompts_per_step=200000", "--train.group_size=64"))
    assert not large["memory"].fault and "GiB in the actor" in large["memory"].detail
    assert "transfer_queue" in large["memory"].hint


def test_settings_that_a_job_uses_are_not_named() -> None:
    used = config.load(overrides=[
        "--train.schedule=fully_async", "--train.max_staleness=1", "--train.queue=transfer_queue",
        "--train.queue_units=1", "--algorithm.name=ppo", "--algorithm.options.gae_lambda=0.9",
        "--critic.warmup_steps=1",
        "--algorithm.kl_coef=0.1", "--algorithm.kl_estimator=k3", "--algorithm.options.clip_high=0.3"])
    assert unread_settings(used) == []
    own = config.load(overrides=["--algorithm.name=some.module:mine", "--algorithm.overlong_penalty=0.9",
                                 "--reference.enabled=true", "--algorithm.reference_every_steps=2"])
    assert unread_settings(own) == []


@pytest.mark.parametrize(("given", "pool"), [
    (["--eval.min_p=0.1"], "rollout"), (["--rollout.min_p=0.1"], "rollout"),
    (["--rollout.reward=genrm", "--rollout.reward_options={min_p: 0.1}", "--pools.genrm.model=/judge"], "genrm"),
    (["--eval.min_p=0.1", "--engine.seeded_sampling=off"], ""), ([], "")])
def test_pool_that_loses_its_seeds_by_min_p_is_named(given: list[str], pool: str) -> None:
    found = [finding.detail for finding in job_check._of_seeds(config.load(overrides=given))]
    assert [f"of the pool {pool} is" in detail for detail in found] == ([True] if pool else [])


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


def altered(folder: Path, model: Path, file: str, alter: Callable[[Any], object]) -> Path:
    """A copy of a model with one of its JSON files altered."""
    shutil.copytree(model, folder)
    raw = json.loads((folder / file).read_text())
    alter(raw)
    (folder / file).write_text(json.dumps(raw))
    return folder


def exchange_two_tokens(tokenizer: Any) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]


def test_critic_must_have_the_policys_tokens_and_positions_for_its_sequences(tmp_path: Path, model: Path) -> None:
    def found(*settings: str) -> dict[str, job_check.JobFinding]:
        return by_part(text_job(tmp_path, model, ROWS, "--algorithm.name=ppo", *settings))

    assert not any(f.fault for f in found(f"--critic.model={model}").values())
    other = altered(tmp_path / "other", model, "tokenizer.json", exchange_two_tokens)
    assert (f"critic.model={other}: its tokenizer differs from that of model.path in 2 tokens, such as '1'"
            in found(f"--critic.model={other}")["critic"].fault)
    shutil.copytree(model, bare := tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    without = found(f"--critic.model={bare}")["critic"]
    assert f"there is no tokenizer in {bare}" in without.fault
    assert without.hint.startswith("critic.model needs the model's tokenizer")
    short = altered(tmp_path / "short", model, "config.json", lambda raw: raw.update(max_position_embeddings=8))
    assert "max_position_embeddings=8 is too small" in found(f"--critic.model={short}")["data"].fault
    uneven = found("--critic.trainer.tensor_parallel=3")["critic"]
    assert "is not a multiple of critic.trainer.tensor_parallel=3" in uneven.fault
    assert "set a critic.trainer.tensor_parallel that divides" in uneven.hint


def test_teacher_must_have_the_policys_tokens_and_room_for_its_sequences(tmp_path: Path, model: Path) -> None:
    settings = ["--algorithm.name=on_policy_distillation", "--algorithm.teacher=large", f"--pools.large.model={model}"]
    assert not any(f.fault for f in by_part(text_job(tmp_path, model, ROWS, *settings)).values())
    found = by_part(text_job(tmp_path, model, ROWS, *settings, "--pools.large.engine.max_total_tokens=96"))["data"]
    assert "up to 96 tokens, and the teacher's engines take sequences of up to 88" in found.fault
    found = by_part(text_job(tmp_path, model, ROWS, *settings, "--algorithm.teacher_top_k=256"))["data"]
    assert not found.fault
    other = altered(tmp_path / "other", model, "tokenizer.json", exchange_two_tokens)
    found = by_part(text_job(tmp_path, model, ROWS, *settings[:2], f"--pools.large.model={other}"))["data"]
    assert f"pools.large.model={other}: its tokenizer differs from that of model.path in 2 tokens" in found.fault
    found = by_part(config.load(overrides=settings))
    assert "with the built-in model, whose tokens no teacher has" in found["data"].fault
    found = by_part(text_job(tmp_path, model, ROWS, *settings[:2], "--pools.large.model=/nowhere"))
    assert "there is no folder /nowhere" in found["pool large"].fault and not found["data"].fault


def test_judge_is_asked_nothing_but_its_questions_are_written(tmp_path: Path, model: Path) -> None:
    settings = ["--rollout.reward=genrm", f"--pools.genrm.model={model}", "--rollout.reward_options.max_tokens=8"]
    prompt = "Is {response} right? {question}"
    found = by_part(text_job(tmp_path, model, ROWS, *settings, f"--rollout.reward_options.prompt={prompt}"))
    assert not any(f.fault for f in found.values())
    assert found["reward of the answers"].detail == "not tried: the judge's engines run with the job only"
    found = by_part(text_job(tmp_path, model, ROWS, *settings, f"--rollout.reward_options.prompt={prompt * 20}"))
    assert "a question for the judge has" in found["reward of the answers"].fault
    unanswered = [{"question": row["question"]} for row in ROWS]
    bare = ["--data.options.answer_key=''", "--sft.max_steps=0", f"--rollout.reward_options.prompt={prompt} {{topic}}"]
    found = by_part(text_job(tmp_path, model, unanswered, *settings, *bare))
    assert "has no column 'topic'" in found["reward of the answers"].fault


def test_pool_that_nothing_asks_is_pointed_out(tmp_path: Path, model: Path) -> None:
    found = by_part(text_job(tmp_path, model, ROWS, f"--pools.spare.model={model}"))["pool spare"]
    assert not found.fault and "no reward and no algorithm asks it" in found.hint
    wrong = by_part(text_job(tmp_path, model, ROWS, f"--pools.spare.model={model}",
                             "--pools.spare.engine.extra_args=[--tp-size=x]"))["pool spare"]
    assert wrong.fault.startswith("pools.spare.engine.extra_args")


# -- functions of the user's own ---------------------------------------------------------------------------------------
CALLED = """
import functools

def plain(request, engines): ...
async def no_arguments(): ...
async def good(request, engines): ...
@functools.wraps(good)
def wrapped(*args): return good(*args)
class Object:
    async def __call__(self, request, engines): ...
an_object = Object()

def keeps(group): return ""
def keeps_none(): return ""
async def keeps_later(group): return ""
class Keeps:
    def __init__(self, *, above=0): self.above = above
    def __call__(self, group): return ""
"""


@pytest.mark.parametrize(("setting", "fault"), [
    ("rollout.generate=own_calls:plain", "is no async function"),
    ("rollout.generate=own_calls:no_arguments", "is a function that does not take 2 arguments"),
    ("rollout.generate=own_calls:Object", "is a class"),
    ("rollout.generate=own_calls:good", ""), ("rollout.generate=own_calls:wrapped", ""),
    ("rollout.generate=own_calls:an_object", ""),
    ("rollout.filters=['own_calls:keeps_none']", "is a function that does not take 1 argument"),
    ("rollout.filters=['own_calls:keeps_later']", "is an async function"),
    ("rollout.filters=['own_calls:Keeps']", "is a class"),
    ("rollout.filters=['own_calls:keeps']", ""),
    ("rollout.filters=[{name: 'own_calls:Keeps', above: 1}]", "")])
def test_function_that_cannot_be_called_is_refused_before_anything_runs(
        local_plugins: Path, setting: str, fault: str) -> None:  # noqa: F811
    """In a run it would fail for every group, which is waited for without end."""
    (local_plugins / "own_calls.py").write_text(CALLED)
    cfg = config.load(overrides=[f"--{setting}"])
    found = next(f for f in job_check._plug_ins(cfg) if f.part == setting.partition("=")[0].partition(".")[2])
    assert fault in found.fault and bool(found.fault) is bool(fault)


# -- environments ------------------------------------------------------------------------------------------------------
OWN = """
class Episode:
    def __init__(self, prompt): self.prompt = prompt
    async def step(self, text): ...
    async def close(self): ...

class Plain(Episode):
    def step(self, text): ...

class NoText(Episode):
    async def step(self): ...

def plain(options, context): return lambda prompt, seed: Plain(prompt)
def no_text(options, context): return lambda prompt, seed: NoText(prompt)
def good(options, context): return lambda prompt, seed: Episode(prompt)
def seeded(options, context): return lambda prompt, seed: Episode(prompt.metadata["seed"])
def no_step(options, context): return lambda prompt, seed: 5
def one_parameter(options, context): return lambda prompt: Episode(prompt)
"""
PLAYED = ["--rollout.reward=environment"]


@pytest.mark.parametrize(("name", "part", "named"), [
    ("good", "", ""), ("seeded", "environment", "begins no episode with a prompt of the data: KeyError: 'seed'"),
    ("no_step", "environment", "an episode that is a int, without step or close"),
    ("plain", "environment", "an episode whose step is no async function"),
    ("no_text", "environment", "an episode whose step is a function that does not take 1 argument"),
    ("one_parameter", "generate", "of other parameters")])
def test_environment_is_tried_with_the_data(tmp_path: Path, model: Path, local_plugins: Path,  # noqa: F811
                                            name: str, part: str, named: str) -> None:
    (local_plugins / "own_episodes.py").write_text(OWN)
    found = by_part(text_job(tmp_path, model, ROWS, *PLAYED, f"--rollout.environment=own_episodes:{name}"))
    assert {p for p, f in found.items() if f.fault} == ({part} if part else set())
    if part:
        assert named in found[part].fault
    else:
        assert "4 prompts" in found["environment"].detail and "an episode" in found["reward of the answers"].detail


def test_reward_of_an_environment_needs_one(tmp_path: Path, model: Path) -> None:
    mix = "--rollout.reward_options={parts: [{reward: environment}, {reward: f1}]}"
    for more in (["--rollout.reward=environment"], ["--rollout.reward=mix", mix]):
        with pytest.raises(ConfigError, match=r"set rollout\.environment to what the policy acts in"):
            text_job(tmp_path, model, ROWS, *more)
    text_job(tmp_path, model, ROWS, "--rollout.reward=environment", "--rollout.generate=my_module:plays")


def test_other_parts_of_a_mix_are_tried_with_the_answers(tmp_path: Path, model: Path,
                                                         local_plugins: Path) -> None:  # noqa: F811
    (local_plugins / "own_episodes.py").write_text(OWN)
    found = by_part(text_job(
        tmp_path, model, ROWS, "--rollout.environment=own_episodes:good",
        "--rollout.reward=mix", "--rollout.reward_options={parts: [{reward: environment}, {reward: f1}]}"))
    assert not found["reward of the answers"].fault and "get 1, 1, 1, 1" in found["reward of the answers"].detail


def test_responses_without_room_for_a_second_turn_are_hinted_at(tmp_path: Path, model: Path,
                                                                local_plugins: Path) -> None:  # noqa: F811
    (local_plugins / "own_episodes.py").write_text(OWN)
    played = [*PLAYED, "--rollout.environment=own_episodes:good"]
    found = by_part(text_job(tmp_path, model, ROWS, *played, "--data.options.max_response_tokens=4"))["environment"]
    assert not found.fault and "max_response_tokens=4, and the shortest turn" in found.hint
    assert not by_part(text_job(tmp_path, model, ROWS, *played))["environment"].hint


def test_hints_about_tools_are_of_the_part_that_generates(tmp_path: Path, model: Path,
                                                          local_plugins: Path) -> None:  # noqa: F811
    cfg = text_job(tmp_path, model, ROWS, "--rollout.environment=tools",
                   "--rollout.environment_options={tools: [calculator], parser: pythonic}", "--rollout.max_turns=1")
    found = next(f for f in job_check._plug_ins(cfg) if f.part == "generate")
    assert not found.fault and "no result is ever read" in found.hint
