"""store-failover-*, store-watch-*: etcd's leading member of three fails under one client that writes all the time.

Timed is the longest pause between two writes that were answered, and between two changes that a watch returned, from
the fault on. The client and the watch are connected to the member that fails. etcd's timings are its defaults.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator

from elastic_rl.bench.control.testbed import Testbed
from elastic_rl.bench.etcd import Members
from elastic_rl.bench.measurement import Row
from elastic_rl.errors import DeadlineExceeded
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.runtime.waiting import wait_until

_HOW = {"kill": (signal.SIGKILL, "kill -9 of the leading etcd member"), "stop": (signal.SIGSTOP, "SIGSTOP of it")}
_GOAL_S = 2.5
_AFTER_S = 5.0
"""How long after a fault pauses are measured."""
_EVERY_S = 0.005


def measure(testbed: Testbed) -> Iterator[Row]:
    trials = 3 if testbed.options.quick else 15
    with contextlib.ExitStack() as stack:
        members = Members(testbed.folder, stack)
        for how, (number, name) in _HOW.items():
            pauses = [_trial(members, number) for _ in range(trials)]
            for kind, what, times in (("failover", "writes pause", [w for w, _ in pauses]),
                                      ("watch", "a watch pauses", [e for _, e in pauses])):
                yield Row.of(f"store-{kind}-{how}", f"{name} → {what}", times, "s", goal=_GOAL_S)
                yield Row(id=f"store-{kind}-{how}-max", name=f"… at most, of {trials}", value=max(times), unit="s",
                          goal=_GOAL_S, samples=trials)


def _trial(members: Members, number: signal.Signals) -> tuple[float, float]:
    """Seconds of the longest pause of the writes, and of the watch."""
    keys, victim = Keys("bench-store"), _leader(members)
    with _connected_to(members, victim) as etcd:
        revision, done = etcd.put(keys.root + "n", b""), threading.Event()
        written, seen = [time.monotonic()], [time.monotonic()]
        with etcd.watch(keys.root + "n", start_revision=revision + 1) as watch:

            def write() -> None:
                while not done.wait(_EVERY_S):
                    etcd.put(keys.root + "n", b"")
                    written.append(time.monotonic())

            def follow() -> None:
                while not done.is_set():
                    if watch.get(0.1) is not None:
                        seen.append(time.monotonic())

            threads = [threading.Thread(target=work, daemon=True) for work in (write, follow)]
            for thread in threads:
                thread.start()
            wait_until(lambda: len(written) > 50 and len(seen) > 50, timeout_s=20, what="writes")
            fault = time.monotonic()
            members.signal(victim, number)
            time.sleep(_AFTER_S)
            if max(written[-1], seen[-1]) < fault + _AFTER_S / 2:
                raise DeadlineExceeded(f"no write was answered within {_AFTER_S:g} s of the fault")
            members.restore(victim)
            done.set()
            for thread in threads:
                thread.join(20)
    return _longest(written, fault), _longest(seen, fault)


def _longest(times: list[float], fault: float) -> float:
    within = [t for t in times if fault - 1 < t < fault + _AFTER_S]
    return max(later - earlier for earlier, later in zip(within, [*within[1:], within[-1]], strict=True))


def _leader(members: Members) -> int:
    with EtcdClient(members.endpoints, call_timeout_s=2.0) as etcd:
        return int(wait_until(lambda: [i for i, s in enumerate(etcd.statuses()) if s.is_leader], timeout_s=20,
                              what="a leading member")[0])


def _connected_to(members: Members, i: int) -> EtcdClient:
    """A client with the default settings. It picks a member at random, so this retries until it picked this one."""
    while True:
        etcd = EtcdClient(members.endpoints)
        if etcd.endpoint == members.endpoints[i]:
            return etcd
        etcd.close()
