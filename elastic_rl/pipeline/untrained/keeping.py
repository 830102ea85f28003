"""Rejection sampling: which samples of a prompt are kept, as lines that supervised fine-tuning reads. Pure.

The best samples of a model become demonstrations for it (RAFT, arXiv 2304.06767; arXiv 2307.09288, section 3.2).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_rl.config.rejection import RejectionConfig
from elastic_rl.data.ledger import ConsumedGroups
from elastic_rl.data.samples import Group, Prompt, Sample
from elastic_rl.plugins.user_code import plain

_ANSWER = 1000
"""Characters of an answer that JSON does not have."""


def best(samples: Sequence[Sample], rule: RejectionConfig) -> list[int]:
    """Indices of the samples of one prompt that are kept, the best first; of two with the same reward the earlier one.
    One that did not end by itself is never kept, since what imitates it would not learn to end, and of equal responses
    only one."""
    whole = [i for i, s in enumerate(samples) if s.finish_reason == "stop"
             and (rule.min_reward is None or s.reward >= rule.min_reward)]
    chosen: dict[tuple[int, ...], int] = {}
    for i in sorted(whole, key=lambda i: (-samples[i].reward, i)):
        chosen.setdefault(samples[i].response_ids, i)
    return list(chosen.values())[:rule.keep]


def kept_line(ordinal: int, index: int, prompt: str, sample: Sample, answer: Any) -> bytes:
    """A sample as one line of JSON. ``prompt``: the text that the model saw; ``answer``: the right one, if the data
    have it."""
    return _line({"prompt": prompt, "response": sample.text, "reward": sample.reward,
                  "reward_parts": dict(sample.reward_parts), "answer": _json_value(answer), "ordinal": ordinal,
                  "sample": index, "versions": list(sample.versions)})


def sample_line(set_name: str, index: int, number: int, prompt: str, sample: Sample, failed: str) -> bytes:
    """A sample of an evaluation as one line of JSON: the ``number``-th of the prompt ``index`` of a set. ``failed``:
    why its reward failed, if it did."""
    return _line({"set": set_name, "index": index, "sample": number, "prompt": prompt, "response": sample.text,
                  "reward": sample.reward, "reward_parts": dict(sample.reward_parts),
                  "finish_reason": sample.finish_reason, "response_tokens": len(sample.response_ids),
                  "versions": list(sample.versions), **({"failed": failed} if failed else {})})


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"  # half of a surrogate pair is escaped


def _json_value(value: Any) -> Any:
    """What a source gives, as it is where JSON has it, else as text."""
    try:
        json.dumps(value, allow_nan=False)
        return value
    except Exception:  # whatever a class of a user's source raises
        with contextlib.suppress(Exception):
            return plain(str(value), _ANSWER)
    return None


def answer_of(prompt: Prompt) -> Any:
    """The right answer, where the source gives one to rewards."""
    return prompt.metadata.get("answer")


def add_totals(totals: Mapping[str, float], groups: Sequence[Group], kept: Sequence[Sample]) -> dict[str, float]:
    """Sums over the job with those of a step. ``groups``: those that were not dropped; ``kept``: of their samples."""
    samples = [s for g in groups for s in g.samples]
    step = {"prompts": len(groups), "samples": len(samples), "kept": len(kept),
            "reward": sum(s.reward for s in samples), "kept_reward": sum(s.reward for s in kept),
            "tokens": sum(len(s.response_ids) for s in samples),
            "truncated": sum(s.finish_reason == "length" for s in samples)}
    return {name: totals.get(name, 0) + value for name, value in step.items()}


def kept_summary(totals: Mapping[str, float], consumed: ConsumedGroups, **facts: Any) -> dict[str, Any]:
    """What rejection sampling came to. Rewards are means over samples, all of them and those that were kept; None of
    nothing."""
    def mean(of: str, by: str) -> float | None:
        return totals.get(of, 0) / totals[by] if totals.get(by) else None

    return {**facts, "prompts": len(consumed.groups), "dropped": dict(consumed.dropped),
            "samples": totals.get("samples", 0), "kept": totals.get("kept", 0),
            "reward_mean": mean("reward", "samples"), "kept_reward_mean": mean("kept_reward", "kept"),
            "truncated": mean("truncated", "samples"), "response_tokens_mean": mean("tokens", "samples")}
