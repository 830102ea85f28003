"""The sources jsonl and parquet: rows, columns, templates, splits, what is left out, and errors that say what to do."""

from __future__ import annotations

import datetime
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.text_model import DATED_CHAT, make_tokenizer_folder
from transformers.utils import chat_template_utils

from elastic_rl import config
from elastic_rl.data import derived, parquet
from elastic_rl.data.order import fingerprint
from elastic_rl.data.parquet import ParquetRows
from elastic_rl.data.rows import JsonlRows, value_at
from elastic_rl.data.samples import Prompt
from elastic_rl.data.sources import make_source, read_prompts
from elastic_rl.data.templates import Template
from elastic_rl.data.values import plain_json, text_value
from elastic_rl.errors import ConfigError, SourceFailed

ROWS = [{"question": f"what is {i} and {i}?", "answer": 2 * i, "level": {"name": f"l{i % 3}"}} for i in range(60)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer_folder(tmp_path_factory.mktemp("models") / "chat")


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=7)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make(folder: Path, model: Path | str, kind: str = "jsonl", *, seed: int = 0, eval_fraction: float = 0.1,
         mode: str = "rl", data: Mapping[str, Any] | None = None, **options: Any) -> Any:
    if not {"prompt_key", "messages_key", "template"} & options.keys():
        options["prompt_key"] = "question"
    given = {"max_prompt_tokens": 64, "max_response_tokens": 8} | options
    return make_source(config.parse({
        "mode": mode, "seed": seed, "run_dir": str(folder / "runs"), "model": {"path": str(model)},
        "sft": {"max_steps": 0},
        "data": {"source": kind, "options": given, "eval_fraction": eval_fraction, **(data or {})}}))


def make_mix(folder: Path, model: Path, mode: str, options: Mapping[str, Any]) -> Any:
    return make_source(config.parse({
        "mode": mode, "run_dir": str(folder / "runs"), "model": {"path": str(model)}, "sft": {"max_steps": 0},
        "data": {"source": "mix", "options": options}}))


def test_files_to_evaluate_are_enough_to_evaluate(tmp_path: Path, model: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"question": f"what is {n}"} for n in range(9)])
    given = {"evals": {"sums": {"paths": path}}}
    source = make(tmp_path, model, mode="eval", **given)
    assert len(source.eval) == 9 and len(source.train) == 0 and source.eval_name == "sums"
    assert len(make(tmp_path, model, mode="eval", paths="/of/another/machine.jsonl", **given).eval) == 9
    mixed = {"parts": [{"source": "jsonl", "options": {
        "prompt_key": "question", "max_prompt_tokens": 64, "max_response_tokens": 8, "paths": path, **given}}]}
    assert len(make_mix(tmp_path, model, "eval", mixed).eval) == 9  # also where each would be trained on
    [part] = mixed["parts"]
    mixed["parts"] = [{**part, "name": "sums", "options": {k: v for k, v in part["options"].items() if k != "paths"}},
                      {**part, "name": "whole", "options": {**part["options"], "overlap": "unchecked"}}]
    with pytest.raises(ConfigError, match="part 'sums' of the mix has no prompt to train on"):
        make_mix(tmp_path, model, "rl", mixed)
    with pytest.raises(ConfigError, match="no prompt to train on"):
        make(tmp_path, model, **given)
    with pytest.raises(ConfigError, match="set paths; or, with mode: eval"):
        make(tmp_path, model, mode="eval")


def texts(prompts: Sequence[Prompt]) -> list[str]:
    return [p.text for p in prompts]


