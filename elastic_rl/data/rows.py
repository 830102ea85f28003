"""Rows of data files by their number, read when they are asked for: the seam ``Rows``, and JSON Lines."""

from __future__ import annotations

import difflib
import glob
import gzip
import hashlib
import itertools
import json
import os
import zlib
from bisect import bisect_right
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from elastic_rl.data import derived
from elastic_rl.data.values import ROW_READER, kind_of, require_readable_digits
from elastic_rl.errors import ConfigError, SourceFailed
from elastic_rl.plugins.user_code import did_you_mean

_STRIDE = 64
"""Lines for which the place of one is kept: 12 MB of memory for 100 million lines."""
_BLOCK = 1 << 22
_MAX_ROW = 1 << 24
"""Longest line, in bytes."""
_FREE_UNPACKED, _MOST_UNPACKED = 256 << 20, 100
"""What a file compressed with gzip may unpack to: so many bytes, or so many times its size; texts have up to 30."""
_NAMED = 12
"""Columns and files that an error names."""
_GZIP = b"\x1f\x8b"
_OTHERS = {b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}
"""First bytes of compressed files that are not read."""
_PARQUET = b"PAR1"
_MAGIC_BYTES = 6
_WHITESPACE = b" \t\r\n"
"""The blanks that JSON allows between values."""


class Rows(Protocol):
    """Rows of one file."""

    path: Path
    state: tuple[int, int]
    """The file's state when it was first read (``derived.state_of``)."""

    def __len__(self) -> int: ...

    def row(self, number: int) -> Mapping[str, Any]:
        """Raises SourceFailed, which says where the row is, for one that cannot be read."""

    def scan(self) -> Iterator[Mapping[str, Any]]:
        """Yields all rows, in order, without holding them all in memory. Raises as ``row``."""

    def where(self, number: int) -> str:
        """File and place of a row, for people."""


