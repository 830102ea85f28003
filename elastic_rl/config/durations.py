"""Durations and times as people write them. Pure."""

from __future__ import annotations

import re
from datetime import datetime

from elastic_rl.errors import ConfigError

_DURATION = re.compile(r"(\d+)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(duration: str) -> int:
    """``90s``, ``15m``, ``2h`` or ``7d`` in seconds. Raises ConfigError."""
    found = _DURATION.fullmatch(duration)
    if found is None or not int(found[1]):
        raise ConfigError(f"{duration!r} is not a duration", hint="write it as 90s, 15m, 2h or 7d")
    return int(found[1]) * _SECONDS[found[2]]


def moment(text: str, now: float) -> float:
    """Unix seconds of ``15m`` (ago), ``14:05``, ``14:05:30`` (today, local time) or ``2026-11-21T14:05``. ``now``: unix
    seconds. Raises ConfigError."""
    if _DURATION.fullmatch(text):
        return now - seconds(text)
    try:
        if re.fullmatch(r"\d\d?:\d\d(:\d\d)?", text):
            today = datetime.fromtimestamp(now).date().isoformat()
            return datetime.fromisoformat(f"{today}T{text.zfill(5 if text.count(':') == 1 else 8)}").timestamp()
        return datetime.fromisoformat(text).timestamp()
    except ValueError as e:
        raise ConfigError(f"{text!r} is not a time", hint="write it as 15m (ago), 14:05 or 2026-11-21T14:05") from e
