"""Copies of committed versions outside the nodes: any folder or object store that fsspec can reach.

    chunks/<aa>/<digest>                       a chunk, whole
    chunks/<aa>/<digest>.<base digest>         the delta that makes it of another chunk, which is there whole
    versions/<stream>/<number>/<part>.json     the mark of a part: every object that it needs
    versions/<stream>/<number>.json            the commit mark: the version's record, and how many parts it has

Nodes store their own parts at the same time. The mark of a part is written after each of its objects was read back and
verified, the commit mark after those of all parts; a version without a commit mark is not there.
"""

from __future__ import annotations

import contextlib
import errno
import json
import secrets
import time
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import fsspec

from elastic_rl.config.secrets import redacted_url
from elastic_rl.dcs.codecs import delta
from elastic_rl.dcs.codecs.digests import matches
from elastic_rl.errors import (
    AccessDenied,
    ChunkCorrupt,
    ChunkMissing,
    ConfigError,
    DiskFull,
    ElasticRLError,
    NodeUnavailable,
    VersionNotFound,
)
from elastic_rl.etcd.records import Version

SCHEMA = 2
_PARTIAL = ".partial"
ORPHAN_AGE_S = 3600.0
"""An object without a mark is kept for so long: the copy that it belongs to may not be complete yet."""


@dataclass(frozen=True)
class CommitMark:
    """A version that is there completely."""

    version: Version
    anchor: int
    """Number of the version whose chunks its deltas are made against; its own if it has none."""
    parts: int = 1
    """Number of its parts."""

    def encode(self) -> bytes:
        return json.dumps({"schema": SCHEMA, "version": json.loads(self.version.encode()), "anchor": self.anchor,
                           "parts": self.parts}).encode()

    @classmethod
    def decode(cls, raw: bytes) -> CommitMark:
        """Raises ChunkCorrupt."""
        with _decoding("a commit mark"):
            value = _value(raw)
            version = Version.decode(json.dumps(value["version"]).encode())
            return cls(version, int(value["anchor"]), int(value["parts"]))


@dataclass(frozen=True)
class PartMark:
    """A part of a version that is there completely. The first part has the manifest too."""

    objects: Mapping[str, str] = field(default_factory=dict)
    """Digest of each chunk → digest of its base, empty for a whole one."""

    def encode(self) -> bytes:
        return json.dumps({"schema": SCHEMA, "objects": dict(self.objects)}).encode()

    @classmethod
    def decode(cls, raw: bytes) -> PartMark:
        """Raises ChunkCorrupt."""
        with _decoding("the mark of a part"):
            return cls({str(d): str(b) for d, b in _value(raw)["objects"].items()})


def _value(raw: bytes) -> dict[str, Any]:
    value = json.loads(raw)
    if value["schema"] != SCHEMA:
        raise ChunkCorrupt(f"a mark has schema {value['schema']}; this release reads {SCHEMA}")
    return dict(value)


