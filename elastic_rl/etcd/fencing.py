"""The fencing epoch of a run: raised by each new driver, carried by every writer, checked inside every write.

The epoch's number is the version of its key (etcd counts the puts), so a write can be made conditional on the number
alone, whoever holds the epoch.
"""

from __future__ import annotations

import time
from typing import Any

from elastic_rl.errors import Conflict, Fenced
from elastic_rl.etcd import events
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Epoch, Event, Severity
from elastic_rl.etcd.transaction import Compare, Op

_TRIES = 32


def raise_epoch(etcd: EtcdClient, keys: Keys, holder: str) -> Epoch:
    """Begins the next epoch for ``holder``; from here on every write of an earlier one fails. The first is 1."""
    key = keys.epoch()
    version = current_epoch(etcd, keys)
    for _ in range(_TRIES):
        # Guarded, although a lower number could never win: two drivers that start at once get two epochs.
        guard, put = ending(keys, version, holder)
        outcome = etcd.txn([guard], [put], [Op.get(key)])
        if outcome.succeeded:
            return Epoch.decode(put.data)
        found = outcome.get(key)
        version = found.version if found else 0
    raise Conflict(f"{key} was raised by others during each of {_TRIES} tries")


def ending(keys: Keys, number: int, holder: str) -> tuple[Compare, Op]:
    """Condition and write that end epoch ``number`` and begin the next one, for a transaction of the caller's."""
    epoch = Epoch(number=number + 1, holder=holder, started_at=time.time())
    return epoch_guard(keys, number), Op.put(keys.epoch(), epoch.encode())


def current_epoch(etcd: EtcdClient, keys: Keys) -> int:
    """Number of the epoch that may write; 0 before the first."""
    kv = etcd.get(keys.epoch())
    return kv.version if kv else 0


def epoch_guard(keys: Keys, number: int) -> Compare:
    """The condition that makes a transaction fail once the run has a later epoch than ``number``."""
    return Compare.version(keys.epoch(), "==", number)


def write(etcd: EtcdClient, keys: Keys, number: int, *ops: Op) -> None:
    """Carries the operations out if ``number`` is still the epoch that may write; raises Fenced, with nothing done."""
    if not etcd.txn([epoch_guard(keys, number)], ops).succeeded:
        raise Fenced(f"epoch {number} of job {keys.job} is over", hint="stop; another incarnation runs the job")


def emit(etcd: EtcdClient, keys: Keys, number: int, kind: str, subject: str, message: str, *,
         severity: Severity = Severity.INFO, **data: Any) -> Event:
    """Writes an event of now if ``number`` is still the epoch that may write; ``data`` must be JSON-able. Raises Fenced
    and EtcdUnavailable."""
    event = events.build(kind, subject, message, severity=severity, **data)
    write(etcd, keys, number, events.put_op(keys, event))
    return event


def require_epoch(etcd: EtcdClient, keys: Keys, number: int) -> None:
    """Raises Fenced unless ``number`` is the epoch that may write; so a failed guard is told from other conditions."""
    now = current_epoch(etcd, keys)
    if now != number:
        raise Fenced(f"epoch {number} of job {keys.job} is over; the run is in epoch {now}")
