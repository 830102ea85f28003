"""Text is UTF-8 in files, names of files and arguments, whatever the locale says; only what a person reads on a
terminal is in the terminal's encoding. Output never fails on a character."""

from __future__ import annotations

import contextlib
import io
import locale
import os
import sys

_CHILDREN = {"PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8:backslashreplace"}
"""Environment of the processes that this one starts. Their output goes to logs, which are UTF-8."""


def use_utf8() -> None:
    """Call this first in a program that a person starts. Where the locale's encoding is another one, Python is started
    again, as the same process, in its UTF-8 mode, since nothing else changes how names of files are encoded."""
    if sys.getfilesystemencoding() != "utf-8" and not sys.flags.utf8_mode:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    own = "" if os.environ.get("PYTHONIOENCODING") else _of_terminal()
    for stream in (sys.stdout, sys.stderr):
        # Python asks for the position of what was a file at the start, and is a pipe now: the encoding is set by then.
        with contextlib.suppress(OSError):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(encoding=own or stream.encoding, errors="backslashreplace")
    os.environ.update(_CHILDREN)


def _of_terminal() -> str:
    """The encoding of the locale, which Python's UTF-8 mode does not change. That of the C locale is ASCII, and says
    only that nobody has set one."""
    found = locale.getencoding()
    return "utf-8" if found.lower() in ("ansi_x3.4-1968", "ascii", "646", "us-ascii") else found
