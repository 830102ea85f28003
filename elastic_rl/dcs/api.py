"""The checkpoint service for any program: publish versions of named tensors, follow a stream of them, pull them.

    from elastic_rl import dcs

    with dcs.connect("access.json") as service:             # made by `elastic-rl versions access access.json`
        service.publish("policy", model.state_dict(), meta={"step": 7})

    with dcs.connect("access.json") as service:             # another process, on this host or another one
        for version in service.follow("policy"):            # each new committed version, the newest first
            service.pull(version, into=model.state_dict())  # in place, verified

This module is stable: what it exports changes with a line in the changelog and a release in which the old form still
works. It needs etcd and a DCS node on each host, and imports neither Ray, Megatron, SGLang nor torch.distributed. A
version is named as in the command line: ``policy`` is the head of the stream, ``policy/12`` version 12, ``policy/-1``
the one before the head.

Every call raises EtcdUnavailable, NodeUnavailable and AccessDenied, which are all kinds of ``ElasticRLError``, beside
what its docstring names. A call that has failed may be repeated, except after Fenced.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from elastic_rl.config import Stream
from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.codecs.tensors import dtype_name
from elastic_rl.dcs.connection import Progress
from elastic_rl.dcs.fetch.puller import Pulled, Puller
from elastic_rl.dcs.manifest import DTYPES, TensorEntry
from elastic_rl.dcs.publish import parts
from elastic_rl.dcs.publish.part_writer import LocalArena, PartWriter
from elastic_rl.dcs.publish.parts import Part
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.dcs.service_access import ServiceAccess
from elastic_rl.dcs.versions import names
from elastic_rl.dcs.versions.service import ChunkFinding, VersionService
from elastic_rl.errors import ChunkMissing, ConfigError, ElasticRLError, Fenced, TensorMismatch
from elastic_rl.etcd import fencing
from elastic_rl.etcd.record import require_plain_numbers
from elastic_rl.etcd.records import Version, VersionState
from elastic_rl.runtime.json_values import require_json

__all__ = ["CheckpointService", "ChunkFinding", "ListedVersion", "OpenVersion", "PulledTensors", "ServiceAccess",
           "Shard", "VersionInfo", "connect"]

Tensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
"""Named tensors of any shape, any device, and any dtype that torch has names for (``manifest.DTYPES``)."""

Kind = tuple[str, tuple[int, ...]]
"""Dtype and shape of a tensor."""
_WEIGHTS = (Stream.POLICY, Stream.CRITIC)
"""Streams whose versions are all of one model, which their readers have loaded."""
_TRACE = "trace"
_MAX_META_BYTES = 16 << 10
"""Largest size of the JSON of ``meta``: it is part of a record that every follower watches."""
_NAMED = 5
"""Tensors that an error names."""


# -- what is returned --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class VersionInfo:
    """A committed version: immutable, and complete on the nodes."""

    stream: str
    number: int
    """Numbers of a stream only grow, and none is used twice. Some are left out: those of publishes that failed."""
    nbytes: int
    """Bytes of all its tensors."""
    committed_at: float
    """Unix seconds."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """What its publisher gave."""

    @property
    def name(self) -> str:
        """``policy/12``."""
        return f"{self.stream}/{self.number}"

    @classmethod
    def from_record(cls, version: Version) -> Self:
        return cls(version.stream, version.number, version.nbytes, version.committed_at,
                   {k: v for k, v in version.meta.items() if k != _TRACE})


@dataclass(frozen=True)
class ListedVersion:
    """A version as ``CheckpointService.list_versions`` finds it."""

    version: VersionInfo
    is_head: bool
    """Whether it is the newest of its stream."""
    pinned_by: tuple[str, ...]
    """Who keeps it from being released: people by ``user@host``, nodes that have it open by their ids."""
    copies: int
    """Number of registered nodes that have the part of it which the fewest have."""
    copies_wanted: int
    durable: bool
    """Whether it is in the durable store (``dcs.durable_url``) too."""


@dataclass(frozen=True)
class PulledTensors:
    version: VersionInfo
    tensors: Mapping[str, torch.Tensor]
    """The tensors by name, in the order of publication: those of ``into``, or new ones on the CPU."""


class OpenVersion:
    """A version whose bytes lie, verified, in the shared memory of this host, for as long as its block lasts."""

    def __init__(self, pulled: Pulled) -> None:
        self._pulled = pulled
        self.version = VersionInfo.from_record(pulled.version)

    @property
    def entries(self) -> Sequence[TensorEntry]:
        """Name, dtype, shape and ``nbytes`` of each tensor, in the order of publication."""
        return self._pulled.manifest.tensors

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) in the order of publication: on the CPU, **read-only** views of shared memory. Copy what is
        needed after the block, and write to none. Every chunk is verified before the first one is yielded. Raises
        ChunkCorrupt."""
        return self._pulled.tensors(verify=True)

    def confirm(self) -> None:
        """Returns if what was read until now is the version's. The end of the block calls it. Raises NodeUnavailable
        when this host's node has ended meanwhile: what was read may be anything."""
        self._pulled.confirm()


