"""Conversations as chat templates get them: what transformers writes of a message is what the prompt has."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.text_model import make_tokenizer_folder
from transformers import AutoTokenizer

from elastic_rl import config
from elastic_rl.data.conversations import Asked, messages_of, variable
from elastic_rl.data.order import fingerprint
from elastic_rl.data.sources import make_source
from elastic_rl.errors import ConfigError, SourceFailed

TOOL_CHAT = """{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for d in documents or [] %}[{{ d.text }}]
{%- endfor %}{% for m in messages %}<|{{ m.role }}|>{% if 'reasoning_content' in m %}({{ m.reasoning_content.strip() }})
{%- endif %}{{ m.content or '' }}{% if 'tool_calls' in m %}{% for c in m.tool_calls %}<call>{{ c.function.name }} {{
c.function.arguments | tojson }}</call>{% endfor %}{% endif %}{% if m.name %} name={{ m.name }}{% endif %}
{%- if m.tool_call_id %} id={{ m.tool_call_id }}{% endif %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}{% if mood %}{{ mood }}{% endif %}"""
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
OTHER = {"id": "c2", "type": "function", "function": {"name": "clock", "arguments": {"zone": "CET", "at": 1e-7}}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "How is it in Rome?", "name": "Ann"},
    {"role": "assistant", "reasoning_content": " look ", "content": None, "tool_calls": [CALL, OTHER]},
    {"role": "tool", "content": "22 C", "tool_call_id": "c1", "name": "weather"}]
TOOL = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer_folder(tmp_path_factory.mktemp("models") / "tools", chat_template=TOOL_CHAT)


def _written(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _source(folder: Path, model: Path, path: Path, **options: Any) -> Any:
    given = {"paths": str(path), "messages_key": "messages", "max_prompt_tokens": 999, "max_response_tokens": 8,
             "overlap": "unchecked"} | options
    return make_source(config.parse({
        "run_dir": str(folder / "runs"), "model": {"path": str(model)}, "sft": {"max_steps": 0},
        "data": {"source": path.suffix[1:], "options": given}}))


def _texts(source: Any) -> set[str]:
    return {prompt.text for part in (source.train, source.eval) for prompt in part}


def _of_transformers(model: Path, messages: list[dict[str, Any]], **variables: Any) -> str:
    return str(AutoTokenizer.from_pretrained(str(model)).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **variables))


@pytest.mark.parametrize("form", ["a.jsonl", "a.parquet", "filled.jsonl"])
def test_all_keys_of_a_message_reach_the_chat_template(tmp_path: Path, model: Path, form: str) -> None:
    """Arrow has all keys in all messages and calls, those that others have as null; so have files that were written
    from it."""
    rows = [{"messages": TALK}, {"messages": TALK[:1]}]
    path = _written(tmp_path / (form if form.startswith("a.") else "x.parquet"), rows)
    if form == "filled.jsonl":
        filled = pq.read_table(path).to_pylist()
        assert filled[0]["messages"][0]["tool_calls"] is None
        path = _written(tmp_path / form, filled)
    want = {_of_transformers(model, TALK), _of_transformers(model, TALK[:1])}
    assert _texts(_source(tmp_path, model, path)) == want
    assert '(look)<call>weather {"city": "Rome"}</call>' in max(want) and "id=c1" in max(want)


def test_question_of_a_conversation_shows_its_calls(tmp_path: Path, model: Path) -> None:
    source = _source(tmp_path, model, _written(tmp_path / "a.jsonl", [{"messages": TALK}] * 2))
    assert source.train[0].question == (
        "user: How is it in Rome?\n\nassistant: " + json.dumps([CALL, OTHER]) + "\n\ntool: 22 C")


@pytest.mark.parametrize(("change", "same"), [
    (lambda row: None, True), (lambda row: row["messages"][1].update(tool_calls=[CALL]), False),
    (lambda row: row["messages"][2].update(tool_call_id="c9"), False), (lambda row: row.update(mood="!"), False),
    (lambda row: row["messages"][0].update(refusal=None), True)])
def test_identity_of_a_prompt_is_of_all_that_its_template_gets(tmp_path: Path, model: Path, change: Any,
                                                               same: bool) -> None:
    rows: list[dict[str, Any]] = [{"messages": TALK, "mood": None}, {"messages": TALK[:1], "mood": "?"}]
    first = _source(tmp_path, model, _written(tmp_path / "a.jsonl", rows), chat_template_keys=["mood"])
    for row in (changed := copy.deepcopy(rows)):
        if len(row["messages"]) > 1:
            change(row)
    second = _source(tmp_path, model, _written(tmp_path / "b.jsonl", changed), chat_template_keys=["mood"])
    assert (fingerprint([*first.train, *first.eval]) == fingerprint([*second.train, *second.eval])) is same


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_columns_are_variables_of_the_chat_template(tmp_path: Path, model: Path, kind: str) -> None:
    documents = [{"title": "t", "text": "it rains"}]
    rows: list[dict[str, Any]] = [
        {"messages": TALK[:1], "tools": json.dumps([TOOL]), "documents": documents, "mood": "!"},
        {"messages": TALK[:1], "tools": None, "documents": None, "mood": None}]
    source = _source(tmp_path, model, _written(tmp_path / f"a.{kind}", rows), chat_template_options={"mood": "?"},
                     chat_template_keys=["tools", "documents", "mood"])
    assert _texts(source) == {_of_transformers(model, TALK[:1], tools=[TOOL], documents=documents, mood="!"),
                              _of_transformers(model, TALK[:1], mood="?")}
    plain = _source(tmp_path, model, _written(tmp_path / f"b.{kind}", [
        {"q": "x", "tools": [TOOL]}, {"q": "x", "tools": []}]), messages_key="", prompt_key="q",
        chat_template_keys=["tools"])
    assert _texts(plain) == {_of_transformers(model, [{"role": "user", "content": "x"}], tools=tools)
                             for tools in ([TOOL], [])}


@pytest.mark.parametrize(("content", "text"), [
    ([{"type": "text", "text": "a "}, {"type": "text", "text": "b", "image_url": None}], "a b"), (["a", "b"], "ab"),
    ([{"text": "a"}], "a"), (7, "7"), ("", "")])
def test_parts_of_a_content_are_one_text(content: Any, text: str) -> None:
    assert messages_of([{"role": "user", "content": content}], "x") == [{"role": "user", "content": text}]


@pytest.mark.parametrize(("message", "said", "hint"), [
    ({"role": "user"}, "content of message 0 is null", "tool_calls"),
    ({"role": "user", "content": None, "name": "A", "tool_calls": None}, "content of message 0 is null", "tool_calls"),
    ({"from": "human", "value": "hi"}, "message 0 is no object with a role", "rename its keys, from and value"),
    ({"role": None, "content": "x"}, "message 0 is no object with a role", '"role": "user"'),
    ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "part 0, is of the type 'image_url'",
     "only text"), ({"role": "user", "content": []}, "content of message 0 is an empty list", ""),
    ({"role": "user", "content": True}, "true or false, not text", "yes or true"),
    ({"role": "user", "content": "x", "score": float("nan")}, "message 0: a number is nan", "null"),
    ({"role": "user", "content": "x\ud83d"}, "surrogate", ""), ("hi", "no object with a role", "")])
def test_message_that_is_no_text_says_what_to_do(message: Any, said: str, hint: str) -> None:
    with pytest.raises(SourceFailed, match=said) as e:
        messages_of([message], "x:1")
    assert e.value.message.startswith("x:1: ") and hint in e.value.hint


def test_content_that_is_an_object_reaches_the_chat_template() -> None:
    """As of the answer of a tool, which Llama's template writes as JSON."""
    [message] = messages_of([{"role": "tool", "content": {"degrees": 22, "wind": None}}], "x")
    assert message == {"role": "tool", "content": {"degrees": 22}} and Asked([message]).text == '{"degrees": 22}'


