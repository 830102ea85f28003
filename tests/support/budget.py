"""How many examples and seeds the tests of pure state machines try."""

from __future__ import annotations

import os


def seeds(usual: int) -> int:
    """``usual`` examples in the suite; ``ELASTIC_RL_SEEDS`` (set by ``ops/test.sh --all``) where that is more."""
    return max(usual, int(os.environ.get("ELASTIC_RL_SEEDS", "0")))


def load_profile() -> None:
    """Settings of every test of hypothesis: without a limit for one example, whose time says nothing about the code on
    a machine that does something else too. The usual examples are the same ones for the same code, so that a suite that
    passed passes again; where there are more (``--all``), they are drawn anew. The settings hold for tests that are
    defined from then on."""
    import hypothesis  # it takes two seconds, and few integration tests use it

    hypothesis.settings.register_profile("suite", deadline=None, max_examples=seeds(40),
                                           derandomize="ELASTIC_RL_SEEDS" not in os.environ)
    hypothesis.settings.load_profile("suite")