# -- publishing by several ranks ---------------------------------------------------------------------------------------
class Shard:
    """The tensors of one rank, stored on its host's node and held there until this is closed, for ``commit``. A context
    manager."""

    def __init__(self, part: Part, client: DcsClient) -> None:
        self._part, self._client = part, client

    def describe(self) -> dict[str, Any]:
        """What ``CheckpointService.commit`` takes: JSON-able, some 100 bytes a tensor. Send it to the rank that
        commits."""
        return self._part.to_json()

    def close(self) -> None:
        """Ends the hold. Close it when the version is committed, or given up; before that, it cannot be committed any
        more."""
        with contextlib.suppress(ElasticRLError):
            self._client.local().release_holds()
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- the service -------------------------------------------------------------------------------------------------------
def connect(access: ServiceAccess | Path | str, *, node: str = "") -> CheckpointService:
    """The service that a file of ``elastic-rl versions access``, or a ``ServiceAccess``, describes; a context manager.
    Nothing is asked of it yet.

    ``node``: id of the node that this program uses, where a host has several of the job. Raises ConfigError for a file
    that cannot be read, is damaged, or is not this user's alone.
    """
    return CheckpointService(access if isinstance(access, ServiceAccess) else ServiceAccess.read(Path(access)),
                             node=node)


