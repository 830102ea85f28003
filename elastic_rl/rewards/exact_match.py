"""Reward of tasks with one right answer."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_rl.data.tasks import Problem


def exact_match(problem: Problem, token_ids: Sequence[int]) -> float:
    """1.0 if the response equals the right answer token for token, else 0.0.

    ``token_ids`` includes the end-of-sequence token: an answer that continues, or was cut off, is wrong.
    """
    return float(list(token_ids) == problem.answer_ids)
