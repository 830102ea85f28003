"""How well etcd is: each member asked now and then by a thread of its own, since one that is stopped answers late."""

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
_OLD_S = 60.0
_HOLD_S = 10.0
_SLOW_HOLD_S = 30.0


@dataclass(frozen=True)
class Health:
    """One look at etcd. ``read_s``: seconds of a linearizable read."""

    members: Sequence[MemberStatus] = ()
    read_s: float = 0.0


def conditions(health: Health, slow_s: float, largest_bytes: float) -> list[Condition]:
    """What is wrong with etcd, as far as one can see who still reaches a majority. Pure."""
    found, n = [], len(health.members)
    silent = [m for m in health.members if m.error]
    margin = n - len(silent) - (n // 2 + 1)
    for member in silent:
        left = "no further member may fail" if margin <= 0 else f"{margin} more may fail"
        # Of one fault one alert: how near the end is goes with the member's own.
        message = f"etcd member {member.endpoint} does not answer; {left}"
        found.append(Condition("etcd.degraded", member.endpoint, message,
                               Severity.ERROR if margin <= 0 else Severity.WARNING, hold_s=_HOLD_S))
    for member in health.members:
        for alarm in member.alarms:
            message = f"etcd member {member.endpoint} has an alarm: {alarm}"
            found.append(Condition("etcd.alarm", member.endpoint, message))
    if (size := max((m.db_bytes for m in health.members), default=0)) > largest_bytes:
        found.append(Condition("etcd.full", "etcd", f"etcd's database has {size >> 20} MiB, which is near its quota: "
                               "compact and defragment it, or raise --quota-backend-bytes", Severity.WARNING))
    if health.read_s > slow_s:
        found.append(Condition("etcd.slow", "etcd", f"a read of etcd takes {health.read_s:.2f} s: look at its disk and "
                               "network", Severity.WARNING, hold_s=_SLOW_HOLD_S))
    return found


class EtcdProbe:
    """Keeps the last look at etcd."""

    def __init__(self, etcd: EtcdClient, keys: Keys) -> None:
        self._etcd, self._keys = etcd, keys
        self._lock = threading.Lock()
        self._health, self._at = Health(), 0.0
        self._stopping, self._wanted = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="etcd-probe", daemon=True)
        self._thread.start()

    def health(self) -> Health:
        """The last look, an empty one when it is too old to go by; asks for a newer one. Never blocks."""
        with self._lock:
            age = time.monotonic() - self._at if self._at else _OLD_S
            if age >= _EVERY_S:
                self._wanted.set()
            return self._health if age < _OLD_S else Health()

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
                log.debug("etcd was not looked at: %s", e)
                continue
            with self._lock:
                self._health, self._at = Health(members, read_s), time.monotonic()
            self._stopping.wait(_EVERY_S / 2)
