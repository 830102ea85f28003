"""The output of a job on disk: a piece for each step, and at the end one file of all.

A piece is named by its step and the term of the actor that wrote it, so that two actors at once never write the same
file. Which pieces belong to the output is not known here: etcd says so (``pipeline.untrained.output``).
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

from elastic_rl.errors import OutputFailed
from elastic_rl.runtime.files import replace_file

_NAME = re.compile(r"(\d{8,})-(\d+)\.jsonl(\.partial)?")
_COPY_BYTES = 1 << 20


class Piece(NamedTuple):
    """``step`` of the job, written by ``term`` of its actor."""

    step: int
    term: int


class PieceFolder:
    """The pieces of one job. Every method raises OutputFailed where the folder cannot be written or read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, piece: Piece, lines: Iterable[bytes]) -> None:
        """Writes a piece, whole and for good; one of this name is replaced. ``lines``: each with its newline."""
        with self._explained("written"):
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(self._path(piece), lambda file: file.writelines(lines), durable=True)

    def require(self, pieces: Iterable[Piece]) -> None:
        """Raises OutputFailed unless every piece is there."""
        with self._explained("read"):
            names = {path.name for path in self._folder.iterdir()} if self._folder.is_dir() else set()
        for piece in pieces:
            if self._path(piece).name not in names:
                raise self._gone(piece)

    def join(self, pieces: Iterable[Piece], target: Path, *, alive: Callable[[], None], term: int) -> None:
        """Writes one file of the content of these pieces, one after the other. ``alive``: called for each of them; may
        raise. ``term``: of the caller, so that two that join at once do not write the same file."""
        def copy(file: IO[bytes]) -> None:
            for piece in pieces:
                alive()
                try:
                    with self._path(piece).open("rb") as source:
                        shutil.copyfileobj(source, file, _COPY_BYTES)
                except FileNotFoundError as e:
                    raise self._gone(piece) from e

        with self._explained("joined"):
            replace_file(target, copy, mark=str(term), durable=True)

    def sweep(self, keep: Callable[[Piece], bool], term: int) -> None:
        """Deletes what was written in terms up to ``term`` and is not to be kept, and the folder once it is empty. What
        a later term wrote stays: it knows more."""
        with self._explained("swept"):
            for path in [*self._folder.iterdir()] if self._folder.is_dir() else []:
                match = _NAME.fullmatch(path.name)
                if match is None or int(match[2]) > term:
                    continue
                if match[3] or not keep(Piece(int(match[1]), int(match[2]))):
                    path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._folder.rmdir()

    def _gone(self, piece: Piece) -> OutputFailed:
        return OutputFailed(f"{self._path(piece)} is gone: it has the samples of step {piece.step}",
                            hint="restore it, or begin a new job")

    def _path(self, piece: Piece) -> Path:
        return self._folder / f"{piece.step:08d}-{piece.term}.jsonl"

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise OutputFailed(f"{self._folder} cannot be {what}: {e.strerror or e}",
                               hint="make room, or let the job write there") from e


def sweep_partial(path: Path, term: int) -> None:
    """Deletes what was begun as this file, in terms up to ``term``, and not finished. What cannot be deleted stays."""
    for partial in path.parent.glob(f"{path.name}.*.partial"):
        mark = partial.name.removeprefix(f"{path.name}.").removesuffix(".partial")
        if mark.isdecimal() and int(mark) <= term:
            with contextlib.suppress(OSError):
                partial.unlink()
