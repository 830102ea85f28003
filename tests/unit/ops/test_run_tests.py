"""ops/run_tests.py: what fails the run, on made-up test files that pytest runs for real."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from support import durations, tiers

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
STEADY = """
import pytest
from support.tiers import parametrize

@parametrize("case", [1, 2], proved_in="tests/unit/ops/test_run_tests.py", why="another case")
def test_passes(case): assert case == 1

def test_is_skipped(): pytest.skip("here")
"""
BROKEN_IMPORT = "import a_module_that_is_not_there\n"
CRASHED_ONCE = """
import os, pathlib

def test_crashes_once():
    marker = pathlib.Path("crashed")
    if not marker.exists():
        marker.touch()
        os._exit(7)

def test_passes(): pass
"""


WAITS = """
import time

def test_passes(): pass

def test_waits(): time.sleep(10000)
"""


@pytest.fixture(autouse=True)
def only_the_plugins_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts of pytest are most of what these tests cost, and imports of others' plug-ins are most of such a start."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def run(folder: Path, files: dict[str, str], *args: str, forgiving: bool = True, stalled_s: float = 2400.0) -> int:
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name, text in files.items():
        (folder / name).write_text(text)
    records = folder / "records"
    records.mkdir()
    suite = run_tests.Suite(folder, records, forgiving=forgiving, stalled_s=stalled_s)
    suite.run("made-up tests", [*args, "."])
    suite.run_failed_again()
    return suite.close()


def test_unstable_test_is_listed_with_both_outputs_and_fails_nothing(
        tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = run(tmp_path, {"test_steady.py": STEADY, "test_flaky.py": FLAKY.format(names=["a"])}, "-m", "not full")
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


def test_too_many_unstable_tests_fail_the_run_without_a_retry(
        tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, {"test_flaky.py": FLAKY.format(names=["a", "b", "c", "d"])}) == 1
    shown = capfd.readouterr().out
    assert "once more" not in shown and shown.splitlines()[-1].startswith("===== 4 failed in ")


def test_every_first_failure_fails_a_run_of_everything(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, {"test_flaky.py": FLAKY.format(names=["a"])}, forgiving=False) == 1
    shown = capfd.readouterr().out
    assert "UNSTABLE" in shown and shown.splitlines()[-1].startswith("===== 1 failed in ")


def test_test_whose_worker_crashes_is_run_again_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, {"test_crashed.py": CRASHED_ONCE}, "-p", "xdist.plugin", "-n", "1", "--dist", "loadfile") == 0
    shown = capfd.readouterr().out
    assert "UNSTABLE test_crashed.py::test_crashes_once" in shown and "worker 'gw0' crashed" in shown
    assert shown.splitlines()[-1].startswith("===== 2 passed in ")


def test_run_that_ends_before_all_tests_have_run_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, {"test_ends.py": "import os\ndef test_ends(): os._exit(0)\n"}) == 1


def test_run_in_which_no_test_ends_any_more_is_ended_and_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]
                                                               ) -> None:
    assert run(tmp_path, {"test_waits.py": WAITS}, stalled_s=2.0) == 1
    assert "no test has ended for 2 s" in capfd.readouterr().out


def test_tests_of_the_full_tier_are_listed_with_reason_and_proof(capsys: pytest.CaptureFixture[str]) -> None:
    mark = tiers.full(proved_in="tests/unit/ops/test_run_tests.py", why="at size").mark
    items = [SimpleNamespace(nodeid=f"tests/test_a.py::test_large[{n}]", get_closest_marker=lambda _: mark)
             for n in (1, 2)]
    run_tests.FullTests().pytest_collection_finish(SimpleNamespace(items=items))
    assert capsys.readouterr().out == (
        "tests/test_a.py::test_large (2 cases)\n    at size; see tests/unit/ops/test_run_tests.py\n")


def test_full_tier_names_no_proof_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="test_gone.py"):
        tiers.full(proved_in="tests/unit/ops/test_run_tests.py tests/unit/test_gone.py", why="")


def test_durations_are_summed_by_process_part_file_and_fixture(tmp_path: Path) -> None:
    spans = [durations.Span("test", "tests/unit/a/test_x.py", 2.0, 1.0, "11"),
             durations.Span("test", "tests/unit/b/test_y.py", 3.0, 2.5, "12"),
             durations.Span("test", "tests/unit/a/test_x.py", 2.0, 1.0, "11"),
             durations.Span("fixture", "etcd (tests)", 1.0, 0.5, "11")]
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(asdict(span)) + "\n" for span in spans) + '{"kind": "te')
    assert durations.read(tmp_path) == spans
    processes, part, files, fixtures = durations.tables(spans).split("\n\n")
    assert [line.split() for line in processes.splitlines()[1:3]] == [
        ["4.0", "2.0", "2", "11"], ["3.0", "2.5", "1", "12"]]
    assert part.splitlines()[1].split() == ["7.0", "4.5", "3", "tests/unit"]
    assert [line.split()[0] for line in files.splitlines()[1:3]] == ["4.0", "3.0"]
    assert fixtures.splitlines()[-1].split() == ["1.0", "0.5", "1", "all"]
