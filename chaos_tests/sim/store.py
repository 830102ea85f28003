"""The model of etcd behind the product's own client class, for worlds that run the product's calls as they are; and the
event log that the independent observer would write of it, for the validators of real runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from chaos_tests.event_log import FORM, Event, Kind
from chaos_tests.history import Operation
from chaos_tests.sim.election import SimulatedEtcd
from elastic_rl.errors import EtcdUnavailable, LeaseLost
from elastic_rl.etcd.client import Changed, ChangedRanges, EtcdClient, Page
from elastic_rl.etcd.transaction import Compare, KeyValue, Op, TxnResult


class Log:
    """The records of one run, as a file of ``event_log`` has them."""

    def __init__(self, world: str, seed: int, *, cluster: str = "", clock: Callable[[], float] = lambda: 0.0,
                 settings: Mapping[str, Any] = MappingProxyType({}), steps: int = 0) -> None:
        """``steps``: that the run is to make; 0: it is no run of steps."""
        self.clock = clock
        self.events: list[Event] = []
        self.write(
            Kind.RUN, form=FORM, scenario=world, seed=seed, schedule={"steps": steps} if steps else {},
            target="simulated", commit="", floor={"answers": 0}, settings={"cluster": cluster, **settings}, versions={},
            baseline=False)

    def write(self, kind: Kind, **fields: Any) -> None:
        self.events.append({"at": self.clock(), "kind": kind.value, **fields})

    def change(self, key: str, kv: KeyValue | None, revision: int) -> None:
        """A key was put, or deleted."""
        self.write(Kind.CHANGE, revision=revision, put=kv is not None, key=key,
                   create=kv.create_revision if kv is not None else 0,
                   value=kv.value.decode() if kv is not None else "")

    def operation(self, operation: Operation) -> None:
        """A client was told the result of a call, or will not be."""
        self.write(Kind.OPERATION, **asdict(operation))

    def end(self, **found: Any) -> list[Event]:
        """All records, with the last one. ``found``: what it has of a job that has ended."""
        self.write(Kind.END, **{"phase": "", "report": {}, "alerts": [], "aborted": "", **found})
        return self.events


class ObservedEtcd(SimulatedEtcd):
    """A model of etcd whose changes are observed: each transaction's together, under its revision."""

    def __init__(self, log: Log, on_put: Callable[[KeyValue], None] = lambda kv: None) -> None:
        """``on_put``: called with each key that was put, after its transaction."""
        super().__init__()
        self._log, self._on_put = log, on_put

    def txn(self, compares: Sequence[Compare], ops: Sequence[Op]) -> int:
        before = {op.key for op in ops if op.key in self.keys}
        if revision := super().txn(compares, ops):
            for op in ops:
                if op.kind == "put" or op.key in before:
                    self._log.change(op.key, self.keys.get(op.key), revision)
            for kv in [self.keys[op.key] for op in ops if op.kind == "put"]:
                self._on_put(kv)
        return revision

    def revoke(self, lease: int) -> None:
        keys = [key for key, kv in self.keys.items() if kv.lease == lease]
        super().revoke(lease)
        for key in (key for key in keys if key not in self.keys):
            self._log.change(key, None, self.revision)


@dataclass
class SimLease:
    """What ``EtcdClient.keepalive`` gives: kept alive by the world while its process lives."""

    id: int
    client: SimClient

    @property
    def alive(self) -> bool:
        return self.id in self.client.model.leases

    def close(self) -> None:
        self.client.leases.discard(self.id)
        if not self.client.dead:
            self.client.model.revoke(self.id)


