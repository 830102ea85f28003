"""The tool ``calculator``: arithmetic, and nothing else that Python can do. It takes microseconds, so that it may run
in an event loop."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

_MAX_LENGTH = 500
_MAX_BITS = 13_000
"""Most bits of a whole number: Python writes one of up to 4300 decimal digits."""
_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow}
_UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculator(expression: str) -> str:
    """Computes an arithmetic expression of numbers, + - * / // % ** and parentheses."""
    if len(expression) > _MAX_LENGTH:
        raise ValueError(f"the expression is longer than {_MAX_LENGTH} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as e:
        raise ValueError("it is no arithmetic expression") from e
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else str(value)


def _value(node: ast.expr) -> float:
    """Raises ValueError for anything else, and for numbers that are too large."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            first, second = _value(left), _value(right)
            if isinstance(op, ast.Pow) and isinstance(first, int) and first.bit_length() * abs(second) > _MAX_BITS:
                raise ValueError("a power is too large")  # before it is computed, which may take long
            try:
                return _bounded(_BINARY[type(op)](first, second))
            except ArithmeticError as e:
                raise ValueError(str(e)) from e
    raise ValueError("it is no arithmetic expression")


def _bounded(number: float) -> float:
    """Raises ValueError for what is no finite number, or has too many digits."""
    if isinstance(number, complex) or (isinstance(number, float) and not math.isfinite(number)):
        raise ValueError("the result is no finite number")
    if isinstance(number, int) and number.bit_length() > _MAX_BITS:
        raise ValueError("the result has too many digits")
    return number
