"""What a simulated world raises where a rule was broken."""

from __future__ import annotations


class Violation(AssertionError):
    """A rule was broken."""
