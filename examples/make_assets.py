"""Makes what the examples train on: small models with random weights, tokenizers, and files of problems.

    python examples/make_assets.py            # into runs/examples; what is there is kept

In place of these folders and files you name your own.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from elastic_rl import config
from elastic_rl.data.tiny_model import make_model_dir

HERE = Path("runs/examples")
END, PAD, UNKNOWN = "<|end|>", "<|pad|>", "<|unknown|>"
SPECIAL = (PAD, END, UNKNOWN, "<|user|>", "<|assistant|>")
WORDS = ("What", " is", " plus", " times", "?", " ", *"0123456789")
CHAT = ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}")
OPERATIONS = {"add": "+", "subtract": "-", "multiply by": "*"}
GYM_TASKS = ("chain_sum", "gcd", "leg_counting")
"""Tasks of reasoning-gym whose words the tokenizer ``text-tokenizer`` has as tokens."""
SHAPE = {"hidden_size": 96, "intermediate_size": 288, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
         "max_positions": 64}
MODELS = {"llama": ("tokenizer", SHAPE | {"family": "llama", "tied_embeddings": True}),
          "qwen3-moe": ("tokenizer", SHAPE | {"family": "qwen3_moe", "num_experts": 4, "experts_per_token": 2,
                                              "expert_intermediate_size": 144}),
          "qwen3-text": ("text-tokenizer", SHAPE | {"family": "qwen3", "tied_embeddings": True, "max_positions": 96})}
"""Name of the model → name of its tokenizer, and shape."""


def make_word_tokenizer(folder: Path) -> None:
    """A token for each word of the sums and for each digit, and a chat template."""
    core = Tokenizer(models.WordLevel({text: i for i, text in enumerate((*SPECIAL, *WORDS))}, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d| ?[A-Za-z]+|."), "isolated")
    core.decoder = decoders.Fuse()
    _save(core, folder, unk_token=UNKNOWN)


def make_text_tokenizer(folder: Path) -> None:
    """A token for each byte, so that any text can be written, for each word of the problems, and for each digit; and a
    chat template."""
    from reasoning_gym import create_dataset

    texts = [problem["prompt"] + problem["answer"] for problem in functions()[:100]]
    texts += [entry["question"] for task in GYM_TASKS for entry in create_dataset(task, size=300, seed=0)]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                  pre_tokenizers.ByteLevel(add_prefix_space=False)])
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=640, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    _save(core, folder)


def _save(core: Tokenizer, folder: Path, **special: str) -> None:
    made = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=END, unk_token=UNKNOWN,
                                   additional_special_tokens=list(SPECIAL[3:]), clean_up_tokenization_spaces=False)
    made.chat_template = CHAT
    made.save_pretrained(folder)


def sums(numbers: range = range(60)) -> list[dict[str, Any]]:
    """Every sum of two of these numbers."""
    return _shuffled({"a": f"{a:02}", "b": f"{b:02}", "answer": f"{a + b:03}"} for a in numbers for b in numbers)


def functions() -> list[dict[str, Any]]:
    """One-line Python functions of two operations each, with a test that runs them."""
    steps = [(words, sign, n) for words, sign in OPERATIONS.items() for n in range(2, 20)]

    def problem(first: tuple[str, str, int], then: tuple[str, str, int]) -> dict[str, Any]:
        body = f"(x {first[1]} {first[2]}) {then[1]} {then[2]}"
        wanted = " and ".join(f"f({x}) == {eval(body, {'x': x})}" for x in (3, -8))
        return {"prompt": f"Write a function f: first {first[0]} {first[2]}, then {then[0]} {then[2]}.",
                "answer": f"def f(x): return {body}", "tests": [{"code": f"assert {wanted}"}]}

    return _shuffled(problem(first, then) for first in steps for then in steps)


def _shuffled(problems: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """In an order that is the same each time."""
    found = list(problems)
    random.Random(0).shuffle(found)
    return found


def write(path: Path, problems: list[dict[str, Any]]) -> None:
    """As JSON Lines."""
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    partial.rename(path)


TOKENIZERS: dict[str, Callable[[Path], None]] = {"tokenizer": make_word_tokenizer, "text-tokenizer":
                                                 make_text_tokenizer}
PROBLEMS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "sums.jsonl": sums, "larger_sums.jsonl": lambda: sums(range(60, 90)), "functions.jsonl": functions}


def main() -> None:
    HERE.mkdir(parents=True, exist_ok=True)
    for name, make in TOKENIZERS.items():
        if not (HERE / name / "tokenizer.json").exists():
            make(HERE / name)
    for name, (tokenizer, shape) in MODELS.items():
        print(make_model_dir(HERE / name, config.parse({"model": shape}), HERE / tokenizer))
    for name, problems in PROBLEMS.items():
        if not (HERE / name).exists():
            write(HERE / name, problems())
        print(HERE / name)


if __name__ == "__main__":
    main()
