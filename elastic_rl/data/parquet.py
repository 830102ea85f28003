"""Rows of Parquet files. Parquet is compressed in parts of up to millions of rows, so single rows are read from an
uncompressed copy in Arrow's file format, which is mapped into memory: it may be larger than memory, and what the kernel
keeps of it is shared by all processes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from elastic_rl.data import derived
from elastic_rl.data.rows import column_of, names_column, require_unpacked
from elastic_rl.errors import ConfigError, SourceFailed
from elastic_rl.plugins.user_code import describe, did_you_mean

_FORMAT = 2
"""Format of the copies: those of another one are made again."""
_BATCH = 512
"""Rows of one record batch of a copy; what is decoded for one row is one row of it."""
_MAPPED = 64
"""Copies that a process keeps mapped, each of which takes a file descriptor; a data set may have thousands of files."""


class ParquetRows:
    """A Parquet file, of which some columns are used."""

    def __init__(self, path: Path, columns: Mapping[str, str], folder: Path) -> None:
        """``columns``: by name, or ``a.b`` for the field ``b`` of the column ``a``, the setting that names each.
        ``folder``: for the copy, which stays there for the next start of the job, and is made again when the file has
        changed. Raises ConfigError for a file that is missing, damaged or without one of the columns, and for a folder
        without room. A file without rows, as some programs write for a part of a data set, needs no columns."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = path
        try:
            self.state = derived.state_of(path)
            with path.open("rb") as raw:
                require_unpacked(path, raw.read(8))
            with pq.ParquetFile(path, memory_map=True) as file:
                self._count = int(file.metadata.num_rows)
                if not self._count:
                    return
                self._columns = list(dict.fromkeys(self._named(name, file.schema_arrow.names, setting)
                                                   for name, setting in columns.items()))
            known = json.dumps([_FORMAT, str(path), *self.state, sorted(self._columns)])
            self._copy = derived.path(folder, path.stem, hashlib.sha256(known.encode()).hexdigest(), ".arrow")
            self._reader()
        except (OSError, pa.ArrowException) as e:
            raise ConfigError(f"{path} cannot be read: {describe(e)}",
                              hint="check that it is a Parquet file, and that the job's folder has room for its "
                              "uncompressed columns") from e

    def _named(self, key: str, there: Sequence[str], setting: str) -> str:
        """The column that ``key`` names, which ``setting`` has."""
        if (name := column_of(key, there)) is None:
            raise ConfigError(f"{self.path} has no column {key!r}, only {', '.join(there)}{did_you_mean(key, there)}",
                              hint=names_column(setting))
        return name

    def _reader(self) -> Any:
        """A reader of the copy, which is made unless there is one that can be read."""
        import pyarrow as pa

        try:
            return _mapped(self._copy)
        except (OSError, pa.ArrowException):
            derived.write(self._copy, self._write_copy)
        return _mapped(self._copy)

    def _write_copy(self, out: IO[bytes]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        with pq.ParquetFile(self.path, memory_map=True) as file:
            schema = pa.schema([file.schema_arrow.field(name) for name in self._columns])
            kept = pa.schema([field.with_type(_kept_type(field.type)) for field in schema])
            with pa.ipc.new_file(out, kept) as writer:
                for batch in file.iter_batches(batch_size=_BATCH, columns=self._columns):
                    if batch.num_rows != _BATCH and writer.stats.num_record_batches != self._count // _BATCH:
                        raise SourceFailed(f"{self.path}: pyarrow gave a batch of {batch.num_rows} rows")
                    writer.write_batch(pa.record_batch([_kept(batch.column(field.name)) for field in kept],
                                                       schema=kept))
        derived.require_same(self.path, self.state, derived.state_of(self.path))

    def __len__(self) -> int:
        return self._count

    def where(self, number: int) -> str:
        """See ``Rows``."""
        return f"{self.path}: row {number}"

    def row(self, number: int) -> Mapping[str, Any]:
        """See ``Rows``."""
        if not 0 <= number < self._count:
            raise IndexError(f"row {number} of {self._count}")
        batch, at = divmod(number, _BATCH)
        return self._decoded(batch, number, slice_from=at, length=1)[0]

    def scan(self) -> Iterator[Mapping[str, Any]]:
        """See ``Rows``."""
        for number in range(0, self._count, _BATCH):
            yield from self._decoded(number // _BATCH, number, slice_from=0, length=_BATCH)

    def _decoded(self, batch: int, number: int, *, slice_from: int, length: int) -> list[dict[str, Any]]:
        import pyarrow as pa

        try:
            rows: list[dict[str, Any]] = self._reader().get_batch(batch).slice(slice_from, length).to_pylist(
                maps_as_pydicts="strict")
        except (OSError, pa.ArrowException, ValueError, KeyError) as e:  # KeyError: a map has a key twice
            raise SourceFailed(f"{self.where(number)} cannot be read: {describe(e)}") from e
        return rows


def _kept(values: Any) -> Any:
    """An array as the copy has it. Floats of 32 bits are the doubles with the same digits: 0.1, where the double of the
    same value is 0.10000000149011612. Times are in microseconds, as Python's."""
    kind = _kept_type(values.type)
    if kind == values.type:
        return values
    return values.cast(_kept_type(values.type, as_text=True), safe=False).cast(kind, safe=False)


def _kept_type(kind: Any, *, as_text: bool = False) -> Any:
    """The type that a copy has in the place of one of the file, also within lists, maps and structs. ``as_text``: with
    text in the place of numbers that are read by their digits."""
    import pyarrow as pa

    def inner(field: Any) -> Any:
        return field.with_type(_kept_type(field.type, as_text=as_text))

    if pa.types.is_float32(kind):
        return pa.string() if as_text else pa.float64()
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if pa.types.is_time64(kind) and kind.unit == "ns":
        return pa.time64("us")
    if pa.types.is_struct(kind):
        return pa.struct([inner(field) for field in kind.fields])
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, inner(kind.item_field))
    if pa.types.is_list(kind):
        return pa.list_(inner(kind.value_field))
    if pa.types.is_large_list(kind):
        return pa.large_list(inner(kind.value_field))
    return pa.list_(inner(kind.value_field), kind.list_size) if pa.types.is_fixed_size_list(kind) else kind


@lru_cache(_MAPPED)
def _mapped(copy: Path) -> Any:
    """Raises OSError and ArrowException."""
    import pyarrow as pa

    return pa.ipc.open_file(pa.memory_map(str(copy), "r"))
