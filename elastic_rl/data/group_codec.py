"""Groups as bytes: JSON, so that whoever reads them runs nothing of what was written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_rl.data.samples import MAX_TOKEN_IDS, Group, Prompt, Sample, Segment
from elastic_rl.errors import PluginFailed
from elastic_rl.plugins import describe


def encode_group(group: Group) -> bytes:
    """Floats keep every bit, and tuples within metadata return as lists. Raises PluginFailed for metadata that JSON
    does not have."""
    prompt = group.prompt
    try:
        return json.dumps({
            "ordinal": group.ordinal, "failed": group.failed,
            "prompt": [prompt.token_ids, prompt.text, prompt.answer_ids, dict(prompt.metadata), prompt.question],
            "samples": [{
                "segments": [[s.token_ids, s.logprobs, s.loss, s.version] for s in sample.segments],
                "finish_reason": sample.finish_reason, "reward": sample.reward, "parts": dict(sample.reward_parts),
                "metadata": dict(sample.metadata), "text": sample.text} for sample in group.samples],
        }, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as e:
        raise _unwritable(f"group {group.ordinal}", e) from e


def require_writable(prompt: Prompt, samples: Sequence[Sample]) -> None:
    """Raises PluginFailed for metadata for which ``encode_group`` would."""
    try:
        json.dumps([dict(prompt.metadata), *(dict(sample.metadata) for sample in samples)])
    except (TypeError, ValueError, RecursionError) as e:
        raise _unwritable("the group", e) from e


def _unwritable(what: str, error: Exception) -> PluginFailed:
    return PluginFailed(f"{what} cannot be written as JSON, because of the metadata of its prompt or samples: "
                        f"{describe(error)}", hint="a data source, a reward and a function to generate put plain "
                        "values into metadata: numbers, texts, lists and mappings of them")


def decode_group(raw: bytes) -> Group:
    """Raises ValueError for anything but what ``encode_group`` returned."""
    try:
        found: dict[str, Any] = json.loads(raw)
        token_ids, text, answer_ids, metadata, question = found["prompt"]
        group = Group(_whole(found["ordinal"]), Prompt(
            _tokens(token_ids), _of(str, text), None if answer_ids is None else _tokens(answer_ids),
            _of(dict, metadata), _of(str, question),
        ), tuple(_sample(sample) for sample in _of(list, found["samples"])), _of(str, found["failed"]))
    except (KeyError, TypeError, RecursionError, OverflowError) as e:
        raise ValueError(f"not a group: {type(e).__name__}: {e}") from e
    if not group.samples and not group.failed:
        raise ValueError("not a group: it has no samples, and nothing failed")
    return group


def _sample(found: Mapping[str, Any]) -> Sample:
    return Sample(
        tuple(Segment(_tokens(ids), tuple(_number(logprob) for logprob in _of(list, logprobs)), _of(bool, loss),
                      _whole(version)) for ids, logprobs, loss, version in _of(list, found["segments"])),
        _of(str, found["finish_reason"]), _number(found["reward"]),
        {name: _number(part) for name, part in _of(dict, found["parts"]).items()}, _of(dict, found["metadata"]),
        _of(str, found["text"]))


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:  # a bool is an int, too
        raise ValueError(f"not a group: a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"not a group: {str(value)[:40]!r} where a whole number belongs")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"not a group: {str(value)[:40]!r} where a finite number belongs")
    return value


def _tokens(value: Any) -> tuple[int, ...]:
    found = tuple(_of(list, value))
    if not all(type(token) is int and 0 <= token < MAX_TOKEN_IDS for token in found):
        raise ValueError("not a group: token ids that are none")
    return found
