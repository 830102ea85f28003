"""Points at which a test can kill a process, as by kill -9: of the checkpoint service, of a coordinator, and of those
that make a job's steps.

    ELASTIC_RL_FAILPOINT=publish.sealed:3   dies when it reaches that point for the third time

Unset, as always outside of tests, a point costs one comparison.
"""

from __future__ import annotations

import itertools
import os
import signal

from elastic_rl.errors import ConfigError

ENV = "ELASTIC_RL_FAILPOINT"

PUBLISHER = ("publish.begun", "publish.sealed", "publish.manifest", "publish.replicated", "publish.committed")
PULLER = ("pull.connected", "pull.opened")
COLLECTOR = ("gc.gone", "gc.marked", "gc.dropped")
ENGINE = ("apply.staged", "apply.torn", "apply.applied")
OPENING = ("open.pinned", "open.manifest", "open.located")
NODE = ("node.received", "node.sealed", "disk.partial", "disk.saved", "disk.removed", "node.indexed")
LEADER = ("leader.elected", "leader.announced")
ACTOR = ("step.taken", "step.trained", "step.recorded")
RANK = ("rank.stepped",)
POINTS = frozenset((*PUBLISHER, *PULLER, *COLLECTOR, *ENGINE, *OPENING, *NODE, *LEADER, *ACTOR, *RANK))
"""All points, by the process that reaches them. The chaos suite kills a process at each of them."""

def parse(value: str) -> tuple[str, int]:
    """Point and number of the time in ``POINT:N``, or ``POINT`` for the first; ("", 1) where nothing is set. Raises
    ConfigError."""
    point, _, nth = value.partition(":")
    if value and point not in POINTS:
        raise ConfigError(f"{ENV}={value}: there is no failpoint {point!r}", hint="one of " + ", ".join(sorted(POINTS)))
    if nth and not (nth.isdecimal() and int(nth)):
        raise ConfigError(f"{ENV}={value}: {nth!r} is not a number of times", hint=f"for instance {point}:1")
    return point, int(nth or 1)


_wanted, _nth = parse(os.environ.get(ENV, ""))
_count = itertools.count(1)


def reach(point: str) -> None:
    """The process has reached this one of ``POINTS``; it dies here if a test says so."""
    if _wanted == point and next(_count) == _nth:
        os.kill(os.getpid(), signal.SIGKILL)
