"""The secrets of a job on this host, derived from the cluster's, and the files with them for programs that take them in
no other way. A file may be removed at any time: who starts such a program writes it again."""

from __future__ import annotations

import os
from pathlib import Path

from elastic_rl.config import Config
from elastic_rl.dcs.security import Security
from elastic_rl.dcs.service_access import ServiceAccess
from elastic_rl.host.local_host import LocalHost
from elastic_rl.host.paths import ClusterPaths, JobPaths
from elastic_rl.net.cluster_secret import ClusterSecret
from elastic_rl.net.engine_key import EngineAccess
from elastic_rl.net.tls import TlsFolder
from elastic_rl.runtime.files import replace_file


def dcs_security(cfg: Config, *, required: bool = False) -> Security:
    """What a process of the job needs to call DCS nodes and trainer ranks. Where the job's cluster is not up on this
    host, its nodes are those of other hosts and may have no token, so none is needed. ``required``: there must be one
    all the same, for a process that serves. Raises ConfigError."""
    paths = ClusterPaths.of(cfg)
    return Security.from_config(cfg, paths.secret, required=required or paths.info.exists(),
                                tls=LocalHost.of(paths).tls(paths))


def service_access(cfg: Config, etcd_endpoints: list[str]) -> ServiceAccess:
    """What another program on this host needs to use the checkpoint service of a job. Raises ConfigError."""
    paths = ClusterPaths.of(cfg)
    host = LocalHost.of(paths)
    return ServiceAccess.of(host.settings_here(cfg, paths.tls), etcd_endpoints, dcs_security(cfg), host.tls(paths))


def engine_key(cfg: Config) -> str:
    """The key of the job's engines and routers. Raises ConfigError."""
    return ClusterSecret.read(ClusterPaths.of(cfg).secret).engine(cfg.job)


def engine_access(cfg: Config) -> EngineAccess:
    """What a client of the job's engines and routers needs on this host. Raises ConfigError."""
    tls = engine_tls(cfg)
    return EngineAccess(engine_key(cfg), str(tls.ca) if tls is not None else "")


def engine_tls(cfg: Config) -> TlsFolder | None:
    """The files of the certificate that engines, routers and Ray on this host serve with; None where others do not
    reach them. Raises ConfigError."""
    cluster = ClusterPaths.of(cfg)
    return LocalHost.of(cluster).tls(cluster)


def engine_key_file(cfg: Config) -> Path:
    """The file with ``engine_key``, which is written unless it is there. Raises ConfigError and OSError."""
    return _written(JobPaths.of(cfg).engine_key, engine_key(cfg))


def ray_token_file(cfg: Config, epoch: int) -> Path:
    """The file with the token of the Ray of an epoch, for RAY_AUTH_TOKEN_PATH. Ray reads it when it starts, or
    connects. Each epoch has its file, so that no process of an earlier one presents the token of this one; the files of
    earlier epochs are removed. Raises ConfigError and OSError."""
    job, secret = JobPaths.of(cfg), ClusterSecret.read(ClusterPaths.of(cfg).secret)
    for earlier, path in job.ray_tokens().items():
        if earlier < epoch:
            path.unlink(missing_ok=True)
    return _written(job.ray_token(epoch), secret.ray(cfg.job, epoch))


def remove_secret_files(job: JobPaths) -> None:
    """Removes what ``engine_key_file`` and ``ray_token_file`` have written."""
    for path in job.secret_files():
        path.unlink(missing_ok=True)


def _written(path: Path, secret: str) -> Path:
    if not _has(path, secret):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, secret, private=True, mark=str(os.getpid()))  # engines and routers start at the same time
    return path


def _has(path: Path, secret: str) -> bool:
    """Whether this is the file with the secret, and its owner alone may read it."""
    try:
        return path.stat().st_mode & 0o077 == 0 and path.read_text(encoding="utf-8") == secret
    except (OSError, UnicodeDecodeError):
        return False