class JsonlRows:
    """A file of one JSON object a line (https://jsonlines.org), which stays as it is while the run lasts."""

    def __init__(self, path: Path, folder: Path) -> None:
        """Reads the file through once, to find its lines. ``folder``: for the copy of one that is compressed with gzip,
        which is unpacked there for the next start of the job. Raises ConfigError for a file that is missing, compressed
        otherwise, or has a line of more than 16 MiB, and for a folder without room."""
        self.path = path
        try:
            with path.open("rb", buffering=0) as file:
                self.state = derived.state_of(file.fileno())
                begin = file.read(_MAGIC_BYTES)
            require_unpacked(path, begin)
            if begin.startswith(_PARQUET):
                raise ConfigError(f"{path} is a Parquet file", hint="set data.source to parquet")
            known = json.dumps([str(path), *self.state])
            self._copy = derived.path(folder, path.stem, hashlib.sha256(known.encode()).hexdigest(), ".jsonl") if (
                begin.startswith(_GZIP)) else None
            with self._opened(buffering=0) as file:
                self._count, self._places = self._find_lines(file)
        except OSError as e:
            raise ConfigError(f"{path} cannot be read: {e.strerror or e}", hint="check data.options.paths" + (
                ", and that the job's folder has room for the unpacked file" if self._copy else "")) from e

    def _find_lines(self, file: IO[bytes]) -> tuple[int, np.ndarray]:
        """Number of lines up to the last one that is not blank, and where every ``_STRIDE``-th begins. A line ends with
        a newline or with the file."""
        kept, count, at, begun, rows = [np.zeros(1, np.int64)], 0, 0, 0, 0
        while block := file.read(_BLOCK):
            starts = np.flatnonzero(np.frombuffer(block, np.uint8) == 0x0A).astype(np.int64) + at + 1
            if (longest := int(np.diff(starts, prepend=begun).max(initial=0))) > _MAX_ROW or (
                    at + len(block) - (int(starts[-1]) if len(starts) else begun)) > _MAX_ROW:
                raise ConfigError(f"{self.path} has a line of more than {_MAX_ROW >> 20} MiB after line {count + 1}"
                                  + (f": {longest} bytes" if longest > _MAX_ROW else ""),
                                  hint="write one JSON object a line")
            kept.append(starts[-(count + 1) % _STRIDE::_STRIDE])
            if written := block.rstrip(_WHITESPACE):
                rows = count + written.count(b"\n") + 1
            count += len(starts)
            begun = int(starts[-1]) if len(starts) else begun
            at += len(block)
        return rows, np.concatenate(kept)

    @contextmanager
    def _opened(self, buffering: int = -1) -> Iterator[IO[bytes]]:
        """The lines' file. Raises OSError, and SourceFailed for a file whose lines may be elsewhere now."""
        with self.path.open("rb", buffering) as file:
            derived.require_same(self.path, self.state, derived.state_of(file.fileno()))
            if self._copy is None:
                yield file
                return
            if not self._copy.exists():
                derived.write(self._copy, lambda out: self._unpack(file, out))
        with self._copy.open("rb", buffering) as unpacked:
            yield unpacked

    def _unpack(self, packed: IO[bytes], out: IO[bytes]) -> None:
        try:
            size, most = 0, max(_FREE_UNPACKED, os.fstat(packed.fileno()).st_size * _MOST_UNPACKED)
            with gzip.open(packed) as content:
                while block := content.read(_BLOCK):
                    if (size := size + len(block)) > most:
                        raise ConfigError(f"{self.path} unpacks to more than {_MOST_UNPACKED} times its size, as no "
                                          "text does that somebody has written", hint="unpack it, if that is right")
                    out.write(block)
        except (gzip.BadGzipFile, EOFError, zlib.error) as e:
            raise ConfigError(f"{self.path} is compressed with gzip, and damaged: {e}",
                              hint=f"copy or download it again; `gzip -t {self.path}` checks it") from e

    def __len__(self) -> int:
        return self._count

    def where(self, number: int) -> str:
        """See ``Rows``."""
        return f"{self.path}:{number + 1}"

    def row(self, number: int) -> Mapping[str, Any]:
        """See ``Rows``."""
        if not 0 <= number < self._count:
            raise IndexError(f"row {number} of {self._count}")
        try:
            with self._opened() as file:
                file.seek(int(self._places[number // _STRIDE]))
                for _ in range(number % _STRIDE):
                    file.readline(2 * _MAX_ROW)
                line = file.readline(2 * _MAX_ROW)
        except OSError as e:
            raise SourceFailed(f"{self.where(number)} cannot be read: {e.strerror}") from e
        return self._parsed(line, number)

    def scan(self) -> Iterator[Mapping[str, Any]]:
        """See ``Rows``."""
        number = 0
        try:
            with self._opened() as file:
                for number in range(self._count):
                    yield self._parsed(file.readline(2 * _MAX_ROW), number)
        except OSError as e:
            raise SourceFailed(f"{self.where(number)} cannot be read: {e.strerror}") from e

    def _parsed(self, line: bytes, number: int) -> Mapping[str, Any]:
        try:
            row = ROW_READER.decode(line.decode(json.detect_encoding(line), "surrogatepass"))
        except UnicodeDecodeError as e:
            raise SourceFailed(f"{self.where(number)} is not UTF-8: {e.reason} at byte {e.start} of the line",
                               hint="write the file as UTF-8, for instance with iconv") from e
        except RecursionError as e:
            raise SourceFailed(f"{self.where(number)} is nested too deeply",
                               hint="write what is nested as text, of JSON for instance") from e
        except ValueError as e:
            require_readable_digits(e, self.where(number))
            what = "is empty, with rows after it" if not line.strip() else f"is not JSON: {e}"
            raise SourceFailed(f"{self.where(number)} {what}", hint="write one JSON object a line") from e
        if not isinstance(row, dict):
            raise SourceFailed(f"{self.where(number)} is {kind_of(row)}, not an object with columns",
                               hint="write one JSON object a line")
        return row


class FilesRows:
    """The rows of several files, one file after the other."""

    def __init__(self, files: Sequence[Rows]) -> None:
        self.files = tuple(files)
        self._ends = list(itertools.accumulate(map(len, files)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _place(self, number: int) -> tuple[Rows, int]:
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        at = bisect_right(self._ends, number)
        return self.files[at], number - (self._ends[at] - len(self.files[at]))

    def row(self, number: int) -> Mapping[str, Any]:
        """See ``Rows``."""
        file, own = self._place(number)
        return file.row(own)

    def where(self, number: int) -> str:
        """See ``Rows``."""
        file, own = self._place(number)
        return file.where(own)

    def scan(self) -> Iterator[Mapping[str, Any]]:
        """See ``Rows``."""
        for file in self.files:
            yield from file.scan()


def require_unpacked(path: Path, begin: bytes) -> None:
    """Raises ConfigError for a file that is compressed in a way that is not read. ``begin``: its first bytes."""
    if kind := next((name for magic, name in _OTHERS.items() if begin.startswith(magic)), ""):
        raise ConfigError(f"{path} is compressed with {kind}", hint="unpack it, or compress JSON Lines with gzip")


def files_of(paths: str | Sequence[str], setting: str) -> list[Path]:
    """The files that paths and patterns (``*``, ``?``, ``[...]``, ``**``) name, each once: in the order of the paths,
    those of one pattern by name. Raises ConfigError, which names the setting, for a path without a file."""
    found: dict[Path, None] = {}
    for text in [paths] if isinstance(paths, str) else paths:
        plain = Path(text).expanduser()
        if not (matches := _matches(plain)):
            if os.path.isdir(plain):
                raise ConfigError(f"{setting}: {text} is a folder", hint=f"name its files, as {plain / '*'}")
            raise ConfigError(f"{setting}: there is no file {text}{_near(plain)}",
                              hint="paths are relative to the folder in which the job was started")
        found |= dict.fromkeys(p.resolve() for p in matches)
    if not found:
        raise ConfigError(f"{setting} names no file")
    return list(found)


def _matches(path: Path) -> list[Path]:
    """The files of a path or pattern. Its folders that are there are no patterns: a name may have brackets, and so may
    that of the folder in which the job was started."""
    if os.path.isfile(path):
        return [path]
    there = next(folder for folder in (*path.parents, Path(path.anchor)) if os.path.isdir(folder))
    names = glob.glob(str(path.relative_to(there)), root_dir=there, recursive=True)
    return sorted(there / name for name in names if os.path.isfile(there / name))


def _near(path: Path) -> str:
    """Which file of the folder was perhaps meant."""
    try:
        with os.scandir(path.parent) as entries:
            names = [entry.name for entry in itertools.islice(entries, 1000)]
    except OSError:
        return f", nor a folder {path.parent}" if not path.parent.is_dir() else ""
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def column_of(key: str, columns: Container[str]) -> str | None:
    """The column that ``key`` names: the one of this name, or for ``a.b`` the column ``a``, of which it is the field
    ``b``. Names of columns may have dots; the longest one that is there counts. None: there is none."""
    names = (key[:end] for end in range(len(key), 0, -1) if end == len(key) or key[end] == ".")
    return next((name for name in names if name in columns), None)


def names_column(setting: str) -> str:
    """The hint of an error for rows without a column, which names the columns that they have."""
    return f"{setting} names it: set it to one of the columns that there are"


def value_at(row: Mapping[str, Any], key: str, where: str, *, hint: str = "", optional: bool = False) -> Any:
    """The value of a column, or of a field of one (see ``column_of``); None for a field of null and, if it is
    ``optional``, for one that is not there: Arrow fills such fields with null. Raises SourceFailed, which names the
    columns that there are and the nearest."""
    found: Any = row
    rest = key
    while found is not None:
        name = column_of(rest, found) if isinstance(found, Mapping) else None
        if name is None:
            if not isinstance(found, Mapping):
                raise SourceFailed(f"{where} has no field {rest!r} of {key[:-len(rest) - 1]!r}, which is "
                                   f"{kind_of(found)}", hint="only objects have fields")
            if optional:
                return None
            names = [str(n) for n in found]
            raise SourceFailed(f"{where} has no column {key!r}, only {', '.join(names[:_NAMED]) or 'none'}"
                               f"{did_you_mean(rest.partition('.')[0], names)}", hint=hint)
        found, rest = found[name], rest[len(name) + 1:]
        if not rest:
            break
    return found
