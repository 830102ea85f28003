"""The order in which a run takes its problems: a function of the seed and a position. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Protocol

from elastic_rl.data.permutation import Permutation
from elastic_rl.data.samples import Prompt

_PROBES = 64


class Order(Protocol):
    """An endless sequence of problem indices. Position ``g`` of it is the *ordinal* of a prompt group and identifies it
    for the whole run. The problem of an ordinal does not depend on earlier calls, so a run that resumes anywhere takes
    the same problems."""

    def problem(self, ordinal: int) -> tuple[int, int]:
        """Index of the ordinal's problem, and how many times that problem was taken by lower ordinals: its pass over
        the data. No two ordinals have both the same. Raises ValueError for a negative ordinal."""


class PromptOrder:
    """Epoch after epoch, each a different shuffle of all problems. Needs no memory, however many there are."""

    def __init__(self, n_train: int, seed: int) -> None:
        """Raises ValueError unless there is at least one problem."""
        if n_train < 1:
            raise ValueError(f"an order needs at least one problem, got {n_train}")
        self._n = n_train
        self._seed = seed
        self._epoch = -1
        self._shuffle: Permutation | None = None

    def problem(self, ordinal: int) -> tuple[int, int]:
        """See ``Order``."""
        epoch, position = _pass(ordinal, self._n)
        if self._shuffle is None or epoch != self._epoch:
            self._shuffle, self._epoch = Permutation(self._n, f"prompt-order-{self._seed}-{epoch}"), epoch
        return self._shuffle[position], epoch

    def groups(self, first_ordinal: int, count: int) -> list[int]:
        """Problem indices of the ordinals [first_ordinal, first_ordinal + count); ValueError for negative ones."""
        return groups(self, first_ordinal, count)


def order_of(source: Any, seed: int) -> Order:
    """The order of a source's training prompts: its own, by its method ``order(seed)``, or shuffles of all."""
    own = getattr(source, "order", None)
    made: Order = own(seed) if own is not None else PromptOrder(len(source.train), seed)
    return made


def sft_order(source: Any, seed: int) -> Order:
    """The order in which supervised steps take the training prompts of a source: that of another seed, since RL would
    else begin with the prompts that were imitated."""
    return order_of(source, int.from_bytes(hashlib.sha256(f"sft/{seed}".encode()).digest()[:4], "little") & 0x7FFFFFFF)


def sft_ordinals(batch_size: int, step: int) -> range:
    """The ordinals of the prompts whose answers a supervised step imitates, in ``sft_order``. Steps count from 1."""
    return range(batch_size * (step - 1), batch_size * step)


def groups(order: Order, first_ordinal: int, count: int) -> list[int]:
    """Problem indices of the ordinals [first_ordinal, first_ordinal + count); ValueError for negative ones."""
    if first_ordinal < 0 or count < 0:
        raise ValueError(f"ordinals count from 0, got first {first_ordinal} and count {count}")
    return [order.problem(g)[0] for g in range(first_ordinal, first_ordinal + count)]


def _pass(ordinal: int, n: int) -> tuple[int, int]:
    if ordinal < 0:
        raise ValueError(f"ordinals count from 0, got {ordinal}")
    return divmod(ordinal, n)


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """How many prompts there are, and a digest of what some are made from (``probes``), or of their tokens. Another
    order or other data is found unless it has the same prompts at just these places."""
    text = json.dumps([prompt.identity or [int(t) for t in prompt.token_ids]
                       for prompt in (prompts[i] for i in probes(prompts))])
    return f"{len(prompts)}/{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def probes(prompts: Sequence[Prompt]) -> list[int]:
    """Indices that stand for all: those of ``fingerprint_indices``, where the sequence has it, else some that are
    spread over all, with the first and the last among them."""
    own = getattr(prompts, "fingerprint_indices", None)
    n = len(prompts)
    if own is not None:
        return list(own)
    return sorted({i * (n - 1) // (_PROBES - 1) for i in range(_PROBES)}) if n else []