class CheckpointService:
    """The versions of one job. Thread-safe; one publish of a stream at a time. Use it in the process that has made it:
    a process that is forked makes its own."""

    def __init__(self, access: ServiceAccess, *, node: str = "") -> None:
        self._cfg, self._security, self._node = access.config(), access.security(), node
        self._dcs = self._cfg.dcs
        # ``model_dir`` is for exports as folders, which are not part of this interface.
        self._versions = VersionService(self._cfg, access.job, access.etcd_endpoints, self._security, Path())
        self._etcd, self._keys, self._me = self._versions.etcd, self._versions.keys, self._versions.me
        self._puller = Puller(self._etcd, self._keys, self._me, io_timeout_s=self._dcs.io_timeout_s, node=node,
                              security=self._security)
        self._lock = threading.Lock()
        self._publishers: dict[str, Publisher] = {}
        self._layouts: dict[str, tuple[int, Mapping[str, Kind]]] = {}
        """Number and tensors of the head that a stream of weights had last."""

    # -- publish -----------------------------------------------------------------------------------------------------
    def publish(self, stream: str, tensors: Tensors, *, meta: Mapping[str, Any] | None = None,
                other_model: bool = False) -> VersionInfo:
        """Publishes named tensors as the next version of a stream, and returns it committed: every chunk is hashed, and
        on as many nodes as ``dcs.replicas`` says.

        ``tensors``: read once, in order; dense, of any shape, device and dtype, and not changed until this returns.
        Tensors that share all of their memory are stored once. ``meta``: JSON of at most 16 KiB that readers get with
        the version, such as ``{"step": 7}``. ``other_model``: the tensors of a stream of weights (policy, critic) may
        have other names, dtypes and shapes than those of its head, which engines and readers have loaded.

        Whatever it raises, nothing of the version is visible, and the number is not used again. Raises ConfigError (a
        name that is there twice, a tensor that cannot be stored, a stream of the run while the job has one),
        TensorMismatch (another model than the head's), ArenaFull, DiskFull, Conflict (a newer version was committed
        meanwhile, or a node was restarted; try again), Fenced (another program took over: stop; each later publish of
        this service is refused too, until it takes over itself) and CatalogMismatch. Only after OutcomeUnknown, when
        etcd went away during the commit, the version may be visible: look with ``list_versions``.
        """
        checked = _checked_meta(meta)
        with self._publishing(stream) as publisher:
            given, head = storable(tensors), None if other_model else self._layout_of_head(stream)
            return VersionInfo.from_record(publisher.publish(
                given if head is None else same_model(*head, given), meta=checked))

    def write_shard(self, tensors: Tensors) -> Shard:
        """Stores the tensors of this rank on this host's node, and holds them there for ``commit``. When it returns the
        tensors may change again: a trainer goes on, while another thread commits.

        Each rank gives whole tensors, under names that no other rank uses; a rank that has a slice of one gives it a
        name for the slice, such as ``w.0``. Raises ConfigError, ArenaFull and DiskFull.
        """
        client = DcsClient(self._etcd, self._keys, io_timeout_s=self._dcs.io_timeout_s, node=self._node,
                           security=self._security)
        arena = LocalArena(client)
        try:
            writer = PartWriter(arena, chunk_bytes=self._dcs.chunk_bytes, digest=self._dcs.digest, seal_early=True)
            for name, tensor in storable(tensors):
                writer.add(name, tensor)
            return Shard(writer.seal(time.monotonic() + self._dcs.publish_timeout_s), client)
        except BaseException:
            client.close()  # the node takes back what was stored on this connection
            raise
        finally:
            arena.close()

    def commit(self, stream: str, shards: Sequence[Shard | Mapping[str, Any]], *, meta: Mapping[str, Any] | None = None,
               other_model: bool = False) -> VersionInfo:
        """Publishes the shards of all ranks as one version of a stream: for one of the ranks. The version has the
        tensors of the first shard, then those of the next one, and so on.

        ``shards``: of each rank, its ``Shard`` or what ``Shard.describe`` returned, all of them still open. Raises as
        ``publish``, ConfigError also for a description that is malformed or a tensor that two shards have, ChunkMissing
        for a shard that was closed, and DeadlineExceeded after ``dcs.publish_timeout_s``.
        """
        checked = _checked_meta(meta)
        described = [s.describe() if isinstance(s, Shard) else s for s in shards]
        if not described:
            raise ConfigError("a version of no shards cannot be committed", hint="give the shard of each rank")
        found = parts.in_order([Part.from_json(d) for d in described])
        merged, _ = parts.merge(found)  # what does not fit together is found before a number is taken
        with self._publishing(stream) as publisher:
            if not other_model and (head := self._layout_of_head(stream)) is not None:
                require_same_model(*head, kinds_of(merged.tensors))
            return VersionInfo.from_record(publisher.publish_parts(
                found, meta=checked, deadline=time.monotonic() + self._dcs.publish_timeout_s))

    def take_over(self) -> int:
        """Fences all programs that have published until now: whatever they publish from now on is refused. Call it when
        a trainer starts, so that one that hangs, or is cut off, and wakes up later cannot add to the stream. It is for
        all streams of the job. Returns the number of the new epoch. Raises ConfigError while the job has a run, which
        would be fenced."""
        self._versions.require_idle("it would be fenced", False)
        number = fencing.raise_epoch(self._etcd, self._keys, f"taken over by {self._me}").number
        self._close_publishers()
        return number

    @contextlib.contextmanager
    def _publishing(self, stream: str) -> Iterator[Publisher]:
        """The publisher of a stream, for one version."""
        try:
            yield self._publisher(stream)
        except Fenced as e:
            # The publisher is kept: under the new epoch, a program that hung until now would add to the stream again.
            raise Fenced(e.message, hint=("end this program, since another one, or a run, took over; if this one is to "
                                          "publish, it calls take_over(), which fences the other")) from e

    def _layout_of_head(self, stream: str) -> tuple[str, Mapping[str, Kind]] | None:
        """Name and tensors of the head of a stream of weights; None for another stream, or one without a version."""
        if stream not in _WEIGHTS or (head := self._puller.head(stream)) is None:
            return None
        kept = self._layouts.get(stream)
        if kept is None or kept[0] != head.number:
            try:
                manifest = self._versions.manifest(head)
            except ChunkMissing:  # the head is lost: a new version is the way out
                return None
            kept = self._layouts[stream] = head.number, kinds_of(manifest.tensors)
        return f"{stream}/{head.number}", kept[1]

    def _publisher(self, stream: str) -> Publisher:
        names.require_importable(stream)  # else the state of a trainer could be replaced by what is none
        if stream in set(Stream):  # each time: a run may have begun since the last version
            self._versions.require_idle(f"it publishes the stream {stream} itself", False)
        with self._lock:
            if stream not in self._publishers:
                dcs = self._dcs
                self._publishers[stream] = Publisher(
                    self._etcd, self._keys, stream, epoch=self._versions.epoch_to_publish(self._me), owner=self._me,
                    chunk_bytes=dcs.chunk_bytes, replicas=dcs.replicas, digest=dcs.digest,
                    staging_ttl_s=dcs.staging_ttl_s, io_timeout_s=dcs.io_timeout_s, node=self._node,
                    security=self._security)
            return self._publishers[stream]

    # -- follow and pull ---------------------------------------------------------------------------------------------
    def follow(self, stream: str, *, after: int = 0, timeout_s: float | None = None) -> Iterator[VersionInfo]:
        """Gives the newest version of a stream, then each newer one. Versions that were committed while the caller was
        busy are skipped but for the newest, so a slow reader never falls behind.

        ``after``: only versions with higher numbers, for a reader that has one. ``timeout_s``: ends when none came for
        so long; None: never. An outage of etcd counts as no news; where etcd is away at the beginning this raises
        EtcdUnavailable.
        """
        return map(VersionInfo.from_record, self._versions.follow(stream, after=after, timeout_s=timeout_s))

    @contextlib.contextmanager
    def open(self, version: str | VersionInfo, *, on_progress: Progress | None = None) -> Iterator[OpenVersion]:
        """Brings a version to this host and gives its tensors as views of shared memory, without a copy, for the time
        of the block. However many processes of a host open it, it is fetched once.

        ``on_progress`` is called about every second with the bytes that are here and those of the whole version. Raises
        VersionNotFound, ChunkMissing, ChunkCorrupt (no sound copy anywhere), ArenaFull and DiskFull; at the end of the
        block NodeUnavailable, as ``OpenVersion.confirm``.
        """
        stream, number = self._named(version)
        with self._puller.pull(stream, number, on_progress=on_progress) as pulled:
            opened = OpenVersion(pulled)
            yield opened
            opened.confirm()

    def pull(self, version: str | VersionInfo, into: Mapping[str, torch.Tensor] | None = None, *, strict: bool = True,
             on_progress: Progress | None = None) -> PulledTensors:
        """Copies the tensors of a version into existing ones, or into new ones on the CPU.

        ``into``: by name, of the version's dtypes and shapes, on any device, such as ``model.state_dict()``; each one
        is written in place. ``strict``: they are all of the version's tensors; otherwise the version may have others
        too, for a reader that needs some. Raises TensorMismatch, before anything is changed, and as ``open``. After
        NodeUnavailable the tensors of ``into`` may have any values: pull again before they are used.
        """
        with self.open(version, on_progress=on_progress) as opened:
            if into is not None:
                require_match(opened.version.name, opened.entries, into, strict=strict)
            out = dict[str, torch.Tensor]()
            with torch.no_grad():
                for name, tensor in opened.tensors():
                    if into is None:
                        out[name] = tensor.clone()
                    elif name in into:
                        out[name] = into[name].copy_(tensor)
        return PulledTensors(opened.version, out)

    def _named(self, version: str | VersionInfo) -> tuple[str, int | None]:
        """Stream and number; None for the head, so that it is chosen and pinned in one step."""
        if isinstance(version, VersionInfo):
            return version.stream, version.number
        stream, number = names.parse(version)
        return stream, self._versions.resolve(version).number if number < 0 else number or None

    # -- keep, check, list -------------------------------------------------------------------------------------------
    def pin(self, version: str | VersionInfo, duration: str = "1d") -> VersionInfo:
        """Keeps a version from being released for ``90s``, ``15m``, ``2h`` or ``7d``, also when this program ends. The
        pin is this user's: another one of the same version replaces it. Raises VersionNotFound, and ConfigError for a
        malformed duration."""
        return VersionInfo.from_record(self._versions.pin(_text(version), duration))

    def unpin(self, version: str | VersionInfo) -> None:
        """Ends this user's pin. Raises VersionNotFound when there is none."""
        self._versions.unpin(_text(version))

    def verify(self, version: str | VersionInfo, *, on_progress: Progress | None = None) -> list[ChunkFinding]:
        """Reads every chunk of a version on every node that should have it, and returns those that are missing or
        corrupt; none where all is well. Raises VersionNotFound, and ChunkMissing when no node has its manifest."""
        return self._versions.verify(_text(version), on_progress or (lambda done, total: None))[0]

    def list_versions(self, stream: str = "") -> list[ListedVersion]:
        """The committed versions of a stream, or of all streams, the oldest first."""
        if stream:
            names.require_stream(stream)
        return [ListedVersion(VersionInfo.from_record(Version.model_validate(row)), row["head"], tuple(row["pins"]),
                              row["copies"] or 0, row["copies_wanted"], row["durable"])
                for row in self._versions.listing(stream) if row["state"] == VersionState.COMMITTED]

    # -- end ---------------------------------------------------------------------------------------------------------
    def _close_publishers(self) -> None:
        with self._lock:
            publishers, self._publishers = list(self._publishers.values()), {}
        for publisher in publishers:
            publisher.close()

    def close(self) -> None:
        """Ends all connections. What was published stays; shards and versions that are open become unusable."""
        self._close_publishers()
        self._puller.close()
        self._versions.__exit__()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- checks: pure ------------------------------------------------------------------------------------------------------
