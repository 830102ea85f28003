"""Answers of engines to /generate as bytes: token ids and log-probs as arrays, what else is read of them as JSON. As
JSON a token takes 44 bytes, and a reader a hundred nanoseconds and more.

    length of the JSON, uint64 | JSON | token ids, int32 each | log-probs, float64 each

The JSON has for each answer its finish reason, weight version and versions, and the lengths of its two arrays. Byte
order is little-endian. Engines of ours answer so to a request with ``REQUEST_FIELD``; others do not know what it means,
and answer with JSON. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

MEDIA_TYPE = "application/vnd.elastic-rl.answers"
REQUEST_FIELD = "return_bytes"
"""Field of a request to /generate that is true for packed answers. SGLang has it, for images only; the router passes on
no fields, and hardly a header, that it does not know."""
LOGPROBS = "output_logprobs"
"""Key in the ``meta_info`` of an unpacked answer: the log-prob of each token."""

_LENGTH = struct.Struct("<Q")
_TOKENS, _LOGPROBS = np.dtype("<i4"), np.dtype("<f8")


def pack(answers: Sequence[Mapping[str, Any]]) -> bytes:
    """SGLang's answers to a request with ``return_logprob``. Raises KeyError, TypeError and ValueError for anything
    else."""
    head: list[Sequence[Any]] = []
    tokens: list[bytes] = []
    logprobs: list[bytes] = []
    for answer in answers:
        ids, meta = answer["output_ids"], answer["meta_info"]
        entries = meta["output_token_logprobs"] if ids else ()
        head.append(((meta.get("finish_reason") or {}).get("type"), meta.get("weight_version"),
                     meta.get("weight_versions"), len(ids), len(entries)))
        tokens.append(np.array(ids, _TOKENS).tobytes())
        logprobs.append(np.array([entry[0] for entry in entries], _LOGPROBS).tobytes())
    text = orjson.dumps(head)
    return b"".join((_LENGTH.pack(len(text)), text, *tokens, *logprobs))


class Unpacked(dict[str, Any]):
    """An answer that was packed: its token ids and log-probs are arrays."""


def unpack(raw: bytes) -> list[dict[str, Any]]:
    """Answers in SGLang's form, but for ``LOGPROBS`` in place of ``output_token_logprobs``. Raises ValueError for
    anything but what ``pack`` returned."""
    try:
        [length] = _LENGTH.unpack_from(raw)
        head = orjson.loads(memoryview(raw)[_LENGTH.size:_LENGTH.size + length])
        place = _LENGTH.size + length
        counts = [(_count(entry[3]), _count(entry[4])) for entry in head]
        tokens, logprobs = sum(n for n, _ in counts), sum(n for _, n in counts)
        if len(raw) != place + tokens * _TOKENS.itemsize + logprobs * _LOGPROBS.itemsize:
            raise ValueError("a part of the bytes is missing, or there are others")
        ids = np.frombuffer(raw, _TOKENS, tokens, place)
        values = np.frombuffer(raw, _LOGPROBS, logprobs, place + tokens * _TOKENS.itemsize)
        if any(n != m for n, m in counts) or (ids < 0).any() or not np.isfinite(values).all():
            raise ValueError("token ids or log-probs that are none")  # of the engine, and of no prompt
        answers: list[dict[str, Any]] = []
        i = j = 0
        for (reason, version, versions, *_), (n_tokens, n_logprobs) in zip(head, counts, strict=True):
            answers.append(Unpacked({"output_ids": ids[i:i + n_tokens], "meta_info": {
                "finish_reason": {"type": reason}, "weight_version": version, "weight_versions": versions,
                LOGPROBS: values[j:j + n_logprobs]}}))
            i, j = i + n_tokens, j + n_logprobs
        return answers
    except (struct.error, TypeError, IndexError, KeyError, OverflowError) as e:
        raise ValueError(f"not packed answers: {type(e).__name__}: {e}") from e


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("not packed answers: a length that is none")
    return value
