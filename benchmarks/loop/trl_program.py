"""The program that ``vs_trl`` runs: GRPO steps with TRL, timed. It needs TRL, and nothing of elastic-rl.

``python trl_program.py SPEC RESULT``: both are JSON files; ``vs_trl.spec`` says what the first one has.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def seconds_of_steps(times: Sequence[float], updates: int) -> list[float]:
    """Seconds of each step of so many updates. ``times``: when the training began and when each update ended. Updates
    of a step that did not end do not count. Pure."""
    ends = times[::updates]
    return [end - begin for begin, end in zip(ends, ends[1:], strict=False)]


def main(given: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each step (generation, rewards and all updates), of its generation (with TRL's pass for the log-probs
    of what was generated), and mean tokens of a response in each. Raises ValueError for prompts that are no text."""
    import torch
    import transformers
    import trl
    from datasets import Dataset

    torch.set_num_threads(given["threads"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(given["model"])
    # TRL takes prompts as text and tokenizes them itself: the text must give the same tokens.
    texts = [tokenizer.decode(ids) for ids in given["prompts"]]
    if [tokenizer.encode(text) for text in texts] != given["prompts"]:
        raise ValueError("the prompts are no text of the model's tokenizer")
    answers = [tokenizer.decode(ids, skip_special_tokens=True) for ids in given["answers"]]
    updates, times, tokens, generated = given["updates"], [], [], []

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            times.append(time.perf_counter())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times.append(time.perf_counter())

    def reward(prompts: list[str], completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
        generated.append(time.perf_counter() - times[-1])  # called once a generation
        ids = kwargs["completion_ids"]
        tokens.append(sum(map(len, ids)) / len(ids))
        if given["reward"] == "even_tokens":
            return [sum(token % 2 == 0 for token in one) / max(len(one), 1) for one in ids]
        return [float(text == right) for text, right in zip(completions, answer, strict=True)]

    settings = trl.GRPOConfig(
        output_dir=str(Path(given["model"]).parent / "trl"), seed=given["seed"], use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=given["prompts_per_step"] * given["group_size"],
        num_generations=given["group_size"], steps_per_generation=1, num_iterations=updates,
        max_steps=given["steps"] * updates, max_completion_length=given["max_new_tokens"],
        temperature=given["temperature"], learning_rate=given["lr"], beta=0.0, bf16=False, gradient_checkpointing=False,
        logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True, shuffle_dataset=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(given["model"])
    if given["stop_token_ids"]:  # besides the tokenizer's own, which TRL adds, as SGLang does
        model.generation_config.eos_token_id = given["stop_token_ids"]
    trainer = trl.GRPOTrainer(
        model=model, reward_funcs=reward, args=settings,
        train_dataset=Dataset.from_dict({"prompt": texts, "answer": answers}), processing_class=tokenizer)
    trainer.add_callback(Clock())
    trainer.train()
    return {"seconds": seconds_of_steps(times, updates), "tokens": tokens, "generate_s": generated,
            "versions": f"trl {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"}


if __name__ == "__main__":
    answer = main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    Path(sys.argv[2]).write_text(json.dumps(answer), encoding="utf-8")
