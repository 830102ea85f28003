"""Whether a response has the right mathematical result; called in worker processes, see ``math_rewards.py``. Which part
of the response counts, and how it is compared: docs/rewards.md.

SymPy, which compares the results, may take for ever or all memory for a short text; nothing here bounds it.
"""

from __future__ import annotations

import logging
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sympy
from math_verify import ExprExtractionConfig, LatexExtractionConfig, grader, parse, verify
from sympy.core.relational import Relational

from elastic_rl.rewards.final_answer import answer_of
from elastic_rl.rewards.math_text import (
    has_loose_numbers,
    letter_of,
    letter_of_text,
    plain_answer,
    plain_number_signs,
    spelled,
    without_percent,
)

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that it has no limit; the worker's owner has one

_TARGETS = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
_HUNDREDTH = sympy.UnevaluatedExpr(sympy.Rational(1, 100))
_DIGITS = 40
"""Significant digits to which expressions are evaluated that are no fractions."""
_EQUAL = sympy.Float("1e-30")
"""Relative difference below which such expressions are equal."""
_ROUNDED = sympy.Rational(1, 10**6)
"""Difference of a decimal and of what it is a rounding of, at most: absolute, and relative."""


@dataclass(frozen=True)
class _Result:
    """What was read of an answer."""

    values: list[Any]
    """What it may mean: expressions, and the text that was read. Empty where nothing could be read."""
    percent: bool = False
    letter: str = ""
    """The choice that it names."""
    spelling: str = ""


def grade(job: Mapping[str, Any]) -> bool | None:
    """``job``: ``text``, a response, and ``right``, a list of results of which one is enough. None where no answer
    could be read in the response. Raises ValueError for a right result that cannot be read."""
    right = [_right(text) for text in job["right"]]
    answer = answer_of(job["text"])
    given = _of_text(answer.text) if answer.form == "text" else _of_answer(answer.text)
    if any(_same(one, given) for one in right):
        return True
    return False if any(not isinstance(value, str) for value in given.values) or given.letter else None


@lru_cache(maxsize=4096)
def _right(text: str) -> _Result:
    """Each prompt has several samples, and returns in each pass over the data."""
    found = answer_of(text)
    result = _of_answer(text if found.form == "text" else found.text)
    if not result.values and not result.letter:
        result = _of_text(text)  # an answer of words and numbers is no LaTeX
    if not result.values and not result.letter:
        raise ValueError(f"the right answer {text[:200]!r} is no mathematical result")
    return _Result([*result.values, *_as_it_was(text)], result.percent, result.letter, result.spelling)


def _as_it_was(text: str) -> list[Any]:
    """The number of which a long decimal is what a computer made: 0.6 of 0.6000000238418579, which is its fp32, and
    0.3 of 0.30000000000000004."""
    if not re.fullmatch(r"-?\d*\.\d+", text.strip()) or len(text.strip(" -0.")) < 15:
        return []
    value = float(text)
    short = [f"{value:.12g}"]
    if struct.unpack("f", struct.pack("f", value))[0] == value and abs(value) < 1e30:
        short += [near for digits in range(6, 10) if struct.unpack("f", struct.pack(
            "f", float(near := f"{value:.{digits}g}")))[0] == value][:1]
    return [sympy.Rational(one) for one in short]


def _of_answer(text: str) -> _Result:
    """What is all of an answer: mathematics, or words."""
    spelling, letter = spelled(text), letter_of(text)
    bare, percent = without_percent(plain_answer(text))
    if bare.count("$") == 1:  # it encloses nothing, so it is one of money too
        bare = bare.replace("$", "")
    values = [] if not bare.strip() or has_loose_numbers(bare) else _parsed(
        bare if "$" in bare else f"\\boxed{{{bare}}}")
    return _Result(values, percent, letter, spelling)


def _of_text(text: str) -> _Result:
    """A text that has an answer in it somewhere."""
    values = _parsed(plain_number_signs(text, latex=False))
    percents = [value.args[0] for value in values if _is_percent(value)]
    return _Result(percents or values, bool(percents), letter_of_text(text), spelled(text))


def _parsed(text: str) -> list[Any]:
    return [_exact(value) for value in parse(text, extraction_config=_TARGETS, parsing_timeout=None)]


