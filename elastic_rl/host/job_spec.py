"""What a job decided at its first start, in etcd; later starts are compared with it (I13).

A job may still change everything while nothing of it is committed: then its spec is replaced.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from datetime import date

from elastic_rl.config import Config, Stream
from elastic_rl.config.fixed_settings import ChangedSetting, changes, fixed_settings
from elastic_rl.errors import ConfigError
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient, Op
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import JobSpec, JobStatus

log = logging.getLogger(__name__)

_TEMPLATE_DATE = "data.template_date"
_SHOWN = 12
"""Changed settings that an error names; the others are counted."""


@dataclass(frozen=True)
class Decided:
    """What a job has decided so far. ``spec`` None: a new one, or one of a release that recorded none."""

    spec: JobSpec | None
    epoch: int
    committed: bool
    """Whether there is a version, or a step, that depends on its settings."""
    sft_is_over: bool


def read(etcd: EtcdClient, keys: Keys) -> Decided:
    """Raises EtcdUnavailable."""
    epoch = fencing.current_epoch(etcd, keys)
    spec = readable_one(etcd.get(keys.job_spec()), JobSpec)
    status = readable_one(etcd.get(keys.job_status()), JobStatus) or JobStatus(phase="")
    # The policy stream begins with the version after the SFT phase.
    policy, state = (etcd.get(keys.stream_head(s)) is not None for s in (Stream.POLICY, Stream.TRAINER_STATE))
    sft_is_over = policy or status.step > 0 or status.phase in ("rl", "finished")
    return Decided(spec, epoch, policy or state or sft_is_over, sft_is_over)


def with_template_date(cfg: Config, decided: Decided) -> Config:
    """The settings with the date that the job's chat templates write: the configured one, else the one that the job has
    decided, also before it committed anything, else today's."""
    if cfg.data.template_date is not None:
        return cfg
    known = decided.spec.settings.get(_TEMPLATE_DATE) if decided.spec is not None else None
    day = date.fromisoformat(known) if known else date.today()
    return cfg.model_copy(update={"data": cfg.data.model_copy(update={"template_date": day})})


def require_same(cfg: Config, decided: Decided) -> None:
    """Raises ConfigError, which names each setting, when ``cfg`` contradicts what the job has done."""
    if decided.spec is None or not decided.committed:
        return
    found = changes(decided.spec.settings, fixed_settings(cfg), sft_is_over=decided.sft_is_over)
    if found:
        raise _contradiction(cfg.job, found)


def _contradiction(job: str, found: list[ChangedSetting]) -> ConfigError:
    lines = [str(change) for change in found[:_SHOWN]]
    if len(found) > _SHOWN:
        lines.append(f"and {len(found) - _SHOWN} more")
    if any(change.key.startswith("model.") for change in found):
        other = "start a new job with `--job=NEW`"
    else:
        other = f"start a new job from this one's weights with `--job=NEW --from-job={job}`"
    return ConfigError(f"job {job} cannot be resumed with other settings than it has decided:\n  " + "\n  ".join(lines),
                       hint=f"set them back, or {other}")


def record(etcd: EtcdClient, keys: Keys, cfg: Config, decided: Decided, *, from_job: str = "",
           from_version: int = 0) -> JobSpec:
    """Writes the spec of a job that has none, or of one that has committed nothing; returns the one that holds.

    Raises Fenced when a driver has started since ``decided`` was read, and EtcdUnavailable.
    """
    spec = JobSpec(settings=fixed_settings(cfg), created_at=time.time(), from_job=from_job, from_version=from_version)
    old = decided.spec
    if old is not None and (decided.committed or old.replace(created_at=spec.created_at) == spec):
        return old
    if decided.committed:
        log.warning("job %s has versions and no record of its settings; from now on it keeps the present ones", cfg.job)
    fencing.write(etcd, keys, decided.epoch, Op.put(keys.job_spec(), spec.encode()))
    return spec
