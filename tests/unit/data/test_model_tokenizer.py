"""The tokenizer of a model folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.text_model import make_tokenizer_folder

from elastic_rl.data.model_tokenizer import ModelTokenizer

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
