"""Fencing: writes that etcd refuses once their writer has been superseded (I1).

A fencing token is a set of conditions that hold only while its holder may write: the run's epoch, or a leader's term.
``FencedWriter`` puts them into every transaction of the holder, events included.

The epoch of a run is raised by each global restart. Its number is the version of its key (etcd counts the puts), so a
write can be made conditional on the number alone, for any holder of the epoch. Within an epoch the drivers that follow
one another have generations, and the replicas of the actor have terms, which are counted in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from elastic_rl.errors import Conflict, Fenced
from elastic_rl.etcd import events
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.cluster_records import driver_of
from elastic_rl.etcd.event_kinds import EventKind
from elastic_rl.etcd.keys import ClusterKeys, Keys, LeaderKeys
from elastic_rl.etcd.records import Epoch, Event, Severity
from elastic_rl.etcd.transaction import Compare, Op, TxnResult

_TRIES = 32
GLOBAL_RESTART = "global restart"
"""Holder of an epoch that a global restart has begun, and in which no driver has begun yet."""


class FencedWriter:
    """Writes under one fencing token. Every method raises Fenced, with nothing written, once the token no longer holds.

    Calling it runs a transaction as ``GuardedWrite`` has it. Thread-safe.
    """

    def __init__(self, etcd: EtcdClient, keys: LeaderKeys, token: Callable[[], Sequence[Compare]], holder: str) -> None:
        """``token``: the conditions as of now; may raise Fenced. ``holder``: who writes, for the error's text."""
        self._etcd, self._keys, self._token, self._holder = etcd, keys, token, holder

    @classmethod
    def of_epoch(cls, etcd: EtcdClient, keys: Keys, number: int) -> Self:
        """A writer of the run's epoch ``number``."""
        guard = [epoch_guard(keys, number)]
        return cls(etcd, keys, lambda: guard, f"epoch {number} of job {keys.job}")

    @classmethod
    def of_term(cls, etcd: EtcdClient, keys: Keys, epoch: int, term: int) -> Self:
        """A writer of the actor's term ``term`` in the run's epoch ``epoch``."""
        guards = [epoch_guard(keys, epoch), Compare.version(keys.actor_term(), "==", term)]
        return cls(etcd, keys, lambda: guards, f"term {term} of the actor of job {keys.job}")

    @classmethod
    def of_driver(cls, etcd: EtcdClient, keys: Keys, epoch: int, generation: int) -> Self:
        """A writer of the driver of generation ``generation`` in the run's epoch ``epoch``."""
        guards = [epoch_guard(keys, epoch), Compare.version(keys.driver(), "==", generation)]
        return cls(etcd, keys, lambda: guards, f"driver {generation} in epoch {epoch} of job {keys.job}")

    @classmethod
    def of_formation(cls, etcd: EtcdClient, keys: Keys, epoch: int, group: str, number: int) -> Self:
        """A writer of the formation ``number`` of a trainer group in the run's epoch ``epoch``; 0: of any."""
        if not number:
            return cls.of_epoch(etcd, keys, epoch)
        guards = [epoch_guard(keys, epoch), Compare.version(keys.formation(group), "==", number)]
        return cls(etcd, keys, lambda: guards, f"formation {number} of the group {group} of job {keys.job}")

    @classmethod
    def of_assignment(cls, etcd: EtcdClient, cluster: ClusterKeys, job: str, generation: int) -> Self:
        """A writer of who carries a job out, by ``assigned``."""
        guards = assigned(cluster, job, generation)
        return cls(etcd, Keys(job), lambda: guards, f"assignment {generation} of {driver_of(job)}")

    @property
    def guards(self) -> Sequence[Compare]:
        """The conditions as of now, for a transaction of the caller's. May raise Fenced."""
        return self._token()

    def require(self) -> None:
        """Raises Fenced when the token no longer holds, and EtcdUnavailable."""
        self.txn((), ())

    def txn(self, compares: Sequence[Compare], then: Sequence[Op], orelse: Sequence[Op] = ()) -> TxnResult:
        """Makes a transaction as ``EtcdClient.txn`` does, under the token. ``orelse`` runs when the token holds and a
        comparison does not."""
        token = self._token()
        reads = list(dict.fromkeys([*(Op.get(guard.key) for guard in token), *orelse]))
        outcome = self._etcd.txn([*token, *compares], then, reads)
        if not outcome.succeeded and not all(guard.holds(outcome.get(guard.key)) for guard in token):
            raise Fenced(f"{self._holder} is over", hint="stop; another incarnation has taken over")
        return outcome

    def __call__(self, compares: Sequence[Compare], then: Sequence[Op]) -> bool:
        """Runs ``then`` if the comparisons hold, and returns whether they did."""
        return self.txn(compares, then).succeeded

    def write(self, *ops: Op) -> None:
        """Runs the operations, all in one transaction."""
        self.txn((), ops)

    def emit(self, kind: EventKind, subject: str, message: str, *, severity: Severity = Severity.INFO,
             compares: Sequence[Compare] = (), ops: Sequence[Op] = (), **data: Any) -> Event | None:
        """Writes an event of now, together with ``ops``, if ``compares`` hold; None when they do not."""
        event = events.build(kind, subject, message, severity=severity, **data)
        return event if self.write_event(event, compares, ops) else None

    def write_event(self, event: Event, compares: Sequence[Compare] = (), ops: Sequence[Op] = ()) -> bool:
        """Writes an event that was built, as ``emit``; False when ``compares`` do not hold, or it was written before.
        Who repeats this after an answer that was lost writes it once."""
        absent = Compare.absent(self._keys.event(event.id))
        return self([absent, *compares], [*ops, events.put_op(self._keys, event)])


