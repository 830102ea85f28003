"""What a person can do with the versions of a job. Talks to etcd and the nodes directly."""

from __future__ import annotations

import contextlib
import getpass
import logging
import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from elastic_rl.config import Config, Stream, durations
from elastic_rl.config.groups import TRAINER_GROUPS
from elastic_rl.dcs.catalog import pins, reads, replica_sets
from elastic_rl.dcs.catalog.pins import pin_holders
from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.codecs.digests import matches
from elastic_rl.dcs.durable.store import DurableStore
from elastic_rl.dcs.fetch.puller import HeadWatch, Puller
from elastic_rl.dcs.manifest import Manifest
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.dcs.registered_nodes import read_nodes
from elastic_rl.dcs.security import Security
from elastic_rl.dcs.versions import compare, hf_folder, names, recovery
from elastic_rl.errors import (
    ChunkCorrupt,
    ChunkMissing,
    ConfigError,
    ElasticRLError,
    EtcdDenied,
    EtcdUnavailable,
    VersionNotFound,
)
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import ReplicaSets, Version, VersionState

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with bytes done and total bytes."""
_WAIT_S = 60.0
"""Longest single wait of a follower, which then waits again."""


@dataclass(frozen=True)
class ChunkFinding:
    """One chunk that a node does not have as it should. ``what``: missing or corrupt."""

    node: str
    digest: str
    what: str


class VersionService:
    """A context manager. Versions are named as in ``names.py``; every method raises VersionNotFound for one that is
    not there."""

    def __init__(self, cfg: Config, job: str, etcd_endpoints: Sequence[str], security: Security, model_dir: Path
                 ) -> None:
        """``model_dir``: the folder whose config and tokenizer the run's weights belong to."""
        self.cfg, self.keys, self._security, self._model_dir = cfg, Keys(job), security, model_dir
        self.etcd = EtcdClient.from_config(cfg.etcd, list(etcd_endpoints))
        self._client = DcsClient(self.etcd, self.keys, io_timeout_s=cfg.dcs.io_timeout_s, security=self._security)
        self.me = f"{getpass.getuser()}@{socket.gethostname()}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self.etcd.close()

    # -- reading -----------------------------------------------------------------------------------------------------
    def listing(self, stream: str = "") -> list[dict[str, Any]]:
        """Every version with a record, oldest first: its fields, ``head``, ``pins`` (holders) and ``durable``; of a
        committed one also ``copies``, the number of nodes that hold each part, and ``copies_wanted``."""
        if stream:
            names.require_stream(stream)
        rows: list[dict[str, Any]] = []
        identity, _ = reads.read_identity(self.etcd, self.keys)
        nodes = {i for i, n in read_nodes(self.etcd, self.keys)[0].items()
                 if identity is not None and n.belongs_to(identity.id)}
        wanted = replica_sets.wanted(self.cfg.dcs.replicas, len(nodes))
        for name in [stream] if stream else self._streams():
            head = reads.head(self.etcd, self.keys, name)
            pins = pin_holders(self.etcd, self.keys, name)
            durable = {kv.key for kv in self.etcd.range(self.keys.durable_prefix(name))[0]}
            copies = {number: replica_sets.fewest(sets, nodes) for number, sets in reads.list_replica_sets(
                self.etcd, self.keys, name).items()}
            rows += [{**v.model_dump(mode="json"), "head": head is not None and head.number == v.number,
                      "pins": sorted(pins.get(v.number, [])), "step": v.meta.get("step"),
                      "durable": self.keys.durable(name, v.number) in durable, "copies": copies.get(v.number),
                      "copies_wanted": wanted if v.state is VersionState.COMMITTED else None}
                     for v in reads.list_versions(self.etcd, self.keys, name)]
        return rows

    def nodes(self, version: Version) -> list[str]:
        """Ids of the nodes that hold parts of a version."""
        return replica_sets.nodes_of(self._replica_sets(version))

    def _replica_sets(self, version: Version) -> ReplicaSets:
        return reads.read_replica_sets(self.etcd, self.keys, version.stream, version.number).replica_sets

    def resolve(self, name: str) -> Version:
        stream, number = names.parse(name)
        return names.pick(reads.list_versions(self.etcd, self.keys, stream), stream, number)

    def manifest(self, version: Version) -> Manifest:
        """Raises ChunkMissing when no node that answers has it."""
        for node_id in dict.fromkeys([*version.sources, *(n.id for n in self._client.nodes())]):
            with contextlib.suppress(ElasticRLError):
                data = self._client.connect(node_id).get(version.manifest)
                if matches(data, version.manifest):
                    return Manifest.decode(data)
        raise ChunkMissing(f"no node has a valid manifest of {version.stream} version {version.number}")

    def before(self, version: Version) -> Version | None:
        """The committed version before this one that is still there."""
        older = [v for v in reads.list_versions(self.etcd, self.keys, version.stream)
                 if v.state is VersionState.COMMITTED and v.number < version.number]
        return older[-1] if older else None

    def _streams(self) -> list[str]:
        prefix = self.keys.streams_prefix()
        return sorted({kv.key.removeprefix(prefix).partition("/")[0] for kv in self.etcd.range(prefix)[0]})

    def follow(self, stream: str, *, after: int = 0, timeout_s: float | None = None) -> Iterator[Version]:
        """Yields the newest version of a stream, then each newer one, the newest alone of those that were committed
        while the caller was busy. ``after``: only versions with higher numbers. ``timeout_s``: ends when none came for
        so long; None: never. An outage of etcd counts as no news; where etcd is away at the beginning this raises
        EtcdUnavailable."""
        names.require_stream(stream)
        with HeadWatch(self.etcd, self.keys, stream) as heads:
            first, since = True, time.monotonic()
            while (left := math.inf if timeout_s is None else since + timeout_s - time.monotonic()) > 0 or first:
                try:
                    head = heads.get(0.0 if first else min(left, _WAIT_S))
                except EtcdDenied:
                    raise
                except EtcdUnavailable as e:
                    if first:
                        raise
                    log.warning("following %s: %s", stream, e)  # each try takes etcd.retry_budget_s
                    continue
                first = False
                if head is not None and head.number > after:
                    yield head
                    since = time.monotonic()

    # -- comparing and checking --------------------------------------------------------------------------------------
    def diff(self, old: str, new: str) -> list[compare.Change]:
        """What changed from one version to another. Tensors in chunks that both have are not compared."""
        a, b = self.resolve(old), self.resolve(new)
        changes, candidates = compare.differing(self.manifest(a), self.manifest(b))
        if candidates:
            with self._puller() as puller, puller.pull(a.stream, a.number) as pa, puller.pull(b.stream, b.number) as pb:
                changes += compare.compare(candidates, dict(pa.tensors()), dict(pb.tensors()))
        return sorted(changes, key=lambda c: (-c.share, c.name))

    def verify(self, name: str, progress: Progress = lambda done, total: None) -> tuple[list[ChunkFinding], int]:
        """Reads every chunk of a version on every node that should hold it: what is wrong, and the bytes read. A part
        that no node holds is reported with node ``-``."""
        version = self.resolve(name)
        manifest = self.manifest(version)
        digests, sets = manifest.part_digests(), self._replica_sets(version)
        listed = replica_sets.parts_by_node(sets)
        sizes = {version.manifest: 0, **manifest.chunks}
        wanted = [(n, d) for n, parts in listed.items()
                  for d in (version.manifest, *(d for i in parts for d in digests[i]))]
        total, done, found = sum(sizes[d] for _, d in wanted), 0, list[ChunkFinding]()
        for node_id, digest in wanted:
            if what := self._fault(node_id, digest):
                found.append(ChunkFinding(node_id, digest, what))
            done += sizes[digest]
            progress(done, total)
        nowhere = replica_sets.short_of(sets, 1) if sets.parts else range(len(digests))
        found += [ChunkFinding("-", d, "missing") for i in nowhere for d in digests[i]]
        return found, done

    def _fault(self, node_id: str, digest: str) -> str:
        """What is wrong with a node's copy of a chunk; empty if nothing is."""
        try:
            return "" if matches(self._client.connect(node_id).get(digest), digest) else "corrupt"
        except ChunkCorrupt:
            return "corrupt"
        except ElasticRLError:
            return "missing"

    # -- keeping -----------------------------------------------------------------------------------------------------
    def pin(self, name: str, duration: str) -> Version:
        """Keeps a version for a while, under this person's name; nothing has to stay running for it."""
        ttl_s, version = durations.seconds(duration), self.resolve(name)
        lease = self.etcd.grant(ttl_s)
        try:
            return pins.pin(self.etcd, self.keys, version.stream, version.number, self.me, lease)
        except ElasticRLError:
            with contextlib.suppress(ElasticRLError):
                self.etcd.revoke(lease)
            raise

    def unpin(self, name: str, holder: str = "") -> None:
        """Ends a person's pin. Raises VersionNotFound when there is none."""
        version, holder = self.resolve(name), holder or self.me
        if not self.etcd.delete(self.keys.pin(version.stream, version.number, holder)):
            there = ", ".join(pin_holders(self.etcd, self.keys, version.stream).get(version.number, [])) or "no reader"
            raise VersionNotFound(f"{holder} does not pin {version.stream} version {version.number}",
                                  hint=f"pinned by: {there}; name one with --holder")

    # -- out and in --------------------------------------------------------------------------------------------------
    def export(self, name: str, target: Path, *, like: Path | None, shard_bytes: int, force: bool,
               progress: Progress = lambda done, total: None) -> list[str]:
        """Writes a version as an HF folder, which says which one it is (``names.LABEL``); the names of its files.
        Raises ConfigError and DiskFull."""
        version = self.resolve(name)
        with self._puller() as puller, puller.pull(version.stream, version.number) as pulled:
            total = pulled.manifest.nbytes
            counter = _Counter(lambda done: progress(done, total))
            return hf_folder.write(target, pulled.tensors(), like or self._require_model(), shard_bytes=shard_bytes,
                                   force=force, progress=counter, label={
                                       "job": self.keys.job, "stream": version.stream, "version": version.number,
                                       **{k: version.meta[k] for k in ("phase", "step") if k in version.meta}})

    def import_(self, source: Path, stream: str, *, yes: bool,
                progress: Progress = lambda done, total: None) -> Version:
        """Publishes an HF folder as the stream's next version under the present epoch.

        Raises ConfigError for a folder without weights, a stream that is no name or that only the run may write,
        weights of another model than those of the stream, and unless ``yes`` while a trainer is running: its engines
        would load the imported version. Nothing is changed then.
        """
        names.require_importable(stream)
        self._require_same_model(source, stream)
        self.require_idle("its engines would load this version", yes)
        epoch = self.epoch_to_publish(f"import by {self.me}")
        total, dcs = hf_folder.nbytes_of(source), self.cfg.dcs
        with Publisher(self.etcd, self.keys, stream, epoch=epoch, owner=f"import-{self.me}",
                       chunk_bytes=dcs.chunk_bytes, replicas=dcs.replicas, digest=dcs.digest,
                       staging_ttl_s=dcs.staging_ttl_s, io_timeout_s=dcs.io_timeout_s,
                       security=self._security) as publisher:
            counter = _Counter(lambda done: progress(min(done, total), total))
            return publisher.publish(hf_folder.read(source, counter), meta={"imported": str(source), "by": self.me})

    def _require_same_model(self, source: Path, stream: str) -> None:
        """Raises ConfigError unless a folder has the tensors of the stream's head or, of a policy without one, those of
        the job's model."""
        found, head = hf_folder.layout(source), reads.head(self.etcd, self.keys, stream)
        if head is not None:
            wanted, of = {t.name: tuple(t.shape) for t in self.manifest(head).tensors}, f"{stream}/{head.number}"
        elif stream == Stream.POLICY and next(self._model_dir.glob("*.safetensors"), None) is not None:
            wanted, of = hf_folder.layout(self._model_dir), f"the job's model, {self._model_dir}"
        else:
            return
        tied = hf_folder.is_tied(source) or hf_folder.is_tied(self._model_dir)
        if fault := compare.fault_of_layout(found, wanted, tied=tied):
            raise ConfigError(f"{source} has other weights than {of}: {fault}", hint=(
                "import a folder of the same model, or into a new stream under a name of your own"))

    def epoch_to_publish(self, holder: str) -> int:
        """The present epoch, under which anybody may publish; begins the first one for ``holder``."""
        return fencing.ensure_epoch(self.etcd, self.keys, holder)

    def require_idle(self, otherwise: str, yes: bool) -> None:
        """Raises ConfigError unless ``yes`` while a trainer of the job is running. ``otherwise``: what would happen."""
        if not yes and any(self.etcd.count(self.keys.members_prefix(group)) for group in TRAINER_GROUPS):
            raise ConfigError(f"a trainer of job {self.keys.job} is running, and {otherwise}",
                              hint="stop the run first, or give --yes if that is what you want")

    # -- recovery ----------------------------------------------------------------------------------------------------
    def plan_recovery(self, catalog: str = "") -> tuple[recovery.RecoveryPlan, list[str]]:
        """What ``recover`` would do, with nothing changed, and the ids of the nodes that did not answer."""
        sources = recovery.gather(self.etcd, self.keys, self._client, self._durable())
        return recovery.plan(sources, catalog), list(sources.unreachable)

    def recover(self, catalog: str = "", *, yes: bool) -> recovery.RecoveryPlan:
        """Rebuilds the catalog from the nodes and the durable store (``recovery.py``). Raises ConfigError unless
        ``yes`` while a trainer is running, which would be fenced."""
        self.require_idle("it would be fenced", yes)
        return recovery.recover(self.etcd, self.keys, self._client, self._durable(), catalog=catalog,
                                holder=f"recovery by {self.me}")

    def _durable(self) -> DurableStore | None:
        return DurableStore(self.cfg.dcs.durable_url, self.keys.job) if self.cfg.dcs.durable_url else None

    def _puller(self) -> Puller:
        return Puller(self.etcd, self.keys, self.me, io_timeout_s=self.cfg.dcs.io_timeout_s, security=self._security)

    def _require_model(self) -> Path:
        if not (self._model_dir / "config.json").exists():
            raise ConfigError(f"the run has no model folder {self._model_dir}", hint="name one with --like")
        return self._model_dir


class _Counter:
    """Adds up increments, and passes on the sum."""

    def __init__(self, report: Callable[[int], None]) -> None:
        self._report, self._done = report, 0

    def __call__(self, nbytes: int) -> None:
        self._done += nbytes
        self._report(self._done)


def tensor_rows(manifest: Manifest) -> Sequence[dict[str, Any]]:
    """A row for each tensor of a manifest, for a listing."""
    return [{"name": t.name, "dtype": t.dtype, "shape": "x".join(map(str, t.shape)) or "scalar", "nbytes": t.nbytes,
             "slices": [s._asdict() for s in t.slices]} for t in manifest.tensors]
