"""A few samples of each of the last steps, for people: a ring of records in etcd that never grows.

Every step has its own slots, by its number alone, so a step that is repeated after a rewind overwrites what it wrote
before, and no writer has to remember where the ring stands.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from elastic_rl.etcd.client import EtcdClient, Op
from elastic_rl.etcd.decoding import decode
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import SampleRecord
from elastic_rl.etcd.transaction import MAX_OPS
from elastic_rl.plugins.user_code import encodable

MAX_TEXT_CHARS = 2000
"""Characters that are kept of a prompt and of a response."""
MAX_RECORD_BYTES = 8 * 1024
"""Longest record as it is stored. A text in a script of many bytes a character is cut further than MAX_TEXT_CHARS."""
MAX_PARTS = 16
"""Named parts of the reward that are kept of a sample."""
_MAX_NAME_CHARS = 64
_MAX_VERSIONS = 32
_PER_STEP = 4
_BESIDE = 8
"""Operations of a step's transaction that are not of the ring: its status, its metrics and its records of the log."""
MAX_SLOTS = MAX_OPS - _BESIDE - _PER_STEP
"""Slots of the largest ring: the deletion of all of them has to fit into the transaction of a step."""
_MARK = "\n[… {} characters left out …]\n"


class SampleRing:
    """The samples of a run. They are written with the records of their steps, so that a step costs one transaction.
    ``ops`` is called for one step at a time, by one thread, and what it returns is written before the next call."""

    def __init__(self, etcd: EtcdClient, keys: Keys, slots: int = 64) -> None:
        """``slots``: keys that it uses at most, from 4 to ``MAX_SLOTS``; every step gets four of them, so 64 hold the
        last 16 steps. Raises ValueError for another number."""
        if not _PER_STEP <= slots <= MAX_SLOTS:
            raise ValueError(f"slots must be from {_PER_STEP} to {MAX_SLOTS}, not {slots}")
        self._etcd, self._keys = etcd, keys
        self._steps = slots // _PER_STEP
        self._newest: int | None = None

    def ops(self, step: int, samples: Sequence[SampleRecord]) -> list[Op]:
        """Operations that write up to four samples of a step, and delete what an earlier run of it left. Those of the
        first call, and of a step that is not newer than the last, also delete the samples of later steps, which were
        undone.

        Further samples are left out (``pick`` chooses), texts are cut (``fitted``), and ``step`` is set in each record.
        The records are for people only: a caller may go on without them when this raises EtcdUnavailable.
        """
        now = time.time()
        records = [fitted(sample.replace(step=step, at=sample.at or now)) for sample in samples[:_PER_STEP]]
        first = step % self._steps * _PER_STEP
        puts = {self._keys.sample(first + n): record.encode() for n, record in enumerate(records)}
        stale = {self._keys.sample(first + n) for n in range(len(records), _PER_STEP)}
        if self._newest is None or step <= self._newest:
            stale |= self._undone(step)
        ops = [Op.put(key, value) for key, value in puts.items()]
        ops += [Op.delete(key) for key in sorted(stale - puts.keys())[:MAX_OPS - _BESIDE - len(ops)]]
        self._newest = step
        return ops

    def _undone(self, step: int) -> set[str]:
        """Keys of later steps, of slots that this ring does not have, and of what cannot be read."""
        own = {self._keys.sample(slot) for slot in range(self._steps * _PER_STEP)}
        found: set[str] = set()
        # An earlier run may have had more slots: the rest of them is deleted by the next runs.
        for kv in self._etcd.page(self._keys.samples_prefix(), limit=MAX_OPS).kvs:
            record = decode(kv, SampleRecord, {})
            if kv.key not in own or record is None or record.step > step:
                found.add(kv.key)
        return found


def pick(rewards: Sequence[float], limit: int = _PER_STEP) -> list[int]:
    """Which of a step's samples to show, as indices into ``rewards``: the worst, the best, and others evenly between
    them by reward; at most ``limit``, in ascending order of reward."""
    ranked = sorted(range(len(rewards)), key=lambda i: (rewards[i], i))
    if len(ranked) <= limit:
        return ranked
    if limit == 1:
        return ranked[-1:]
    return [ranked[n * (len(ranked) - 1) // (limit - 1)] for n in range(limit)]


def fitted(sample: SampleRecord) -> SampleRecord:
    """The record with its texts cut to MAX_TEXT_CHARS, and further until the record has at most MAX_RECORD_BYTES; its
    other fields are cut to a bounded size as well. What is left out of a text is its middle: the answer is often at its
    end."""
    parts = {_head(name): value for name, value in list(sample.reward_parts.items())[:MAX_PARTS]}
    sample = sample.replace(prompt=encodable(sample.prompt), response=encodable(sample.response), reward_parts=parts,
                            finish_reason=_head(sample.finish_reason), versions=sample.versions[-_MAX_VERSIONS:])
    # Validated again, because ``replace`` does not: a value that is not finite would make the record unreadable.
    sample = SampleRecord.model_validate(sample.model_dump())
    chars = MAX_TEXT_CHARS
    while True:
        prompt, response = cut_text(sample.prompt, chars), cut_text(sample.response, chars)
        cut = sample.cut or (prompt, response) != (sample.prompt, sample.response)
        record = sample.replace(prompt=prompt, response=response, cut=cut)
        if len(record.encode()) <= MAX_RECORD_BYTES or not chars:
            return record
        chars = chars * 3 // 4


def cut_text(text: str, limit: int) -> str:
    """The text if it has at most ``limit`` characters; else its first two thirds of them and its last third, with a
    mark in between that says how many are missing."""
    if len(text) <= limit:
        return text
    head, tail = limit - limit // 3, limit // 3
    return text[:head] + _MARK.format(f"{len(text) - limit:,}") + text[len(text) - tail:]


def _head(text: str) -> str:
    return encodable(text)[:_MAX_NAME_CHARS]
