"""Which hosts of a cluster something may be on, by their labels."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

LABEL = r"[A-Za-z0-9._/-]{1,63}"
"""Regular expression of a label's name."""
LABEL_VALUE = r"[A-Za-z0-9._/-]{0,63}"
HostSelector = dict[Annotated[str, Field(pattern=f"^{LABEL}$")], Annotated[str, Field(pattern=f"^{LABEL_VALUE}$")]]
"""Labels that a host must have, all of them, with these values; empty: any host."""


def selector_text(selector: HostSelector) -> str:
    """``zone=a, disk=nvme`` for people."""
    return ", ".join(f"{name}={value}" for name, value in selector.items())
