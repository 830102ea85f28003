"""Logs, traces and trackers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from elastic_rl.config.section import Positive, Section


class TelemetryConfig(Section):
    otlp_endpoint: str = ""
    """OTLP/HTTP endpoint that traces are sent to, such as http://collector:4318. Empty: tracing is off."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level of the lines in every process's log."""
    log_max_bytes: Annotated[int, Field(ge=4096)] = 64 << 20
    """A process's log file (its stdout and stderr) that is larger than this many bytes is rotated. Sizes are checked
    every 5 seconds, and a rotated part holds at most twice this many bytes."""
    log_backups: Positive = 2
    """Number of rotated parts kept of each log file; ``<name>.log.1`` is the newest."""
    log_files: Annotated[int, Field(ge=10)] = 500
    """Number of log files kept in the cluster's log folder, rotated parts included. Beyond it, those of processes that
    have ended are deleted, the oldest first; each replaced engine leaves one."""
    trackers: list[Literal["tensorboard", "wandb", "mlflow", "clearml", "trackio"]] = []
    """Experiment trackers that get the training metrics, each in a folder of its name in the job's folder, or where its
    own environment variables say (``MLFLOW_TRACKING_URI``; ``CLEARML_API_HOST``, ``CLEARML_API_ACCESS_KEY`` and others;
    ``TRACKIO_SERVER_URL`` or ``TRACKIO_SPACE_ID``), which must be set for ``elastic-rl train``. ``tensorboard`` and
    ``wandb`` need the extra ``track``, the others the extras of their names."""
    wandb_mode: Literal["offline", "online"] = "offline"
    """How W&B runs. ``offline``: it writes files, which ``wandb sync`` uploads. ``online``: it uploads while the job
    trains, with the key, entity, project and server of its own environment variables (``WANDB_API_KEY`` and others),
    which must be set for ``elastic-rl train``."""
