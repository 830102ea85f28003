"""Runs checks and tests in the environment that ``ops/test.sh`` has set up; its header has the forms of the command.

A test that fails is run once more, alone, when all others have ended. If it passes then it is *unstable*: it is printed
with both outputs, and up to three such tests do not fail the run. Unstable tests are defects, of the test or of the
product. With ``--all`` every first failure fails the run.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support import durations, outcomes  # noqa: E402

CHECKS = {
    "ruff": ["ruff", "check", "--quiet", "."],
    "mypy": ["mypy", "--no-error-summary"],
    "imports": ["lint-imports", "--no-cache"],
    "docs": ["mkdocs", "build", "--strict", "--quiet", "--site-dir"],  # and a folder
}
DEFAULT_TIER = ["-m", "not full"]
# A whole run leaves most of two cores idle. All other tests run beside it, at the lowest priority: what they take is
# left over, so that they do not starve its heartbeats. One of several hosts leaves them next to nothing for minutes, in
# which Ray's own limits of some processes' start are over: it runs alone.
WHOLE_RUNS = ["tests/e2e"]
SEVERAL_HOSTS = "tests/e2e/test_every_host_lost.py"
# Most integration tests wait for other processes more than they compute, so there are more workers than cores. Folders
# that take minutes in one worker, and those whose files do, come first, and the unit tests, whose files take seconds,
# last: what takes long and begins last would run alone at the end. No folder is named together with one above it, since
# pytest would take that one for both, and the order would be lost.
SLOW_FIRST = ["trainer", "engine", "driver", "pipeline", "dcs", "coordinator"]
_OTHERS = sorted({folder.name for folder in (ROOT / "tests" / "integration").iterdir() if any(folder.glob("test_*.py"))}
                 - {*SLOW_FIRST})
SIDE_BY_SIDE = ["-n", os.environ.get("ELASTIC_RL_TEST_WORKERS", "5"), "--dist", "loadfile", "--no-loadscope-reorder",
                "-p", "support.folder_workers",
                *(f"tests/integration/{part}" for part in (*SLOW_FIRST, *_OTHERS)), "chaos_tests", "tests/unit",
                "tests/gpu"]
# What cannot be imported shows before anything runs; and pytest compiles each file once, where the workers would
# compile all of them at the same time.
COLLECT = [sys.executable, "-m", "pytest", "--collect-only", "-qqq", "tests", "chaos_tests"]
ALL_SEEDS = "3000"
MAX_UNSTABLE = 3
_LOOK_S, _END_S = 5.0, 60.0
RECORDS = ROOT / ".pytest_cache" / "suite"
"""What the plug-ins have written of the last run."""


@dataclass
class Suite:
    """One run of the suite. ``cwd``: the folder that tests are named relative to; ``records``: the folder that the
    plug-ins write to; ``forgiving``: whether a test that passes in its second run counts as passed."""

    cwd: Path
    records: Path
    forgiving: bool = True
    stalled_s: float = 2400.0
    """Without the end of any test for so long, nothing more is expected; more than any one test may take."""
    failed: list[str] = field(default_factory=list)
    """Checks that failed, and groups of tests that did not run to their end."""
    found: dict[str, outcomes.Outcome] = field(default_factory=dict)
    """The first outcome of each test."""
    unstable: list[str] = field(default_factory=list)
    """Tests that failed, and passed in their second run."""
    started: float = field(default_factory=time.monotonic)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def check(self, checks: dict[str, list[str]]) -> None:
        """Runs the checks side by side; the output of one that failed is shown."""
        running = {name: subprocess.Popen(command, cwd=self.cwd, env=_environment(), stdout=subprocess.PIPE,
                                          stderr=subprocess.STDOUT, encoding="utf-8", errors="replace")
                   for name, command in checks.items()}
        for name, process in running.items():
            output, _ = process.communicate()
            say(f"{name}: {'FAILED' if process.returncode else 'ok'}")
            if process.returncode:
                print(output, flush=True)
                self.failed.append(name)

    def run_beside(self, name: str, args: Sequence[str], other: str, other_args: Sequence[str]) -> None:
        """Runs a group of tests, whose output is shown at its end, and beside it another one, at the lowest
        priority."""
        with ThreadPoolExecutor(1) as pool, tempfile.TemporaryFile("w+", dir=self.records, encoding="utf-8") as log:
            first = pool.submit(self.run, name, args, log=log)
            try:
                self.run(other, other_args, lowest_priority=True)
                first.result()
            finally:  # also after Ctrl-C
                log.seek(0)
                print(f"--- {name} ---\n{log.read()}", flush=True)

    def run(self, name: str, args: Sequence[str], *, log: IO[str] | None = None, lowest_priority: bool = False) -> None:
        """Runs a group of tests with these arguments of pytest. ``log`` takes their output."""
        say(f"pytest: {name}")
        began = time.monotonic()
        code, first = self._pytest([*args, "--continue-on-collection-errors",
                                    "--durations-to", str(self.records / "durations")], log,
                                   lowest_priority=lowest_priority)
        ended = first.pop(outcomes.END, None)
        self.found |= first
        # pytest's 1 is "all ran, some failed", and its 0 "all ran and passed"; otherwise it did not run to the end.
        if ended is None or code != (1 if any(each.outcome == "failed" for each in first.values()) else 0):
            self.failed.append(f"pytest {name} (exit status {code})")
        say(f"{name}: {time.monotonic() - began:.0f} s")

    def run_failed_again(self) -> None:
        """Runs each test that failed once more, alone. More failures than are forgiven need no second run."""
        failed = self._failed_tests()
        for test in failed if len(failed) <= MAX_UNSTABLE else ():
            say(f"once more, alone: {test}")
            with tempfile.TemporaryFile("w+", dir=self.records, encoding="utf-8") as log:
                code, again = self._pytest(["-p", "no:xdist", test], stdout=log)
                ended = again.pop(outcomes.END, None)
                log.seek(0)
                output = log.read()
            if code == 0 and ended is not None and any(each.outcome == "passed" for each in again.values()):
                self.unstable.append(test)
                say(f"UNSTABLE {test}")
                output = f"--- first run, which failed ---\n{self.found[test].output}\n--- second run ---\n{output}"
            print(output, flush=True)

    def terminate(self, *_: object) -> None:
        """Does what Ctrl-C at a terminal does, which sends SIGINT to pytest as well. Raises KeyboardInterrupt."""
        for process in self._processes:
            process.send_signal(signal.SIGINT)  # nothing where it has ended
        raise KeyboardInterrupt

    def close(self) -> int:
        """Prints what the run has found and, last, a line like pytest's closing line. Returns the exit status."""
        if self.unstable:
            say("unstable (defects of the test or of the product; both outputs of each are above):")
            print(*(f"    {test}" for test in self.unstable), sep="\n")
        forgiven = set(self.unstable) if self.forgiving else set()
        failed = [*self.failed, *(test for test in self._failed_tests() if test not in forgiven)]
        say("all checks passed" if not failed else "FAILED:")
        print(*(f"    {name}\n" for name in failed), sep="", end="")
        counts = Counter("passed" if test in forgiven else each.outcome for test, each in self.found.items())
        told = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("failed", "passed", "skipped")
                         if counts[outcome])
        print(f"===== {told or 'no tests ran'} in {time.monotonic() - self.started:.2f}s =====", flush=True)
        return 1 if failed else 0

    def _failed_tests(self) -> list[str]:
        return [test for test, each in self.found.items() if each.outcome == "failed"]

    def _pytest(self, args: Sequence[str], stdout: IO[str] | None = None, *,
                lowest_priority: bool = False
                ) -> tuple[int, dict[str, outcomes.Outcome]]:
        """Runs pytest to its end, also after Ctrl-C, when it ends what its tests have started. Returns its exit status
        and what became of each test."""
        record = self.records / f"outcomes-{next(self._numbers)}.jsonl"
        command = [*(["nice", "-n", "19"] if lowest_priority else []), sys.executable, "-m", "pytest",
                   "-p", "support.outcomes", "-p", "support.durations", "--outcomes-to", str(record), *args]
        process = subprocess.Popen(command, cwd=self.cwd, env=_environment(), stdout=stdout, stderr=stdout)
        self._processes.append(process)
        try:
            code = self._end_of(process, record)
        except KeyboardInterrupt:  # which pytest has had too
            process.wait()
            raise
        return code, outcomes.read(record)

    def _end_of(self, process: subprocess.Popen[bytes], record: Path) -> int:
        """The exit status of pytest. It is ended when no test has ended for ``stalled_s``: xdist waits for ever when a
        worker crashes with one test of its file left."""
        since, size = time.monotonic(), -1
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(min(_LOOK_S, self.stalled_s))
            if (now := record.stat().st_size if record.exists() else 0) != size:
                since, size = time.monotonic(), now
            elif time.monotonic() - since >= self.stalled_s:
                say(f"no test has ended for {self.stalled_s:.0f} s: pytest is ended")
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)
                process.kill()  # of the workers, those that are left end when their connection does
                return process.wait()


