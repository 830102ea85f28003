"""Whether a history is linearizable: whether each operation can have happened at one moment between its call and its
answer, so that all of them in this order are what a sequential model does.

The search is that of Wing and Gong, with the cache of Lowe ("Testing for linearizability", 2017), which knows what was
tried already: the set of operations so far, and the state after them. An operation that can come now and changes
nothing, such as a reading, is not tried later as well: what can follow without it can follow it too. The search is
exponential at worst, so it has a limit: a history that cannot be decided is no history that is right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from chaos_tests.history import Operation

S = TypeVar("S", bound=Hashable)

MAX_TRIED = 2_000_000


class Model(Protocol[S]):
    """What one key does when its operations come one after the other."""

    @property
    def initial(self) -> S: ...

    def step(self, state: S, operation: Operation) -> S | None:
        """The state after an operation, or None if the operation cannot have had its result in this state. The result
        of an unknown operation (``ended_s`` None) says nothing: what is asked is the state if it has happened."""
        ...


class Undecided(Exception):
    """A history is too entangled to be decided within the limit: fewer clients a key, or a shorter one."""


@dataclass(frozen=True)
class Violation:
    """A key whose history no order explains."""

    key: str
    longest: list[Operation]
    """The longest order that was found."""
    stuck: list[Operation]
    """What was under way where that order ends, none of which can come next."""

    def __str__(self) -> str:
        told = [f"{self.key}: no order of these operations explains what the clients were told. The longest has "
                f"{len(self.longest)}; its last are:"]
        told += [f"  {_line(o)}" for o in self.longest[-8:]]
        told += ["none of these can come next:", *(f"  {_line(o)}" for o in self.stuck)]
        return "\n".join(told)


def _line(o: Operation) -> str:
    end = f"{o.ended_s:.3f}" if o.ended_s is not None else "?"
    result = f" → {o.result!r}" if o.ended_s is not None else " → unknown"
    return f"[{o.began_s:.3f}, {end}] {o.client} {o.call}({o.argument!r}){result}"


def check(model: Model[S], history: Iterable[Operation], *, max_tried: int = MAX_TRIED) -> list[Violation]:
    """The keys whose operations cannot be put in order, each with why. Raises Undecided where ``max_tried`` states of a
    key were not enough, and ValueError for an operation that ends before it begins."""
    by_key = defaultdict[str, list[Operation]](list)
    for operation in history:
        if operation.ended_s is not None and operation.ended_s < operation.began_s:
            raise ValueError(f"an operation ends before it begins: {operation}")
        by_key[operation.key].append(operation)
    searches = [_Search(model, key, operations, max_tried) for key, operations in sorted(by_key.items())]
    return [found for search in searches if (found := search.run()) is not None]


@dataclass(eq=False, repr=False)
class _Entry:
    """A call or an answer in the list of what is not in the order yet. ``answer``: of a call, its answer."""

    number: int
    operation: Operation
    answer: _Entry | None = None
    before: _Entry | None = None
    after: _Entry | None = None

    def take_out(self) -> None:
        for entry in (self, self.answer):
            assert entry is not None and entry.before is not None
            entry.before.after = entry.after
            if entry.after is not None:
                entry.after.before = entry.before

    def put_back(self) -> None:
        for entry in (self.answer, self):  # the other way round, so that each finds its neighbours
            assert entry is not None and entry.before is not None
            entry.before.after = entry
            if entry.after is not None:
                entry.after.before = entry


@dataclass(repr=False)
class _Search(Generic[S]):
    model: Model[S]
    key: str
    operations: Sequence[Operation]
    max_tried: int
    _longest: list[_Entry] = field(default_factory=list)
    _stuck: list[Operation] = field(default_factory=list)

    def run(self) -> Violation | None:
        head = self._linked()
        state, done = self.model.initial, 0
        order: list[tuple[_Entry, S, bool]] = []
        tried = {(done, state)}
        entry = head.after
        while entry is not None:
            if entry.answer is not None:  # a call: may it come next?
                after = self.model.step(state, entry.operation)
                idle = after == state
                if after is None or idle and entry.operation.ended_s is None:  # that one need not have happened
                    entry = entry.after
                    continue
                now = (done | 1 << entry.number, after)
                if now not in tried:
                    if len(tried) >= self.max_tried:
                        raise Undecided(f"{self.key}: {len(self.operations)} operations, {len(tried)} states tried")
                    tried.add(now)
                    order.append((entry, state, idle))
                    done, state = now
                    entry.take_out()
                    entry = head.after
                    continue
                if not idle:
                    entry = entry.after
                    continue
            elif entry.operation.ended_s is None:
                return None  # answers that never came are behind all that did: what is left need not have happened
            elif len(order) >= len(self._longest):
                self._longest = [e for e, _, _ in order]
                self._stuck = _under_way(head, entry)
            idle = True
            while idle:  # back to the last one that may come later
                if not order:
                    return Violation(self.key, [e.operation for e in self._longest], self._stuck)
                entry, state, idle = order.pop()
                done &= ~(1 << entry.number)
                entry.put_back()
            entry = entry.after
        return None

    def _linked(self) -> _Entry:
        """Calls and answers in the order of time, behind a head. A call comes before the answers of its moment: those
        two operations overlap."""
        moments = list[tuple[float, int, _Entry]]()
        for number, operation in enumerate(self.operations):
            answer = _Entry(number, operation)
            ended_s = operation.ended_s if operation.ended_s is not None else float("inf")
            moments += [(operation.began_s, 0, _Entry(number, operation, answer)), (ended_s, 1, answer)]
        moments.sort(key=lambda m: m[:2])
        head = last = _Entry(-1, Operation("", self.key, "", None, 0.0))
        for _, _, entry in moments:
            last.after, entry.before, last = entry, last, entry
        return head


def _under_way(head: _Entry, first_answer: _Entry) -> list[Operation]:
    found, entry = list[Operation](), head.after
    while entry is not None and entry is not first_answer:
        found.append(entry.operation)
        entry = entry.after
    return found
