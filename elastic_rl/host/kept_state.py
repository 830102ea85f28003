"""What a job keeps in its folders when its cluster stops. Only ``down --purge`` deletes it, after it was named and
confirmed (I15: stopping never deletes)."""

from __future__ import annotations

import contextlib
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_rl.config import Config, secrets
from elastic_rl.dcs.storage.disk import owner
from elastic_rl.errors import ConfigError, ElasticRLError
from elastic_rl.etcd.keys import Keys
from elastic_rl.host import cluster_settings
from elastic_rl.host.local_host import LocalHost
from elastic_rl.host.paths import ClusterPaths, JobPaths
from elastic_rl.runtime.files import os_error_text


@dataclass(frozen=True)
class KeptFolder:
    path: Path
    what: str

    @property
    def nbytes(self) -> int:
        """Bytes that its files take on the disk."""
        return sum(_blocks(p) for p in self.path.rglob("*"))


def folders(cfg: Config) -> list[KeptFolder]:
    """The folders that hold the state of a job."""
    found = []
    if not cfg.cluster:
        etcd = ClusterPaths.of(cfg).etcd
        found += [KeptFolder(etcd, "what the job has decided and done (etcd)")]
        found += [KeptFolder(path, "the same of an earlier cluster")
                  for path in sorted(etcd.parent.glob(f"{etcd.name}.*"))]
    node = chunks(cfg)
    found += [KeptFolder(path, "its versions: policies and the trainer's state") for path in (node, *_aside(node))
              if owner(path) in ("", cfg.job)]
    return [folder for folder in found if folder.path.is_dir()]


def chunks(cfg: Config) -> Path:
    """The folder with the chunks of the job's DCS node. A cluster that was started before has it where its settings
    say, which the command line need not name."""
    return _node_folder(cfg, _dcs(cfg, "disk_dir"))


def require_same_cluster(cfg: Config) -> None:
    """Raises ConfigError when what is kept of the job belongs to another cluster than the configured one, whose etcd
    knows nothing of it."""
    job = JobPaths.of(cfg)
    own, before = ClusterPaths(job.private), cluster_settings.cluster_of(job)
    if before and before != cfg.cluster:
        raise ConfigError(f"job {cfg.job} is on cluster {before}, which has its records", hint=(
            f"leave --cluster out, or name another job with --job=NAME; `elastic-rl down --purge {options(cfg)}` "
            "deletes what the job has"))
    if cfg.cluster and not before and (any(p.exists() for p in (own.info, own.stopped, own.etcd))
                                       or _has_chunks(chunks(cfg))):
        raise ConfigError(f"job {cfg.job} has a cluster of its own, with its state in {own.folder}", hint=(
            f"name another job with --job=NAME, which may begin with this one's policy (--from-job={cfg.job}); or "
            f"delete what it has: `elastic-rl down --purge {options(cfg)} --cluster=`"))


def require_same_disk(cfg: Config) -> None:
    """Raises ConfigError when the settings name another folder than the one with the job's chunks: a node on an empty
    disk would not have the versions that etcd lists."""
    old, new = chunks(cfg), _node_folder(cfg, cfg.dcs.disk_dir)
    if old.resolve() != new.resolve() and owner(old) in ("", cfg.job) and _has_chunks(old):
        raise ConfigError(f"the versions of job {cfg.job} are in {old}, and dcs.disk_dir would have them in {new}",
                          hint=f"give --dcs.disk_dir={shlex.quote(str(old.parent))}, or move {old.name} there while "
                               "the cluster is stopped")


def elsewhere(cfg: Config) -> list[str]:
    """Where a job keeps what is not in its folders, and what ``delete`` leaves there."""
    found = []
    if endpoints := _external_etcd(cfg):
        found.append(f"its records, {Keys(cfg.job).root} in the etcd at {', '.join(endpoints)}")
    if url := _dcs(cfg, "durable_url"):
        found.append(f"its durable versions, in {secrets.redacted_url(str(url))}")
    return found


def in_cluster(cfg: Config) -> list[str]:
    """What a job keeps in the cluster with a name that it is on."""
    return [f"its records, {Keys(cfg.job).root} in the etcd of cluster {cfg.cluster}"] if cfg.cluster else []


def can_continue(cfg: Config) -> bool:
    """Whether the data of the etcd that ``up`` starts are there and, for a cluster of the job's own, the versions that
    they list: an etcd that lists nothing but lost chunks would only mislead."""
    return (ClusterPaths.of(cfg).etcd / "member").is_dir() and (bool(cfg.cluster) or keeps_versions(cfg))


def keeps_versions(cfg: Config) -> bool:
    """Whether versions outlive the nodes: in a durable store, and on the node's disk after a stop in order, which saves
    the chunks, and after a crash, where some were saved."""
    if _dcs(cfg, "durable_url"):
        return True
    if not _dcs(cfg, "disk_bytes"):
        return False
    cluster = ClusterPaths.of(cfg)
    return (cluster.stopped.exists() and not JobPaths.of(cfg).unsaved.exists()) or _has_chunks(chunks(cfg))


