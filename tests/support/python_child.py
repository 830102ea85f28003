"""Python code that runs in a process of its own, with pipes of text."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def running(code: str, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """The process runs within the block, and is killed at its end. ``env``: is added to its environment."""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                               env={**os.environ, **(env or {})})
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
