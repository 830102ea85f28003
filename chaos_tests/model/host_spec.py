"""What operators want of a host, as a number of ``model.number``. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

USED, CORDONED = 0, 1


def wanted_of_host(spec: Mapping[str, Any]) -> int:
    """The number of a host's spec."""
    return CORDONED if spec.get("cordoned") else USED


def change_of_host(wanted: int) -> dict[str, Any]:
    """What a request changes of a host so that this is wanted of it."""
    return {"cordoned": wanted == CORDONED}
