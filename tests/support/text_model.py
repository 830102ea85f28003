"""A folder with a tokenizer of a Hugging Face model, made on the spot: what sources of text need of a model."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CHAT = ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}{% if think is defined %}({{ think }}){% endif %}")
DATED_CHAT = "<|system|>Today is {{ strftime_now('%d %b %Y') }}<|end|>" + CHAT
"""Writes the date, as the templates of Llama 3.2 and Granite do."""
_TRAINED_ON = ["what is two and two?", "the answer is four", "system user assistant", "0123456789 +-*/=.,:{}"]


def make_tokenizer_folder(folder: Path, *, chat_template: str = CHAT, eos: str = "<|end|>",
                          around: str = "$A") -> Path:
    """A byte-level BPE, with a chat template and a token that ends a response unless they are empty. ``around``: the
    text ``$A`` with the special tokens that the tokenizer adds to it."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(_TRAINED_ON, trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|stop|>", "<|user|>", "<|system|>", "<|assistant|>"]))
    core.post_processor = processors.TemplateProcessing(
        single=around, special_tokens=[(token, core.token_to_id(token)) for token in around.split() if token != "$A"])
    folder.mkdir(parents=True)
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast"} | ({"eos_token": eos} if eos else {})
        | ({"chat_template": chat_template} if chat_template else {})))
    if eos:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 0]}))
    return folder
