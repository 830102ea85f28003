"""What a node knows of the catalog that its chunks belong to. It protects them from a catalog that does not know them.

The index holds the id of the catalog, the highest number of commits of it that the node has seen, and the record of
every committed version that has not been released yet. With a disk it is a file beside the chunks, replaced as a whole
and synced at each change; a node without a disk has it in memory, as it has its chunks.

Two things follow:

- *Dropping.* Chunks are dropped on behalf of this catalog only, and only while it is no older than what the node has
  seen. An etcd that lost its data, was restored from an old backup, or is another one, has another id or fewer commits.
  A version that is in the index and that the catalog neither has nor knows to be released is kept for
  ``dcs.unknown_version_grace_s``.
- *Recovery.* The records, with the manifests and chunks that nodes hold, are all it takes to rebuild the catalog
  (``versions/recovery.py``).

A node belongs to no catalog before it learned of one with a commit: until then there is nothing to protect.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from elastic_rl.dcs.connection import VersionName
from elastic_rl.dcs.manifest import Manifest
from elastic_rl.dcs.protocol import count
from elastic_rl.dcs.registered_nodes import RECOVER_HINT
from elastic_rl.errors import CatalogMismatch, ChunkCorrupt, ChunkMissing, Conflict, DiskFull, NodeUnavailable
from elastic_rl.etcd.records import Version
from elastic_rl.runtime.files import replace_file

log = logging.getLogger(__name__)

FILE = "catalog.json"
SCHEMA = 1
UNREADABLE = "unreadable"
"""Stands for the id of the catalog where the file cannot be decoded: no catalog has it, so nothing is dropped."""


class Chunks(Protocol):
    """What the index needs of a node's chunk table."""

    def has(self, digest: str) -> bool: ...

    def reading(self, digest: str) -> contextlib.AbstractContextManager[memoryview]:
        """The chunk's bytes. Raises ChunkMissing."""
        ...