def assigned(keys: ClusterKeys, job: str, generation: int) -> list[Compare]:
    """The fencing token of who carries a job out: the driver's assignment is of this generation. None for 0, which is
    for a driver that was started without an assignment."""
    return [Compare.version(keys.assignment(driver_of(job)), "==", generation)] if generation else []


def raise_epoch(etcd: EtcdClient, keys: Keys, holder: str, token: Sequence[Compare] = ()) -> Epoch:
    """Begins the next epoch for ``holder``; every later write of an earlier one fails. The first is 1. Raises Fenced
    where the token does not hold under which ``holder`` may begin one (``assigned``)."""
    key, writer = keys.epoch(), FencedWriter(etcd, keys, lambda: token, holder)
    version = current_epoch(etcd, keys)
    for _ in range(_TRIES):
        # Guarded, although a lower number could never win: two drivers that start at once get two epochs.
        guard, put = next_epoch(keys, version, holder)
        outcome = writer.txn([guard], [put], [Op.get(key)])
        if outcome.succeeded:
            return Epoch.decode(put.data)
        found = outcome.get(key)
        version = found.version if found else 0
    raise Conflict(f"{key} was raised concurrently in each of {_TRIES} tries")


def ensure_epoch(etcd: EtcdClient, keys: Keys, holder: str) -> int:
    """Number of the epoch that may write; begins the first one for ``holder`` where there is none. Callers that do so
    at once get the same one: none of them is fenced by another."""
    if not (number := current_epoch(etcd, keys)):
        guard, put = next_epoch(keys, 0, holder)
        outcome = etcd.txn([guard], [put], [Op.get(keys.epoch())])
        found = outcome.get(keys.epoch()) if not outcome.succeeded else None
        number = found.version if found else 1
    return number


def next_epoch(keys: Keys, number: int, holder: str) -> tuple[Compare, Op]:
    """Condition and write that end epoch ``number`` and begin the next one, for a transaction of the caller's."""
    epoch = Epoch(number=number + 1, holder=holder, started_at=time.time())
    return epoch_guard(keys, number), Op.put(keys.epoch(), epoch.encode())


