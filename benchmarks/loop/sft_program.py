"""The program that ``sft_vs_transformers`` runs: supervised steps with the Trainer of transformers, timed. It needs
transformers and accelerate, and nothing of elastic-rl.

``python sft_program.py SPEC RESULT``: both are JSON files; ``sft_vs_transformers.spec`` says what the first one has.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

IGNORED = -100
"""Label of a position whose token is not trained on."""


def padded(rows: Sequence[dict[str, list[int]]], pad_id: int) -> dict[str, list[list[int]]]:
    """A batch of rows of ``prompt`` and ``answer``, padded on the right to the longest; answers are labels. Pure."""
    width = max(len(row["prompt"]) + len(row["answer"]) for row in rows)
    ids, mask, labels = [], [], []
    for row in rows:
        tokens = [*row["prompt"], *row["answer"]]
        rest = width - len(tokens)
        ids.append([*tokens, *[pad_id] * rest])
        mask.append([*[1] * len(tokens), *[0] * rest])
        labels.append([*[IGNORED] * len(row["prompt"]), *row["answer"], *[IGNORED] * rest])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def main(given: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each step."""
    import torch
    import transformers

    torch.set_num_threads(given["threads"])
    times: list[float] = []

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            times.append(time.perf_counter())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times.append(time.perf_counter())

    class InOrder(transformers.Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    def collate(rows: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        return {name: torch.tensor(values) for name, values in padded(rows, given["pad_id"]).items()}

    settings = transformers.TrainingArguments(
        output_dir=str(Path(given["model"]).parent / "transformers"), seed=given["seed"],
        use_cpu=not torch.cuda.is_available(), per_device_train_batch_size=given["batch_size"] // given["passes"],
        gradient_accumulation_steps=given["passes"],
        max_steps=len(given["rows"]) // given["batch_size"], learning_rate=given["lr"], lr_scheduler_type="constant",
        weight_decay=0.0, max_grad_norm=1.0, bf16=False, remove_unused_columns=False, logging_strategy="no",
        save_strategy="no", report_to=[], disable_tqdm=True)
    trainer = InOrder(model=transformers.AutoModelForCausalLM.from_pretrained(given["model"]), args=settings,
                      train_dataset=given["rows"], data_collator=collate, callbacks=[Clock()])
    trainer.train()
    return {"seconds": [end - begin for begin, end in zip(times, times[1:], strict=False)],
            "versions": f"transformers {transformers.__version__}, torch {torch.__version__}"}


if __name__ == "__main__":
    answer = main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    Path(sys.argv[2]).write_text(json.dumps(answer), encoding="utf-8")
