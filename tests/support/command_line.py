"""The command line with what its commands import loaded already, which takes a CPU second: for ``support.forked``."""

from __future__ import annotations

from elastic_rl.cli import main as command_line
from elastic_rl.coordinator.client import admin_client, event_stream  # noqa: F401  # which commands import when they run

main = command_line.main
