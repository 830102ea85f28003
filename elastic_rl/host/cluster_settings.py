"""The settings that a cluster was started with, in its folder, and those of a command line on top of them. Those of a
run are stored in the same way, in the folder of its job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from elastic_rl import config
from elastic_rl.config import Config, EtcdConfig, reading, yaml_text
from elastic_rl.config.root import CLUSTER_SECTIONS
from elastic_rl.errors import ConfigError
from elastic_rl.host.paths import JobPaths, is_own_folder
from elastic_rl.runtime.files import replace_file, require_own_folder

OTHER_RUN_DIR = "see who has put it there, or set another run_dir"
"""Hint of an error about a cluster's folder that is not its user's."""
_LOCATION = ("job", "run_dir", "cluster")


def location(given: Mapping[str, Any]) -> Config:
    """A configuration with nothing but the job, its folder and its cluster, as given; a job that was started before is
    on the cluster that it was started on. Raises ConfigError."""
    cfg = config.parse({key: given[key] for key in _LOCATION if key in given})
    if "cluster" in given:
        return cfg
    found = cluster_of(JobPaths.of(cfg.model_copy(update={"run_dir": cfg.run_dir.expanduser()})))
    return config.parse({**cfg.model_dump(include=set(_LOCATION)), "cluster": found})


def cluster_of(job: JobPaths) -> str:
    """Name of the cluster that a job was started on; empty for one of its own, and for another user's job, whose file
    is not followed: it names what to connect to. Raises ConfigError for a damaged file."""
    if not is_own_folder(job.private):
        return ""
    try:
        return config.parse({"cluster": job.cluster_name.read_text(encoding="utf-8").strip() or None}).cluster
    except FileNotFoundError:
        return ""
    except (ConfigError, UnicodeDecodeError) as e:
        raise ConfigError(f"{job.cluster_name} is damaged: it has no name of a cluster", hint=(
            "write the name of the cluster that the job was started on into it")) from e


def save(cfg: Config, path: Path) -> None:
    """Stores the settings, readable by their owner only: URLs of alerts and of the durable store hold passwords."""
    replace_file(path, document(cfg), private=True)


def document(cfg: Config) -> bytes:
    """What ``save`` stores."""
    return yaml_text.dump(cfg.model_dump(mode="json")).encode()


def snapshot(path: Path) -> bytes | None:
    """The stored settings, for ``restore``; None where there are none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def restore(path: Path, before: bytes | None) -> None:
    """Puts back what ``snapshot`` returned. The file is not replaced when nothing has changed it: a host agent would
    read it again."""
    if before is None:
        path.unlink(missing_ok=True)
    elif snapshot(path) != before:
        replace_file(path, before, private=True)


@contextlib.contextmanager
def unchanged_on_error(path: Path) -> Iterator[None]:
    """Restores the stored settings when the block raises."""
    before = snapshot(path)
    try:
        yield
    except BaseException:
        restore(path, before)
        raise


def stored(path: Path) -> dict[str, Any]:
    """The settings that ``up`` stored last; empty where there are none. Raises ConfigError for a damaged file, and
    PreflightFailed for one in a folder of another user, or behind a link: they name folders to write to and to delete,
    and plug-ins to run."""
    if not path.exists():
        return {}
    require_own_folder(path.parent, hint=OTHER_RUN_DIR)
    return config.given(path, ())


def on_top(path: Path, given: Mapping[str, Any], *, of_file: Mapping[str, Any] | None = None) -> Config:
    """The settings stored in a file, with the given ones on top. ``of_file``: those of the given ones that a
    file names. Mappings with keys of the user's own that a file has, such as ``pools`` and ``rollout.reward_options``,
    take the place of the stored ones, which may have other keys. Raises ConfigError."""
    base = stored(path)
    for *section, leaf in reading.mappings(Config):
        under, named = _at(base, section), _at(of_file or {}, section)
        if leaf in under and leaf in named:
            del under[leaf]
    try:
        return config.parse(_merged(base, given))
    except ConfigError as e:
        if _is_valid(base):
            raise
        # Nobody has typed the key that it names.
        raise ConfigError(f"of the settings stored in {path}, with those given on top: {e.message}",
                          hint=f"correct that file, or give them again with -c{f'; {e.hint}' if e.hint else ''}") from e


def with_sections_of_cluster(path: Path, cfg: Config, given: Mapping[str, Any]) -> Config:
    """The settings of a job with the sections of its cluster, which are stored in a file. ``given``: what the command
    line names. Raises ConfigError where that contradicts them: nobody would follow it."""
    if not (of_cluster := stored(path)):
        raise ConfigError(f"{path} is gone, the settings of cluster {cfg.cluster}",
                          hint=f"`elastic-rl up --cluster={cfg.cluster}` with its settings writes it again")
    holds = config.parse({name: of_cluster.get(name, {}) for name in CLUSTER_SECTIONS})
    wanted = config.parse({name: _merged(of_cluster.get(name) or {}, given.get(name) or {})
                           for name in CLUSTER_SECTIONS})
    if other := [name for name in CLUSTER_SECTIONS if getattr(wanted, name) != getattr(holds, name)]:
        raise ConfigError(f"the settings in {' and '.join(other)} are those of cluster {cfg.cluster}, and these are "
                          f"others", hint=f"leave them out; `elastic-rl up --cluster={cfg.cluster}` sets them")
    return cfg.model_copy(update={name: getattr(holds, name) for name in CLUSTER_SECTIONS})


def _is_valid(values: Mapping[str, Any]) -> bool:
    try:
        config.parse(values)
    except ConfigError:
        return False
    return True


def _at(values: Mapping[str, Any], path: list[str]) -> dict[str, Any]:
    """The section at ``path``; empty where there is none."""
    found: Any = values
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def of_etcd(path: Path, otherwise: EtcdConfig) -> EtcdConfig:
    """How to connect to a cluster's etcd by its stored settings; ``otherwise`` where there are none, or damaged ones: a
    run must be stopped all the same."""
    try:
        section = stored(path).get("etcd")
        return config.parse({"etcd": section}).etcd if section else otherwise
    except ConfigError:
        return otherwise


def external_endpoints(path: Path) -> list[str]:
    """``etcd.endpoints`` of the stored settings: empty for a cluster with an etcd of its own. Raises ConfigError."""
    section = stored(path).get("etcd")
    found = section.get("endpoints") if isinstance(section, dict) else None
    if found is None and section is not None or not isinstance(found or [], list):
        raise ConfigError(f"{path} has no valid etcd.endpoints", hint="give the settings again with -c")
    return [str(endpoint) for endpoint in found or []]


def _merged(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(base)
    for key, value in top.items():
        under = found.get(key)
        both = isinstance(under, Mapping) and isinstance(value, Mapping)
        found[key] = _merged(under, value) if both else value  # type: ignore[arg-type]
    return found
