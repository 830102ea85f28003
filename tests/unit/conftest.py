"""Settings of hypothesis for unit tests; those of other folders that use it name theirs (``support/budget.py``)."""

from __future__ import annotations

from support.budget import load_profile

load_profile()
