"""ops/run_tests.py: what fails the run, on made-up test files that pytest runs for real."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support import durations

ROOT = Path(__file__).parents[3]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_tests", ROOT / "ops" / "run_tests.py")
    assert spec and spec.loader
    module = sys.modules["run_tests"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run_tests = _load()

FLAKY = """
import pathlib, pytest

@pytest.mark.parametrize("name", {names})
def test_fails_once(name):
    marker = pathlib.Path(name)
    first = not marker.exists()
    marker.touch()
    print("first" if first else "second", "output of", name)
    assert not first
"""
BROKEN_IMPORT = "import a_module_that_is_not_there\n"
CRASHED_ONCE = """
import os, pathlib

def test_crashes_once():
    marker = pathlib.Path("crashed")
    if not marker.exists():
        marker.touch()
        os._exit(7)
"""


@pytest.fixture(autouse=True)
def only_the_plugins_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts of pytest are most of what these tests cost, and imports of others' plug-ins are most of such a start."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def run(folder: Path, files: dict[str, str], *args: str, forgiving: bool = True) -> int:
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name, text in files.items():
        (folder / name).write_text(text)
    records = folder / "records"
    records.mkdir()
    suite = run_tests.Suite(folder, records, forgiving=forgiving)
    suite.run("made-up tests", [*args, "."])
    suite.run_failed_again()
    return suite.close()


def test_test_that_passes_in_its_second_run_is_listed_with_both_outputs_and_fails_nothing(
        tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    steady = "import pytest\ndef test_passes(): pass\ndef test_is_skipped(): pytest.skip('here')\n"
    code = run(tmp_path, {"test_steady.py": steady, "test_flaky.py": FLAKY.format(names=["a"])})
    shown = capfd.readouterr().out
    assert code == 0
    listed = shown.partition("UNSTABLE test_flaky.py::test_fails_once[a]")[2]
    first, second = listed.partition("--- second run ---")[::2]
    assert "first output of a" in first and "assert not True" in first
    assert "1 passed" in second
    assert "unstable (defects" in second and "all checks passed" in second
    assert shown.splitlines()[-1].startswith("===== 2 passed, 1 skipped in ")
    assert {span.name for span in durations.read(tmp_path / "records" / "durations")} >= {"test_flaky.py"}


def test_test_that_fails_twice_fails_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = run(tmp_path, {"test_broken.py": "def test_fails(): assert False\n", "test_import.py": BROKEN_IMPORT,
                          "test_steady.py": "def test_passes(): pass\n"})
    shown = capfd.readouterr().out
    assert code == 1 and "UNSTABLE" not in shown
    assert "FAILED:\n    test_import.py\n    test_broken.py::test_fails\n" in shown
    assert shown.splitlines()[-1].startswith("===== 2 failed, 1 passed in ")


def test_more_unstable_tests_than_are_forgiven_fail_the_run_without_a_second_one(
        tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, {"test_flaky.py": FLAKY.format(names=["a", "b", "c", "d"])}) == 1
    shown = capfd.readouterr().out
    assert "once more" not in shown and shown.splitlines()[-1].startswith("===== 4 failed in ")


def test_every_first_failure_fails_a_run_of_everything(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, {"test_flaky.py": FLAKY.format(names=["a"])}, forgiving=False) == 1
    shown = capfd.readouterr().out
    assert "UNSTABLE" in shown and shown.splitlines()[-1].startswith("===== 1 failed in ")


def test_test_whose_worker_crashes_is_run_again_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files = {"test_crashed.py": CRASHED_ONCE, "test_steady.py": "def test_passes(): pass\n"}
    assert run(tmp_path, files, "-p", "xdist.plugin", "-n", "1", "--dist", "loadfile") == 0
    shown = capfd.readouterr().out
    assert "UNSTABLE test_crashed.py::test_crashes_once" in shown and "worker 'gw0' crashed" in shown
    assert shown.splitlines()[-1].startswith("===== 2 passed in ")


def test_run_that_ends_before_all_tests_have_run_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, {"test_ends.py": "import os\ndef test_ends(): os._exit(0)\n"}) == 1
    assert run(tmp_path, {"test_ends.py": "import os\ndef test_ends(): os._exit(1)\n"}) == 1
