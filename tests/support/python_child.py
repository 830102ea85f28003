"""Python code that runs in a process of its own, with pipes of text."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def running(code: str) -> Iterator[subprocess.Popen[str]]:
    """The process runs within the block, and is killed at its end."""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
