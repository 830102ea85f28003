"""What the independent observer saw of a store: its history, change by change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_OBSERVER = Path(__file__).parent / "observer.py"
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Change:
    """One change of one key, as the observer saw it."""

    revision: int
    put: bool
    key: str
    create: int
    value: str


def observe(endpoint: str, prefix: str, since: int, last: str, *, tls: Sequence[str] = ()) -> list[Change]:
    """The changes under ``prefix`` from the revision ``since`` to that of the key ``last``, in their order, read by the
    observer in a process of its own. ``tls``: files with the authority of the store, and with the certificate and the
    key of a client. Raises AssertionError if it fails."""
    done = subprocess.run(
        [sys.executable, str(_OBSERVER), endpoint, prefix, str(since), last, *tls], capture_output=True,
        encoding="utf-8",
        timeout=_TIMEOUT_S, env={**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"})
    assert done.returncode == 0, done.stderr[-2000:]
    return [Change(**json.loads(line)) for line in done.stdout.splitlines()]