def next_term(keys: Keys, number: int, holder: str) -> tuple[Compare, Op]:
    """Condition and write that end the actor's term ``number`` and begin the next one, for a transaction of the
    caller's."""
    term = Epoch(number=number + 1, holder=holder, started_at=time.time())
    return Compare.version(keys.actor_term(), "==", number), Op.put(keys.actor_term(), term.encode())


def current_epoch(etcd: EtcdClient, keys: Keys) -> int:
    """Number of the epoch that may write; 0 before the first."""
    kv = etcd.get(keys.epoch())
    return kv.version if kv else 0


def begin_driver(etcd: EtcdClient, keys: Keys, epoch: int, holder: str, token: Sequence[Compare] = ()) -> int:
    """Begins the next generation of the job's driver for ``holder``, under the run's epoch; every later write of an
    earlier one fails. Generations count over the whole run. Raises Fenced when the epoch is over, and as
    ``raise_epoch``."""
    return _begin(etcd, keys, keys.driver(), epoch, holder, token)


def begin_term(etcd: EtcdClient, keys: Keys, epoch: int, holder: str) -> int:
    """Begins the next term of the actor for ``holder``, under the run's epoch; every later write of an earlier one
    fails. Terms count over the whole run. Raises Fenced when the epoch is over."""
    return _begin(etcd, keys, keys.actor_term(), epoch, holder)


def _begin(etcd: EtcdClient, keys: Keys, key: str, epoch: int, holder: str, token: Sequence[Compare] = ()) -> int:
    """Puts the next version of ``key``, which is the fencing number of ``holder``, and returns it."""
    writer = FencedWriter(etcd, keys, lambda: [epoch_guard(keys, epoch), *token], f"epoch {epoch} of job {keys.job}")
    found = etcd.get(key)
    number = found.version if found else 0
    for _ in range(_TRIES):
        record = Epoch(number=number + 1, holder=holder, started_at=time.time())
        outcome = writer.txn([Compare.version(key, "==", number)], [Op.put(key, record.encode())], [Op.get(key)])
        if outcome.succeeded:
            return number + 1
        found = outcome.get(key)
        number = found.version if found else 0
    raise Conflict(f"{key} was raised concurrently in each of {_TRIES} tries")


def current_driver(etcd: EtcdClient, keys: Keys) -> int:
    """Generation of the driver that may write; 0 before the first."""
    kv = etcd.get(keys.driver())
    return kv.version if kv else 0


def current_term(etcd: EtcdClient, keys: Keys) -> int:
    """Number of the term of the actor that may write; 0 before the first."""
    kv = etcd.get(keys.actor_term())
    return kv.version if kv else 0


def epoch_guard(keys: Keys, number: int) -> Compare:
    """The condition that makes a transaction fail once the run has a later epoch than ``number``."""
    return Compare.version(keys.epoch(), "==", number)


def write(etcd: EtcdClient, keys: Keys, number: int, *ops: Op) -> None:
    """Runs the operations if ``number`` is still the epoch that may write; raises Fenced, with nothing written."""
    FencedWriter.of_epoch(etcd, keys, number).write(*ops)


def emit(etcd: EtcdClient, keys: Keys, number: int, kind: EventKind, subject: str, message: str, *,
         severity: Severity = Severity.INFO, **data: Any) -> None:
    """Writes an event of now if ``number`` is still the epoch that may write; ``data`` must be JSON-able. Raises Fenced
    and EtcdUnavailable."""
    FencedWriter.of_epoch(etcd, keys, number).emit(kind, subject, message, severity=severity, **data)


def require_epoch(etcd: EtcdClient, keys: Keys, number: int) -> None:
    """Raises Fenced unless ``number`` is the epoch that may write."""
    now = current_epoch(etcd, keys)
    if now != number:
        raise Fenced(f"epoch {number} of job {keys.job} is over; the run is in epoch {now}")
