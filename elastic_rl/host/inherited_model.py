"""Policies as model folders: that of a job that begins with another job's (``elastic-rl train --job=NEW
--from-job=OLD``), and the one that a finished job leaves in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_rl.config import Config, Stream
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.dcs.versions.names import LABEL
from elastic_rl.errors import ConfigError, EtcdUnavailable, VersionNotFound
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.records import JobSpec
from elastic_rl.host import cluster_settings
from elastic_rl.host.job_secrets import dcs_security
from elastic_rl.host.local_host import LocalHost
from elastic_rl.host.paths import ClusterPaths, JobPaths

if TYPE_CHECKING:
    from elastic_rl.dcs.versions.service import VersionService

_SHARD_BYTES = 5 << 30


def with_inherited_model(cfg: Config, from_job: str) -> Config:
    """The settings of a job that begins with the model in its folder. RL has no SFT phase then: the policy that it
    begins with has been through one."""
    if not from_job:
        return cfg
    sft = cfg.sft.model_copy(update={"max_steps": 0}) if cfg.mode == "rl" else cfg.sft
    return cfg.model_copy(update={"model": cfg.model.model_copy(update={"path": str(folder(cfg))}), "sft": sft})


def folder(cfg: Config) -> Path:
    """Where the model of a job is that has none of its own."""
    return JobPaths.of(cfg).model


def began_with(cfg: Config) -> Path:
    """The model that a run of these settings starts from, as an absolute path."""
    return Path(cfg.model.path).expanduser().resolve() if cfg.model.path else folder(cfg)


def keep_policy(cfg: Config, info: ClusterInfo, target: Path) -> str:
    """Writes the newest committed policy of a job, whose cluster is up, as a model folder; one that is there is
    replaced. Returns what it holds (``holds``). Raises ConfigError for a folder with other files in it,
    VersionNotFound, EtcdUnavailable, ChunkMissing and DiskFull."""
    from elastic_rl.dcs.versions.service import VersionService  # imports torch
    with VersionService(cfg, cfg.job, info.etcd_endpoints, dcs_security(cfg), began_with(cfg)) as service:
        _write(service, 0, target, began_with(cfg))
    return holds(target)


def holds(target: Path) -> str:
    """Which policy a folder has that ``keep_policy`` has written, such as "step 30, version 31"; empty where it does
    not say it."""
    try:
        label = json.loads((target / LABEL).read_bytes())
        supervised = "supervised " if label.get("phase") == "sft" else ""
        step = f"{supervised}step {label['step']}, " if "step" in label else ""
        return f"{step}version {label['version']}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""


def export_policy(cfg: Config, from_job: str, *, number: int = 0) -> int:
    """Writes a committed policy of ``from_job``, the newest one or that of a number, as the model folder of the job of
    ``cfg``; returns the version's number.

    The cluster of ``from_job`` must be up: the one under the same run_dir, else, with ``etcd.endpoints`` set, the one
    in that etcd. Raises ConfigError, VersionNotFound, EtcdUnavailable, ChunkMissing and DiskFull.
    """
    from elastic_rl.dcs.versions.service import VersionService  # imports torch
    if from_job == cfg.job:
        raise ConfigError(f"job {cfg.job} cannot begin with its own policy",
                          hint="name a new job with --job=NEW; without --from-job the job resumes")
    source = cluster_settings.location({"job": from_job, "run_dir": str(cfg.run_dir)})
    cluster = ClusterPaths.of(source)
    info = ClusterInfo.load(cluster.info)
    if info is not None:
        source = cluster_settings.on_top(JobPaths.of(source).submitted_settings, {
            "job": from_job, "run_dir": str(cfg.run_dir), "cluster": source.cluster})
        if source.cluster:
            source = cluster_settings.with_sections_of_cluster(cluster.settings, source, {})
            source = LocalHost.of(cluster).settings_here(source, cluster.tls)
        endpoints = info.etcd_endpoints
    elif cfg.etcd.endpoints:
        source, endpoints = cfg.model_copy(update={"job": from_job}), list(cfg.etcd.endpoints)
    else:
        raise ConfigError(f"no cluster of job {from_job} is up under {cfg.run_dir}", hint=(
            f"`elastic-rl up --job={from_job}` starts it, unless `down --purge` has deleted its versions"))
    try:
        with VersionService(source, from_job, endpoints, dcs_security(source), began_with(source)) as service:
            spec = readable_one(service.etcd.get(service.keys.job_spec()), JobSpec)
            path = str(spec.settings.get("model.path") or "") if spec is not None else ""
            return _write(service, number, folder(cfg), Path(path) if path else None)
    except VersionNotFound as e:
        if number:
            raise VersionNotFound(f"job {cfg.job} began with the policy {number} of job {from_job}, which is gone: "
                                  f"{e.message}", hint=f"--from-job={from_job} begins with its newest one") from e
        raise VersionNotFound(f"job {from_job} has no committed policy: {e.message}",
                              hint="it has one once its SFT phase is over") from e
    except EtcdUnavailable as e:
        e.hint = f"start the cluster of job {from_job} with `elastic-rl up --job={from_job}`"
        raise


def _write(service: VersionService, number: int, target: Path, like: Path | None) -> int:
    """Writes the committed policy of this number, the newest one for 0, and returns its number. Raises
    VersionNotFound, ChunkMissing and DiskFull."""
    version = service.resolve(f"{Stream.POLICY}/{number}")
    service.export(f"{version.stream}/{version.number}", target, like=like, shard_bytes=_SHARD_BYTES, force=True)
    return version.number
