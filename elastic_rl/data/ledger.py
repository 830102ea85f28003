"""The experience ledger in etcd: which prompt groups each training step was trained on.

It answers one question: was every group trained on exactly once? The trainer's committed state says which step the
weights are at; entries after that step describe lost work, and ``rewind`` deletes them. Record a step before it is
trained: a step that was recorded and never trained is rewound, while one that was trained and never recorded would look
lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from elastic_rl.errors import Conflict, Fenced, OutcomeUnknown
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import Compare, EtcdClient, Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import LedgerEntry
from elastic_rl.etcd.transaction import batches


@dataclass(frozen=True)
class Audit:
    """Ordinals that a ledger has not exactly once. Both lists are sorted."""

    lost: list[int]
    """In no entry."""
    duplicated: list[int]
    """More than once in one entry or in several."""


def audit_entries(entries: Iterable[LedgerEntry], *, up_to_step: int, per_step: int) -> Audit:
    """Pure audit: steps 1..up_to_step have to contain the ordinals 0..up_to_step * per_step - 1, each exactly once.

    Entries of later steps are work in progress and are left out. An ordinal beyond the range counts as duplicated only
    if it occurs twice.
    """
    found: Counter[int] = Counter()
    for entry in entries:
        if entry.step <= up_to_step:
            found.update(entry.groups)
    return Audit(lost=[g for g in range(up_to_step * per_step) if g not in found],
                 duplicated=sorted(g for g, n in found.items() if n > 1))


class Ledger:
    """The ledger of one job. Every write is guarded by the fencing epoch of the run."""

    def __init__(self, etcd: EtcdClient, keys: Keys) -> None:
        self._etcd = etcd
        self._keys = keys

    def record(self, entry: LedgerEntry) -> None:
        """Records a step. Idempotent, so that a call whose answer was lost can be retried.

        Raises Fenced when ``entry.epoch`` is not the run's epoch, Conflict when the step already has another entry, and
        EtcdUnavailable.
        """
        guard = self._guard(entry.epoch)
        key, value = self._keys.ledger(entry.step), entry.encode()
        try:
            done = self._etcd.txn([guard, Compare.absent(key)], [Op.put(key, value)]).succeeded
        except OutcomeUnknown:
            done = False
        if done:
            return
        # Not recorded, or recorded by an attempt whose answer was lost.
        found = self._etcd.get(key)
        if found is not None and found.value == value:
            return
        self._guard(entry.epoch)
        if found is None:
            raise OutcomeUnknown(f"the entry of step {entry.step} was not written", hint="record it again")
        raise Conflict(f"step {entry.step} already has another entry in the ledger",
                       hint="rewind the ledger to the trainer's step before repeating the step")

    def rewind(self, to_step: int, *, epoch: int | None = None) -> list[int]:
        """Deletes the entries of all steps after ``to_step``; returns those steps. Idempotent.

        Guarded by ``epoch`` if given, else by the epoch that holds when the call starts, so that it deletes no entry of
        a newer epoch. Raises Fenced.
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
        """``audit_entries`` of the entries in etcd."""
        return audit_entries(self.entries(), up_to_step=up_to_step, per_step=per_step)

    def _guard(self, epoch: int | None) -> Compare:
        """The condition that ``epoch`` (None: the current one) is the run's epoch. Raises Fenced if it is not."""
        if epoch is None:
            return fencing.epoch_guard(self._keys, fencing.current_epoch(self._etcd, self._keys))
        fencing.require_epoch(self._etcd, self._keys, epoch)
        return fencing.epoch_guard(self._keys, epoch)
