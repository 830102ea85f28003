"""What a job is to do, as etcd has it: its settings and its submission, sealed with a key of the cluster's secret.

They hold passwords (URLs of alerts and of the durable store, options of plug-ins, the submitter's environment), and
they name programs and plug-ins, which the job's processes run. So who can only read etcd learns none of them, and who
can only write to it has none of his own accepted.
"""

from __future__ import annotations

import base64
import json
import secrets
import time
from collections.abc import Sequence

from cryptography.fernet import Fernet, InvalidToken

from elastic_rl import config
from elastic_rl.config import Config
from elastic_rl.config.root import CLUSTER_SECTIONS
from elastic_rl.errors import ConfigError
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.cluster_records import JobRecord
from elastic_rl.etcd.decoding import decode_bytes
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.etcd.transaction import Compare
from elastic_rl.net.cluster_secret import ClusterSecret

_OF_THE_CLUSTER = frozenset({*CLUSTER_SECTIONS, "run_dir"})


class OtherSecret(ConfigError):
    """Settings were not sealed with the secret that is to open them."""


def sealed(cfg: Config, secret: ClusterSecret) -> str:
    """The settings of ``cfg.job`` for its record."""
    values = cfg.model_dump(mode="json", exclude=set(_OF_THE_CLUSTER))
    return seal(json.dumps(values).encode(), cfg.job, secret).decode()


def opened(settings: str, job: str, secret: ClusterSecret, cluster: Config) -> Config:
    """The settings of a job, with the sections of its cluster. Raises ConfigError for what was not sealed under this
    secret for this job, and for settings that this release cannot use."""
    values = json.loads(unseal(settings.encode(), job, secret))
    if not isinstance(values, dict):
        raise ConfigError(f"the settings in the record of job {job} are no mapping", hint="submit the job again")
    return config.parse({**values, **cluster.model_dump(mode="json", include=set(_OF_THE_CLUSTER)),
                         "job": job})


def submit(etcd: EtcdClient, keys: ClusterKeys, cfg: Config, secret: ClusterSecret, *, resubmit: bool = True,
           reseal: bool = True, token: Sequence[Compare] = ()) -> None:
    """Writes the record of ``cfg.job``, or the settings in the one that is there unless they are these. ``resubmit``:
    also where it has others. ``reseal``: also where they were sealed with another secret, which the coordinators that
    run must then not have. ``token``: the fencing token of a writer that may be stale.

    Raises Fenced, OtherSecret, ConfigError for a record that this release cannot read, and EtcdUnavailable.
    """
    found = etcd.get(keys.job(cfg.job))
    if found is not None:
        record = read_record(found.value, cfg.job)
        try:
            if opened(record.settings, cfg.job, secret, cfg) == cfg or not resubmit:
                return
        except OtherSecret:
            if not reseal:
                raise
        except ConfigError:  # settings of another release: replaced by those of this one
            pass

    def change(raw: bytes | None) -> bytes:
        before = read_record(raw, cfg.job) if raw is not None else JobRecord(
            id=secrets.token_hex(8), submitted_at=time.time())
        return before.replace(settings=sealed(cfg, secret), stop_s=cfg.trainer.stop_timeout_s).encode()

    etcd.update(keys.job(cfg.job), change, guards=token)


def seal(raw: bytes, job: str, secret: ClusterSecret) -> bytes:
    """What nobody can read or make without the cluster's secret, of this job alone."""
    return _fernet(secret, job).encrypt(raw)


def unseal(token: bytes, job: str, secret: ClusterSecret) -> bytes:
    """What was sealed. Raises OtherSecret for what was not sealed with this secret for this job."""
    try:
        return _fernet(secret, job).decrypt(token)
    except InvalidToken as e:
        raise OtherSecret(f"the settings of job {job} were not sealed with this cluster's secret",
                          hint="submit the job again, and restart what still runs with an older secret") from e


def read_record(raw: bytes, job: str) -> JobRecord:
    """The record of a job. Raises ConfigError for one that this release cannot read."""
    found = decode_bytes(raw, JobRecord)
    if found is None:
        raise ConfigError(f"the record of job {job} in etcd cannot be read",
                          hint="a later release may have written it: use that one")
    return found


def _fernet(secret: ClusterSecret, job: str) -> Fernet:
    return Fernet(base64.urlsafe_b64encode(bytes.fromhex(secret.settings(job))))
