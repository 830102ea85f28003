"""How a bench runs: which rows are measured, and what is kept when it is interrupted. Nothing here is timed."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

import benchmarks
from elastic_rl.bench import BENCHES, control, dcs, loop
from elastic_rl.bench.loop import job
from elastic_rl.bench.measurement import Row
from elastic_rl.bench.options import DEFAULT_BYTES, QUICK_BYTES, Options, Unmeasurable, parse_size
from elastic_rl.bench.recorder import Emit, MarkdownFile, Printer, Recorder
from elastic_rl.bench.suite import Suite
from elastic_rl.cli import main
from elastic_rl.cli.exit_codes import Exit
from elastic_rl.errors import ConfigError
from elastic_rl.host import inherited_model

MODULE = """
from elastic_rl.bench.measurement import Row
from elastic_rl.bench.options import Unmeasurable

def measure(testbed):
    testbed.append("start {name}")
    try:
        {body}
    finally:
        testbed.append("end {name}")
"""
FIRST = "yield Row(id='first-a', name='a', value=1.0, unit='s'); yield Row(id='first-b', name='b', value=2.0)"


# -- options ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("text", "nbytes"), [("1GiB", 1 << 30), ("64MiB", 64 << 20), ("1.5k", 1536), ("4096", 4096),
                                              ("2 G", 2 << 30), ("3mb", 3 << 20)])
def test_sizes_are_parsed_with_binary_units(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "much", "-1GiB", "0", "1 GiB of them", "9" * 400, "9" * 6000,
                                  "99999T", "0.5"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a size") as e:
        parse_size(text)
    assert len(str(e.value)) < 300


def test_quick_run_moves_fewer_bytes_unless_a_size_is_given() -> None:
    assert (Options().nbytes, Options(quick=True).nbytes) == (DEFAULT_BYTES, QUICK_BYTES)
    assert Options(quick=True, size_bytes=5).nbytes == 5


def test_command_repeats_the_options() -> None:
    options = Options(quick=True, size_bytes=64 << 20, rows=("P1", "P3"))
    assert options.command("dcs") == "elastic-rl bench dcs --quick --size 64MiB --rows P1,P3"
    assert Options(settings=("--data.name=a b",)).command("loop") == "elastic-rl bench loop '--data.name=a b'"


# -- which rows -------------------------------------------------------------------------------------------------------
@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Suite]]:
    """Makes a suite of modules ``first``, ``second``, … with these bodies, and with these row ids each."""
    package = f"bench_suite_{tmp_path.name.replace('-', '_')}"

    def make(**bodies: str) -> Suite:
        folder = tmp_path / package
        folder.mkdir()
        (folder / "__init__.py").touch()
        for name, body in bodies.items():
            (folder / f"{name}.py").write_text(MODULE.format(name=name, body=body))
        return Suite(package, {name: (f"{name}-a", f"{name}-b") for name in bodies})

    monkeypatch.syspath_prepend(str(tmp_path))
    yield make
    for name in [m for m in sys.modules if m.partition(".")[0] == package]:
        del sys.modules[name]


def run(suite: Suite, recorder: Recorder, *ids: str) -> list[str]:
    """Runs a suite; what its modules did."""
    done: list[str] = []
    suite.run(Options(rows=ids), recorder.emit, lambda: nullcontext(done))
    return done


def test_every_listed_row_can_be_selected_by_its_id() -> None:
    for bench in (control.SUITE, dcs.SUITE, loop.SUITE, benchmarks.CONTROL, benchmarks.DCS, benchmarks.LOOP):
        for module, ids in bench.rows.items():
            for row in ids:
                assert module in bench.modules([row])
        listed = [row for rows in bench.rows.values() for row in rows]
        assert len(listed) == len(set(listed))


def test_rows_are_selected_by_id_or_by_the_part_before_a_dash(suite: Callable[..., Suite]) -> None:
    made = suite(first=FIRST, second=FIRST)
    assert made.modules([]) == ["first", "second"]
    assert made.modules(["second-b"]) == made.modules(["second"]) == ["second"]
    with pytest.raises(ConfigError, match="no row 'sec'"):
        made.modules(["sec"])
    assert run(made, Recorder(), "first-a") == ["start first", "end first"]


def test_extended_suite_measures_modules_of_both_packages(suite: Callable[..., Suite], tmp_path: Path) -> None:
    made = suite(first=FIRST, second=FIRST)
    other = tmp_path / f"{made.package}_other"
    other.mkdir()
    (other / "__init__.py").touch()
    body = "yield Row(id='second-a', name='a', value=7.0)"
    (other / "second.py").write_text(MODULE.format(name="other second", body=body))
    extended = made.extended(other.name, {"second": ("second-a",)})
    recorder = Recorder()
    assert run(extended, recorder) == ["start first", "end first", "start other second", "end other second"]
    assert {row.id: row.value for row in recorder.rows} == {"first-a": 1.0, "first-b": 2.0, "second-a": 7.0}


def test_benchmarks_are_a_program_with_its_own_usage(monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    got: list[Options] = []
    monkeypatch.setitem(benchmarks.BENCHES.by_name, "dcs", lambda options, emit: got.append(options))
    for args in ["dcs", "--quick"], ["--help"]:
        with pytest.raises(SystemExit) as ended:
            main.run_benches(benchmarks.BENCHES, args)
        assert ended.value.code == 0
    assert got[0].command("dcs") == "python -m benchmarks dcs --quick"
    assert capsys.readouterr().out.strip().startswith("Usage: python -m benchmarks [OPTIONS]")


def test_failing_module_keeps_its_first_rows_and_costs_no_other(suite: Callable[..., Suite]) -> None:
    made = suite(first="yield Row(id='first-a', name='a', value=1.0); raise Unmeasurable('out of memory')",
                 second="yield Row(id='second-b', name='b', value=2.0)")
    recorder = Recorder()
    run(made, recorder)
    rows = {row.id: row for row in recorder.rows}
    assert (rows["first-a"].value, rows["second-b"].value) == (1.0, 2.0)
    assert "out of memory" in str(rows["first-b"].why)
    assert "no such row" in str(rows["second-a"].why)


def test_row_that_is_not_listed_is_an_error(suite: Callable[..., Suite]) -> None:
    recorder = Recorder()
    run(suite(first="yield Row(id='first-c', name='c', value=1.0)"), recorder)
    assert [row.id for row in recorder.rows] == ["first-a", "first-b"]
    assert "first-c is not listed" in str(recorder.rows[0].why)


def test_interrupted_suite_keeps_measured_rows_and_ends_its_processes(suite: Callable[..., Suite], tmp_path: Path
                                                                      ) -> None:
    """The second row is interrupted: the first one is in the file already, and all that was started has ended."""
    made = suite(first="yield Row(id='first-a', name='a', value=1.0); raise KeyboardInterrupt", second=FIRST)
    path, lines, done = tmp_path / "RESULTS.md", [], []  # type: ignore[var-annotated]
    recorder = Recorder(Printer(lines.append), MarkdownFile(path, "dcs", "command"))
    with pytest.raises(KeyboardInterrupt):
        made.run(Options(), recorder.emit, lambda: nullcontext(done))
    assert "| first-a | a | 1 |" in path.read_text() and "(incomplete)" in path.read_text()
    assert lines[0].startswith("first-a ") and done == ["start first", "end first"]


def test_module_ends_when_a_row_cannot_be_emitted(suite: Callable[..., Suite]) -> None:
    done: list[str] = []

    def emit(row: Row) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        suite(first=FIRST).run(Options(), emit, lambda: nullcontext(done))
    assert done == ["start first", "end first"]


class Failing:
    """A sink that fails at its first rows."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.got: list[str] = []

    def row(self, row: Row, earlier: Row | None) -> None:
        if self.times:
            self.times -= 1
            raise OSError(28, "No space left on device")
        self.got.append(row.id)


