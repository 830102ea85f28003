"""Runs with a stub in the driver's place, which begins an epoch and works until the job's status is ``finished``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_STUB = Path(__file__).parent.parent / "integration" / "driver" / "stub_driver.py"
_SITE = f"""
import sys
if "elastic_rl.run_service" in sys.orig_argv:
    from elastic_rl import train
    python = train.processes.python
    train.job_check.require = lambda *_, **__: None
    train.processes.python = lambda module, *args: (
        [sys.executable, {str(_STUB)!r}, "hangs-until-finished", *args] if module == "elastic_rl.driver" else
        python(module, *args))
"""
"""What the interpreter of a run executes when it starts, because the environment that the run was submitted with says
so: a run that the host agent has started must have that environment too."""


def put_stub_in_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the runs that this process submits from here on start the stub. ``folder``: an empty one for the means."""
    (site := folder / "site").mkdir()
    (site / "sitecustomize.py").write_text(_SITE)
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{os.environ['PYTHONPATH']}")