class VersionIndex:
    """See the module. Thread-safe."""

    def __init__(self, folder: Path | None, *, grace_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``folder``: the folder of the chunks on disk; None: memory only. ``grace_s``:
        ``dcs.unknown_version_grace_s``; counts the time during which this process runs, whatever the wall clock
        says."""
        self._file = folder / FILE if folder is not None else None
        self._grace_s, self._clock = grace_s, clock
        self._lock = threading.Lock()
        self._catalog, self._commits = "", 0
        self._versions: dict[VersionName, Version] = {}
        self._unknown_since: dict[VersionName, float] = {}
        if self._file is not None:
            self._load(self._file)

    # -- what it knows -----------------------------------------------------------------------------------------------
    def summary(self) -> tuple[str, int]:
        """Id of the catalog, empty before the node learned of one with a commit, and its commits."""
        with self._lock:
            return self._catalog, self._commits

    def names(self) -> list[VersionName]:
        with self._lock:
            return list(self._versions)

    def inventory(self, chunks: Chunks, start: int, limit: int) -> dict[str, Any]:
        """Versions number ``start`` to ``start + limit``, each with the parts whose every chunk is in ``chunks``."""
        with self._lock:
            versions = list(self._versions.values())
            catalog, commits = self._catalog, self._commits
        page = versions[start:start + limit]
        return {"catalog": catalog, "commits": commits, "more": start + limit < len(versions),
                "versions": [{"version": v.model_dump(mode="json"), **_held(chunks, v)} for v in page]}

    # -- updates ------------------------------------------------------------------------------------------------------
    def note(self, catalog: str, commits: int, versions: Iterable[Version]) -> None:
        """These versions are committed. The first catalog with a commit that a node learns of is its own from then on.
        Raises CatalogMismatch for another one, and DiskFull or NodeUnavailable when the file cannot be written."""
        with self._lock:
            self._require(catalog)
            if not commits:
                return
            new = {VersionName.from_version(v): v for v in versions}
            if (self._catalog == catalog and commits <= self._commits
                    and all(self._versions.get(n) == v for n, v in new.items())):
                return
            self._save(catalog, max(commits, self._commits), {**self._versions, **new})

    def kept(self, catalog: str, commits: int, live: Iterable[VersionName], released: Iterable[VersionName]
             ) -> set[str]:
        """Digests of the manifests whose chunks must be kept, given the catalog's versions: ``live``, and those of the
        index that are not live and were not ``released`` either, until their grace ends.

        Raises CatalogMismatch for another catalog. Raises Conflict for an older state of this one than the node has
        seen, which a commit under way explains if it does not last. Raises DiskFull and NodeUnavailable.
        """
        with self._lock:
            self._require(catalog)
            if commits < self._commits:
                raise Conflict(f"catalog {catalog} has {commits} commits, and this node has seen {self._commits}")
            live, now = set(live), self._clock()
            unknown = self._versions.keys() - live - set(released)
            self._unknown_since = {n: self._unknown_since.get(n, now) for n in unknown}
            waiting = {n for n in unknown if now - self._unknown_since[n] < self._grace_s}
            for name in unknown - waiting:
                log.warning("%s version %d (manifest %s) is dropped: the catalog has not known it for %g s", *name,
                            self._grace_s)
            remaining = {n: v for n, v in self._versions.items() if n in live or n in waiting}
            if commits and (remaining.keys(), catalog, commits) != (
                    self._versions.keys(), self._catalog, self._commits):
                self._save(catalog, commits, remaining)
            return {n.manifest for n in live | waiting}

    def _require(self, catalog: str) -> None:
        if self._catalog not in ("", catalog):
            raise CatalogMismatch(f"this node's chunks belong to catalog {self._catalog}, and not to {catalog}",
                                  hint=RECOVER_HINT)

    # -- the file ----------------------------------------------------------------------------------------------------
    def _save(self, catalog: str, commits: int, versions: dict[VersionName, Version]) -> None:
        """Locked: on disk first, then in memory."""
        if self._file is not None:
            value = {"schema": SCHEMA, "catalog": catalog, "commits": commits,
                     "versions": [v.model_dump(mode="json") for v in versions.values()]}
            try:
                replace_file(self._file, json.dumps(value), durable=True)
            except OSError as e:
                kind = DiskFull if e.errno in (errno.ENOSPC, errno.EDQUOT) else NodeUnavailable
                raise kind(f"{self._file} cannot be written: {e.strerror}", hint="look at dcs.disk_dir") from e
        self._catalog, self._commits, self._versions = catalog, commits, versions

    def _load(self, file: Path) -> None:
        try:
            value = json.loads(file.read_bytes())
            if value["schema"] != SCHEMA:
                raise ValueError(f"schema {value['schema']}; this release reads {SCHEMA}")
            versions = [Version.model_validate(v) for v in value["versions"]]
            self._catalog, self._commits = str(value["catalog"]), count(value["commits"])
            self._versions = {VersionName.from_version(v): v for v in versions}
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, ValidationError) as e:
            log.error("%s cannot be decoded, so that this node drops no chunks and joins no catalog: %s. Remove the "
                      "file if the chunks beside it may be dropped.", file, e)
            self._catalog = UNREADABLE


def _held(chunks: Chunks, version: Version) -> dict[str, Any]:
    """Number of the version's parts, and which of them are in ``chunks`` completely."""
    try:
        with chunks.reading(version.manifest) as data:
            parts = Manifest.decode(data).part_digests()
    except (ChunkMissing, ChunkCorrupt):
        return {"parts": 0, "held": []}
    return {"parts": len(parts), "held": [i for i, digests in enumerate(parts) if all(map(chunks.has, digests))]}


def versions_of(raw: Sequence[Any]) -> list[Version]:
    """Version records of a request. Raises ValueError."""
    return [Version.model_validate(v) for v in raw]


def names_of(raw: Sequence[Any]) -> list[VersionName]:
    """Version names of a request. Raises ValueError and TypeError."""
    return [VersionName(str(stream), int(number), str(manifest)) for stream, number, manifest in raw]
