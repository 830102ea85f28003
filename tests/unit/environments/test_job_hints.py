"""Which settings of a job are pointed out because its policy would learn nothing of its environment."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest
from support.text_model import make_tokenizer_folder
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from elastic_rl import config
from elastic_rl.config import Config
from elastic_rl.engine.own_generate import EnvironmentJob
from elastic_rl.environments import job_hints

TOLD = "data.options.system_prompt=call calculator or search"


def job(*more: str, model: Path | str = "/models/policy") -> Config:
    return config.load(overrides=[
        f"model.path={model}", "rollout.environment=tools",
        "rollout.environment_options={tools: [calculator, \"own.tools:search\"]}", *more])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer_folder(tmp_path_factory.mktemp("policy") / "model")


def test_environment_writes_the_date_of_the_job() -> None:
    assert EnvironmentJob.of(job("data.template_date=2026-11-25"), "").template_date == datetime.date(2026, 11, 25)


@pytest.mark.parametrize(("described", "missing"), [
    ("{tools: [{function: {name: search}}]}", "calculator"), ("{}", "calculator, search"),
    ("{tools: [{function: {name: search}}, {function: {name: calculator}}]}", "")])
def test_tools_that_the_prompts_do_not_describe_are_pointed_out(monkeypatch: pytest.MonkeyPatch, folder: Path,
                                                                described: str, missing: str) -> None:
    cfg = job(f"data.options.chat_template_options={described}", model=folder)
    assert ("," in missing) is not any(job_hints.of_settings(cfg)) or not missing
    assert not list(job_hints.of_tokens(cfg, 1000)), "a tokenizer of one task"
    monkeypatch.setattr(job_hints, "_OF_ONE_TASK", 0)
    found = "; ".join([*job_hints.of_settings(cfg), *job_hints.of_tokens(cfg, 1000)])
    assert f"does not describe {missing}:" in found if missing else not found


def test_tools_that_the_system_prompt_names_are_described() -> None:
    assert not list(job_hints.of_settings(job(TOLD)))
    assert not list(job_hints.of_settings(config.load()))


def test_single_turn_which_reads_no_result_is_pointed_out(folder: Path) -> None:
    [said] = job_hints.of_settings(job(TOLD, "rollout.max_turns=1"))
    assert "no result is ever read" in said
    assert not list(job_hints.of_tokens(job(TOLD, "rollout.max_turns=1", model=folder), 1))


def test_responses_without_room_for_a_second_turn_are_pointed_out(folder: Path) -> None:
    cfg = job(TOLD, model=folder)
    [said] = job_hints.of_tokens(cfg, 1)
    takes = int(said.partition("takes ")[2].partition(":")[0])
    assert len(list(job_hints.of_tokens(cfg, takes))) == 1 and not list(job_hints.of_tokens(cfg, takes + 1))


def test_results_that_the_tokenizer_has_no_tokens_for_are_pointed_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                                      folder: Path) -> None:
    monkeypatch.setattr(job_hints, "_OF_ONE_TASK", 0)
    words = Tokenizer(WordLevel({"<unk>": 0, "x": 1, "<|end|>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    other = make_tokenizer_folder(tmp_path / "words")
    words.save(str(other / "tokenizer.json"))
    raw = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps({**raw, "unk_token": "<unk>"}))
    [said] = job_hints.of_tokens(job(TOLD, model=other), 1000)
    assert "as its unknown token" in said
    assert not list(job_hints.of_tokens(job(TOLD, model=folder), 1000))
