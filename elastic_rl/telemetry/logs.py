"""Logging of every process of the project: one JSON object a line, on stderr."""

from __future__ import annotations

import io
import json
import logging
import sys
from datetime import UTC, datetime
from pathlib import Path

from opentelemetry import trace

from elastic_rl.telemetry.log_files import open_log

_NOISY = ("httpx", "httpcore", "urllib3", "uvicorn.access", "apprise", "markdown", "opentelemetry", "asyncio")


class JsonLines(logging.Formatter):
    """One JSON object a record: at (UTC, ISO 8601), level, process, logger, message, and trace_id or error if any."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "process": self.process,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            line["trace_id"] = f"{context.trace_id:032x}"
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def setup(process: str, level: str = "info", *, file: Path | None = None) -> None:
    """Sends every logger of this process to stderr, or to ``file``. ``process``: name of the process in each line, such
    as ``coordinator-a``. ``level``: debug, info, warning or error. A later call replaces an earlier one."""
    handler = logging.StreamHandler(sys.stderr if file is None else io.TextIOWrapper(
        open_log(file), encoding="utf-8", errors="backslashreplace", write_through=True))
    handler.setFormatter(JsonLines(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    logging.captureWarnings(True)
