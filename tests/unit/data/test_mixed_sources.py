"""The sources reasoning_gym and mix, and what a user's own factory is called with."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.text_model import make_tokenizer_folder

from elastic_rl import config
from elastic_rl.data import sources
from elastic_rl.data.generated_tasks import ENDLESS
from elastic_rl.data.order import fingerprint, sft_order
from elastic_rl.data.samples import Prompt
from elastic_rl.data.sources import make_source, read_order, read_prompts
from elastic_rl.data.text_options import with_absolute_paths
from elastic_rl.errors import ConfigError, SourceFailed

SIZES = {"max_prompt_tokens": 2000, "max_response_tokens": 8}
PROMPT = Prompt((1, 2), "1+1=", (3, 4))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer_folder(tmp_path_factory.mktemp("models") / "chat")


def make(folder: Path, model: Path | str, source: str, seed: int = 0, **options: Any) -> Any:
    return make_source(config.parse({
        "seed": seed, "run_dir": str(folder), "model": {"path": str(model)}, "sft": {"max_steps": 0},
        "data": {"source": source, "options": options}}))


def taken(source: Any, count: int, seed: int = 0) -> list[Prompt]:
    indices = [i for i, _ in read_order(source.order(seed), range(count), len(source.train), named="it")]
    return read_prompts(source.train, indices, named="it", answers=False)


# -- reasoning-gym -----------------------------------------------------------------------------------------------------
TASKS = [{"name": "basic_arithmetic", "weight": 3, "config": {"max_terms": 2}}, {"name": "leg_counting"},
         {"name": "rubiks_cube", "config": {"cube_size": 2}}]


def test_tasks_give_problems_without_end_by_weight_which_their_task_scores(tmp_path: Path, model: Path) -> None:
    from reasoning_gym import create_dataset  # in seconds, which each process that collects tests would take

    source = make(tmp_path, model, "reasoning_gym", tasks=TASKS, eval_prompts=20, system_prompt="be brief",
                  template="Q: {question}", **SIZES)
    assert len(source.train) == 3 * ENDLESS and {n: len(p) for n, p in source.evals.items()} == {
        "eval": 20, "basic_arithmetic": 12, "leg_counting": 4, "rubiks_cube": 4}
    prompts = taken(source, 50)
    assert Counter(p.metadata["task"] for p in prompts) == {
        "basic_arithmetic": 30, "leg_counting": 10, "rubiks_cube": 10}
    assert len({p.text for p in prompts}) > 45 and not {p.text for p in prompts} & {p.text for p in source.eval}
    for p in prompts[:10] + list(source.eval)[-3:]:
        known = json.loads(json.dumps(dict(p.metadata)))
        assert known == p.metadata
        task = create_dataset(known["task"], seed=known["seed"], size=known["size"], **known["config"])
        entry = known["entry"]
        assert task[known["index"]]["question"] == entry["question"]
        assert p.text == f"<|system|>be brief<|end|><|user|>Q: {entry['question']}<|end|><|assistant|>"
        if entry["answer"] is None:  # the task has many right answers
            assert p.answer_ids is None and known["answer"] == ""
            continue
        assert task.score_answer(known["answer"], entry) == 1.0 > task.score_answer("no", entry)
        assert source.tokenizer.decode(p.answer_ids) == entry["answer"] == known["answer"]
    again = make(tmp_path, model, "reasoning_gym", tasks=TASKS, eval_prompts=20, system_prompt="be brief",
                 template="Q: {question}", **SIZES)
    assert [*taken(again, 50), *again.eval] == [*prompts, *source.eval]
    assert fingerprint(again.train) == fingerprint(source.train)
    other = make(tmp_path, model, "reasoning_gym", 1, tasks=TASKS, eval_prompts=20, **SIZES)
    assert fingerprint(other.train) != fingerprint(source.train)


def test_problem_that_is_evaluated_is_never_trained_on(tmp_path: Path, model: Path) -> None:
    few = {"name": "leg_counting", "config": {"min_animals": 1, "max_animals": 1, "max_instances": 2}}
    source = make(tmp_path, model, "reasoning_gym", tasks=[few], eval_prompts=5, **SIZES)
    held_out = {p.text for p in source.eval}
    trained = {p.text for p in taken(source, 150)}
    assert held_out and trained and not held_out & trained
    with pytest.raises(ConfigError, match="too few different problems"):
        make(tmp_path, model, "reasoning_gym", tasks=[few], eval_prompts=2000, **SIZES)


def test_long_problems_are_refused_or_others_taken(tmp_path: Path, model: Path) -> None:
    words = {"name": "letter_counting", "config": {"min_words": 1, "max_words": 40}}
    options: dict[str, Any] = {"tasks": [words], "eval_prompts": 2, "max_prompt_tokens": 200, "max_response_tokens": 4}
    short = taken(make(tmp_path, model, "reasoning_gym", long_prompts="drop", **options), 20)
    assert max(len(p.token_ids) for p in short) <= 200
    with pytest.raises((ConfigError, SourceFailed), match="has 2.. tokens"):
        taken(make(tmp_path, model, "reasoning_gym", **options), 20)


def test_task_with_a_size_comes_again_after_it(tmp_path: Path, model: Path) -> None:
    source = make(tmp_path, model, "reasoning_gym", tasks=[{"name": "leg_counting", "size": 7}], eval_prompts=2,
                  **SIZES)
    texts = [prompt.text for prompt in taken(source, 14)]
    assert len(source.train) == 7 and sorted(texts[:7]) == sorted(texts[7:])


def test_rl_does_not_begin_with_the_problems_that_were_imitated(tmp_path: Path, model: Path) -> None:
    source = make(tmp_path, model, "reasoning_gym", tasks=TASKS, eval_prompts=2, **SIZES)
    imitated, of_rl = ({i for i, _ in read_order(order, range(500), len(source.train), named="reasoning_gym")}
                       for order in (sft_order(source, 0), source.order(0)))
    assert len(imitated) == len(of_rl) == 500 and not imitated & of_rl


@pytest.mark.parametrize(("options", "named"), [
    ({"tasks": [{"name": "leg_countin"}]}, "no task 'leg_countin'; did you mean 'leg_counting'"),
    ({"tasks": [{"name": "leg_counting", "config": {"nope": 1}}]}, "leg_counting cannot be made: TypeError.*nope"),
    ({"tasks": [{"name": "leg_counting", "config": {"min_animals": -1}}]}, "leg_counting cannot be made: Assertion"),
    ({"tasks": [{"name": "leg_counting", "config": {"seed": 1}}]}, "'seed', which follows from the job's"),
    ({"tasks": [{"name": "leg_counting"}] * 2}, "different names"),
    ({"tasks": []}, "data.options.tasks"),
    ({"tasks": [{"name": "leg_counting"}], "template": "{question} {x}"}, "the only field is {question}")])
def test_wrong_task_is_a_wrong_setting(tmp_path: Path, model: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make(tmp_path, model, "reasoning_gym", **{**SIZES, **options})


# -- mix ---------------------------------------------------------------------------------------------------------------
def lines(path: Path, texts: list[str]) -> dict[str, Any]:
    path.write_text("".join(json.dumps({"q": t}) + "\n" for t in texts))
    return {"paths": str(path), "prompt_key": "q", **SIZES}


def test_mix_takes_its_parts_by_weight_and_evaluates_all_of_them(tmp_path: Path, model: Path) -> None:
    a, b = (lines(tmp_path / name, [f"{name}{i}" for i in range(size)]) for name, size in (("a", 20), ("b", 50)))
    parts = [{"source": "jsonl", "name": "a", "weight": 2, "options": a},
             {"source": "jsonl", "name": "b", "options": b},
             {"source": "reasoning_gym", "options": {"tasks": TASKS[:2], "eval_prompts": 4, **SIZES}}]
    source = make(tmp_path, model, "mix", parts=parts)
    assert {n: len(p) for n, p in source.evals.items()} == {"eval": 11, "a": 2, "b": 5, "reasoning_gym": 4}
    assert list(source.eval) == [p for n in ("a", "b", "reasoning_gym") for p in source.evals[n]]
    prompts = taken(source, 80)
    assert Counter(p.metadata["part"] for p in prompts) == {"a": 40, "b": 20, "reasoning_gym": 20}
    assert set(Counter(p.text for p in prompts if p.metadata["part"] == "a").values()) == {2, 3}, "two passes and a bit"
    assert {p.metadata["task"] for p in prompts if p.metadata["part"] == "reasoning_gym"} == {
        "basic_arithmetic", "leg_counting"}
    assert taken(make(tmp_path, model, "mix", parts=parts), 80) == prompts
    order, seen = source.order(0), set[tuple[int, int]]()
    for ordinal in range(200):
        seen.add(order.problem(ordinal))
    assert len(seen) == 200 and max(data_pass for _, data_pass in seen) == 5


def test_prompt_that_another_part_evaluates_is_found(tmp_path: Path, model: Path) -> None:
    held_out = lines(tmp_path / "e", ["x", "y"])["paths"]
    a = lines(tmp_path / "a", [f"a{i}" for i in range(20)]) | {"evals": {"held": {"paths": held_out}}}
    b = lines(tmp_path / "b", [f"b{i}" for i in range(20)] + ["y"]) | {"evals": {"own": {"paths": lines(
        tmp_path / "f", ["z"])["paths"]}}}
    parts = [{"source": "jsonl", "name": n, "options": options} for n, options in (("a", a), ("b", b))]
    with pytest.raises(ConfigError, match="b:21: this prompt is trained on and evaluated"):
        make(tmp_path, model, "mix", parts=parts)
    parts[1]["options"] = b | {"overlap": "drop"}
    source = make(tmp_path, model, "mix", parts=parts)
    assert len(source.train) == 40 and not {p.text for p in source.train} & {p.text for p in source.eval}


@pytest.mark.parametrize(("parts", "named"), [
    ([], "data.options.parts"), ([{"source": "mix"}], "no mix"),
    ([{"source": "addition"}, {"source": "addition"}], "two parts are called 'addition'"),
    ([{"source": "adition"}], "did you mean 'addition'"), ([{"source": "addition", "weight": 0}], "weight"),
    ([{"source": "addition", "options": {"nope": 1}}], "data source 'addition' are invalid.*nope"),
    ([{"source": "addition"}, {"source": "jsonl", "options": {}}], "data source 'jsonl' are invalid.*paths")])
def test_wrong_mix_is_a_wrong_setting(tmp_path: Path, parts: list[dict[str, Any]], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make(tmp_path, "", "mix", parts=parts)


def test_parts_for_other_models_do_not_mix(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match="end responses with other tokens"):
        make(tmp_path, model, "mix", parts=[{"source": "addition"}, {
            "source": "jsonl", "options": lines(tmp_path / "a", ["a", "b"])}])


def test_addition_alone_in_a_mix_is_addition(tmp_path: Path) -> None:
    source = make(tmp_path, "", "mix", parts=[{"source": "addition", "options": {"operand_below": 7}}])
    assert len(source.train) + len(source.eval) == 49
    assert all(p.metadata == {"answer": source.tokenizer.decode(p.answer_ids or ()), "part": "addition"}
               for p in islice(source.train, 9))


# -- a user's own ------------------------------------------------------------------------------------------------------
def of(**given: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"train": [PROMPT], "eval": [PROMPT], "stop_token_ids": [0], "max_prompt_tokens": 4,
                              "max_response_tokens": 4} | given)


def test_factory_gets_the_keywords_that_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def old(options: dict[str, Any], *, seed: int, eval_fraction: float) -> Any:
        seen["old"] = (options, seed, eval_fraction)
        return of()

    def new(options: dict[str, Any], seed: int, tokenizer: Any, folder: Path, other: int = 3) -> Any:
        seen["new"] = (seed, tokenizer.encode_batch(["1+"], special_tokens=True), folder, other)
        return of(tokenizer=tokenizer)

    def bare(options: dict[str, Any]) -> Any:
        return of()

    def everything(*args: Any, **keywords: Any) -> Any:
        seen["all"] = sorted(keywords)
        return of()

    for name, factory in (("old", old), ("new", new), ("bare", bare), ("everything", everything)):
        monkeypatch.setitem(sources.SOURCES, name, factory)
    assert make(tmp_path, "", "old", 5, x=1).tokenizer is None and seen["old"] == ({"x": 1}, 5, 0.1)
    assert make(tmp_path, "", "new", 5).tokenizer.decode([3, 12, 1]) == "1+"
    assert seen["new"] == (5, [[3, 12]], tmp_path / "quickstart/data", 3)
    assert list(make(tmp_path, "", "bare").evals) == ["eval"]
    make(tmp_path, "", "everything")
    assert seen["all"] == sorted(sources.OFFERED)


def test_factory_that_wants_something_else_is_told_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                 ) -> None:
    monkeypatch.setitem(sources.SOURCES, "mine", lambda options, seed, tokeniser: of())
    with pytest.raises(ConfigError, match="wants the arguments tokeniser, .*seed, eval_fraction, tokenizer, folder"):
        make(tmp_path, "", "mine")


@pytest.mark.parametrize("problem", [
    lambda ordinal: 1 / 0, lambda ordinal: 3, lambda ordinal: (1, 0), lambda ordinal: (0, -1),
    lambda ordinal: (0.0, 0)])
def test_wrong_order_of_a_source_is_a_wrong_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Any
                                                    ) -> None:
    monkeypatch.setitem(sources.SOURCES, "mine", lambda options: of(
        order=lambda seed: SimpleNamespace(problem=problem)))
    with pytest.raises(ConfigError, match="mine.* order"):
        make(tmp_path, "", "mine")


def test_paths_of_files_are_made_absolute_also_in_a_mix() -> None:
    here = str(Path.cwd())
    one = {"paths": ["a*.jsonl", "/b"], "eval_paths": "c", "evals": {"x": {"paths": "~/d"}, "y": 3}, "prompt_key": "q"}
    shown = {"paths": [f"{here}/a*.jsonl", "/b"], "eval_paths": f"{here}/c", "prompt_key": "q",
             "evals": {"x": {"paths": str(Path("~/d").expanduser())}, "y": 3}}
    assert with_absolute_paths("parquet", one) == shown
    mixed = {"parts": [{"source": "jsonl", "options": one}, {"source": "addition", "options": {"paths": "x"}}, 4]}
    assert with_absolute_paths("mix", mixed) == {"parts": [{"source": "jsonl", "options": shown}, *mixed["parts"][1:]]}
    assert with_absolute_paths("mine:make", one) == one
