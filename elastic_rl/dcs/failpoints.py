"""Places at which a test can have a process of the checkpoint service die, as kill -9 would have it.

    ELASTIC_RL_FAILPOINT=publish.sealed:3   dies when it comes to that place for the third time

Unset, as always outside of tests, a place costs one comparison.
"""

from __future__ import annotations

import itertools
import os
import signal

ENV = "ELASTIC_RL_FAILPOINT"

PUBLISHER = ("publish.begun", "publish.sealed", "publish.manifest", "publish.replicated", "publish.committed")
PULLER = ("pull.connected", "pull.opened")
JANITOR = ("gc.releasing", "gc.gone", "gc.marked", "gc.dropped")
ENGINE = ("apply.staged", "apply.torn", "apply.applied")
OPENING = ("open.pinned", "open.manifest", "open.located")
NODE = ("node.received", "node.sealed", "disk.partial", "disk.saved", "disk.removed", "node.indexed")
POINTS = frozenset((*PUBLISHER, *PULLER, *JANITOR, *ENGINE, *OPENING, *NODE))
"""Every place, by who comes to it. The chaos suite kills a process at each of them."""

_wanted, _, _nth = os.environ.get(ENV, "").partition(":")
_count = itertools.count(1)


def reach(point: str) -> None:
    """The process is at this place of ``POINTS``; it dies here if a test says so."""
    if _wanted == point and next(_count) == int(_nth or 1):
        os.kill(os.getpid(), signal.SIGKILL)
