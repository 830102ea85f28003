"""Values of rows: what JSON has and every encoder takes, texts and answers, and columns that a row need not have."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds
from support.text_model import make_tokenizer_folder

from elastic_rl import config
from elastic_rl.data.queue.group_codec import decode_group, encode_group
from elastic_rl.data.rows import value_at
from elastic_rl.data.samples import Group, Prompt, Sample
from elastic_rl.data.sources import make_source, read_prompts
from elastic_rl.data.values import answer_value, plain_json, text_value
from elastic_rl.errors import ConfigError, SourceFailed
from elastic_rl.runtime.json_values import as_json, json_fault

_BIG = 2**70


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"x": value}
    return value


_ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from([_BIG, -_BIG, 2**4095, 2**5000]) | st.floats()
    | st.text(st.characters(exclude_categories=())), lambda inner: st.lists(inner) | st.dictionaries(
        st.text(st.characters(exclude_categories=())), inner), max_leaves=9)


@settings(max_examples=seeds(200))
@given(_ODD)
def test_value_is_refused_when_it_is_read_or_passed_on_by_every_encoder_as_it_is(value: Any) -> None:
    if json_fault(value):
        with pytest.raises(SourceFailed, match="row 1: "):
            plain_json(value, "row 1")
        return
    metadata = plain_json({"v": value}, "row 1")
    assert metadata == {"v": value}
    assert json.loads(json.dumps(metadata, ensure_ascii=False, allow_nan=False).encode()) == metadata
    group = Group(1, Prompt((1,), metadata=metadata), (Sample(()),))
    assert decode_group(encode_group(group)).prompt.metadata == metadata
    if all(abs(number) < 2**63 for number in _integers(metadata)):
        assert orjson.loads(orjson.dumps(metadata)) == metadata


def _integers(value: Any) -> list[int]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [n for v in inner for n in _integers(v)] + ([value] if isinstance(value, int) else [])


@pytest.mark.parametrize(("value", "why"), [
    (float("nan"), "a number is nan"), ([float("-inf")], "a number is -inf"), (np.float32("nan"), "a number is nan"),
    ("a\ud83d", "half of a surrogate pair"), ({"\ud83d": 1}, "half of a surrogate pair"), (2**5000, "4096 bits"),
    (_nested(600), "nested more than 100 deep"), (_nested(100_000), "nested more than 100 deep"),
    (["x" * 2**20] * 17, "more than 16777216 characters"), ([0] * 1_000_001, "more than 1000000 values"),
    ({1: "a", "1": "b"}, "two keys"), (b"x", "a value is a bytes"), (object(), "a value is a object"),
    (datetime.timedelta(1), "a value is a timedelta")])
def test_value_that_some_encoder_would_refuse_is_named(value: Any, why: str) -> None:
    with pytest.raises(SourceFailed, match="x:1: ") as e:
        plain_json(value, "x:1")
    assert why in e.value.message and len(e.value.message) < 200 and e.value.hint


@pytest.mark.parametrize(("value", "made"), [
    (np.bool_(True), True), (np.int64(3), 3), (np.float64(0.5), 0.5), (np.array([[1, 2]]), [[1, 2]]), (np.array(7), 7),
    (torch.tensor([0.5]), [0.5]), (Decimal("18.90"), "18.90"), (Decimal("1E-7"), "0.0000001"),
    (datetime.date(2026, 1, 2), "2026-01-02"), ((1, (2,)), [1, [2]]), ({3, 1}, [1, 3]), ({1: 2}, {"1": 2}),
    (_BIG, _BIG), (1e-7, 1e-7)])
def test_value_of_another_type_is_what_json_has_for_it(value: Any, made: Any) -> None:
    found = as_json({"v": [value]})["v"][0]
    assert found == made and type(found) is type(made)


@pytest.mark.parametrize(("value", "text"), [
    (1e-5, "0.00001"), (5e-324, "0." + "0" * 323 + "5"), (1e16, "10000000000000000"), (_BIG, str(_BIG)),
    (Decimal("18.90"), "18.90"), (Decimal("1E+3"), "1000"), (datetime.date(2026, 1, 2), "2026-01-02"), (0, "0")])
def test_number_or_date_is_written_in_full(value: Any, text: str) -> None:
    assert text_value(value, "x") == text
    assert answer_value([value, None, "b"], "x") == [text, "b"]


@pytest.mark.parametrize(("value", "why", "hint"), [
    (True, "true or false", "yes or true"), (b"x", "of type bytes", "as text"), (["a"], "a list", "messages_key"),
    ({"a": 1}, "an object", "column.field"), (float("nan"), "a number is nan", "leave out rows"),
    ("a\ud83d", "surrogate", "cut"), (None, "null, not text", "")])
def test_value_that_is_no_text_says_what_to_do(value: Any, why: str, hint: str) -> None:
    with pytest.raises(SourceFailed, match=why) as e:
        text_value(value, "x")
    assert hint in e.value.hint


@pytest.mark.parametrize("value", [None, [], [None], [["a"]], [True], {"text": ["a"]}])
def test_what_has_no_answer_is_refused(value: Any) -> None:
    with pytest.raises(SourceFailed, match="x"):
        answer_value(value, "x")


# -- rows --------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer_folder(tmp_path_factory.mktemp("models") / "chat")


def _source(folder: Path, model: Path, path: Path, **options: Any) -> Any:
    given = {"paths": str(path), "prompt_key": "q", "max_prompt_tokens": 64, "max_response_tokens": 8,
             "overlap": "unchecked"} | options
    return make_source(config.parse({
        "run_dir": str(folder / "runs"), "model": {"path": str(model)}, "sft": {"max_steps": 0},
        "data": {"source": "parquet" if path.suffix == ".parquet" else "jsonl", "options": given}}))


def _prompts(source: Any) -> dict[str, Prompt]:
    return {p.question: p for part in (source.train, source.eval)
            for p in read_prompts(part, range(len(part)), named="x", answers=False)}


def _written(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_list_of_answers_is_kept_and_the_first_is_imitated(tmp_path: Path, model: Path, kind: str) -> None:
    path = _written(tmp_path / f"a.{kind}", [
        {"q": f"{n}", "a": ["1/2", "0.5"], "squad": {"text": ["x", "y"], "answer_start": [1, 2]}} for n in range(5)])
    source = _source(tmp_path, model, path, answer_key="a")
    for prompt in _prompts(source).values():
        assert prompt.metadata == {"answer": ["1/2", "0.5"]} and source.tokenizer.decode(prompt.answer_ids) == "1/2"
    assert _prompts(_source(tmp_path, model, path, answer_key="squad.text"))["0"].metadata == {"answer": ["x", "y"]}
    alone = _prompts(_source(tmp_path, model, path, metadata_keys=["a"], answer_key=""))["0"]
    assert alone.metadata == {"a": ["1/2", "0.5"]} and alone.answer_ids is None
    with pytest.raises(ConfigError, match="leave it out of metadata_keys"):
        _source(tmp_path, model, path, answer_key="a", metadata_keys=["answer"])


def test_column_of_answers_may_be_given_as_metadata(tmp_path: Path, model: Path) -> None:
    path = _written(tmp_path / "a.jsonl", [{"q": f"{n}", "answer": ["1/2", 0.5]} for n in range(5)])
    found = _prompts(_source(tmp_path, model, path, metadata_keys=["answer"]))["0"]
    assert found.metadata == {"answer": ["1/2", 0.5]} and found.answer_ids is None


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_row_without_an_optional_column_has_none_as_with_null(tmp_path: Path, model: Path, kind: str) -> None:
    rows: list[dict[str, Any]] = [
        {"q": "0", "info": {"a": 1}}, *({"q": f"{n}", "info": {"b": n}} for n in range(1, 9)), {"q": "9"}]
    path = _written(tmp_path / f"a.{kind}", rows)
    found = _prompts(_source(tmp_path, model, path, metadata_keys=["info.a", "info.b"]))
    assert [tuple(found[q].metadata.values()) for q in "059"] == [(1, None), (None, 5), (None, None)]


def test_column_that_none_of_the_first_rows_has_is_misspelt(tmp_path: Path, model: Path) -> None:
    path = _written(tmp_path / "a.jsonl", [{"q": f"{n}", "level": 1} for n in range(9)])
    with pytest.raises(ConfigError, match="a.jsonl:1 has no column 'lvel', only q, level; did you mean 'level'") as e:
        _source(tmp_path, model, path, metadata_keys=["lvel"])
    assert "need not have it" in e.value.hint


def test_field_of_what_is_no_object_is_named() -> None:
    for row, said in (({"a": ["x"]}, "a list"), ({"a": "x"}, "text")):
        for optional in (False, True):
            with pytest.raises(SourceFailed, match=f"x:1 has no field 'b.c' of 'a', which is {said}"):
                value_at(row, "a.b.c", "x:1", optional=optional)


@pytest.mark.parametrize(("line", "said"), [
    ('{"q": "x", "m": NaN}', "the column 'm': a number is nan"), ('{"q": "x", "m": 1e999}', "a number is inf"),
    ('{"q": "x", "m": ' + "9" * 5000 + "}", "a number of thousands of digits"),
    ('{"q": "x", "m": ' + "9" * 2000 + "}", "a number has more than 4096 bits"),
    ('{"q": "x", "m": ' + "[" * 600 + "]" * 600 + "}", "nested more than 100 deep"),
    ('{"q": "x", "m": ' + "[" * 10**6 + "]" * 10**6 + "}", "nested too deeply"),
    ('{"q": "x", "m": "\\ud83d"}', "half of a surrogate pair"),
    ('{"q": "\\ud83d", "m": 1}', "half of a surrogate pair"),
    ('{"q": NaN, "m": 1}', "the column 'q': a number is nan")])
def test_row_that_cannot_be_passed_on_is_named_when_it_is_read(tmp_path: Path, model: Path, line: str,
                                                               said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(line + '\n{"q": "y", "m": 1}\n')
    with pytest.raises(ConfigError, match="a.jsonl:1") as e:
        _source(tmp_path, model, path, metadata_keys=["m"])
    assert said in e.value.message and len(e.value.message) < 300
    whole = '{"q": "other", "unused": NaN, "m": [' + str(_BIG) + "]}\n"
    path.write_text(2 * whole)
    assert _prompts(_source(tmp_path, model, path, metadata_keys=["m"]))["other"].metadata == {"m": [_BIG]}


@pytest.mark.parametrize(("written", "text"), [
    ("3.14159265358979323846", "3.14159265358979323846"), ("18.90", "18.90"), ("1e-05", "0.00001"), ("2.50E1", "25.0"),
    ("12345678901234567890.5", "12345678901234567890.5"), ("-0.0", "-0.0"), ("0e-999999999", "0.0"), ("42", "42"),
    ("1e-999999999", "0.0"), ("100000000000000000000000000000", "100000000000000000000000000000")])
def test_number_of_an_answer_has_the_digits_that_are_written(tmp_path: Path, model: Path, written: str,
                                                             text: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"q": "x", "a": {written}, "m": [{written}]}}\n' * 2)
    found = _prompts(_source(tmp_path, model, tmp_path / "a.jsonl", answer_key="a", metadata_keys=["m"]))["x"]
    assert found.metadata == {"answer": text, "m": [json.loads(written)]}
    assert type(found.metadata["m"][0]) in (int, float)


def test_parquet_values_are_those_that_were_written(tmp_path: Path, model: Path) -> None:
    """A float of 32 bits has the digits that were written, maps are objects, and decimals keep their zeros."""
    table = pa.table({
        "q": [f"{n}" for n in range(9)], "a": pa.array([0.1] * 9, pa.float32()),
        "m": pa.array([{"w": [0.3, None], "k": [("b", 0.7)]}] * 9, pa.struct([
            ("w", pa.list_(pa.float32())), ("k", pa.map_(pa.string(), pa.float32()))])),
        "price": pa.array([Decimal("18.90")] * 9, pa.decimal128(10, 2)),
        "day": pa.array([datetime.date(2026, 1, 2)] * 9), "at": pa.array([1_700_000_000_123_456_789] * 9,
                                                                         pa.timestamp("ns", "UTC"))})
    pq.write_table(table, tmp_path / "a.parquet")
    found = _prompts(_source(tmp_path, model, tmp_path / "a.parquet", answer_key="a",
                             metadata_keys=["m", "price", "day", "at"]))
    assert found["0"].metadata == {"answer": "0.1", "m": {"w": [0.3, None], "k": {"b": 0.7}}, "price": "18.90",
                                   "day": "2026-01-02", "at": "2023-11-14T22:13:20.123456+00:00"}
    twice = pa.table({"q": ["a", "b"], "m": pa.array([[("k", 1), ("k", 2)]] * 2, pa.map_(pa.string(), pa.int64()))})
    pq.write_table(twice, tmp_path / "b.parquet")
    with pytest.raises(ConfigError, match="b.parquet: row 0 cannot be read: .*duplicate"):
        _source(tmp_path, model, tmp_path / "b.parquet", metadata_keys=["m"])


def test_metadata_of_a_users_source_follow_the_same_rule() -> None:
    def read(**about: Any) -> dict[str, Any]:
        [found] = read_prompts([Prompt((1,), **about)], [0], named="own:source", answers=False)
        return dict(found.metadata)

    class Odd(dict[str, Any]):
        def items(self) -> Any:
            raise SystemExit("gone")

    class Endless:
        def tolist(self) -> Any:
            return [Endless()]

    assert read(metadata={"ok": np.bool_(True), "t": (1, 2)}) == {"ok": True, "t": [1, 2]}
    at = np.datetime64("2026-01-02T03:04:05.123456789", "ns")
    assert read(metadata={"x": np.longdouble("1.5"), "y": np.ones(2, np.longdouble), "at": at,
                          "all": np.array([at] * 2), "day": np.datetime64("2026-01-02"),
                          "none": np.datetime64("NaT", "ns")}) == {
        "x": 1.5, "y": [1.0, 1.0], "at": "2026-01-02T03:04:05.123456", "all": ["2026-01-02T03:04:05.123456"] * 2,
        "day": "2026-01-02", "none": None}
    for odd, said in ((Odd(a=1), "SystemExit"), ({"x": Odd(a=1)}, "SystemExit"), ({"x": Endless()}, "100 deep"),
                      ({"x": np.timedelta64(5, "ns")}, "time span"), ({"x": np.clongdouble(1)}, "complex256"),
                      ({"x": np.datetime64("20000-01-01")}, "datetime64")):
        with pytest.raises(SourceFailed, match=f"own:source gives prompt 0 with metadata.*{said}"):
            read(metadata=odd)
    for about, said in (({"metadata": {"x": float("nan")}}, "a number is nan"), ({"text": "\ud83d"}, "surrogate"),
                        ({"metadata": {"x": object()}}, "a value is a object"), ({"question": 1}, "question")):
        with pytest.raises(SourceFailed, match=f"own:source gives prompt 0 with .*{said}"):
            read(**about)
