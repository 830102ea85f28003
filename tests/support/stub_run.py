"""Runs with a stub in the driver's place, which begins an epoch and works until the job's status is ``finished``, or
with a driver that has stubs in the place of engines, trainer and roles (``support.plane_driver``)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from chaos_tests.traffic import driver_writes

_STUB = Path(__file__).parent.parent / "integration" / "driver" / "stub_driver.py"


def put_stub_in_place(folder: Path, monkeypatch: pytest.MonkeyPatch, *, with_plane: bool = False,
                      behaviour: str = "hangs-until-finished") -> None:
    """Has the runs that this process submits from here on start the stub. ``folder``: an empty one for the means.
    ``with_plane``: the driver with stubs for what it runs, instead. ``behaviour``: of the stub."""
    stub = ["-m", "support.plane_driver"] if with_plane else [str(_STUB), behaviour]
    for name, value in driver_writes.environment(folder, [sys.executable, *stub]).items():
        monkeypatch.setenv(name, value)
