"""Where the suite's time goes: seconds of the wall and of the CPU, by file and by fixture.

A pytest plug-in writes them, ``pytest -p support.durations --durations-to DIR``: one file for each process that runs
tests, a line as soon as something has ended, so that a run which is interrupted has figures too. As a program it prints
them as tables: ``python tests/support/durations.py DIR``. The CPU's seconds are those of the process and of what it
started, without processes that left it (daemons, such as Ray's).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic  # by its name: some tests replace that of the module

import pytest

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Span:
    """One thing that took time. ``kind``: ``test`` (with the fixtures that began or ended around it), ``fixture`` or
    ``import`` (of all test files); ``name``: a file, or a fixture and where it is defined."""

    kind: str
    name: str
    wall_s: float
    cpu_s: float
    process: str = ""
    """Pid of the process that ran it. One that takes much more CPU than others has something that spins."""


# -- the plug-in -------------------------------------------------------------------------------------------------------
def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--durations-to", metavar="DIR", default=None, help="write what took how long into this folder")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--durations-to")
    distributes = config.getoption("numprocesses", None)  # then the workers run the tests
    if folder and not (distributes and not hasattr(config, "workerinput")):
        config.pluginmanager.register(Recorder(Path(folder)))


class Recorder:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._pid = str(os.getpid())
        self._path = folder / f"{self._pid}.jsonl"

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        with self._span("import", "all test files"):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        with self._span("test", item.location[0]):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Iterator[None]:
        name = f"{fixturedef.argname} ({fixturedef.baseid or 'plug-in'})"
        ending = contextlib.ExitStack()
        fixturedef.addfinalizer(ending.close)  # finalizers run in reverse order: the fixture's own end is in between
        with self._span("fixture", name):
            found = yield
        fixturedef.addfinalizer(lambda: ending.enter_context(self._span("fixture", name)))
        return found

    @contextlib.contextmanager
    def _span(self, kind: str, name: str) -> Iterator[None]:
        wall, cpu = monotonic(), _cpu_s()
        try:
            yield
        finally:
            span = Span(kind, name, round(monotonic() - wall, 4), round(max(0.0, _cpu_s() - cpu), 3), self._pid)
            with self._path.open("a") as out:
                out.write(json.dumps(asdict(span)) + "\n")


def _cpu_s() -> float:
    """CPU seconds of this process, of its descendants that are there, and of those that it has waited for."""
    own = os.times()
    return sum(own[:4]) + sum(map(_cpu_of, _descendants(os.getpid())))


def _descendants(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                yield child
                yield from _descendants(child)


def _cpu_of(pid: int) -> float:
    """CPU seconds of a process and of the children it has waited for; 0 when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    return sum(map(int, stat.rpartition(")")[2].split()[11:15])) / _TICKS


# -- the tables --------------------------------------------------------------------------------------------------------
def read(folder: Path) -> list[Span]:
    """Everything that was recorded; a line that an interrupted process left unfinished is ignored."""
    spans = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                spans.append(Span(**json.loads(line)))
    return spans


def tables(spans: Iterable[Span], rows: int = 40) -> str:
    """Figures by process, by part (the first two folders), by file and by fixture, the largest first."""
    spans = list(spans)
    files = [s for s in spans if s.kind != "fixture"]
    processes = [replace(s, name=s.process) for s in files]
    parts = [replace(s, name="/".join(Path(s.name).parts[:-1][:2]) or s.name) for s in files]
    fixtures = [s for s in spans if s.kind == "fixture"]
    return "\n\n".join(_table(title, chosen, rows) for title, chosen in
                       (("process", processes), ("part", parts), ("file", files), ("fixture", fixtures)) if chosen)


def _table(title: str, spans: list[Span], rows: int) -> str:
    grouped: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        grouped[span.name].append(span)
    sums = sorted(((sum(s.wall_s for s in each), sum(s.cpu_s for s in each), len(each), name)
                   for name, each in grouped.items()), reverse=True)
    lines = [f"{'wall s':>8} {'CPU s':>8} {'count':>6}  {title}"]
    lines += [f"{wall:8.1f} {cpu:8.1f} {count:6}  {name}" for wall, cpu, count, name in sums[:rows]]
    rest = sums[rows:]
    if rest:
        lines.append(f"{sum(r[0] for r in rest):8.1f} {sum(r[1] for r in rest):8.1f} {sum(r[2] for r in rest):6}  "
                     f"({len(rest)} more)")
    return "\n".join([*lines, f"{sum(s[0] for s in sums):8.1f} {sum(s[1] for s in sums):8.1f} {len(spans):6}  all"])


if __name__ == "__main__":
    print(tables(read(Path(sys.argv[1]))))
