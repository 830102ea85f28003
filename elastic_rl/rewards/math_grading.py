"""Whether a response has the right mathematical result; called in worker processes, see ``math_rewards.py``.

SymPy, which compares the results, may take for ever or all memory for a short text; nothing here bounds it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that it has no limit; the worker's owner has one


def grade(job: Mapping[str, Any]) -> bool:
    """``job``: ``text``, whose result counts, and ``right``, a list of results of which one is enough.
    Raises ValueError for a right result that cannot be read."""
    right = [_right(text) for text in job["right"]]
    given = parse(_without_currency(job["text"]), extraction_config=_TARGETS, parsing_timeout=None)
    return any(bool(verify(one, given, timeout_seconds=None)) for one in right) if given else False


@lru_cache(maxsize=4096)
def _right(text: str) -> list[Any]:
    """Each prompt has several samples, and returns in each pass over the data."""
    text = _without_currency(text)
    if text.count("$") == 1:  # it encloses nothing, so it is one of money too
        text = text.replace("$", "")
    marked = text if "$" in text or "\\boxed" in text else f"${text}$"
    for form in (marked, text):  # an answer of words and numbers is no LaTeX
        if found := parse(form, extraction_config=_TARGETS, parsing_timeout=None):
            return list(found)
    raise ValueError(f"the right answer {text[:200]!r} is no mathematical result")


def _without_currency(text: str) -> str:
    return _CURRENCY.sub(r"\1", text)


_CURRENCY = re.compile(r"(\\\\)|\\text\{\\\$\}|\\\$|\\(?:pounds|textdollar)(?![a-zA-Z])|[£€¥]")
"""Signs of money: an amount is compared by its number. The escaped dollar of LaTeX does not enclose mathematics. The
group is a line break of LaTeX, which is kept: it escapes no dollar behind it."""
_TARGETS = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
