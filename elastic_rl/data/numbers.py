"""Numbers as text. It imports little: the processes of users' rewards import it."""

from __future__ import annotations

import math
from decimal import Decimal


def number_text(value: float) -> str:
    """A number in decimal digits: Python's text of 0.00001 is 1e-05, which graders and models read as e minus 5."""
    return format(Decimal(float.__repr__(value)), "f") if isinstance(value, float) and math.isfinite(value) else (
        str(value))
