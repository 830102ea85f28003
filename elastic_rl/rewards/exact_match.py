"""Reward of tasks with one right answer."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_rl.data.tasks import Problem


def exact_match(problem: Problem, token_ids: Sequence[int]) -> float:
    """1.0 where the response is the right answer and then ends, token for token; else 0.0.

    ``token_ids`` is the response with its end-of-sequence token: an answer that goes on, or was cut off, is wrong.
    """
    return float(list(token_ids) == problem.answer_ids)
