"""Records of a job after weeks: versions, events, steps, operations, pools. Written straight to etcd."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from elastic_rl.bench.control.simulated_members import ENGINES_PER_POOL
from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.client import EtcdClient, Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import (
    Operation,
    OperationKind,
    OperationState,
    PoolSpec,
    PoolStatus,
    StepMetrics,
    Version,
    VersionState,
)
from elastic_rl.etcd.transaction import batches

STREAM = "policy"
VERSIONS = EVENTS = 10_000
RUNNING_OPERATIONS, ENDED_OPERATIONS = 800, 200
"""The API begins no further operation where there are 1,000; the leader keeps 200 that have ended."""
STEPS, POOLS = 2_000, 100
SETTINGS: dict[str, Any] = {"coordinator": {"max_events": EVENTS + 1000, "max_engines": POOLS * ENGINES_PER_POOL},
                            "dcs": {"keep_versions": VERSIONS + 1000}}
"""Settings of the job: with the defaults the leader would delete most of the events and versions."""


def write_history(etcd: EtcdClient, keys: Keys) -> None:
    """Versions, events, and metrics of steps."""
    now = time.time()
    etcd.put(keys.stream_next(STREAM), str(VERSIONS + 1).encode())  # as the catalog leaves it
    _write(etcd, (Op.put(keys.version(STREAM, n), _version(n, now).encode()) for n in range(1, VERSIONS + 1)))
    etcd.put(keys.stream_head(STREAM), _version(VERSIONS, now).encode())
    _write(etcd, (events.put_op(keys, events.build(event_kinds.BENCH_MEASURED, STREAM, f"version {n} is committed",
                                                   at=now - EVENTS + n)) for n in range(EVENTS)))
    stages = {"total": 12.5, "sync": 0.5, "generate": 8.0, "reward": 0.5, "advantage": 0.1, "train": 3.0}
    _write(etcd, (Op.put(keys.step_metrics(n), StepMetrics(
        step=n, at=now - STEPS + n, reward=0.5, samples=512, tokens=65536, policy_version=n,
        seconds=stages).encode()) for n in range(1, STEPS + 1)))


def write_pools(etcd: EtcdClient, keys: Keys) -> None:
    """Pools that have their desired number of engines."""
    names = [f"pool-{n:03d}" for n in range(POOLS)]
    _write(etcd, (Op.put(keys.pool_spec(name), PoolSpec(name=name, desired=ENGINES_PER_POOL).encode())
                  for name in names))
    _write(etcd, (Op.put(keys.pool_status(name), PoolStatus(name=name, ready=ENGINES_PER_POOL, starting=0, draining=0
                                                            ).encode()) for name in names))


def write_operations(etcd: EtcdClient, keys: Keys) -> str:
    """Operations that have ended, and drains that wait for their engines. Returns the id of the newest."""
    made = [operation(n, time.time()) for n in range(ENDED_OPERATIONS + RUNNING_OPERATIONS)]
    _write(etcd, (Op.put(keys.operation(op.id), op.encode()) for op in made))
    return made[-1].id


def _version(n: int, now: float) -> Version:
    at = now - 60.0 * (VERSIONS - n)
    return Version(stream=STREAM, number=n, state=VersionState.COMMITTED, epoch=1, manifest=f"{n:032x}",
                   nbytes=1 << 30, sources=["node-0"], created_at=at, committed_at=at, meta={"step": n})


def operation(n: int, now: float) -> Operation:
    """The n-th: one that has ended, or the drain of an engine that stays."""
    at, ended = now - 3600.0 + n, n < ENDED_OPERATIONS
    return Operation(id=f"op-{int(at * 1000):013d}-{n:06x}", kind=OperationKind.DRAIN, target=f"engines/m-{n:04d}",
                     params={"pool": f"pool-{n // ENGINES_PER_POOL:03d}", "replace": True},
                     state=OperationState.SUCCEEDED if ended else OperationState.RUNNING, by="operator",
                     created_at=at, updated_at=at, timeout_s=86400.0, ended_at=at + 1 if ended else 0.0)


def _write(etcd: EtcdClient, ops: Iterable[Op]) -> None:
    for batch in batches(list(ops)):
        etcd.txn([], batch)
