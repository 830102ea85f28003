"""Fixtures of the probes of Ray."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from support.ray_services import Timing


@pytest.fixture
def timing(record_property: Callable[[str, object], None]) -> Timing:
    """Notes the seconds since a ``time.monotonic()`` under a name, in the report and on standard output."""

    def note(name: str, began: float) -> None:
        seconds = round(time.monotonic() - began, 1)
        record_property(name, seconds)
        print(f"{name}: {seconds} s")

    return note
