"""What a model makes of tokens that another one wrote: their log-probs, and its own most probable ones beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LEAST_LOGPROB = -50.0
"""Log-probs count as at least this: a model may rule a token out, and what is learned of that must stay finite."""


@dataclass(frozen=True)
class ScoreRequest:
    """A sequence, and from where on it is scored."""

    token_ids: tuple[int, ...]
    first: int
    """Position of the first token that is scored, 1 or more: nothing predicts the first one of a sequence."""

    def __post_init__(self) -> None:
        if not 1 <= self.first < len(self.token_ids):
            raise ValueError(f"tokens are scored from 1 to {len(self.token_ids) - 1}, not from {self.first} on")


@dataclass(frozen=True)
class TokenScores:
    """Natural logs of probabilities at temperature 1, of n tokens; of the ``top`` most probable ones at each of these,
    in falling order."""

    logprobs: np.ndarray
    """[n] fp32."""
    top_ids: np.ndarray
    """[n, top] int32."""
    top_logprobs: np.ndarray
    """[n, top] fp32."""


def request_body(sequences: Sequence[ScoreRequest], top: int) -> dict[str, Any]:
    """Body of a request to SGLang's /generate: nothing is generated. The router takes one place from which on all
    sequences are scored; the token there has no score of its own, which is why it is the one before the first that is
    asked for."""
    return {"input_ids": [list(s.token_ids) for s in sequences], "return_logprob": True,
            "logprob_start_len": min(s.first for s in sequences) - 1, **({"top_logprobs_num": top} if top else {}),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0}}


def parse_scores(answer: dict[str, Any], sequence: ScoreRequest, top: int) -> TokenScores | None:
    """Reads one element of SGLang's answer. None if it is about other tokens: SGLang puts one of its own in the place
    of an id that its model does not have, as the policy's vocabulary may have some that no text has. Raises ValueError,
    KeyError, TypeError and IndexError for an answer that cannot be read."""
    meta, expected = answer["meta_info"], sequence.token_ids[sequence.first:]
    entries = meta["input_token_logprobs"][-len(expected):]
    if tuple(int(entry[1]) for entry in entries) != expected:
        return None
    logprobs = np.array([float(entry[0]) for entry in entries], np.float32).clip(LEAST_LOGPROB)
    tops = meta["input_top_logprobs"][-len(expected):] if top else [[]] * len(entries)
    ids = np.array([[int(entry[1]) for entry in row] for row in tops], np.int32).reshape(len(entries), top)
    values = np.array([[float(entry[0]) for entry in row] for row in tops], np.float32).reshape(
        len(entries), top).clip(LEAST_LOGPROB)
    if not (np.isfinite(logprobs).all() and np.isfinite(values).all()):
        raise ValueError("a log-prob is not finite")
    return TokenScores(logprobs, ids, values)
