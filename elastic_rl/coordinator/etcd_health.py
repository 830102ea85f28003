"""Health of etcd. A thread of its own asks each member now and then, since one that is stopped answers late."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_rl.coordinator.alerts.state_machine import Condition
from elastic_rl.errors import ElasticRLError
from elastic_rl.etcd.client import EtcdClient, MemberStatus
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Severity

log = logging.getLogger(__name__)

_EVERY_S = 5.0
_MAX_AGE_S = 60.0
_HOLD_S = 10.0
_SLOW_HOLD_S = 30.0


@dataclass(frozen=True)
class Health:
    """The last report. ``read_s``: seconds that a linearizable read took."""

    members: Sequence[MemberStatus] = ()
    read_s: float = 0.0


def conditions(health: Health, slow_s: float, full_fraction: float, assumed_quota: int) -> list[Condition]:
    """What is wrong with etcd, as seen by a replica that still reaches a majority. Pure.

    ``full_fraction``: part of its quota that a member's database may fill; ``assumed_quota``: bytes, for a member whose
    quota is unknown.
    """
    found, n = [], len(health.members)
    silent = [m for m in health.members if m.error]
    margin = n - len(silent) - (n // 2 + 1)
    for member in silent:
        left = "no further member may fail" if margin <= 0 else f"{margin} more may fail"
        # One fault, one alert: the number of further failures that etcd survives is part of the member's own.
        message = f"etcd member {member.endpoint} does not answer; {left}"
        found.append(Condition("etcd.degraded", member.endpoint, message,
                               Severity.ERROR if margin <= 0 else Severity.WARNING, hold_s=_HOLD_S))
    for member in health.members:
        for alarm in member.alarms:
            message = f"etcd member {member.endpoint} has an alarm: {alarm}"
            found.append(Condition("etcd.alarm", member.endpoint, message))
    largest = max(health.members, key=lambda m: m.db_bytes / (m.quota_bytes or assumed_quota), default=None)
    if largest is not None and largest.db_bytes > full_fraction * (quota := largest.quota_bytes or assumed_quota):
        found.append(Condition(
            "etcd.full", "etcd", f"the database of etcd member {largest.endpoint} has {largest.db_bytes >> 20} of "
            f"{quota >> 20} MiB, {largest.db_in_use_bytes >> 20} of them in use: defragment it if most of that is "
            "free, else raise --quota-backend-bytes", Severity.WARNING))
    if health.read_s > slow_s:
        found.append(Condition("etcd.slow", "etcd", f"a read of etcd takes {health.read_s:.2f} s: check its disk and "
                               "network", Severity.WARNING, hold_s=_SLOW_HOLD_S))
    return found


class EtcdProbe:
    """Keeps the last report about etcd."""

    def __init__(self, etcd: EtcdClient, keys: Keys) -> None:
        self._etcd, self._keys = etcd, keys
        self._lock = threading.Lock()
        self._health, self._at = Health(), 0.0
        self._stopping, self._wanted = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="etcd-probe", daemon=True)
        self._thread.start()

    def health(self) -> Health:
        """The last report, an empty one when it is too old; requests a newer one. Never blocks."""
        with self._lock:
            age = time.monotonic() - self._at if self._at else _MAX_AGE_S
            if age >= _EVERY_S:
                self._wanted.set()
            return self._health if age < _MAX_AGE_S else Health()

    def close(self) -> None:
        self._stopping.set()
        self._wanted.set()
        self._thread.join(2.0)

    def _run(self) -> None:
        while self._wanted.wait() and not self._stopping.is_set():
            self._wanted.clear()
            try:
                started = time.monotonic()
                self._etcd.get(self._keys.epoch())
                read_s = time.monotonic() - started
                members = self._etcd.statuses()
            except ElasticRLError as e:
                log.debug("no report about etcd: %s", e)
                continue
            with self._lock:
                self._health, self._at = Health(members, read_s), time.monotonic()
            self._stopping.wait(_EVERY_S / 2)