@contextlib.contextmanager
def _decoding(what: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ChunkCorrupt(f"{what} in the durable store cannot be decoded: {e!r}") from e


class DurableStore:
    """One place for the versions of one job. Thread-safe as far as the fsspec file system is."""

    def __init__(self, url: str, job: str) -> None:
        """``url``: such as file:///mnt/checkpoints or s3://bucket/path; the job has a folder of its own below it.
        Raises ConfigError for a URL that fsspec does not know."""
        self.url = redacted_url(url)
        """The URL as messages show it: without a password."""
        try:
            self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        except (ValueError, ImportError) as e:
            raise ConfigError(f"the durable store {self.url} cannot be used: {e}",
                              hint="dcs.durable_url is an fsspec URL; s3:// needs the package s3fs") from e
        self._root = f"{root.rstrip('/')}/{job}"

    # -- chunks ------------------------------------------------------------------------------------------------------
    def put_chunk(self, digest: str, data: bytes | memoryview) -> None:
        """Stores a chunk whole, unless it is there, and reads it back. One that is old enough for a sweep to remove it
        soon is written again, since a sweep that began before may not know who needs it. Raises DiskFull, AccessDenied,
        ChunkCorrupt (the store returned other bytes) and NodeUnavailable."""
        path = self._chunk(digest)
        with _typed(self.url):
            if (self._fs.exists(path) and not self._is_older(path, ORPHAN_AGE_S / 2)
                    and matches(self._fs.cat_file(path), digest)):
                return
            self._write(path, bytes(data))
            if not matches(self._fs.cat_file(path), digest):
                raise ChunkCorrupt(f"{self.url} returned other bytes of chunk {digest} than were written")

    def put_delta(self, digest: str, base: str, payload: bytes) -> None:
        """Stores the delta that makes a chunk of ``base``, which is there whole. The same errors."""
        path = f"{self._chunk(digest)}.{base}"
        with _typed(self.url):
            self._write(path, payload)
        self._decoded(digest, base)

    def read_chunk(self, digest: str) -> bytes:
        """A chunk's bytes, verified. Raises ChunkMissing, ChunkCorrupt, AccessDenied and NodeUnavailable."""
        with _typed(self.url):
            try:
                data: bytes = self._fs.cat_file(self._chunk(digest))
                if matches(data, digest):
                    return data
                corrupt = True
            except FileNotFoundError:
                corrupt = False
            found = self._glob(f"{self._chunk(digest)}.*")
        for path in found:
            with contextlib.suppress(ChunkMissing, ChunkCorrupt):
                return self._decoded(digest, path.rpartition(".")[2])
        if corrupt or found:
            raise ChunkCorrupt(f"chunk {digest} is corrupt in {self.url}")
        raise ChunkMissing(f"chunk {digest} is not in {self.url}")

    def _decoded(self, digest: str, base: str) -> bytes:
        with _typed(self.url):
            try:
                payload = self._fs.cat_file(f"{self._chunk(digest)}.{base}")
                old = self._fs.cat_file(self._chunk(base))
            except FileNotFoundError as e:
                raise ChunkMissing(f"the delta of chunk {digest}, or its base, is not in {self.url}") from e
        out = bytearray(len(old))
        delta.decode(payload, memoryview(old), memoryview(out))
        if not matches(out, digest):
            raise ChunkCorrupt(f"chunk {digest} cannot be made of {base} in {self.url}")
        return bytes(out)

    # -- versions ----------------------------------------------------------------------------------------------------
    def commit_part(self, stream: str, number: int, part: int, mark: PartMark) -> None:
        """Marks a part as complete; all its objects must be there."""
        with _typed(self.url):
            self._write(self._part(stream, number, part), mark.encode())

    def commit(self, mark: CommitMark) -> None:
        """Makes the version visible; all its parts must be there."""
        with _typed(self.url):
            self._write(self._mark(mark.version.stream, mark.version.number), mark.encode())

    def numbers(self, stream: str) -> list[int]:
        """Versions of a stream that are there, oldest first."""
        with _typed(self.url):
            names = [p.rpartition("/")[2] for p in self._glob(f"{self._root}/versions/{stream}/*.json")]
        return sorted(int(n.removesuffix(".json")) for n in names if n.removesuffix(".json").isdecimal())

    def mark(self, stream: str, number: int) -> CommitMark:
        """The commit mark of a version. Raises VersionNotFound and ChunkCorrupt."""
        with _typed(self.url):
            try:
                return CommitMark.decode(self._fs.cat_file(self._mark(stream, number)))
            except FileNotFoundError as e:
                raise VersionNotFound(f"{self.url} has no {stream} version {number}") from e

    def streams(self) -> list[str]:
        """Streams that have a version there."""
        with _typed(self.url):
            return sorted({p.split("/")[-2] for p in self._glob(f"{self._root}/versions/*/*.json")})

    def part(self, stream: str, number: int, part: int) -> PartMark:
        """The mark of a part. Raises ChunkMissing and ChunkCorrupt."""
        with _typed(self.url):
            try:
                return PartMark.decode(self._fs.cat_file(self._part(stream, number, part)))
            except FileNotFoundError as e:
                raise ChunkMissing(f"{self.url} has no part {part} of {stream} version {number}") from e

    def drop(self, stream: str, number: int) -> None:
        """Removes a version's commit mark; the rest goes with the next ``sweep``."""
        with _typed(self.url), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._mark(stream, number))

    def sweep(self, *, older_than_s: float = ORPHAN_AGE_S, still_leads: Callable[[], bool] = lambda: True) -> int:
        """Removes objects that no committed version needs and that are older than that; how many chunks. Ends early
        when ``still_leads``, which is called before each removal, returns False: another node may sweep and store
        then. Raises ChunkCorrupt, and removes nothing, when a mark of a committed version cannot be decoded."""
        committed = {(stream, number): self.mark(stream, number)
                     for stream in self.streams() for number in self.numbers(stream)}
        needed = set[str]()
        for (stream, number), mark in committed.items():
            for i in range(mark.parts):
                for digest, base in self.part(stream, number, i).objects.items():
                    needed |= {f"{digest}.{base}", base} if base else {digest}
        removed = 0
        with _typed(self.url):
            for path in self._orphans(needed, committed.keys()):
                if not self._is_older(path, older_than_s):
                    continue
                if not still_leads():
                    break
                if self._is_older(path, older_than_s):  # still: another node may have written it again just now
                    with contextlib.suppress(FileNotFoundError):
                        self._fs.rm_file(path)
                        removed += not path.endswith(".json")
        return removed

    def _orphans(self, needed: Container[str], committed: Container[tuple[str, int]]) -> Iterator[str]:
        """Chunks, then marks of parts, that no committed version needs."""
        for path in map(str, self._fs.glob(f"{self._root}/chunks/*/*")):  # also what dead writers left half written
            if path.rpartition("/")[2] not in needed:
                yield path
        for path in self._glob(f"{self._root}/versions/*/*/*.json"):
            owner, folder = path.split("/")[-3:-1]
            if not folder.isdecimal() or (owner, int(folder)) not in committed:
                yield path

    def _is_older(self, path: str, age_s: float) -> bool:
        return time.time() - self._changed_at(path) > age_s

    # -- the file system ---------------------------------------------------------------------------------------------
    def _chunk(self, digest: str) -> str:
        return f"{self._root}/chunks/{digest[:2]}/{digest}"

    def _mark(self, stream: str, number: int) -> str:
        return f"{self._root}/versions/{stream}/{number:012d}.json"

    def _part(self, stream: str, number: int, part: int) -> str:
        return f"{self._root}/versions/{stream}/{number:012d}/{part:06d}.json"

    def _glob(self, pattern: str) -> list[str]:
        return [str(p) for p in self._fs.glob(pattern) if not str(p).endswith(_PARTIAL)]

    def _changed_at(self, path: str) -> float:
        try:
            return float(self._fs.modified(path).timestamp())
        except (FileNotFoundError, NotImplementedError):
            return time.time()

    def _write(self, path: str, data: bytes) -> None:
        """Writes a file as a whole or not at all: object stores do, a folder needs a rename for it."""
        if "file" not in (self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,)):
            self._fs.pipe_file(path, data)
            return
        partial = f"{path}.{secrets.token_hex(4)}{_PARTIAL}"  # two nodes may store one chunk at the same time
        try:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(partial, data)
            self._fs.mv(partial, path)
        except OSError:
            with contextlib.suppress(OSError):
                self._fs.rm_file(partial)
            raise


@contextlib.contextmanager
def _typed(url: str) -> Iterator[None]:
    """Turns the errors of a file system into ours. Back ends also raise the errors of their own libraries, of any type;
    to the caller they all mean that the store does not work now."""
    try:
        yield
    except (FileNotFoundError, ElasticRLError):
        raise
    except PermissionError as e:
        raise AccessDenied(f"{url} refuses access: {e}", hint="check the credentials and dcs.durable_url") from e
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"{url} has no room", hint="free some, or set a smaller dcs.durable_keep_versions") from e
        raise NodeUnavailable(f"the durable store {url} does not answer: {_first_line(e)}") from e
    except Exception as e:
        raise NodeUnavailable(f"the durable store {url} fails: {type(e).__name__}: {_first_line(e)}") from e


def _first_line(error: Any) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:300]
