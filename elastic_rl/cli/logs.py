"""The command logs: the log of a part of a cluster or job. It needs the files only."""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elastic_rl.cli import completion, tables
from elastic_rl.cli.common import EXTRA, File, Output, argument, err, find_cluster, logs_of, out
from elastic_rl.cli.tables import Format
from elastic_rl.errors import ConfigError

if TYPE_CHECKING:
    from elastic_rl.telemetry.log_files import LogTail

app = typer.Typer()
_Part = Annotated[list[str] | None, typer.Argument(
    metavar="PART", show_default=False, autocompletion=completion.logs, help=(
        "The part, or the start of its name if no other begins with that; else list the parts that have a log."))]
_Lines = Annotated[int, typer.Option("--lines", "-n", min=0, help="Number of lines from the end.")]
_Follow = Annotated[bool, typer.Option("--follow", "-f", help="And what is written from now on, until Ctrl-C.")]

_TICK_S = 0.25
_NAMED = 20
"""Longest list of parts in an error."""


@app.command("logs", context_settings=EXTRA)
def show(ctx: typer.Context, words: _Part = None, follow: _Follow = False, lines: _Lines = 100, file: File = None,
         output: Output = Format.TABLE) -> None:
    """Show the log of a part of the cluster or the job, or list the parts that have one. It works without a cluster."""
    from elastic_rl.host.paths import JobPaths
    part = argument(ctx, words, "part")
    cluster = find_cluster(ctx, file, stored=False)
    logs, paths = logs_of(cluster), JobPaths.of(cluster.cfg)
    there_is = (f"parts with a log: {_names(list(logs))}" if logs else
                f"{paths.logs} has no logs; `elastic-rl jobs` lists the jobs, or name another --run_dir")
    if not part:
        if follow:
            raise ConfigError("--follow needs a part", hint=there_is)
        _list(logs, output)
        return
    path = _find(logs, part)
    if path is None:
        if not follow or Path(part).name != part:
            raise ConfigError(f"there is no log of {part!r}", hint=there_is)
        path = paths.log(part)
        err.print(f"waiting for {path}; {there_is}", markup=False, highlight=False, soft_wrap=True)
    _print(path, lines, follow=follow)


def _list(logs: Mapping[str, Path], output: Format) -> None:
    rows = []
    for part, path in logs.items():
        with contextlib.suppress(FileNotFoundError):  # a rotation has just deleted it
            found = path.stat()
            written = (found.st_mtime if output is Format.JSON else
                       time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.st_mtime)))
            rows.append({"part": part, "nbytes": found.st_size, "written_at": written, "path": str(path)})
    tables.show(out, rows, ("part", "nbytes", "written_at", "path"), output)


def _find(logs: Mapping[str, Path], part: str) -> Path | None:
    """The log of a part, which the start of its name names too. Raises ConfigError where several begin with that."""
    found = [part] if part in logs else [name for name in logs if name.startswith(part)]
    if len(found) > 1:
        raise ConfigError(f"several logs begin with {part!r}", hint=f"name one: {_names(found)}")
    return logs[found[0]] if found else None


def _names(parts: Sequence[str]) -> str:
    return ", ".join(parts[:_NAMED]) + (f" and {len(parts) - _NAMED} more" if len(parts) > _NAMED else "")


# -- the lines of a log ------------------------------------------------------------------------------------------------
def _print(path: Path, lines: int, *, follow: bool) -> None:
    """Copies the end of a log to stdout: as it is, but for a terminal, where control characters are replaced."""
    from elastic_rl.telemetry.log_files import LogTail
    terminal, decoder = sys.stdout.isatty(), codecs.getincrementaldecoder("utf-8")("replace")
    with contextlib.closing(LogTail(path, lines)) as tail, _reader_may_leave():
        for block in _blocks(tail, follow=follow):
            if terminal:
                sys.stdout.write(tables.printable(decoder.decode(block)))
            else:
                sys.stdout.buffer.write(block)
            sys.stdout.flush()


def _blocks(tail: LogTail, *, follow: bool) -> Iterator[bytes]:
    while True:
        while block := tail.read():
            yield block
        if not follow:
            return
        time.sleep(_TICK_S)


@contextlib.contextmanager
def _reader_may_leave() -> Iterator[None]:
    """Ends the block quietly at Ctrl-C, and when the program that reads this one's output has ended (``| head``)."""
    try:
        yield
    except KeyboardInterrupt:
        return  # the way to end it
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still writes at its exit
