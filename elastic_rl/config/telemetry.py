"""Logs, traces and trackers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from elastic_rl.config.section import Positive, Section


class TelemetryConfig(Section):
    otlp_endpoint: str = ""
    """OTLP/HTTP endpoint for traces, such as http://collector:4318; empty: tracing is off."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Level of every process's log."""
    log_max_bytes: Annotated[int, Field(ge=4096)] = 64 << 20
    """A process's log file (its stdout and stderr) that is larger than this many bytes is rotated. Sizes are checked
    every 5 seconds, and a rotated part holds at most twice this many bytes."""
    log_backups: Positive = 2
    """Rotated parts kept of each log file: ``<name>.log.1`` is the newest."""
    log_files: Annotated[int, Field(ge=10)] = 500
    """Log files kept in the cluster's log folder, rotated parts included. Beyond it, those of processes that have ended
    are deleted, the oldest first; replaced engines leave a file each."""
    trackers: list[Literal["tensorboard", "wandb"]] = []
    """Who else is told the metrics of training, in folders of these names in the job's folder; W&B offline. Needs the
    extra ``track``."""
