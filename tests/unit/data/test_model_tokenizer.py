"""The tokenizer of a model folder."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import psutil
import pytest
from support.text_model import make_tokenizer_folder
from transformers import AutoTokenizer

from elastic_rl.data import chat_rendering
from elastic_rl.data.conversations import Asked
from elastic_rl.data.model_tokenizer import ModelTokenizer
from elastic_rl.data.prompts import PromptMaker
from elastic_rl.data.text_options import PromptOptions
from elastic_rl.errors import ConfigError, SourceFailed
from elastic_rl.plugins.worker_pool import CallGivenUp, WorkerPool

TEXTS = ["what is 2+2?", "", "it is 4<|end|>", "a"]


@pytest.mark.parametrize(("around", "begin"), [
    ("$A", ()), ("<|system|> $A", ("<|system|>",)), ("$A <|end|>", ()),
    ("<|system|> $A <|stop|> <|end|>", ("<|system|>",))])
def test_text_has_what_the_tokenizer_begins_it_with_and_nothing_that_ends_it(
        tmp_path: Path, around: str, begin: tuple[str, ...]) -> None:
    """A prompt that ends with an end token is one that the model has nothing to add to."""
    tokenizer = ModelTokenizer(make_tokenizer_folder(tmp_path / "m", around=around))
    plain = tokenizer.encode_batch(TEXTS, special_tokens=False)
    added = [tokenizer.vocabulary[token] for token in begin]
    assert tokenizer.encode_batch(TEXTS, special_tokens=True) == [added + ids for ids in plain]
    assert plain[2][-1] == tokenizer.vocabulary["<|end|>"], "one that the text itself has stays"


def test_end_token_that_tokenizer_config_asks_for_is_no_part_of_a_text(tmp_path: Path) -> None:
    folder = make_tokenizer_folder(tmp_path / "m")
    settings = folder / "tokenizer_config.json"
    settings.write_text(settings.read_text(encoding="utf-8").replace("{", '{"add_eos_token": true, ', 1),
                        encoding="utf-8")
    tokenizer = ModelTokenizer(folder)
    assert tokenizer.encode_batch(["a"], special_tokens=True) == tokenizer.encode_batch(["a"], special_tokens=False)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_folder_without_a_tokenizer_is_refused_with_how_to_write_one(tmp_path: Path, family: str) -> None:
    """For Qwen2 transformers makes a tokenizer of one token, for which all prompts are the same."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="no tokenizer in .*; it has config.json, tokenizer_config.json") as e:
        ModelTokenizer(tmp_path).encode_batch(["a"], special_tokens=False)
    assert "model.path needs" in e.value.hint and "tokenizer.save_pretrained(folder)" in e.value.hint
    assert ModelTokenizer(make_tokenizer_folder(tmp_path / "saved")).encode_batch(["a"], special_tokens=False)


def test_named_chat_template_is_read_and_part_of_the_identity(tmp_path: Path) -> None:
    folder = make_tokenizer_folder(tmp_path / "m")
    plain = ModelTokenizer(folder).identity
    (folder / "additional_chat_templates").mkdir()
    named = folder / "additional_chat_templates" / "tool_use.jinja"
    found = [plain]
    (folder / "chat_template.jinja").write_text("D", encoding="utf-8")
    for text in ("one", "two"):
        named.write_text(text, encoding="utf-8")
        tokenizer = ModelTokenizer(folder)
        assert tokenizer.apply_chat_template([{"role": "user", "content": "?"}], {"chat_template": "tool_use"}) == text
        found.append(tokenizer.identity)
    assert len(set(found)) == 3, "prompts of another template are other prompts"


def _folder_with(tmp_path: Path, template: str) -> Path:
    folder = make_tokenizer_folder(tmp_path / "m")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
GROWING = "{% set ns = namespace(text='x') %}{% for a in range(99) %}{% set ns.text = ns.text + ns.text %}{% endfor %}"


