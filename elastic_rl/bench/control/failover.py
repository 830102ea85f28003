"""failover-*: from the end of a leader to the first guarded write of the next one.

Three replicas; the leader is killed (-9), stopped (SIGSTOP: its connections stay open), or asked to end (SIGTERM: it
hands over). What is timed is the announcement that only a working leader writes, under its fencing token.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

from elastic_rl.bench.control.testbed import TTL_S, Replicas, Testbed
from elastic_rl.bench.measurement import Row
from elastic_rl.coordinator.records import Leadership
from elastic_rl.errors import DeadlineExceeded

_HOW = {"kill": (signal.SIGKILL, "kill -9 of the leader → the next one has written", TTL_S + 1.0),
        "stop": (signal.SIGSTOP, "SIGSTOP of the leader → the next one has written", TTL_S + 1.0),
        "term": (signal.SIGTERM, "SIGTERM of the leader → the next one has written", 1.0)}
_LONGEST_S = 30.0


def measure(testbed: Testbed) -> Iterator[Row]:
    trials = 5 if testbed.options.quick else 30
    with testbed.replicas("a", "b", "c") as replicas:
        for how, (number, name, goal) in _HOW.items():
            times = [_trial(replicas, number) for _ in range(trials)]
            # The lease was renewed at most a third of its time to live before.
            soonest = None if how == "term" else TTL_S * 2 / 3
            yield Row.of(f"failover-{how}", name, times, "s", goal=goal, limit=soonest)
            yield Row(id=f"failover-{how}-max", name=f"… at most, of {trials}", value=max(times), unit="s", goal=goal,
                      samples=trials)


def _trial(replicas: Replicas, number: signal.Signals) -> float:
    victim = replicas.leader()
    _, revision = replicas.etcd.range(replicas.keys.leadership())
    with replicas.etcd.watch(replicas.keys.leadership(), start_revision=revision + 1) as changes:
        began = time.monotonic()
        replicas.signal(victim, number)
        while (change := changes.get(_LONGEST_S)) is not None:
            if Leadership.decode(change.kv.value).replica != victim:
                took = time.monotonic() - began
                break
        else:
            raise DeadlineExceeded(f"no replica led within {_LONGEST_S:g} s")
    replicas.end(victim)
    replicas.start(victim)
    return took
