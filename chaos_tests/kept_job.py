"""What is kept of a job that has ended, once its cluster is down: the run looks at it before it purges the cluster, and
the checker of I15 judges what it has found."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from chaos_tests.streams import STREAMS
from elastic_rl.config import Config
from elastic_rl.dcs.catalog import reads
from elastic_rl.dcs.codecs import digests
from elastic_rl.dcs.manifest import Manifest
from elastic_rl.errors import ChunkCorrupt, ElasticRLError
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Version
from elastic_rl.host import cluster_settings, kept_state
from elastic_rl.host.paths import JobPaths
from elastic_rl.report.build import read_for_build


def heads(etcd: EtcdClient, keys: Keys) -> list[Version]:
    """The newest committed version of each of ``STREAMS`` that has one. Raises EtcdUnavailable."""
    found = (reads.head(etcd, keys, stream) for stream in STREAMS)
    return [version for version in found if version is not None]


def on_disk(cfg: Config, newest: Iterable[Version]) -> dict[str, Any]:
    """What there is of a job whose cluster is down, as ``kept`` of the log's last record has it. ``newest``: the heads
    that etcd had when the job had ended."""
    job = JobPaths.of(cfg)
    lacks = [f"{name}: {why}" for name, why in (
        ("its settings", _why_unreadable(job.submitted_settings)),
        ("the data of its etcd, or its versions", "" if kept_state.can_continue(cfg) else "they are not there")) if why]
    versions = [{"stream": version.stream, "number": version.number, "created_at": version.created_at,
                 **_chunks(kept_state.chunks(cfg), version.manifest)} for version in newest]
    return {"lacks": lacks, "steps": len({record["step"] for record in read_for_build(job.steps)
                                          if record["kind"] == "step"}),
            "versions": versions if cfg.dcs.disk_bytes else None}


def _why_unreadable(settings: Path) -> str:
    try:
        return "" if cluster_settings.stored(settings) else f"{settings} is not there"
    except ElasticRLError as e:
        return e.message


def _chunks(folder: Path, manifest: str) -> dict[str, int]:
    """How many chunks a version has, with its manifest, and how many of them are not whole in the folder of a node."""
    try:
        raw = _whole(folder, manifest)
        named = [*Manifest.decode(raw).chunks] if raw is not None else []
    except ChunkCorrupt:
        raw, named = None, []
    return {"chunks": 1 + len(named), "lost": (raw is None) + sum(_whole(folder, digest) is None for digest in named)}


def _whole(folder: Path, digest: str) -> bytes | None:
    """The bytes of a chunk; None where its file is not there, cannot be read, or has others than its digest says."""
    try:
        data = (folder / digest[:2] / digest).read_bytes()
    except OSError:
        return None
    return data if digests.matches(data, digest) else None
