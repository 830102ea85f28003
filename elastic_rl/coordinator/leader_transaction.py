"""A change that the admin API makes, as one transaction of the leader that is applied once, whatever answers are lost.

etcd's client repeats a transaction without applying it twice, until its budget ends. Then nobody knows whether the
change was made, or will be when a member that was stopped resumes. So each change creates a key that no other change
creates, mostly that of its event: where the key exists, the change was made. Where it does not, the outcome stays
unknown. The transition that must not happen is from there to *not made*, after which the caller would make the change
again: a pool scaled from 3 to 4 by an answer that was lost, and by its repetition to 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from elastic_rl.coordinator.problems import Problem, no_leader
from elastic_rl.errors import EtcdUnavailable, Fenced, OutcomeUnknown
from elastic_rl.etcd import events
from elastic_rl.etcd.client import Compare, EtcdClient, Op
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Event


class IdempotencyClaim(Protocol):
    """Conditions and writes that make a request count once; they go into the transaction that carries it out."""

    @property
    def compares(self) -> list[Compare]: ...

    def ops(self, location: str) -> list[Op]: ...


@dataclass(frozen=True)
class LeaderTransaction:
    """Conditions and writes of one change."""

    compares: Sequence[Compare]
    ops: Sequence[Op]
    proof: str
    """Key that ``ops`` put and that no other transaction creates."""

    @classmethod
    def with_event(cls, keys: Keys, event: Event, compares: Sequence[Compare], ops: Sequence[Op]) -> Self:
        """The change that an event reports; the event is its proof."""
        return cls(compares, [*ops, events.put_op(keys, event)], keys.event(event.id))

    def commit(self, etcd: EtcdClient, writer: FencedWriter, claim: IdempotencyClaim | None = None,
               location: str = "") -> int:
        """The revision at which the change was made; 0 when one of its conditions did not hold. ``location``: path of
        what it creates, for the ``claim``.

        Raises problems: 503 when this replica does not lead; 409 when the ``claim`` was used already. Raises
        OutcomeUnknown (504) when the answer of etcd was lost and the change cannot be seen.
        """
        claimed = claim.compares if claim is not None else []
        writes = [*self.ops, *(claim.ops(location) if claim is not None else [])]
        try:
            outcome = writer.txn([*self.compares, *claimed], writes, [Op.get(c.key) for c in claimed])
        except Fenced as e:
            raise no_leader(e.message) from e
        except OutcomeUnknown as unknown:
            try:
                found = etcd.get(self.proof)
            except EtcdUnavailable:  # that would say that the change was not made
                raise unknown from None
            if found is None:
                raise
            return found.create_revision
        if outcome.succeeded:
            return outcome.revision
        if not all(c.holds(outcome.get(c.key)) for c in claimed):
            raise Problem(409, "conflict", "The same request is being carried out",
                          "a request with this Idempotency-Key was faster; send it again to get its answer")
        return 0
