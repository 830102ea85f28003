"""Readers of ops/monitoring for its tests."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[2] / "ops" / "monitoring"
_UNPACKED = ("prometheus", "usr", "bin", "promtool")


def promtool(*args: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Runs promtool: the one on PATH, or the one that ops/setup.sh unpacked. Skips the test where there is none."""
    own = Path(sys.prefix).joinpath(*_UNPACKED)
    found = str(own) if os.access(own, os.X_OK) else shutil.which("promtool")
    if not found:
        pytest.skip("no promtool: it is not on PATH, and ops/setup.sh could not get Debian's prometheus package")
    return subprocess.run([found, *map(str, args)], input=stdin, capture_output=True, text=True, timeout=60)


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    return dict(json.loads((FOLDER / "grafana-dashboard.json").read_text()))


def expressions() -> dict[str, str]:
    """Every PromQL expression of the rules and the dashboard, by its place."""
    found = {f"rule {rule['alert']}": rule["expr"] for rule in rules()}
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            found[f"panel {panel['title']} {target['refId']}"] = target["expr"]
    return found


def metrics_of(expression: str) -> set[str]:
    return set(re.findall(r"\belastic_rl_[a-z0-9_]+", expression))