def _exact(value: Any) -> Any:
    """An expression with its decimals as the fractions that they are."""
    if isinstance(value, sympy.Float):
        return sympy.Rational(str(value))
    if not isinstance(value, sympy.Basic) or not value.has(sympy.Float):
        return value
    parts = map(_exact, getattr(value, "_unsorted_args", value.args))  # latex2sympy's sets keep the order of the text
    try:
        return value.func(*parts, evaluate=False) if isinstance(value, Relational) else value.func(*parts)
    except (TypeError, ValueError, RecursionError):  # not every class can be made of its arguments
        return value


def _numeric_eq(a: Any, b: Any, float_rounding: int, numeric_precision: int) -> bool:
    """Takes the place of math-verify's own, which takes numbers below 1e-15 for 0, so that 1/2004! is 1/2006!, and
    decimals that differ behind the sixth place for equal."""
    if isinstance(a, sympy.MatrixBase | sympy.MatrixExpr) or isinstance(b, sympy.MatrixBase | sympy.MatrixExpr):
        return bool(_numeric_eq_of_matrices(a, b, float_rounding, numeric_precision))
    if not isinstance(a, sympy.Expr) or not isinstance(b, sympy.Expr) or a.free_symbols or b.free_symbols:
        return False
    a, b = a.doit(), b.doit()
    if a == b:
        return True
    x, y = (one if one.is_Rational else one.evalf(_DIGITS) for one in (a, b))
    if not all(one.is_number and one.is_finite for one in (x, y)) or not x or not y:
        return False
    apart = abs(x - y)
    if not (a.is_Rational and b.is_Rational) and bool(apart <= _EQUAL * abs(x)):
        return True
    rounded = any(_decimals(d) is None and _is_precise(r) for d, r in ((a, b), (b, a)))
    return rounded and bool(apart <= _ROUNDED * min(1, max(abs(x), abs(y))))


def _decimals(value: Any) -> int | None:
    """Digits behind the point; None for what no decimal can be equal to."""
    if not value.is_Rational:
        return None
    digits, rest = 0, int(value.q)
    while rest % 2 == 0 or rest % 5 == 0:
        rest = rest // 10 if rest % 10 == 0 else rest // 2 if rest % 2 == 0 else rest // 5
        digits += 1
    return digits if rest == 1 else None


def _is_precise(value: Any) -> bool:
    """Whether it is a decimal of at least five digits, as those have that are rounded to six, of which one may be 0."""
    decimals = _decimals(value)
    return bool(decimals) and bool(abs(value.p) * 10**decimals >= value.q * 10**4)  # type: ignore[operator]


def _solutions_eq(gold: Any, given: Any, float_rounding: int, numeric_precision: int) -> bool:
    """Takes the place of math-verify's own, which takes two equations for equal where it finds a solution of neither:
    ``D = (0, 1)`` and ``D = (0, 2)``."""
    if isinstance(gold, sympy.Eq) and isinstance(given, sympy.Eq):
        if any(isinstance(side, sympy.Set | sympy.Tuple) for side in (*gold.args, *given.args)):
            return gold.lhs == given.lhs and bool(grader.sympy_expr_eq(
                gold.rhs, given.rhs, float_rounding, numeric_precision))
        if not sympy.solve(gold, gold.free_symbols) or not sympy.solve(given, given.free_symbols):
            ratio = sympy.simplify((gold.lhs - gold.rhs) / (given.lhs - given.rhs))
            return bool(ratio.is_number and ratio.is_finite and ratio.is_nonzero)
    return bool(_solutions_eq_if_any(gold, given, float_rounding, numeric_precision))


_numeric_eq_of_matrices, _solutions_eq_if_any = grader.sympy_numeric_eq, grader.sympy_solve_and_compare
grader.sympy_numeric_eq, grader.sympy_solve_and_compare = _numeric_eq, _solutions_eq


def _is_percent(value: Any) -> bool:
    return isinstance(value, sympy.Mul) and len(value.args) == 2 and value.args[1] == _HUNDREDTH


def _same(right: _Result, given: _Result) -> bool:
    if given.spelling and given.spelling == right.spelling:
        return True
    if right.letter and given.letter:
        return right.letter == given.letter
    rights, givens = right.values, given.values
    if right.percent and not given.percent:
        rights = [*rights, *_hundredths(rights)]
    elif given.percent and not right.percent:
        givens = [*givens, *_hundredths(givens)]
    return bool(rights and givens) and bool(verify(rights, givens, timeout_seconds=None))


def _hundredths(values: list[Any]) -> list[Any]:
    return [value / 100 for value in values if isinstance(value, sympy.Expr)]