def set_aside(path: Path) -> Path | None:
    """Renames a file or folder of an earlier run, by the time of its last change; None where there is none."""
    return path.rename(free_name(path)) if path.exists() else None


def free_name(path: Path) -> Path:
    """The name to set a file or folder aside under, by the time of its last change."""
    when = int(path.stat().st_mtime)
    return next(name for n in range(when, when + 1000)
                if not (name := path.with_name(f"{path.stem}.{n}{path.suffix}")).exists())


def delete(cfg: Config) -> list[KeptFolder]:
    """Deletes the state of a job, and the secrets of a cluster of its own; returns the folders that are gone. Its DCS
    node must be stopped, and so must its own cluster. Raises ElasticRLError for a folder that cannot be deleted.

    The folders get other names first, so that ``up`` never continues with half of the data after a deletion that was
    interrupted. The next deletion finds them, by the settings, which are deleted last."""
    cluster, job, gone = ClusterPaths.of(cfg), JobPaths.of(cfg), folders(cfg)
    if link := next((folder.path for folder in gone if folder.path.is_symlink()), None):
        raise ElasticRLError(f"{link} is a link to {link.resolve()}, which is not deleted",
                             hint="delete that folder and the link yourself, then repeat the command")
    of_cluster = () if cfg.cluster else (cluster.tokens, cluster.credentials, cluster.viewer_token, cluster.secret)
    if not cfg.cluster:
        cluster.stopped.unlink(missing_ok=True)
    in_use = (cluster.etcd, chunks(cfg))
    try:
        renamed = [set_aside(f.path) or f.path if f.path in in_use else f.path for f in gone]
        for path in renamed:
            shutil.rmtree(path)
    except OSError as e:
        raise ElasticRLError(f"cannot delete {os_error_text(e, job.private)}",
                             hint="see who owns it and the files in it") from e
    for path in (job.unsaved, *of_cluster, job.run_status, job.submitted_settings, job.cluster_name, job.job_id):
        path.unlink(missing_ok=True)
    return gone


def options(cfg: Config) -> str:
    """The options with which a command addresses the job, whose cluster it then finds."""
    return f"--job={shlex.quote(cfg.job)}" + _run_dir_option(cfg)


def cluster_options(cfg: Config) -> str:
    """The options with which a command addresses the cluster of the job."""
    return f"--cluster={shlex.quote(cfg.cluster)}" + _run_dir_option(cfg) if cfg.cluster else options(cfg)


def _run_dir_option(cfg: Config) -> str:
    run_dir = cfg.run_dir.expanduser().resolve()
    return f" --run_dir={shlex.quote(str(run_dir))}" if run_dir != Config().run_dir.resolve() else ""


def commands(cfg: Config) -> Iterator[tuple[str, str]]:
    """Name and command line of what can be done with the state of a stopped job."""
    up = f"elastic-rl up {cluster_options(cfg)} && " if cfg.cluster else ""
    if cfg.cluster:
        if keeps_versions(cfg):
            yield "resume", f"{up}elastic-rl train {options(cfg)}"
    elif can_continue(cfg) or (_external_etcd(cfg) and keeps_versions(cfg)):
        yield "resume", f"elastic-rl train --with-cluster {options(cfg)}"
        if cfg.uses_trainer:
            yield "export", f"elastic-rl up {options(cfg)} && elastic-rl versions export policy OUT {options(cfg)}"
    yield "delete", f"{up}elastic-rl down --purge {options(cfg)}"


def _stored(path: Path, section: str) -> dict[str, Any]:
    """A section of the settings that the cluster or the job was started with, which the command line need not repeat.
    """
    try:
        found = cluster_settings.stored(path).get(section)
    except ConfigError:  # a damaged file
        return {}
    return found if isinstance(found, dict) else {}


def _dcs(cfg: Config, key: str) -> Any:
    return _stored(JobPaths.of(cfg).submitted_settings, "dcs").get(key, getattr(cfg.dcs, key))


def _external_etcd(cfg: Config) -> list[str]:
    endpoints = _stored(ClusterPaths.of(cfg).settings, "etcd").get("endpoints", cfg.etcd.endpoints)
    return [str(endpoint) for endpoint in endpoints] if isinstance(endpoints, list) else []


def _node_folder(cfg: Config, disk_dir: object) -> Path:
    path = Path(str(disk_dir)) if disk_dir else JobPaths.of(cfg).disk
    with contextlib.suppress(RuntimeError):  # there is no such user
        path = path.expanduser()
    return path / LocalHost.of(ClusterPaths.of(cfg)).node


def _has_chunks(folder: Path) -> bool:
    return any(folder.glob("??/*"))


def _aside(folder: Path) -> list[Path]:
    """What ``delete`` has renamed the folder to, and not deleted."""
    return [path for path in sorted(folder.parent.glob(f"{folder.name}.*")) if path.suffix[1:].isdigit()]


def _blocks(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except FileNotFoundError:  # the cluster still runs
        return 0