# -- rows --------------------------------------------------------------------------------------------------------------
@given(st.lists(st.text(max_size=9), min_size=1, max_size=200), st.text("\n\r \t", max_size=150), st.integers(0, 3))
def test_jsonl_rows_are_those_of_the_lines(tmp_path_factory: pytest.TempPathFactory, values: list[str], end: str,
                                           newlines: int) -> None:
    """Blank lines at the end are none."""
    path = tmp_path_factory.mktemp("rows") / "a.jsonl"
    lines = [json.dumps({"v": v}, ensure_ascii=False).encode("utf-8", "replace") + b"\r" * (newlines == 1)
             for v in values]
    path.write_bytes(b"\n".join(lines) + end.encode())
    rows = JsonlRows(path, path.parent)
    assert len(rows) == len(values)
    assert [rows.row(i) for i in range(len(rows))] == list(rows.scan()) == [json.loads(line) for line in lines]


def test_jsonl_index_crosses_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_rl.data.rows._BLOCK", 100)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"n": n, "pad": "x" * (n * 7 % 311)}) + "\n" for n in range(1000)))
    rows = JsonlRows(path, tmp_path)
    assert [rows.row(n)["n"] for n in range(1000)] == list(range(1000))


def test_parquet_source_has_the_tables_rows_and_copies_once(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.parquet", [{"n": n, "s": {"t": f"{n}"}, "unused": b"x"} for n in range(1300)]))
    rows = ParquetRows(path, {"n": "", "s.t": ""}, tmp_path / "job")
    assert len(rows) == 1300 and list(rows.scan()) == [rows.row(n) for n in range(1300)]
    assert rows.row(1299) == {"n": 1299, "s": {"t": "1299"}}
    [copy] = (tmp_path / "job").iterdir()
    made_at = copy.stat().st_mtime_ns
    killed, *others = (tmp_path / "job" / f"x.arrow.{name}.partial" for name in (
        f"{derived._machine()}.{2**22 + 1}", f"{derived._machine()}.{os.getppid()}", f"00000000.{2**22 + 1}"))
    for file in (killed, *others):
        file.touch()
    assert ParquetRows(path, {"s.t": "", "n": ""}, tmp_path / "job").row(5)["n"] == 5
    assert copy.stat().st_mtime_ns == made_at
    write(path, [{"n": -1, "s": {"t": ""}}])
    assert ParquetRows(path, {"n": ""}, tmp_path / "job").row(0) == {"n": -1}
    assert not killed.exists() and all(file.exists() for file in others), "others may still write theirs"
    os.utime(others[1], (0, 0))
    derived.write(tmp_path / "job" / "y", "")
    assert others[0].exists() and not others[1].exists()


def test_parquet_files_take_no_descriptor_each(tmp_path: Path) -> None:
    before = psutil.Process().num_fds()
    files = [ParquetRows(Path(write(tmp_path / f"{n}.parquet", [{"n": n}])), {"n": ""}, tmp_path / "job")
             for n in range(99)]
    assert psutil.Process().num_fds() - before <= 70
    (tmp_path / "job" / next(f.name for f in (tmp_path / "job").iterdir() if f.name.startswith("0-"))).unlink()
    assert [file.row(0)["n"] for file in files] == list(range(99)), "also one whose copy is gone"
    write(tmp_path / "1.parquet", [{"n": 100}])
    for copy in (tmp_path / "job").iterdir():
        copy.unlink()
    with pytest.raises(SourceFailed, match="1.parquet has changed since it was first read"):
        files[1].row(0)


@given(st.lists(st.tuples(st.text("abc {}", max_size=5), st.sampled_from(["a", "b", "c.d", "0", "q: [x]!r"])),
                min_size=1, max_size=5),
       st.text(max_size=5))
def test_template_puts_columns_between_its_texts(parts: list[tuple[str, str]], end: str) -> None:
    def escaped(text: str) -> str:
        return text.replace("{", "{{").replace("}", "}}")

    template = Template.parse("".join(escaped(t) + "{" + field + "}" for t, field in parts) + escaped(end), "t")
    row = {"a": "{a}", "b": 2, "c": {"d": "x"}, "0": "zero", "q: [x]!r": "?"}
    shown = {"a": "{a}", "b": "2", "c.d": "x", "0": "zero", "q: [x]!r": "?"}
    assert template.render(row, "") == "".join(t + shown[field] for t, field in parts) + end
    assert set(template.fields) == {field for _, field in parts}


@pytest.mark.parametrize("text", ["no field", "", "{", "{}", "a}", "{{a}", "{a}}", "{a{b}}", "{a} \\boxed{}"])
def test_wrong_template_is_a_wrong_setting(text: str) -> None:
    with pytest.raises(ConfigError, match="data.options.template"):
        Template.parse(text, "data.options.template")


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text()
                    | st.floats(allow_nan=False, allow_infinity=False),
                    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner), max_leaves=9))
