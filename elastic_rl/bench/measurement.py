"""The form of every measurement: rows with a value, a goal, alternatives and the limit of the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

import psutil
from pydantic import BaseModel, ConfigDict, model_validator

from elastic_rl.report.build import percentile

_PACKAGES = ("elastic-rl", "torch", "sglang", "megatron-core", "ray", "sglang-router", "safetensors",
             "checkpoint-engine", "torchft", "trl")


class Row(BaseModel):
    """One measured value. ``met`` follows from value, goal and op; without a goal it is None."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    id: str
    name: str
    value: float | None = None
    unit: str = ""
    goal: float | None = None
    op: Literal["<=", ">="] = "<="
    met: bool | None = None
    alternatives: dict[str, float] = {}
    """The same value for other ways of doing the same."""
    unmeasured_alternatives: dict[str, str] = {}
    """Alternatives without a value, and why."""
    limit: float | None = None
    """The best value that this machine allows; the row itself cannot beat it but for noise."""
    samples: int = 0
    low: float | None = None
    high: float | None = None
    """5th and 95th percentile of the samples."""
    why: str | None = None
    """Why there is no value."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.value is None and not self.why:
            raise ValueError(f"row {self.id}: a row without a value needs a reason")
        if self.value is not None and self.goal is not None:
            met = self.value <= self.goal if self.op == "<=" else self.value >= self.goal
            object.__setattr__(self, "met", met)
        return self

    @property
    def spread(self) -> str:
        return f"{self.low:.4g}–{self.high:.4g}" if self.low is not None and self.high is not None else ""

    @classmethod
    def unmeasured(cls, id: str, name: str, why: str, **fields: Any) -> Self:
        return cls(id=id, name=name, why=why, **fields)

    @classmethod
    def of(cls, id: str, name: str, values: Sequence[float], unit: str, **fields: Any) -> Self:
        """Median of samples with their spread; no samples make an unmeasured row."""
        if not values:
            return cls.unmeasured(id, name, "no sample was taken", unit=unit, **fields)
        return cls(id=id, name=name, value=percentile(values, 0.5), unit=unit, samples=len(values),
                   low=percentile(values, 0.05), high=percentile(values, 0.95), **fields)


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    return {"system": platform.system(), "release": platform.release(), "arch": platform.machine(),
            "cores": len(os.sched_getaffinity(0)), "memory_gib": round(psutil.virtual_memory().total / 2**30, 1)}


def versions() -> dict[str, str]:
    """Releases that the numbers depend on; absent packages are left out."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@cache
def commit() -> str:
    """The commit of the tree that this package is in, with ``+changes`` if files of the package differ from it; "" when
    git knows neither. Read once: what a bench writes is no change of what it measures."""
    def git(*args: str) -> str:
        return subprocess.run(["git", "-C", str(package), *args], capture_output=True, timeout=20,
                              check=True, encoding="utf-8", errors="replace").stdout.strip()

    package = Path(__file__).resolve().parents[1]
    try:
        git("ls-files", "--error-unmatch", __file__)  # an installed package may lie in somebody else's tree
        found = git("rev-parse", "--short=12", "HEAD")
        return found + ("+changes" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def result(bench: str, rows: Sequence[Row], *, complete: bool = True) -> dict[str, Any]:
    """The whole measurement, ready for JSON. ``complete``: whether it came to its end."""
    shown = [{k: v for k, v in row.model_dump().items() if k != "why" or v is not None} for row in rows]
    return {"bench": bench, "complete": complete, "machine": machine(), "versions": versions(), "rows": shown}


def markdown(bench: str, command: str, rows: Sequence[Row], at: str) -> str:
    """The measurement as a section of a Markdown file. ``at``: when it began."""
    host, releases, tree = machine(), versions(), commit()
    lines = [f"## bench {bench}, {at}", "", f"    {command}", "",
             f"{host['cores']} cores ({host['arch']}), {host['memory_gib']} GiB, {host['system']} {host['release']}; "
             + ", ".join(f"{package} {release}" for package, release in releases.items())
             + (f"; commit {tree}" if tree else ""), "",
             "| row | what | value | 5%–95% | goal | met | limit | alternatives |", "|---|---|--:|--:|--:|---|--:|---|"]
    for row in rows:
        what = row.name if row.value is not None else f"{row.name}: not measured, {row.why}"
        others = "; ".join([*(f"{name} {_number(value)}" for name, value in row.alternatives.items()),
                            *(f"{name}: not measured, {why}" for name, why in row.unmeasured_alternatives.items())])
        lines.append("| " + " | ".join(_plain(cell) for cell in (
            row.id, what, _number(row.value, row.unit), row.spread,
            "" if row.goal is None else f"{row.op} {row.goal:g}",
            "" if row.met is None else "yes" if row.met else "**no**", _number(row.limit), others)) + " |")
    return "\n".join(lines) + "\n"


def _plain(cell: str) -> str:
    """A cell without the characters that would end it."""
    return cell.replace("|", "/").replace("\n", " ")


def _number(value: float | None, unit: str = "") -> str:
    return "" if value is None else f"{value:.4g} {unit}".rstrip()