class FullTests:
    """A plug-in that prints, of the tests it collects, what runs with ``--all`` only and where its rule is proved."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        cases: Counter[tuple[str, str, str]] = Counter()
        for item in session.items:
            mark = item.get_closest_marker("full")
            if mark is not None:
                cases[item.nodeid.partition("[")[0], mark.kwargs["why"], mark.kwargs["proved_in"]] += 1
        for (test, why, proved_in), count in cases.items():
            print(f"{test}{f' ({count} cases)' if count > 1 else ''}\n    {why}; see {proved_in}")


def _environment() -> dict[str, str]:
    """The environment of pytest: tests import the product and ``tests/support``."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return os.environ | {"PYTHONPATH": path}


def say(text: str) -> None:
    print(f"[test] {text}", flush=True)


def main(args: Sequence[str]) -> int:
    if args == ["--durations"]:
        print(durations.tables(durations.read(RECORDS / "durations")))
        return 0
    if args == ["--list-full"]:
        return int(pytest.main(["--collect-only", "-qq", "-m", "full"], plugins=[FullTests()]))
    os.environ["PYTHONDONTWRITEBYTECODE"] = ""  # many images set it, and every process would compile what it imports
    everything, args = args[:1] == ["--all"], [arg for arg in args if arg != "--all"]
    if everything:
        os.environ.setdefault("ELASTIC_RL_SEEDS", ALL_SEEDS)
    shutil.rmtree(RECORDS, ignore_errors=True)
    RECORDS.mkdir(parents=True)
    suite = Suite(ROOT, RECORDS, forgiving=not (everything or args))
    signal.signal(signal.SIGTERM, suite.terminate)
    try:
        _run(suite, args, everything=everything)
    except KeyboardInterrupt:
        suite.failed.append("interrupted")
    return suite.close()


def _run(suite: Suite, args: Sequence[str], *, everything: bool) -> None:
    with tempfile.TemporaryDirectory() as site:
        suite.check(CHECKS | {"docs": [*CHECKS["docs"], site]} | ({} if args else {"collection": COLLECT}))
    if "collection" in suite.failed:
        say("tests cannot be imported: none is run")
    elif args:
        suite.run(" ".join(args), args)
    else:
        tier = [] if everything else DEFAULT_TIER
        whole_runs, others = [*WHOLE_RUNS, *tier], [*SIDE_BY_SIDE, *tier]
        if everything:  # whole runs for an hour: beside them the others would have next to nothing of the machine
            suite.run("all other tests", others)
            suite.run("whole runs", whole_runs)
        else:
            suite.run_beside("whole runs", [*whole_runs, f"--ignore={SEVERAL_HOSTS}"], "all other tests", others)
            suite.run("a whole run on several hosts", [SEVERAL_HOSTS, *tier])
        suite.run_failed_again()


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main(sys.argv[1:]))
