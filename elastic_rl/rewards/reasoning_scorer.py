"""What the workers of the reward ``reasoning_gym`` call. It imports the package as it is loaded: that takes seconds,
more on a busy machine, which are part of the start of a worker and not of its first check."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from reasoning_gym.factory import get_score_answer_fn

_verifier = lru_cache(maxsize=256)(get_score_answer_fn)


def score(job: Mapping[str, Any]) -> float:
    """Raises ValueError for a task that is not known, and what a verifier raises for an entry."""
    return float(_verifier(job["task"])(answer=job["answer"], entry=job["entry"]))
