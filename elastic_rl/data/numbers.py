"""Numbers as text. It imports little: the processes of users' rewards import it."""

from __future__ import annotations

import math
from decimal import Decimal


class WrittenFloat(float):
    """A float that keeps the text it was read from: a float has 16 digits of 3.14159265358979323846, and 3 of 18.90."""

    def __init__(self, text: str) -> None:
        self.text = text


def number_text(value: float) -> str:
    """A number in decimal digits: Python's text of 0.00001 is 1e-05, which graders and models read as e minus 5."""
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    # The digits of 0e-999999999 would fill the memory; those of a float that is not 0 are a few hundred more than its
    # text has.
    text = value.text if isinstance(value, WrittenFloat) and value else float.__repr__(value)
    return format(Decimal(text), "f")
