"""The secrets of a job on this host, derived from the cluster's, and the files with them for programs that take them in
no other way. A file may be removed at any time: who starts such a program writes it again."""

from __future__ import annotations

from pathlib import Path

from elastic_rl.config import Config
from elastic_rl.dcs.security import Security
from elastic_rl.host.paths import ClusterPaths, JobPaths
from elastic_rl.net.cluster_secret import ClusterSecret
from elastic_rl.runtime.files import replace_file


def dcs_security(cfg: Config, *, required: bool = False) -> Security:
    """What a process of the job needs to call DCS nodes and trainer ranks. Without a cluster on this host that has made
    a secret the token is the one of ``dcs.token_file``, or none. ``required``: there must be one, for who serves:
    without a token everybody is admitted. Raises ConfigError."""
    secret = ClusterPaths.of(cfg).secret
    derives = not cfg.dcs.token_file and (required or secret.exists())
    return Security.from_config(cfg.dcs, ClusterSecret.read(secret).dcs(cfg.job) if derives else "")


def engine_key(cfg: Config) -> str:
    """The key of the job's engines and routers. Raises ConfigError."""
    return ClusterSecret.read(ClusterPaths.of(cfg).secret).engine(cfg.job)


def engine_key_file(cfg: Config) -> Path:
    """The file with ``engine_key``, which is written unless it is there. Raises ConfigError and OSError."""
    return _written(JobPaths.of(cfg).engine_key, engine_key(cfg))


def ray_token_file(cfg: Config, epoch: int) -> Path:
    """The file with the token of the Ray of an epoch. Ray reads it when it starts, or connects. The processes of an
    earlier epoch read the file of this one, and are refused. Raises ConfigError and OSError."""
    return _written(JobPaths.of(cfg).ray_token, ClusterSecret.read(ClusterPaths.of(cfg).secret).ray(cfg.job, epoch))


def _written(path: Path, secret: str) -> Path:
    if not _has(path, secret):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, secret, private=True)
    return path


def _has(path: Path, secret: str) -> bool:
    """Whether this is the file with the secret, and its owner alone may read it."""
    try:
        return path.stat().st_mode & 0o077 == 0 and path.read_text() == secret
    except (OSError, UnicodeDecodeError):
        return False
