"""One form for every measurement: rows with a goal, how they met it, and what they were compared with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

import psutil
from pydantic import BaseModel, ConfigDict, model_validator
from rich.table import Table

from elastic_rl.report.build import percentile

_PACKAGES = ("elastic-rl", "torch", "sglang", "megatron-core", "ray", "sglang-router", "safetensors",
             "checkpoint-engine", "torchft")


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
    """The same measured on other ways of doing it."""
    limit: float | None = None
    """What the machine allows at best."""
    samples: int = 0
    low: float | None = None
    high: float | None = None
    """Spread of the samples: 5th and 95th percentile."""
    why: str | None = None
    """Why there is no value."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.value is None and not self.why:
            raise ValueError(f"row {self.id}: a row without a value says why")
        if self.value is not None and self.goal is not None:
            met = self.value <= self.goal if self.op == "<=" else self.value >= self.goal
            object.__setattr__(self, "met", met)
        return self

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


def result(bench: str, rows: Sequence[Row]) -> dict[str, Any]:
    """The whole measurement, ready for JSON."""
    shown = [{k: v for k, v in row.model_dump().items() if k != "why" or v is not None} for row in rows]
    return {"bench": bench, "machine": machine(), "versions": versions(), "rows": shown}


def markdown(bench: str, command: str, rows: Sequence[Row], at: str) -> str:
    """The same as a section of a Markdown file. ``at``: when it was measured."""
    host, releases = machine(), versions()
    lines = [f"## bench {bench}, {at}", "", f"    {command}", "",
             f"{host['cores']} cores ({host['arch']}), {host['memory_gib']} GiB, {host['system']} {host['release']}; "
             + ", ".join(f"{package} {release}" for package, release in releases.items()), "",
             "| row | what | value | 5%–95% | goal | met | limit | alternatives |", "|---|---|--:|--:|--:|---|--:|---|"]
    for row in rows:
        what = row.name if row.value is not None else f"{row.name}: not measured, {row.why}"
        others = "; ".join(f"{name} {_number(value)}" for name, value in row.alternatives.items())
        lines.append("| " + " | ".join(_plain(cell) for cell in (
            row.id, what, _number(row.value, row.unit), _spread(row),
            "" if row.goal is None else f"{row.op} {row.goal:g}",
            "" if row.met is None else "yes" if row.met else "**no**", _number(row.limit), others)) + " |")
    return "\n".join(lines) + "\n"


def append_markdown(path: Path, bench: str, command: str, rows: Sequence[Row]) -> None:
    """Adds a section to the file, which keeps the earlier ones."""
    before = path.read_text().rstrip() + "\n\n" if path.exists() else "# Results\n\n"
    path.write_text(before + markdown(bench, command, rows, time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())))


def _plain(cell: str) -> str:
    """Nothing in a cell may end it."""
    return cell.replace("|", "/").replace("\n", " ")


def _number(value: float | None, unit: str = "") -> str:
    return "" if value is None else f"{value:.4g} {unit}".rstrip()


def _spread(row: Row) -> str:
    return f"{row.low:.4g}–{row.high:.4g}" if row.low is not None and row.high is not None else ""


def table(bench: str, rows: Sequence[Row]) -> Table:
    """The same for people."""
    out = Table(title=f"bench {bench}", title_justify="left", box=None, header_style="bold", padding=(0, 2))
    for column, justify in (("", "left"), ("value", "right"), ("5%–95%", "right"), ("goal", "right"), ("met", "left")):
        out.add_column(column, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        if row.value is None:
            out.add_row(row.name, f"– ({row.why})", "", "", "")
            continue
        goal = f"{row.op} {row.goal:g}" if row.goal is not None else ""
        met = "" if row.met is None else "[green]yes[/]" if row.met else "[red]no[/]"
        out.add_row(row.name, f"{row.value:.4g} {row.unit}", _spread(row), goal, met)
        for name, value in row.alternatives.items():
            out.add_row(f"  {name}", f"{value:.4g} {row.unit}", "", "", "")
    return out