def test_conversation_or_its_calls_may_be_json_as_text() -> None:
    assert messages_of(json.dumps(TALK), "x") == messages_of(TALK, "x")
    assert messages_of([TALK[0], {**TALK[1], "tool_calls": json.dumps([CALL, OTHER])}, TALK[2]], "x") == (
        messages_of(TALK, "x"))


def test_conversation_may_end_with_what_is_to_be_continued(tmp_path: Path, model: Path) -> None:
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "so"}]
    path = _written(tmp_path / "a.jsonl", [{"messages": talk}] * 2)
    options = {"continue_final_message": True}
    assert _texts(_source(tmp_path, model, path, chat_template_options=options)) == {
        "<|user|>x<|end|><|assistant|>so"}
    assert _texts(_source(tmp_path, model, path, chat_template_options={"add_generation_prompt": False})) == {
        "<|user|>x<|end|><|assistant|>so<|end|>"}


@pytest.mark.parametrize("content", [None, [], "hi", '"hi"', "[" * 10_000, {"role": "user"}])
def test_what_is_no_conversation_says_what_to_do(content: Any) -> None:
    with pytest.raises(SourceFailed, match="x: the messages are no list") as e:
        messages_of(content, "x")
    assert "prompt_key" in e.value.hint


def test_wrong_variables_and_options_are_named(tmp_path: Path, model: Path) -> None:
    for value, said in (("[1", "text, not a list"), ("{}", "an object, not a list"), (1, "a number, not a list")):
        with pytest.raises(SourceFailed, match=f"x is {said}"):
            variable("tools", value, "x")
    assert variable("mood", "[1", "x") == "[1" and variable("a.tools", "[1]", "x") == [1]
    assert [variable("tools", value, "x") for value in (None, "", "null")] == [None] * 3
    path = _written(tmp_path / "a.jsonl", [{"messages": TALK}] * 2)
    with pytest.raises(ConfigError, match="has no column 'tols'"):
        _source(tmp_path, model, path, chat_template_keys=["tols"])
    with pytest.raises(ConfigError, match="chat_template_keys needs apply_chat_template"):
        _source(tmp_path, model, path, messages_key="", prompt_key="q", apply_chat_template=False,
                chat_template_keys=["tools"])
    for keys in (["a.tools", "tools"], ["messages"]):
        with pytest.raises(ConfigError, match=f"chat_template_keys has '{keys[-1]}'"):
            _source(tmp_path, model, path, chat_template_keys=keys)
    with pytest.raises(ConfigError, match="chat_template_options has 'tokenize'"):
        _source(tmp_path, model, path, chat_template_options={"tokenize": True})


def test_json_in_a_column_keeps_the_digits_of_its_numbers_as_a_row_does() -> None:
    assert messages_of('[{"role": "user", "content": 18.90}]', "x:1")[0]["content"] == "18.90"
    many = "9" * 5000
    for read in (lambda: messages_of(f'[{{"role": "user", "content": {many}}}]', "x:1"),
                 lambda: messages_of([{"role": "assistant", "tool_calls": f"[{many}]"}], "x:1"),
                 lambda: variable("tools", f"[{many}]", "x:1")):
        with pytest.raises(SourceFailed, match="x:1.* has a number of thousands of digits"):
            read()
