"""What became of each test: a pytest plug-in writes it while the tests run, and ``ops/run_tests.py`` reads it.

``pytest -p support.outcomes --outcomes-to FILE`` writes one JSON line for each report. Where workers run the tests the
controller writes, which also learns of tests whose worker crashed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

END = "the end of the session"
"""The name of the outcome that is written last. Without it the process ended before all tests had run."""
_WORST = ("passed", "skipped", "failed")
"""Of several reports of one test (setup, call, teardown) the one that comes last here counts."""


@dataclass(frozen=True)
class Outcome:
    """``test``: the test's node id, or that of a file that could not be collected; ``output``: why it failed, and what
    it had printed."""

    test: str
    outcome: str
    output: str = ""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes-to", metavar="FILE", default=None, help="write what became of each test to this file")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--outcomes-to")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Writer(Path(path)))


class Writer:
    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:  # a setup or teardown that passed says nothing of the test
            self._write(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report)

    def pytest_sessionfinish(self) -> None:
        self._append(Outcome(END, "passed"))

    def _write(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        output = ""
        if report.failed:
            output = "\n".join([report.longreprtext, *(f"--- {title} ---\n{text}" for title, text in report.sections)])
        self._append(Outcome(report.nodeid, report.outcome, output))

    def _append(self, outcome: Outcome) -> None:
        with self._path.open("a") as out:
            out.write(json.dumps(asdict(outcome)) + "\n")


def read(path: Path) -> dict[str, Outcome]:
    """The outcome of each test that has ended, and END if the session has."""
    found: dict[str, Outcome] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        new = Outcome(**json.loads(line))
        old = found.get(new.test)
        if old is None or _WORST.index(new.outcome) > _WORST.index(old.outcome):
            found[new.test] = new
    return found
