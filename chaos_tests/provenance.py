"""What a log says of the software that a run was made with."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from shutil import which

_PACKAGES = ("elastic-rl", "ray", "sglang", "torch", "megatron-core", "etcd3")


def versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def commit() -> str:
    """The commit of the checkout that this package is of; "" where it is of none."""
    root = Path(__file__).resolve().parents[1]

    def asked(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, encoding="utf-8", check=False)
        return done.stdout.strip() if not done.returncode else ""

    # An installed package may be below a checkout of something else.
    return asked("describe", "--always", "--dirty") if which("git") and asked("rev-parse", "--show-toplevel") == str(
        root) else ""