def storable(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields named tensors as they are. Raises ConfigError at one that cannot be stored, or whose name was there."""
    seen: set[str] = set()
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{name!r} is not the name of a tensor", hint="names are texts, and not empty")
        if name in seen:
            raise ConfigError(f"two tensors are named {name!r}", hint="give each one a name of its own")
        seen.add(name)
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"{name!r} is a {type(tensor).__name__} and no tensor",
                              hint="put numbers and texts into meta, or wrap them with torch.tensor")
        if hasattr(tensor, "to_local"):
            raise ConfigError(f"tensor {name!r} is a DTensor: this rank has a part of it", hint=(
                "publish tensor.full_tensor(), or tensor.to_local() under a name for this rank's part"))
        if tensor.layout != torch.strided or tensor.is_meta or dtype_name(tensor.dtype) not in DTYPES:
            raise ConfigError(f"tensor {name!r} ({tensor.dtype}, {tensor.layout}, on {tensor.device}) cannot be stored",
                              hint="dense tensors with memory and a plain dtype can: .to_dense(), .dequantize()")
        yield name, tensor


def require_match(version: str, entries: Sequence[TensorEntry], into: Mapping[str, torch.Tensor], *, strict: bool
                  ) -> None:
    """Raises TensorMismatch, which names the first few, unless each tensor of ``into`` is in the version with its dtype
    and shape and, if ``strict``, each tensor of the version is in ``into``."""
    theirs = kinds_of(entries)
    ours = {name: _kind_of(tensor) for name, tensor in into.items()}
    if faults := _differences("the version", theirs, ours, complete=strict):
        raise TensorMismatch(f"{version} does not fit: {_first_of(faults)}", hint=(
            "pull without `into`, and convert; strict=False allows for tensors that are in the version only"))


def require_same_model(head: str, theirs: Mapping[str, Kind], ours: Mapping[str, Kind], *, complete: bool = True
                       ) -> None:
    """Raises TensorMismatch, which names the first few, unless the tensors for a new version are those of the head of
    its stream. ``complete``: ``ours`` are all of them."""
    if faults := _differences("it", theirs, ours, complete=complete):
        raise TensorMismatch(f"these are tensors of another model than {head}: {_first_of(faults)}", hint=(
            "publish to a stream under another name; other_model=True allows for it, once all readers can take them"))


def same_model(head: str, theirs: Mapping[str, Kind], tensors: Iterable[tuple[str, torch.Tensor]]
               ) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields named tensors as they are, and raises TensorMismatch as ``require_same_model`` does: at the first tensor
    that the head does not have so, before it is stored, or at the end for those that are missing."""
    ours = dict[str, Kind]()
    for name, tensor in tensors:
        kind = ours[name] = _kind_of(tensor)
        require_same_model(head, theirs, {name: kind}, complete=False)
        yield name, tensor
    require_same_model(head, theirs, ours)


def kinds_of(entries: Sequence[TensorEntry]) -> dict[str, Kind]:
    """Dtype and shape of each tensor of a version."""
    return {e.name: (e.dtype, tuple(e.shape)) for e in entries}


def _kind_of(tensor: torch.Tensor) -> Kind:
    return dtype_name(tensor.dtype), tuple(tensor.shape)


def _differences(version: str, theirs: Mapping[str, Kind], ours: Mapping[str, Kind], *, complete: bool) -> list[str]:
    """What of ``ours`` is not as in a version and, if ``complete``, what is in the version only. ``version``: what the
    texts call it."""
    faults = [f"{name} is not in {version}" for name in ours if name not in theirs]
    faults += [f"{name} is {_kind(theirs[name])} in {version} and {_kind(ours[name])} here"
               for name in ours if name in theirs and ours[name] != theirs[name]]
    return faults + [f"{name} is in {version} only" for name in theirs if complete and name not in ours]


def _first_of(faults: Sequence[str]) -> str:
    return "; ".join(faults[:_NAMED]) + (f"; and {len(faults) - _NAMED} more" if len(faults) > _NAMED else "")


def _kind(of: Kind) -> str:
    dtype, shape = of
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _checked_meta(meta: Mapping[str, Any] | None) -> dict[str, Any]:
    """The meta of a version, for its record. Raises ConfigError for what JSON does not have, or for too much of it."""
    try:
        found = require_json(dict(meta or {}))
        require_plain_numbers("meta", json.dumps(found).encode())  # else nobody could read the version's record
    except (TypeError, ValueError) as e:
        raise ConfigError(f"the meta of a version cannot be stored as JSON: {e}",
                          hint="take finite numbers, texts, lists and mappings; float(x) for a number of NumPy or torch"
                          ) from e
    if _TRACE in found:
        raise ConfigError(f"{_TRACE!r} is no key for the meta of a version: the trace of its publish is there",
                          hint="take another name")
    size = len(json.dumps(found, ensure_ascii=False).encode())
    if size > _MAX_META_BYTES:
        raise ConfigError(f"the meta of a version has {size} bytes, and {_MAX_META_BYTES} are allowed",
                          hint="publish large values as tensors")
    return found


def _text(version: str | VersionInfo) -> str:
    return version.name if isinstance(version, VersionInfo) else version

