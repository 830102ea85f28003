"""Groups, and samples without their prompt, as bytes: numbers of tokens as arrays, all else as JSON, so that whoever
reads them runs nothing of what was written. A step may have hundreds of groups of a million tokens each: as JSON their
numbers would take a hundred times as long.

    lengths of the three parts, 3 x uint64 | JSON | token ids, int32 each | log-probs, float32 each

In JSON an array is its length; the arrays follow one another in the order of the JSON. Byte order is little-endian.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from elastic_rl.data.samples import Group, Prompt, Sample, Segment
from elastic_rl.errors import PluginFailed
from elastic_rl.plugins.user_code import describe

Numbers = Sequence[float] | np.ndarray
_LENGTHS = struct.Struct("<3Q")
_TOKENS, _LOGPROBS = np.dtype("<i4"), np.dtype("<f4")


def encode_group(group: Group) -> bytes:
    """Log-probs are rounded to float32, as they are trained on; other floats keep every bit, and tuples within metadata
    return as lists. Raises PluginFailed for metadata that JSON
    does not have."""
    prompt = group.prompt
    segments = [segment for sample in group.samples for segment in sample.segments]
    head = _head(f"group {group.ordinal}", lambda: {
        "ordinal": group.ordinal, "failed": group.failed,
        "prompt": [len(prompt.token_ids), prompt.text,
                   None if prompt.answer_ids is None else len(prompt.answer_ids), dict(prompt.metadata),
                   prompt.question],
        "samples": [_described(sample) for sample in group.samples]})
    return _whole_of(head, [prompt.token_ids, prompt.answer_ids or ()], segments)


def encode_samples(samples: Sequence[Sample]) -> bytes:
    """The samples of a group whose prompt the reader has. Raises PluginFailed as ``encode_group``."""
    segments = [segment for sample in samples for segment in sample.segments]
    head = _head("a sample", lambda: {"samples": [_described(sample) for sample in samples]})
    return _whole_of(head, [], segments)


def _numbers(segment: Segment) -> tuple[Numbers, Numbers]:
    return segment.arrays or (segment.token_ids, segment.logprobs)


def _described(sample: Sample) -> dict[str, Any]:
    return {"segments": [[*map(len, _numbers(s)), s.loss, s.version] for s in sample.segments],
            "finish_reason": sample.finish_reason, "reward": sample.reward, "parts": dict(sample.reward_parts),
            "metadata": dict(sample.metadata), "text": sample.text, "turns": sample.turn_rewards}


def _head(what: str, described: Callable[[], Mapping[str, Any]]) -> bytes:
    try:
        return json.dumps(described(), separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as e:
        raise _unwritable(what, e) from e


def _whole_of(head: bytes, prompt: Sequence[Numbers], segments: Sequence[Segment]) -> bytes:
    numbers = [_numbers(segment) for segment in segments]
    tokens = _joined([*prompt, *(ids for ids, _ in numbers)], _TOKENS)
    logprobs = _joined([logprobs for _, logprobs in numbers], _LOGPROBS)
    return b"".join((_LENGTHS.pack(len(head), len(tokens), len(logprobs)), head, tokens, logprobs))


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


def _joined(parts: Sequence[Numbers], kind: np.dtype[Any]) -> bytes:
    return b"".join(np.asarray(part, kind).tobytes() for part in parts)


def decode_group(raw: bytes) -> Group:
    """Raises ValueError for anything but what ``encode_group`` returned."""
    with _only_value_errors():
        found, arrays = _opened(raw)
        n_tokens, text, n_answer, metadata, question = found["prompt"]
        prompt = Prompt(arrays.tokens(n_tokens), _of(str, text), None if n_answer is None else arrays.tokens(n_answer),
                        _of(dict, metadata), _of(str, question))
        group = Group(_whole(found["ordinal"]), prompt,
                      tuple(_sample(sample, arrays) for sample in _of(list, found["samples"])),
                      _of(str, found["failed"]))
    arrays.require_end()
    if not group.samples and not group.failed:
        raise ValueError("not a group: it has no samples, and nothing failed")
    return group


def decode_samples(raw: bytes) -> list[Sample]:
    """Raises ValueError for anything but what ``encode_samples`` returned."""
    with _only_value_errors():
        found, arrays = _opened(raw)
        samples = [_sample(sample, arrays) for sample in _of(list, found["samples"])]
    arrays.require_end()
    return samples


@contextmanager
def _only_value_errors() -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, RecursionError, OverflowError, struct.error) as e:
        raise ValueError(f"not a group: {type(e).__name__}: {e}") from e


def _opened(raw: bytes) -> tuple[dict[str, Any], _Arrays]:
    """What the JSON has, and the arrays. Raises ValueError and struct.error."""
    lengths = _LENGTHS.unpack_from(raw)
    if sum(lengths) != len(raw) - _LENGTHS.size:
        raise ValueError("not a group: a part of its bytes is missing, or there are others")
    head, tokens, logprobs = (raw[start:start + length] for start, length in zip(
        (_LENGTHS.size, _LENGTHS.size + lengths[0], _LENGTHS.size + lengths[0] + lengths[1]), lengths, strict=True))
    return json.loads(head), _Arrays(tokens, logprobs)


def _sample(found: Mapping[str, Any], arrays: _Arrays) -> Sample:
    return Sample(
        tuple(Segment.of_arrays(arrays.ids(n_tokens), arrays.logprobs(n_logprobs), _of(bool, loss), _whole(version))
              for n_tokens, n_logprobs, loss, version in _of(list, found["segments"])),
        _of(str, found["finish_reason"]), _number(found["reward"]),
        {name: _number(part) for name, part in _of(dict, found["parts"]).items()}, _of(dict, found["metadata"]),
        _of(str, found["text"]), tuple(_number(turn) for turn in _of(list, found["turns"])))


class _Arrays:
    """Gives the arrays one after the other."""

    def __init__(self, tokens: bytes, logprobs: bytes) -> None:
        """Raises ValueError."""
        self._tokens, self._logprobs = np.frombuffer(tokens, _TOKENS), np.frombuffer(logprobs, _LOGPROBS)
        if (self._tokens < 0).any() or not np.isfinite(self._logprobs).all():
            raise ValueError("not a group: token ids or log-probs that are none")

    def tokens(self, n: object) -> tuple[int, ...]:
        return tuple(self.ids(n).tolist())

    def ids(self, n: object) -> np.ndarray:
        found, self._tokens = self._split(self._tokens, n)
        return found

    def logprobs(self, n: object) -> np.ndarray:
        found, self._logprobs = self._split(self._logprobs, n)
        return found

    def require_end(self) -> None:
        if len(self._tokens) or len(self._logprobs):
            raise ValueError("not a group: it has arrays of nothing")

    @staticmethod
    def _split(array: np.ndarray[Any, Any], n: object) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        length = _whole(n)
        if length > len(array):
            raise ValueError("not a group: an array ends too early")
        return array[:length], array[length:]


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