@pytest.mark.parametrize("template", [ENDLESS, GROWING, "{{ 'x' * 10**12 }}"])
def test_template_without_an_end_is_a_typed_error_that_names_its_file(
        tmp_path: Path, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next conversation, which it leaves alone, is rendered: the process of the first one was replaced."""
    monkeypatch.setattr(chat_rendering, "_LIMIT_S", 5.0)
    folder = _folder_with(tmp_path, f"{{% if messages[0].content == 'hang' %}}{template}{{% endif %}}done")
    tokenizer = ModelTokenizer(folder)
    with pytest.raises(ConfigError, match=r"chat_template\.jinja.*did not render .*MiB") as raised:
        tokenizer.apply_chat_template([{"role": "user", "content": "hang"}], {})
    assert "loop" in raised.value.hint
    assert tokenizer.apply_chat_template([{"role": "user", "content": "?"}], {}) == "done"


def test_process_that_dies_for_another_reason_is_not_the_fault_of_the_template(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = ModelTokenizer(_folder_with(tmp_path, "done"))
    calls, call = list[object](), WorkerPool.call_and_wait

    def dies_once(pool: WorkerPool, job: object, timeout_s: float) -> object:
        calls.append(job)
        if len(calls) == 1:
            raise CallGivenUp("the worker died")
        return call(pool, job, timeout_s)

    monkeypatch.setattr(WorkerPool, "call_and_wait", dies_once)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "?"}], {}) == "done" and len(calls) == 2


def test_endless_template_names_the_row_of_a_batch_that_it_hangs_at(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_rendering, "_LIMIT_S", 5.0)
    tokenizer = ModelTokenizer(_folder_with(
        tmp_path, f"{{% if messages[0].content == 'hang' %}}{ENDLESS}{{% endif %}}done"))
    maker = PromptMaker(PromptOptions(max_prompt_tokens=9, max_response_tokens=9), tokenizer)
    rows = [(Asked(content), f"row {n}") for n, content in enumerate(["a", "b", "hang", "c"])]
    assert maker.texts(rows[:2]) == ["done", "done"]
    with pytest.raises(SourceFailed, match=r"^row 2: the chat template in .*chat_template\.jinja did not render"):
        maker.texts(rows)


def test_rendered_text_that_is_too_long_is_refused(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(_folder_with(tmp_path, f"{{{{ 'x' * {chat_rendering.MAX_CHARACTERS + 1} }}}}"))
    with pytest.raises(ConfigError, match="refuses the messages: it writes 16777217 characters"):
        tokenizer.apply_chat_template([{"role": "user", "content": "?"}], {})


def test_batch_is_rendered_as_transformers_renders_each_conversation(tmp_path: Path) -> None:
    folder = _folder_with(tmp_path, "{{ eos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
                          "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
                          "{% if add_generation_prompt %}A{% endif %}{{ extra }}")
    loaded, tokenizer = AutoTokenizer.from_pretrained(str(folder)), ModelTokenizer(folder)
    messages = [{"role": "user", "content": "ünd \ud83d half"}, {"role": "assistant", "content": "end"}]
    options = [{}, {"extra": [1, {"b": None}]}, {"tools": [{"name": "f", "z": 1, "a": 2}]},
               {"continue_final_message": True}, {"eos_token": "E", "add_generation_prompt": False}] * 60
    assert tokenizer.apply_chat_templates([(messages, one) for one in options]) == [
        loaded.apply_chat_template(messages, tokenize=False, **{
            "add_generation_prompt": not one.get("continue_final_message"), **one}) for one in options]
    assert tokenizer.apply_chat_templates([]) == []


def test_worker_of_a_tokenizer_ends_with_it(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(_folder_with(tmp_path, "done"))
    before = set(psutil.Process().children(recursive=True))
    tokenizer.apply_chat_template([{"role": "user", "content": "?"}], {})
    started = set(psutil.Process().children(recursive=True)) - before
    assert started
    del tokenizer
    gc.collect()
    assert not psutil.wait_procs(started, timeout=30)[1]
