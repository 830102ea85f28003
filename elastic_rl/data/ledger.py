"""The experience ledger: which prompt groups each optimiser step was trained on, kept in etcd beside the other truth.

It answers one question: was every group trained on exactly once, or dropped on the record? The trainer's committed
state says which step the weights are at; entries after that step describe work that is lost, and ``rewind`` deletes
them. A step is best entered before it is trained: one that was entered and never trained is rewound, while one that was
trained and never entered would look lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from elastic_rl.errors import Conflict, Fenced, OutcomeUnknown
from elastic_rl.etcd.client import Compare, EtcdClient, Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Epoch, LedgerEntry
from elastic_rl.etcd.transaction import batches

# etcd refuses a transaction of more than 128 operations by default.


@dataclass(frozen=True)
class Audit:
    """What a ledger says about the ordinals that should have been trained on. Both lists are sorted."""

    lost: list[int]
    """Neither trained on nor dropped on the record."""
    duplicated: list[int]
    """Named more than once, by one entry or by several."""


def audit_entries(entries: Iterable[LedgerEntry], *, up_to_step: int, per_step: int) -> Audit:
    """Pure audit: steps 1..up_to_step were to take the ordinals 0..up_to_step * per_step - 1, each exactly once.

    Entries of later steps are work in progress and are left out. An ordinal beyond the range counts as duplicated only
    if it is named twice.
    """
    named: Counter[int] = Counter()
    for entry in entries:
        if entry.step <= up_to_step:
            named.update(entry.groups)
            named.update(entry.dropped)
    return Audit(lost=[g for g in range(up_to_step * per_step) if g not in named],
                 duplicated=sorted(g for g, n in named.items() if n > 1))


class Ledger:
    """The ledger of one job. Every write is guarded by the fencing epoch of the run."""

    def __init__(self, etcd: EtcdClient, keys: Keys) -> None:
        self._etcd = etcd
        self._keys = keys

    def record(self, entry: LedgerEntry) -> None:
        """Enters a step. Entering the same entry again does nothing, so a lost answer is safely retried.

        Raises Fenced when ``entry.epoch`` is not the run's epoch, Conflict when the step already has another entry, and
        what the store raises when etcd does not answer.
        """
        guard = self._guard(entry.epoch)
        key, value = self._keys.ledger(entry.step), entry.encode()
        try:
            done = self._etcd.txn([guard, Compare.absent(key)], [Op.put(key, value)]).succeeded
        except OutcomeUnknown:
            done = False
        if done:
            return
        # Not entered, or entered by an attempt whose answer was lost: what is there now tells which.
        there = self._etcd.get(key)
        if there is not None and there.value == value:
            return
        self._guard(entry.epoch)
        if there is None:
            raise OutcomeUnknown(f"the entry of step {entry.step} was not written", hint="record it again")
        raise Conflict(f"step {entry.step} already has another entry in the ledger",
                       hint="rewind the ledger to the trainer's step before doing the step again")

    def rewind(self, to_step: int, *, epoch: int | None = None) -> list[int]:
        """Deletes the entries of all steps after ``to_step``; returns those steps. Doing it again does nothing.

        Guarded by ``epoch`` where one is given, else by the epoch that holds when the call starts, so that a rewind
        that is overtaken by a new epoch deletes nothing of it. Raises Fenced.
        """
        guard = self._guard(epoch)
        prefix = self._keys.ledger_prefix()
        # Keys sort by step, so what the trainer's state covers, which is almost all of it, is not read.
        pages = self._etcd.pages(prefix, after=self._keys.ledger(to_step))
        doomed = [kv.key for page in pages for kv in page.kvs]
        # Newest first: whenever this stops half-way, what is left has no gap.
        for batch in batches([Op.delete(key) for key in reversed(doomed)]):
            if not self._etcd.txn([guard], batch).succeeded:
                raise Fenced("the ledger belongs to a newer epoch", hint="stop; another incarnation runs the job")
        return [int(key.removeprefix(prefix)) for key in doomed]

    def entries(self) -> list[LedgerEntry]:
        """Every entry, by step."""
        return [LedgerEntry.decode(kv.value) for kv in self._etcd.range(self._keys.ledger_prefix())[0]]

    def audit(self, up_to_step: int, per_step: int) -> Audit:
        """``audit_entries`` of what is in etcd now."""
        return audit_entries(self.entries(), up_to_step=up_to_step, per_step=per_step)

    def _guard(self, epoch: int | None) -> Compare:
        """Compare that the epoch record is still the one that is read here. Raises Fenced if it is not ``epoch``."""
        key = self._keys.epoch()
        held = self._etcd.get(key)
        if held is None:
            if epoch is None:
                return Compare.absent(key)
            raise Fenced(f"the run has no epoch, so epoch {epoch} may not write", hint="raise an epoch first")
        current = Epoch.decode(held.value).number
        if epoch is not None and current != epoch:
            raise Fenced(f"epoch {epoch} is over, the run is in epoch {current}",
                         hint="stop; another incarnation runs the job")
        return Compare.mod(key, "==", held.mod_revision)
