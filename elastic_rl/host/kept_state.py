"""What a job keeps in its folders when its cluster stops. Only ``down --purge`` deletes it, after it was named and
confirmed (I15: stopping never deletes)."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_rl.config import Config, secrets
from elastic_rl.coordinator.api import auth
from elastic_rl.dcs.security import TOKEN_FILE
from elastic_rl.dcs.storage.disk import owner
from elastic_rl.errors import ConfigError, ElasticRLError
from elastic_rl.etcd.keys import Keys
from elastic_rl.host import cluster_settings

STOPPED = "stopped.json"
"""Name of ``cluster.json`` while the cluster is stopped: its settings hold, and ``up`` continues with its data."""
NODE = "node-0"


@dataclass(frozen=True)
class KeptFolder:
    path: Path
    what: str

    @property
    def nbytes(self) -> int:
        """Bytes that its files take on the disk."""
        return sum(_blocks(p) for p in self.path.rglob("*"))


def folders(cfg: Config) -> list[KeptFolder]:
    """The folders of a job's cluster that hold its state."""
    found = [KeptFolder(cfg.cluster_dir / "etcd", "what the job has decided and done (etcd)")]
    found += [KeptFolder(path, "the same of an earlier cluster") for path in sorted(cfg.cluster_dir.glob("etcd.*"))]
    if owner(chunks(cfg)) in ("", cfg.job):
        found.append(KeptFolder(chunks(cfg), "its versions: policies and the trainer's state"))
    return [folder for folder in found if folder.path.is_dir()]


def chunks(cfg: Config) -> Path:
    """The folder with the chunks of the job's DCS node. A cluster that was started before has it where its settings
    say, which the command line need not name."""
    root = _stored(cfg, "dcs").get("disk_dir") or cfg.dcs.disk_dir
    return (Path(str(root)).expanduser() if root else cfg.cluster_dir / "disk") / NODE


def elsewhere(cfg: Config) -> list[str]:
    """Where a job keeps what is not in its folders, and what ``delete`` leaves there."""
    found = []
    if endpoints := _stored(cfg, "etcd").get("endpoints") or cfg.etcd.endpoints:
        found.append(f"its records, {Keys(cfg.job).root} in the etcd at {', '.join(map(str, endpoints))}")
    if url := _stored(cfg, "dcs").get("durable_url") or cfg.dcs.durable_url:
        found.append(f"its durable versions, in {secrets.redacted_url(str(url))}")
    return found


def can_continue(cfg: Config) -> bool:
    """Whether the data of an own etcd and the versions that they list are both there: after a stop, which saves the
    chunks, and after a crash, where some were saved. An etcd that lists nothing but lost chunks would only mislead."""
    if not (cfg.cluster_dir / "etcd" / "member").is_dir():
        return False
    if (cfg.cluster_dir / STOPPED).exists() and (cfg.dcs.disk_bytes or cfg.dcs.durable_url):
        return True
    return bool(cfg.dcs.disk_bytes) and any(chunks(cfg).glob("??/*"))


def set_aside(path: Path) -> Path | None:
    """Renames a file or folder of an earlier run, by the time of its last change; None where there is none."""
    if not path.exists():
        return None
    when = int(path.stat().st_mtime)
    aside = next(name for n in range(when, when + 1000)
                 if not (name := path.with_name(f"{path.stem}.{n}{path.suffix}")).exists())
    return path.rename(aside)


def delete(cfg: Config) -> list[KeptFolder]:
    """Deletes the state of a job, and the credentials of its cluster; returns the folders that are gone. The cluster
    must be stopped. Raises ElasticRLError for a folder that cannot be deleted."""
    gone = folders(cfg)
    for folder in gone:
        try:
            shutil.rmtree(folder.path)
        except OSError as e:
            raise ElasticRLError(f"{folder.path} cannot be deleted: {e.strerror}",
                                 hint="see who owns the files in it") from e
    for name in (STOPPED, auth.TABLE, auth.CREDENTIALS, auth.VIEWER_TOKEN, TOKEN_FILE):
        (cfg.cluster_dir / name).unlink(missing_ok=True)
    return gone


def commands(cfg: Config) -> Iterator[tuple[str, str]]:
    """Name and command line of what can be done with the state of a stopped job."""
    options = f"--job={shlex.quote(cfg.job)}"
    if cfg.run_dir.resolve() != Config().run_dir.resolve():
        options += f" --run_dir={shlex.quote(str(cfg.run_dir))}"
    yield "resume", f"elastic-rl train --with-cluster {options}"
    yield "export", f"elastic-rl up {options} && elastic-rl versions export policy OUT {options}"
    yield "delete", f"elastic-rl down --purge {options}"


def _stored(cfg: Config, section: str) -> dict[str, Any]:
    """A section of the settings that the cluster was started with, which the command line need not repeat."""
    try:
        found = cluster_settings.stored(cfg.cluster_dir).get(section)
    except ConfigError:  # a damaged file
        return {}
    return found if isinstance(found, dict) else {}


def _blocks(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except FileNotFoundError:  # the cluster still runs
        return 0
