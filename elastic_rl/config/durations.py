"""Durations and times as people write them. Pure."""

from __future__ import annotations

import re
from datetime import datetime

from elastic_rl.errors import ConfigError

_DURATION = re.compile(r"([0-9]+)([smhd])")
_MAX_S = 100 * 365 * 86400
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(duration: str) -> int:
    """``90s``, ``15m``, ``2h`` or ``7d`` in seconds; at most 100 years. Raises ConfigError."""
    found = _DURATION.fullmatch(duration)
    if found is None or not found[1].strip("0"):
        raise ConfigError(f"{duration[:60]!r} is not a duration", hint="write it as 90s, 15m, 2h or 7d")
    digits = found[1].lstrip("0")
    # Python reads no integer of thousands of digits.
    if len(digits) > 12 or int(digits) * _SECONDS[found[2]] > _MAX_S:
        raise ConfigError(f"the duration {duration[:60]!r} is longer than 100 years", hint="write it as 90s, 15m or 7d")
    return int(digits) * _SECONDS[found[2]]


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
    except (ValueError, OverflowError) as e:
        raise ConfigError(f"{text[:60]!r} is not a time",
                          hint="write it as 15m (ago), 14:05 or 2026-11-21T14:05") from e
