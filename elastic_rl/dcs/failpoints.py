"""Points at which a test can kill a process of the checkpoint service, as by kill -9.

    ELASTIC_RL_FAILPOINT=publish.sealed:3   dies when it reaches that point for the third time

Unset, as always outside of tests, a point costs one comparison.
"""

from __future__ import annotations

import itertools
import os
import signal

ENV = "ELASTIC_RL_FAILPOINT"

PUBLISHER = ("publish.begun", "publish.sealed", "publish.manifest", "publish.replicated", "publish.committed")
PULLER = ("pull.connected", "pull.opened")
COLLECTOR = ("gc.releasing", "gc.gone", "gc.marked", "gc.dropped")
ENGINE = ("apply.staged", "apply.torn", "apply.applied")
OPENING = ("open.pinned", "open.manifest", "open.located")
NODE = ("node.received", "node.sealed", "disk.partial", "disk.saved", "disk.removed", "node.indexed")
POINTS = frozenset((*PUBLISHER, *PULLER, *COLLECTOR, *ENGINE, *OPENING, *NODE))
"""All points, by the process that reaches them. The chaos suite kills a process at each of them."""

_wanted, _, _nth = os.environ.get(ENV, "").partition(":")
_count = itertools.count(1)


def reach(point: str) -> None:
    """The process has reached this one of ``POINTS``; it dies here if a test says so."""
    if _wanted == point and next(_count) == int(_nth or 1):
        os.kill(os.getpid(), signal.SIGKILL)