def test_sink_that_fails_is_reported_once_and_costs_no_row(suite: Callable[..., Suite],
                                                           caplog: pytest.LogCaptureFixture) -> None:
    lines: list[str] = []
    failing = Failing(times=3)
    recorder = Recorder(failing, Printer(lines.append))
    run(suite(first=FIRST, second=FIRST.replace("first", "second")), recorder)
    assert [(row.id, row.value) for row in recorder.rows] == [
        ("first-a", 1.0), ("first-b", 2.0), ("second-a", 1.0), ("second-b", 2.0)]
    assert len(lines) == 4 and failing.got == ["second-b"]
    assert [r.getMessage() for r in caplog.records if "passed on" in r.getMessage()] == [
        "row first-a is not passed on to Failing: [Errno 28] No space left on device"]


@pytest.mark.parametrize(("name", "said"), [("folder", "is not a file"), ("binary", "not a text file"),
                                            ("nowhere/RESULTS.md", "No such file or directory"),
                                            ("binary/RESULTS.md", "Not a directory")])
def test_file_that_cannot_be_written_is_refused_before_anything_is_measured(
        name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
        ) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    monkeypatch.setitem(BENCHES.by_name, "dcs", lambda options, emit: pytest.fail("it was measured"))
    assert command("bench", "dcs", "--write", str(tmp_path / name)) == Exit.USAGE
    err = " ".join(capsys.readouterr().err.split())
    assert said in err and "name a Markdown file" in err