def test_values_of_a_row_are_plain_json(value: Any) -> None:
    plain = plain_json(value, "it")
    assert json.loads(json.dumps(plain)) == plain == json.loads(json.dumps(value))


@given(st.integers(-10**30, 10**30) | st.floats(allow_nan=False, allow_infinity=False))
def test_number_of_a_row_is_written_in_decimal_digits(value: float) -> None:
    text = text_value(value, "it")
    assert type(value)(text) == value and "e" not in text


def test_value_that_json_does_not_have_is_a_fault_with_its_place() -> None:
    with pytest.raises(SourceFailed, match="a:1: a value is a bytes"):
        plain_json({"x": [b""]}, "a:1")
    for number in (math.inf, -math.inf, math.nan):
        with pytest.raises(SourceFailed, match="a:1: a number is .*, which JSON does not have"):
            plain_json([number], "a:1")
    with pytest.raises(SourceFailed, match="a:1 has no column 'lvl', only level; did you mean 'level'"):
        value_at({"level": 1}, "lvl", "a:1")


# -- prompts -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_prompts_have_tokens_text_answer_and_metadata(tmp_path: Path, model: Path, kind: str) -> None:
    path = write(tmp_path / f"a.{kind}", ROWS)
    source = make(tmp_path, model, kind, paths=path, answer_key="answer", metadata_keys=["level.name"],
                  system_prompt="add", chat_template_options={"think": "no"})
    assert len(source.train) == 54 and len(source.eval) == 6 and list(source.evals) == ["eval"]
    assert sorted(texts([*source.train, *source.eval])) == sorted(
        f"<|system|>add<|end|><|user|>{r['question']}<|end|><|assistant|>(no)" for r in ROWS)
    one = source.train[0]
    assert source.tokenizer.decode(one.token_ids, skip_special_tokens=False) == one.text
    assert one.metadata.keys() == {"answer", "level.name"} and one.metadata["level.name"].startswith("l")
    assert one.answer_ids is not None and one.answer_ids[-1] == 0 and source.stop_token_ids == (0, 1)
    assert source.tokenizer.decode(one.answer_ids) == one.metadata["answer"]
    again = make(tmp_path, model, kind, paths=path, answer_key="answer", metadata_keys=["level.name"],
                 system_prompt="add", chat_template_options={"think": "no"})
    assert fingerprint(again.train) == fingerprint(source.train) and list(again.eval) == list(source.eval)
    other = make(tmp_path, model, kind, seed=1, paths=path, answer_key="answer")
    assert texts(other.eval) != texts(source.eval)


