"""What a simulated world raises where a rule was broken."""

from __future__ import annotations


class RuleViolated(AssertionError):
    """A rule of docs/architecture.md was broken. Nothing else that a run raises says so: that is an error of the
    product, or of the world."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(rule, what)
        self.rule, self.what = rule, what

    def __str__(self) -> str:
        return f"{self.rule}: {self.what}"