def test_file_that_is_gone_fails_the_command_in_one_line(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()

    def bench(options: Options, emit: Emit) -> None:
        folder.rmdir()
        emit(Row(id="P1", name="pull", value=1.0))

    monkeypatch.setitem(BENCHES.by_name, "dcs", bench)
    assert command("bench", "dcs", "--write", str(folder / "RESULTS.md")) == Exit.FAILED
    captured = capsys.readouterr()
    said = " ".join(captured.err.split())
    assert "P1" in captured.out and "cannot be written" in said and "Traceback" not in said


# -- the command ------------------------------------------------------------------------------------------------------
def command(*args: str) -> int:
    with pytest.raises(SystemExit) as e:
        main.main(args)
    return int(e.value.code or 0)


def interrupted(options: Options, emit: Emit) -> None:
    emit(Row(id="P1", name="pull", value=1.5, unit="×", goal=1.15))
    raise KeyboardInterrupt


def test_interrupted_command_prints_and_writes_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(BENCHES.by_name, "dcs", interrupted)
    path = tmp_path / "RESULTS.md"
    assert command("bench", "dcs", "--write", str(path)) == Exit.INTERRUPTED
    assert "P1" in capsys.readouterr().out and "| P1 | pull | 1.5 × |" in path.read_text()
    assert command("bench", "dcs", "-o", "json") == Exit.INTERRUPTED
    shown = json.loads(capsys.readouterr().out)
    assert shown["complete"] is False and [row["id"] for row in shown["rows"]] == ["P1"]


def test_second_signal_does_not_interrupt_the_cleanup_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` sends SIGTERM twice, and people press Ctrl-C twice."""
    cleaned: list[signal.Signals] = []

    def bench(options: Options, emit: Emit) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.raise_signal(number)
                cleaned.append(number)

    monkeypatch.setitem(BENCHES.by_name, "dcs", bench)
    before = signal.getsignal(signal.SIGINT)
    assert command("bench", "dcs") == Exit.INTERRUPTED
    assert cleaned == [signal.SIGTERM, signal.SIGINT] and signal.getsignal(signal.SIGINT) is before


def test_completed_command_leaves_complete_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BENCHES.by_name, "dcs", lambda options, emit: emit(Row(id="P1", name="pull", value=1.0)))
    path = tmp_path / "RESULTS.md"
    for _ in range(2):
        assert command("bench", "dcs", "--quick", "--write", str(path)) == Exit.OK
    text = path.read_text()
    assert text.count("## bench dcs") == 2 and "elastic-rl bench dcs --quick\n" in text and "python 3." in text
    assert "incomplete" not in text


def test_loop_takes_settings_and_other_benches_refuse_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cfg = job.configure(tmp_path, Options(quick=True, settings=("--engine.max_running_requests=3",)))
    assert (cfg.engine.max_running_requests, cfg.train.steps, cfg.run_dir) == (3, 12, tmp_path)
    assert job.configure(tmp_path, Options(settings=("--train.steps=5",))).train.steps == 5
    outages = job.configure_short_steps(tmp_path, Options(settings=("--train.steps=5", "--rollout.engines=3")), 40)
    assert (outages.train.steps, outages.rollout.engines) == (40, 3)
    with pytest.raises(ConfigError, match="did you mean"):
        job.configure(tmp_path, Options(settings=("--train.stepz=5",)))
    for bench in ("control", "dcs"):
        assert command("bench", bench, "--train.steps=5") == Exit.USAGE
        assert "takes no settings" in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["--job=mine", "job=mine", "--run_dir=runs"])
def test_loop_refuses_another_job_and_folder(setting: str, tmp_path: Path) -> None:
    options = Options(settings=("--train.steps=5", setting))
    for configure in (job.configure, lambda f, o: job.configure_short_steps(f, o, 40)):
        with pytest.raises(ConfigError, match=r"takes no --(job|run_dir): .*takes its cluster down"):
            configure(tmp_path, options)


def test_model_folder_is_absolute_and_without_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for given in ("~/model", "model"):
        cfg = job.configure(tmp_path, Options(settings=(f"--model.path={given}",)))
        assert inherited_model.began_with(cfg) == tmp_path / "model"


def test_settings_of_the_command_line_reach_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[Options] = []
    monkeypatch.setitem(BENCHES.by_name, "loop", lambda options, emit: got.append(options))
    assert command("bench", "loop", "--quick", "--train.steps=5", "--rows", "step-s") == Exit.OK
    assert got[0].settings == ("--train.steps=5",) and got[0].rows == ("step-s",) and got[0].quick


@pytest.mark.parametrize("bench", sorted(BENCHES.by_name))
def test_unknown_row_is_refused_before_anything_starts(bench: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("bench", bench, "--rows", "P9") == Exit.USAGE
    captured = capsys.readouterr()
    assert "no row 'P9'" in captured.err and "rows:" in captured.err


# -- what is shown ----------------------------------------------------------------------------------------------------
def test_alternatives_are_printed_as_they_come() -> None:
    lines: list[str] = []
    recorder = Recorder(Printer(lines.append))
    row = Row(id="P1", name="pull", value=2.0, unit="×", goal=1.0)
    recorder.emit(row)
    recorder.emit(row.model_copy(update={"alternatives": {"files": 3.0}}))
    recorder.emit(row.model_copy(update={"alternatives": {"files": 3.0}, "unmeasured_alternatives": {"Ray": "none"}}))
    assert [line.split() for line in lines[1:]] == [["P1:", "files", "3", "×"],
                                                    ["P1:", "Ray", "was", "not", "measured:", "none"]]
    assert lines[0].split() == ["P1", "2", "×", "<=", "1", "MISSED", "pull"]
    assert len(recorder.rows) == 1 and recorder.rows[0].unmeasured_alternatives == {"Ray": "none"}


def test_unmeasurable_row_is_printed_with_its_reason() -> None:
    lines: list[str] = []
    Recorder(Printer(lines.append)).emit(Row.unmeasured("P4", "pause", str(Unmeasurable("no engine"))))
    assert lines[0].startswith("P4 ") and lines[0].endswith("not measured: no engine")


def test_markdown_section_has_command_machine_and_cells_without_separators(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    recorder = Recorder(MarkdownFile(path, "dcs", Options(quick=True).command("dcs")))
    recorder.emit(Row.of("P2-link", "a|b", [0.5, 0.6, 0.7], "×", goal=0.85, op=">=", limit=1.0,
                         alternatives={"raw": 1.0}, unmeasured_alternatives={"RDMA": "no device"}))
    recorder.emit(Row.unmeasured("P4", "pause", "no engine"))
    text = path.read_text()
    assert "elastic-rl bench dcs --quick\n" in text and "cores (" in text
    assert "| P2-link | a/b | 0.6 × | 0.51–0.69 | >= 0.85 | **no** | 1 | raw 1; RDMA: not measured, no device |" in text
    assert "pause: not measured, no engine" in text
