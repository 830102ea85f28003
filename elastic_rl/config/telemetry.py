"""Logs, traces and trackers."""

from __future__ import annotations

from typing import Literal

from elastic_rl.config.section import Section


class TelemetryConfig(Section):
    otlp_endpoint: str = ""
    """OTLP/HTTP endpoint for traces, such as http://collector:4318; empty: tracing is off."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Level of every process's log."""
    trackers: list[Literal["tensorboard", "wandb"]] = []
    """Who else is told the metrics of training, in folders of these names in the job's folder; W&B offline. Needs the
    extra ``track``."""
