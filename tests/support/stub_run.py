"""Runs with a stub in the driver's place, which begins an epoch and works until the job's status is ``finished``, or
with a driver that has stubs in the place of engines, trainer and roles (``support.plane_driver``)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

_STUB = Path(__file__).parent.parent / "integration" / "driver" / "stub_driver.py"
_SITE = """
import sys
if "elastic_rl.run_service" in sys.orig_argv:
    from elastic_rl import train
    python = train.processes.python
    train.job_check.require = lambda *_, **__: []
    train.processes.python = lambda module, *args: (
        COMMAND + list(args) if module == "elastic_rl.driver" else python(module, *args))
"""
"""What the interpreter of a run executes when it starts, because the environment that the run was submitted with says
so: a run that the host agent has started must have that environment too."""


def put_stub_in_place(folder: Path, monkeypatch: pytest.MonkeyPatch, *, with_plane: bool = False,
                      behaviour: str = "hangs-until-finished") -> None:
    """Has the runs that this process submits from here on start the stub. ``folder``: an empty one for the means.
    ``with_plane``: the driver with stubs for what it runs, instead. ``behaviour``: of the stub."""
    (site := folder / "site").mkdir()
    stub = ["-m", "support.plane_driver"] if with_plane else [str(_STUB), behaviour]
    (site / "sitecustomize.py").write_text(f"COMMAND = {[sys.executable, *stub]!r}\n{_SITE}")
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{os.environ['PYTHONPATH']}")