class SimClient(EtcdClient):
    """The client of one process of a world: the product's own client on the model of etcd. ``on_call``: called before
    each call, while which everything else may happen."""

    def __init__(self, model: SimulatedEtcd, clock: Callable[[], float], on_call: Callable[[], None] = lambda: None
                 ) -> None:
        self.model, self._now, self.on_call = model, clock, on_call
        self.dead = False
        """Whether its process was killed, or is cut off: no call arrives."""
        self.leases = set[int]()
        """Those that the process keeps alive."""
        self.read_last = ""
        """The range that it has read last, until it writes."""

    def reach(self) -> None:
        """A call of the process, of etcd or of another: raises EtcdUnavailable where it can make none."""
        if not self.dead:
            self.on_call()
        if self.dead:
            raise EtcdUnavailable("this process was killed")

    def keep_alive(self) -> None:
        """What the client's thread does for the leases of a process that lives."""
        for lease in self.leases if not self.dead else ():
            self.model.keep_alive(lease, self._now())

    # -- what the product calls ----------------------------------------------------------------------------------------
    def get(self, key: str) -> KeyValue | None:
        self.reach()
        return self.model.keys.get(key)

    def range(self, prefix: str, *, limit: int = 0, newest_first: bool = False, revision: int = 0
              ) -> tuple[list[KeyValue], int]:
        self.reach()
        self.read_last = prefix
        found = sorted(self.model.range(prefix), key=lambda kv: -kv.create_revision if newest_first else kv.key)
        return found[:limit or None], self.model.revision

    def page(self, prefix: str, *, limit: int, after: str = "", before: str = "", newest_first: bool = False,
             revision: int = 0) -> Page:
        found = [kv for kv in self.range(prefix)[0] if kv.key > after and (not before or kv.key < before)]
        return Page(found[:limit], self.model.revision, len(found) > limit)

    def changed(self, prefixes: Sequence[str], keys: Sequence[str] = (), *, since: int, limit: int) -> ChangedRanges:
        self.reach()
        ranges = list[Changed]()
        for prefix in prefixes:
            found = self.model.range(prefix)
            kvs = [kv for kv in found if kv.mod_revision > since]
            ranges.append(Changed(kvs[:limit], len(found), len(kvs) > limit))
        return ChangedRanges(ranges, [kv for key in keys if (kv := self.model.keys.get(key)) is not None],
                             self.model.revision)

    def txn(self, compares: Sequence[Compare], then: Sequence[Op], orelse: Sequence[Op] = ()) -> TxnResult:
        self.reach()
        self.read_last = ""
        if any(op.lease and op.lease not in self.model.leases for op in then):
            raise LeaseLost("the lease has ended")
        writes = [op for op in then if op.writes]
        held = all(self.model._holds(c) for c in compares)
        gone = sum(op.kind == "delete" and op.key in self.model.keys for op in then)
        reads = tuple(self._reads(then if held else orelse))
        if held and writes:
            self.model.txn((), writes)
        return TxnResult(held, self.model.revision, reads, gone if held else 0)

    def _reads(self, ops: Sequence[Op]) -> Iterator[KeyValue]:
        for op in ops:
            if op.kind == "get" and (found := self.model.keys.get(op.key)) is not None:
                yield found
            elif op.kind == "get_prefix":
                yield from sorted(self.model.range(op.key), key=lambda kv: kv.key)

    def count(self, prefix: str, *, after: str = "", before: str = "") -> int:
        return sum(kv.key > after and (not before or kv.key < before) for kv in self.range(prefix)[0])

    def grant(self, ttl_s: int) -> int:
        self.reach()
        return self.model.grant(self._now())

    def revoke(self, lease: int) -> None:
        self.reach()
        self.model.revoke(lease)

    def keepalive(self, ttl_s: int) -> SimLease:  # type: ignore[override]
        lease = self.grant(ttl_s)
        self.leases.add(lease)
        return SimLease(lease, self)

    def close(self) -> None:
        pass


class Interference:
    """Has something else happen at the calls of the product: between what it reads and what it writes."""

    def __init__(self, happens: Callable[[], bool], anything: Callable[[], None]) -> None:
        """``happens``: whether it does at this call. ``anything``: one thing, which is not interrupted in turn."""
        self._happens, self._anything, self._depth = happens, anything, 0

    def __call__(self) -> None:
        if self._depth == 0 and self._happens():
            with self.quiet():
                self._anything()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Inside, nothing else happens."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
