"""How many examples and seeds the tests of pure state machines try."""

from __future__ import annotations

import os


def seeds(usual: int) -> int:
    """``usual`` examples in the suite; ``ELASTIC_RL_SEEDS`` (set by ``ops/test.sh --all``) where that is more."""
    return max(usual, int(os.environ.get("ELASTIC_RL_SEEDS", "0")))
