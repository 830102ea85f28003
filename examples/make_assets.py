"""Makes what the examples train on: small models with random weights, tokenizers, and files of problems.

    python examples/make_assets.py            # into runs/examples; what is there is kept

In place of these folders and files you name your own.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from elastic_rl import config
from elastic_rl.data.tiny_model import make_model_dir

HERE = Path("runs/examples")
END, PAD, UNKNOWN = "<|end|>", "<|pad|>", "<|unknown|>"
SPECIAL = (PAD, END, UNKNOWN, "<|user|>", "<|assistant|>")
TOOL = "<|tool|>"
WORDS = ("What", " is", " plus", " times", "?", " ", *"0123456789")
CALL = ('<tool_call>\n{"name": "calculator", "arguments": {"expression": "', "*", '"}}\n</tool_call>')
"""What is around and between the factors of a call, a token each."""
GAME_NUMBERS = range(1, 8)
GAME_TURNS = 3
GAME = "Guess a number between 1 and 7."
HIGHER, LOWER = (f"The target number is {word}." for word in ("higher", "lower"))
REFUSED = tuple(f"You attempted an invalid move. Reason: {why} Please resubmit a valid move and remember to follow the "
                "game rules to avoid penalties." for why in (
                    "Invalid move. Player 0 has already guessed the number.",
                    "Invalid move format. Player 0 did not respond with valid '[number]'."))
"""What the game says to a guess."""
CHAT = ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}")
OPERATIONS = {"add": "+", "subtract": "-", "multiply by": "*"}
GYM_TASKS = ("chain_sum", "gcd", "leg_counting")
"""Tasks of reasoning-gym whose words the tokenizer ``text-tokenizer`` has as tokens."""
SHAPE = {"hidden_size": 96, "intermediate_size": 288, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
         "max_positions": 64}
MODELS = {"llama-tools": ("tool-tokenizer", SHAPE | {"family": "llama", "tied_embeddings": True, "max_positions": 96}),
          "llama": ("tokenizer", SHAPE | {"family": "llama", "tied_embeddings": True}),
          "llama-large": ("tokenizer", SHAPE | {"family": "llama", "tied_embeddings": True, "hidden_size": 128,
                                                "head_dim": 32, "intermediate_size": 384, "num_layers": 3}),
          "llama-game": ("game-tokenizer", SHAPE | {"family": "llama", "tied_embeddings": True}),
          "qwen3-moe": ("tokenizer", SHAPE | {"family": "qwen3_moe", "num_experts": 4, "experts_per_token": 2,
                                              "expert_intermediate_size": 144}),
          "qwen3-text": ("text-tokenizer", SHAPE | {"family": "qwen3", "tied_embeddings": True, "max_positions": 96})}
"""Name of the model → name of its tokenizer, and shape."""


def make_word_tokenizer(folder: Path) -> None:
    """A token for each word of the sums and for each digit, and a chat template."""
    _save(_word_tokenizer((*SPECIAL, *WORDS)), folder, unk_token=UNKNOWN)


def make_tool_tokenizer(folder: Path) -> None:
    """Makes a tokenizer as ``make_word_tokenizer`` does, with what calls of a calculator are made of."""
    core = _word_tokenizer((*SPECIAL, TOOL, *WORDS))
    core.add_tokens([AddedToken(text, normalized=False) for text in CALL])
    _save(core, folder, (*SPECIAL[3:], TOOL), unk_token=UNKNOWN)


def make_game_tokenizer(folder: Path) -> None:
    """A token for each guess, and for each sentence of the game; and a chat template."""
    core = _word_tokenizer(SPECIAL)
    core.add_tokens([AddedToken(text, normalized=False)
                     for text in (GAME, HIGHER, LOWER, *REFUSED, *map(_guess, GAME_NUMBERS))])
    _save(core, folder, unk_token=UNKNOWN)


def _word_tokenizer(tokens: Sequence[str]) -> Tokenizer:
    core = Tokenizer(models.WordLevel({text: i for i, text in enumerate(tokens)}, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d| ?[A-Za-z]+|."), "isolated")
    core.decoder = decoders.Fuse()
    return core


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


def _save(core: Tokenizer, folder: Path, further: Sequence[str] = SPECIAL[3:], **special: str) -> None:
    from transformers import PreTrainedTokenizerFast  # it takes seconds, and most times everything is there

    made = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=END, unk_token=UNKNOWN,
                                   additional_special_tokens=list(further), clean_up_tokenization_spaces=False)
    made.chat_template = CHAT
    made.save_pretrained(folder)


def sums(numbers: range = range(60)) -> list[dict[str, Any]]:
    """Every sum of two of these numbers."""
    return _shuffled({"a": f"{a:02}", "b": f"{b:02}", "answer": f"{a + b:03}"} for a in numbers for b in numbers)


def claims(numbers: range = range(1000)) -> list[dict[str, Any]]:
    """Each number as an answer beside claims of what it is: the right one, and three that are wrong in the ways of a
    model that learns to calculate: one digit or more are others, or the last one is missing or there twice. The verdict
    says of each digit whether it is right (1 or 0), and then of the whole."""
    chance = random.Random(1)

    def wrong(right: str) -> str:
        way = chance.random()
        if way < 0.1:
            return right[:-1] if chance.random() < 0.5 else right + right[-1]
        others = (chance.randrange(len(right)),) if way < 0.6 else range(len(right))
        return "".join(chance.choice("0123456789") if i in others and chance.random() < 0.7 else digit
                       for i, digit in enumerate(right))

    def claimed(right: str) -> dict[str, None]:
        found = {right: None}
        while len(found) < 4:
            found[wrong(right)] = None
        return found

    def verdict(right: str, claim: str) -> str:
        digits = "".join(str(int(claim[i:i + 1] == digit)) for i, digit in enumerate(right))
        return f"{digits} {int(claim == right)}"

    return _shuffled({"answer": right, "claim": claim, "verdict": verdict(right, claim)}
                     for right in (f"{number:03}" for number in numbers) for claim in claimed(right))


def calls(numbers: range = range(10, 50)) -> list[dict[str, Any]]:
    """For every product that no question is for: a conversation up to the call of a calculator, and one up to the
    answer after it. What is imitated is what the model says next."""
    begin, sign, end = CALL
    found = []
    for a, b in _pairs(numbers, held_out=False):
        asked, call, product = _question(a, b), f"{begin}{a}{sign}{b}{end}", str(a * b)
        found += [{"messages": [asked], "answer": call},
                  {"messages": [asked, {"role": "assistant", "content": call}, {"role": "tool", "content": product}],
                   "answer": product}]
    return _shuffled(found)


def products(numbers: range = range(10, 50)) -> list[dict[str, Any]]:
    """Questions for products that ``calls`` does not have."""
    return _shuffled({"messages": [_question(a, b)], "product": str(a * b)}
                     for a, b in _pairs(numbers, held_out=True))


def _question(a: int, b: int) -> dict[str, str]:
    return {"role": "user", "content": f"What is {a} times {b}?"}


def _pairs(numbers: range, *, held_out: bool) -> list[tuple[int, int]]:
    """Four of ten pairs of these numbers, or the others."""
    return [(a, b) for a in numbers for b in numbers if ((a * 7 + b * 3) % 10 < 4) is held_out]


def games(seeds: range = range(1000)) -> list[dict[str, Any]]:
    """Games of guessing a number: textarena draws it by the seed."""
    return [{"prompt": GAME, "seed": seed} for seed in seeds]


def moves(games: int = 1000) -> list[dict[str, Any]]:
    """The conversation up to each guess of games whose player takes any number that is still possible; what is imitated
    is the guess."""
    chance, found = random.Random(3), []
    for _ in range(games):
        target, possible = chance.choice(GAME_NUMBERS), list(GAME_NUMBERS)
        messages = [{"role": "user", "content": GAME}]
        for _ in range(GAME_TURNS):
            guess = chance.choice(possible)
            found.append({"messages": messages, "answer": _guess(guess)})
            if guess == target:
                break
            messages = [*messages, {"role": "assistant", "content": _guess(guess)},
                        {"role": "user", "content": HIGHER if guess < target else LOWER}]
            possible = [n for n in possible if (n > guess) == (target > guess) and n != guess]
    return _shuffled(found)


def _guess(number: int) -> str:
    return f"[{number}]"


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
    """The problems in an order that is the same each time."""
    found = list(problems)
    random.Random(0).shuffle(found)
    return found


def write(path: Path, problems: list[dict[str, Any]]) -> None:
    """Writes the problems as JSON Lines."""
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(problem) + "\n" for problem in problems), encoding="utf-8")
    partial.rename(path)


TOKENIZERS: dict[str, Callable[[Path], None]] = {
    "tokenizer": make_word_tokenizer, "text-tokenizer": make_text_tokenizer, "tool-tokenizer": make_tool_tokenizer,
    "game-tokenizer": make_game_tokenizer}
PROBLEMS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "sums.jsonl": sums, "larger_sums.jsonl": lambda: sums(range(60, 90)), "functions.jsonl": functions,
    "claims.jsonl": claims, "calls.jsonl": calls, "products.jsonl": lambda: products()[:400],
    "further_products.jsonl": lambda: products()[400:], "games.jsonl": games, "moves.jsonl": moves}


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