def test_date_that_a_chat_template_writes_is_the_one_of_the_job(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dated = make_tokenizer_folder(tmp_path / "dated", chat_template=DATED_CHAT)
    path = write(tmp_path / "a.jsonl", ROWS)

    def made(day: str) -> Any:
        return make(tmp_path, dated, data={"template_date": day}, paths=path)

    class Tomorrow(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return datetime.datetime(2030, 1, 1)

    first = made("2026-11-25")
    assert first.train[0].text.startswith("<|system|>Today is 25 Nov 2026<|end|>")
    monkeypatch.setattr(chat_template_utils, "datetime", Tomorrow)
    resumed = made("2026-11-25")
    assert [p.token_ids for p in resumed.train] == [p.token_ids for p in first.train]


def test_identity_of_a_prompt_does_not_depend_on_the_date(tmp_path: Path, model: Path) -> None:
    """A job waits for ever for prompts that are others than it began with."""
    dated = make_tokenizer_folder(tmp_path / "dated", chat_template=DATED_CHAT)
    other = make_tokenizer_folder(tmp_path / "other", chat_template=DATED_CHAT + " ")
    path, rows = write(tmp_path / "a.jsonl", ROWS), write(tmp_path / "b.jsonl", [{"question": "?"}, *ROWS[1:]])

    def made(tokenizer: Path, day: str = "2026-11-25", paths: str = path, **options: Any) -> Any:
        return make(tmp_path, tokenizer, data={"template_date": day}, paths=paths, eval_paths=path, overlap="unchecked",
                    **options)

    first, later = made(dated), made(dated, "2026-11-26")
    assert fingerprint(later.train) == fingerprint(first.train) and later.train[0].token_ids != first.train[0].token_ids
    assert later.tokenizer.identity != first.tokenizer.identity, "prompts of another day may be too long"
    assert made(model, "2026-11-26").tokenizer.identity == made(model).tokenizer.identity
    assert len({fingerprint(source.train) for source in (
        first, made(other), made(model), made(dated, paths=rows), made(dated, system_prompt="add"),
        made(dated, chat_template_options={"think": "no"}), made(dated, special_tokens=True))}) == 7


def test_conversations_and_plain_texts_are_prompts_too(tmp_path: Path, model: Path) -> None:
    chat = [{"chat": [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "?"}]} for i in range(9)]
    source = make(tmp_path, model, paths=write(tmp_path / "c.jsonl", chat), messages_key="chat")
    assert sorted(texts([*source.train, *source.eval]))[0] == "<|user|>0<|end|><|assistant|>?<|end|><|assistant|>"
    assert source.train[0].answer_ids is None and source.train[0].metadata == {}
    plain = make(tmp_path, model, paths=write(tmp_path / "p.jsonl", ROWS), template="Q: {question}\nlevel {level.name}",
                 apply_chat_template=False)
    assert plain.train[0].text.startswith("Q: what is") and "\nlevel l" in plain.train[0].text


def test_built_in_model_reads_files_of_its_characters(tmp_path: Path) -> None:
    rows = [{"q": f"{i}+1=", "a": f"{i + 1}"} for i in range(30)]
    source = make(tmp_path, "", paths=write(tmp_path / "a.jsonl", rows), prompt_key="q", answer_key="a",
                  apply_chat_template=False)
    assert {p.text: source.tokenizer.decode(p.answer_ids) for p in source.train} | {
        p.text: source.tokenizer.decode(p.answer_ids) for p in source.eval} == {r["q"]: r["a"] for r in rows}


def test_paths_are_patterns_and_each_file_is_read_once(tmp_path: Path, model: Path) -> None:
    write(tmp_path / "a1.jsonl", ROWS[:5])
    write(tmp_path / "a2.jsonl", ROWS[5:9])
    both = make(tmp_path, model, paths=[str(tmp_path / "a*.jsonl"), str(tmp_path / "a2.jsonl")])
    assert len(both.train) + len(both.eval) == 9


# -- evaluation sets and what is left out -----------------------------------------------------------------------------
def test_named_evaluation_sets_have_their_files_and_no_more_prompts_than_allowed(tmp_path: Path, model: Path) -> None:
    train, first, second = (write(tmp_path / f"{n}.jsonl", rows) for n, rows in (
        ("t", ROWS[:30]), ("e", ROWS[30:34]), ("f", ROWS[34:60])))
    source = make(tmp_path, model, paths=train, eval_paths=first, evals={"hard": {"paths": second}}, max_eval_prompts=9)
    assert {name: len(prompts) for name, prompts in source.evals.items()} == {"eval": 4, "hard": 9}
    assert len(source.train) == 30 and list(source.eval) == list(source.evals["eval"])
    assert len(set(texts(source.evals["hard"]))) == 9
    named = make(tmp_path, model, paths=train, evals={"x": {"paths": first}})
    assert list(named.eval) == list(named.evals["x"]) and sorted(texts(named.eval)) == sorted(texts(source.eval))


@pytest.mark.parametrize("split", [True, False])
def test_evaluated_prompt_is_refused_or_left_out_of_the_training(tmp_path: Path, model: Path, split: bool) -> None:
    if split:  # each row is there twice, so that some are on both sides of the split
        options: dict[str, Any] = {"paths": write(tmp_path / "a.jsonl", ROWS * 2)}
    else:
        options = {"paths": write(tmp_path / "t.jsonl", ROWS), "evals": {
            "x": {"paths": write(tmp_path / "e.jsonl", [{"question": "new"}])},
            "y": {"paths": write(tmp_path / "f.jsonl", [{"question": "newer"}, ROWS[7]])}}}
    with pytest.raises(ConfigError, match=r"(a|t).jsonl:\d+: this prompt is trained on and evaluated.*overlap"):
        make(tmp_path, model, **options)
    source = make(tmp_path, model, overlap="drop", **options)
    held_out = {t for prompts in source.evals.values() for t in texts(prompts)}
    assert not held_out & set(texts(source.train))
    assert {t for t in texts(source.train)} | held_out >= {f"<|user|>{r['question']}<|end|><|assistant|>" for r in ROWS}
    unchecked = make(tmp_path, model, overlap="unchecked", **options)
    assert held_out & set(texts(unchecked.train))


def test_duplicates_and_long_prompts_are_left_out_and_the_look_is_remembered(tmp_path: Path, model: Path,
                                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    long = {"question": "x" * 500}
    options: dict[str, Any] = {"paths": write(tmp_path / "t.jsonl", [*ROWS, *ROWS, long]), "evals": {
        "x": {"paths": write(tmp_path / "e.jsonl", [{"question": "new"}])}}}
    with pytest.raises(SourceFailed, match=r"t.jsonl:121: the prompt has \d+ tokens.*long_prompts"):
        read_prompts(make(tmp_path, model, **options).train, [120], named="jsonl", answers=False)
    source = make(tmp_path, model, duplicates="drop", long_prompts="drop", **options)
    assert sorted(texts(source.train)) == sorted(f"<|user|>{r['question']}<|end|><|assistant|>" for r in ROWS)
    evaluated = {"evals": {"x": {"paths": write(tmp_path / "f.jsonl", [long, {"question": "new"}])}}}
    assert texts(make(tmp_path, model, **(options | evaluated), long_prompts="drop", duplicates="drop").eval) == [
        "<|user|>new<|end|><|assistant|>"]
    write(tmp_path / "f.jsonl", [long])
    with pytest.raises(ConfigError, match="no prompt of the evaluation set 'x' has at most 64 tokens"):
        make(tmp_path, model, **(options | evaluated), long_prompts="drop")
    monkeypatch.setattr("elastic_rl.data.scan.scan", lambda *a: pytest.fail("it looked again"))
    assert texts(make(tmp_path, model, duplicates="drop", long_prompts="drop", **options).train) == texts(source.train)


@pytest.mark.parametrize("suffix", [".arrow", ".json", ".npy"])
@pytest.mark.parametrize("damage", [lambda whole: b"", lambda whole: bytes(len(whole)), lambda whole: whole[:-8]])
def test_derived_file_that_cannot_be_read_is_made_again(tmp_path: Path, model: Path, suffix: str,
                                                        damage: Callable[[bytes], bytes]) -> None:
    options = {"paths": write(tmp_path / "a.parquet", [*ROWS, *ROWS]), "duplicates": "drop", "overlap": "drop"}
    before = texts(make(tmp_path, model, "parquet", **options).train)
    [file] = (tmp_path / "runs").rglob(f"*{suffix}")
    whole = file.read_bytes()
    parquet._mapped.cache_clear()  # as in another process
    file.write_bytes(damage(whole))
    assert texts(make(tmp_path, model, "parquet", **options).train) == before and file.read_bytes() == whole


def test_what_was_derived_from_other_data_or_options_is_removed(tmp_path: Path, model: Path) -> None:
    path, folder = write(tmp_path / "a.parquet", ROWS), tmp_path / "runs" / "quickstart" / "data"
    own = tmp_path / "runs" / "quickstart" / "data" / "notes.json"
    for changed_at in (10**9, 2 * 10**9):
        os.utime(path, (changed_at, changed_at))
        for options in ({"duplicates": "drop"}, {"answer_key": "answer"}):
            derived._used.clear()  # as in another process
            source = make(tmp_path, model, "parquet", paths=path, **options)
    assert len(list(folder.iterdir())) > 3
    own.touch()
    derived.remove_unused(folder)
    assert sorted(file.suffix for file in folder.iterdir()) == [".arrow", ".json", ".json", ".npy"] and own.exists()
    assert len(texts(source.train)) == 54 and source.train[0].metadata["answer"]


def test_derived_files_are_synced_before_they_have_their_names(tmp_path: Path, model: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr("os.fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    make(tmp_path, model, "parquet", paths=write(tmp_path / "a.parquet", ROWS), duplicates="drop")
    made = [file for file in (tmp_path / "runs").rglob("*") if file.is_file()]
    assert len(made) == 3 and {file.stat().st_ino for file in made} <= set(synced)


def test_file_replaced_while_in_use_is_a_fault_until_put_back(tmp_path: Path, model: Path) -> None:
    path = Path(write(tmp_path / "a.jsonl", ROWS))
    rows, source = JsonlRows(path, tmp_path), make(tmp_path, model, paths=str(path))
    before = list(rows.scan())
    found, kept = path.stat(), path.rename(tmp_path / "kept")
    write(tmp_path / "new", ROWS[::-1])
    os.utime(tmp_path / "new", ns=(0, found.st_mtime_ns + 10**9))
    (tmp_path / "new").rename(path)
    with pytest.raises(SourceFailed, match=r"a.jsonl has changed since it was first read .put it back"):
        read_prompts(source.train, [20], named="jsonl", answers=False)
    with pytest.raises(SourceFailed, match="has changed"):
        list(rows.scan())
    kept.rename(path)
    assert list(rows.scan()) == before
    assert read_prompts(source.train, [20], named="jsonl", answers=False)


# -- errors ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("content", "options", "named"), [
    ("", {}, "a.jsonl is empty"),
    (None, {}, r"data.options.paths: there is no file .*a.jsonl; did you mean b.jsonl\?"),
    ('{"question": "x"}\n{"question": \n', {}, "a.jsonl:2 is not JSON"),
    ('{"question": "x"}\n\n{"question": "y"}\n', {}, "a.jsonl:2 is empty, with rows after it"),
    ('{"question": "x"}\n[1]\n', {}, "a.jsonl:2 is a list, not an object"),
    ('{"qestion": "x"}\n', {}, "a.jsonl:1 has no column 'question', only qestion; did you mean 'qestion'"),
    ('{"question": ["x"]}\n', {}, "a.jsonl:1: the column 'question' is a list, not text"),
    ('{"question": "x"}\n', {}, "one row"),
    ('{"question": "x"}\n', {"answer_key": "answer"}, "has no column 'answer'"),
    ('{"question": "x"}\n', {"template": "{question!r}"}, "no column 'question!r', only question.*with no format"),
    ('{"question": "x"}\n', {"template": "{q}"}, "no column 'q'"),
    ('{"question": "x"}\n', {"prompt_key": "", "template": ""}, "set one of prompt_key, messages_key and template"),
    ('{"question": "x"}\n', {"messages_key": "question"}, "messages are no list"),
    ('{"m": [{"role": "user"}]}\n', {"messages_key": "m"}, "the content of message 0 is null, not text"),
    ('{"m": [{"content": "x"}]}\n', {"messages_key": "m"}, "message 0 is no object with a role"),
    ('{"question": "x"}\n', {"max_prompt_tokens": 2}, "a.jsonl:1: the prompt has 4 tokens, .*max_prompt_tokens is 2"),
    ('{"question": "x"}\n', {"apply_chat_template": False, "system_prompt": "y"}, "system_prompt has no effect"),
    ('{"question": "x"}\n', {"promt_key": "y"}, "promt_key"),
    ('{"question": "\udcff"}\n', {}, "a.jsonl:1 is not UTF-8: invalid start byte at byte 14"),
    ('{"question": "x"}\n', {"paths": "~no-such-user/a.jsonl"}, "data.options.paths.*there is no such user"),
    ('{"question": "x"}\n', {"paths": "/tmp"}, "data.options.paths: /tmp is a folder"),
    ('{"question": "x"}\n' * 5, {}, "this prompt is trained on and evaluated"),
    ('{"question": "x"}\n' * 5, {"overlap": "drop"}, "leaves no row to train on")])
def test_wrong_file_or_option_is_a_wrong_setting_with_its_place(tmp_path: Path, model: Path, content: str | None,
                                                                options: dict[str, Any], named: str) -> None:
    file = tmp_path / ("b.jsonl" if content is None else "a.jsonl")
    file.write_bytes((content or "").encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=named):
        make(tmp_path, model, **{"paths": str(tmp_path / "a.jsonl"), **options})


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(("setting", "options"), [
    ("prompt_key", {"prompt_key": "questions"}), ("template", {"prompt_key": "", "template": "{questions}"}),
    ("messages_key", {"prompt_key": "", "messages_key": "questions"}), ("answer_key", {"answer_key": "questions"}),
    ("metadata_keys", {"metadata_keys": ["questions"]}), ("chat_template_keys", {"chat_template_keys": ["questions"]})])
def test_column_that_is_not_there_is_answered_with_the_setting_that_names_it(
        tmp_path: Path, model: Path, kind: str, setting: str, options: dict[str, Any]) -> None:
    path = write(tmp_path / f"a.{kind}", ROWS)
    with pytest.raises(ConfigError, match="has no column 'questions', only question.*did you mean 'question'") as e:
        make(tmp_path, model, kind, paths=path, **options)
    assert f"data.options.{setting} names it" in e.value.hint


def test_parquet_without_the_column_or_damaged_is_a_wrong_setting(tmp_path: Path, model: Path) -> None:
    path = write(tmp_path / "a.parquet", ROWS)
    with pytest.raises(ConfigError, match="a.parquet has no column 'questions', only .*did you mean 'question'"):
        make(tmp_path, model, "parquet", paths=path, prompt_key="questions")
    Path(path).write_bytes(Path(path).read_bytes()[:-9])
    with pytest.raises(ConfigError, match="a.parquet cannot be read"):
        make(tmp_path, model, "parquet", paths=path)
    write(Path(path), [{"question": "x"}] * 0 or [])
    with pytest.raises(ConfigError, match="no column|is empty"):
        make(tmp_path, model, "parquet", paths=path)


def test_wrong_row_is_found_by_the_scan_or_when_read(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [json.dumps(r) for r in ROWS]
    rows[40] = '{"question": 1.5, "answer": null}'
    path.write_text("\n".join(rows))
    evals = {"x": {"paths": write(tmp_path / "e.jsonl", [{"question": "new", "answer": "x"}])}}
    with pytest.raises(ConfigError, match="a.jsonl:41: the column 'answer' is null, not text"):
        make(tmp_path, model, paths=str(path), answer_key="answer", evals=evals)
    source = make(tmp_path, model, paths=str(path), answer_key="answer", evals=evals, overlap="unchecked")
    assert read_prompts(source.train, [39, 41], named="jsonl", answers=True)
    with pytest.raises(SourceFailed, match="prompt 40: SourceFailed: .*a.jsonl:41: the column 'answer' is null"):
        read_prompts(source.train, [40], named="jsonl", answers=True)
    path.write_text("\n".join(rows[:20]))
    with pytest.raises(SourceFailed, match="a.jsonl has changed"):
        read_prompts(source.train, [59], named="jsonl", answers=True)


@pytest.mark.parametrize(("folder", "named"), [
    ({"chat_template": ""}, "has no chat template .*apply_chat_template"),
    ({"eos": ""}, 'names a token that ends a response .*"eos_token"'),
    ({"chat_template": "{% for m in messages %}\n{{ m.content }"}, "is no valid Jinja, line 2: "),
    ({"chat_template": "{{ raise_exception('no such role') }}"}, "refuses the messages: .*no such role")])
def test_wrong_tokenizer_is_a_wrong_setting(tmp_path: Path, folder: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make(tmp_path, make_tokenizer_folder(tmp_path / "m", **folder), paths=write(tmp_path / "a.jsonl", ROWS))


def test_missing_or_foreign_model_folder_and_unknown_characters_are_wrong_settings(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "empty").mkdir()
    for model, named in ((tmp_path / "none", "there is no folder"),
                         (tmp_path / "empty", "no tokenizer in .*; it has nothing"),
                         ("", "no token for 'w', only for .*model.path.*make_model_dir")):
        with pytest.raises(ConfigError, match=named):
            make(tmp_path, model, paths=path, apply_chat_template=False)
    with pytest.raises(ConfigError, match="built-in model's tokenizer has no chat template.*make_model_dir"):
        make(tmp_path, "", paths=path)


# -- size --------------------------------------------------------------------------------------------------------------
_MEASURED = """
import sys, json, resource, numpy as np, pyarrow.parquet
from elastic_rl import config
from elastic_rl.data.sources import make_source
cfg = config.parse(json.loads(sys.argv[1]))
make_source(config.parse(json.loads(sys.argv[2])))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
source = make_source(cfg)
order = source.order(0)
for ordinal in range(2000):
    source.train[order.problem(ordinal)[0]]
print(len(source.train), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    count, width = 1_000_000, 200
    digits = pa.array([f"{i:0{width}d}" for i in range(1000)])
    path = tmp_path / "large.parquet"
    with pq.ParquetWriter(path, pa.schema([("q", pa.string())])) as writer:
        for _ in range(count // 100_000):
            writer.write_table(pa.table({"q": pa.concat_arrays([digits] * 100)}))
    small = write(tmp_path / "small.parquet", [{"q": f"{i}"} for i in range(30)])

    def settings(file: str) -> str:
        return json.dumps({"run_dir": str(tmp_path), "sft": {"max_steps": 0}, "data": {"source": "parquet", "options": {
            "paths": file, "prompt_key": "q", "apply_chat_template": False, "overlap": "unchecked",
            "max_prompt_tokens": 300, "max_response_tokens": 4}}})

    done = subprocess.run([sys.executable, "-c", _MEASURED, settings(str(path)), settings(small)],
                          capture_output=True, text=True, timeout=120, check=True)
    rows, grown_mib = map(int, done.stdout.split())
    [copy] = (tmp_path / "quickstart/data").glob("large-*.arrow")
    assert rows == count - 1000 and copy.stat().st_size > count * width
    # The kernel counts pages of the mapped copy that were read; what is read of it is a few pages for each prompt.
    assert grown_mib < 120, "the copy has 200 MB, and nothing holds the rows"
