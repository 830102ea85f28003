"""What operators want of a host, as a number of ``model.number``. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

USED, CORDONED, DRAINED = 0, 1, 2
"""From DRAINED on each drain is another one, which its deadline tells apart."""
_DRAIN_UNIT_S = 0.001


def wanted_of_host(spec: Mapping[str, Any]) -> int:
    """The number of a host's spec."""
    if drain := spec.get("drain"):
        return DRAINED + round(drain["within_s"] / _DRAIN_UNIT_S)
    return CORDONED if spec.get("cordoned") else USED


def change_of_host(wanted: int) -> dict[str, Any]:
    """What a request changes of a host so that this is wanted of it."""
    drain = {"within_s": (wanted - DRAINED) * _DRAIN_UNIT_S} if wanted >= DRAINED else None
    return {"cordoned": wanted == CORDONED, "drain": drain}
