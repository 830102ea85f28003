"""Whether a history is linearizable: whether each operation can have happened at one moment between its call and its
answer, so that all of them in this order are what a sequential model does.

The search goes from answer to answer, as the one of Lowe does that linearizes just in time ("Testing for
linearizability", 2017): what has to come before an answer is put in order then, and nothing else. What it knows at an
answer is the state, which of the operations under way came already, and which of the unknown ones, so that a history
whose operations follow one another takes time and memory in proportion to its length. It is exponential at worst, so it
has a limit: a history that cannot be decided is no history that is right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from chaos_tests.history import Operation

S = TypeVar("S", bound=Hashable)

MAX_STEPS = 50_000_000
"""Steps of the search for an order of one key: the operations that it tries as the next one, and the orders in vain
with which it compares what comes of them."""
_FIRST_BUDGET = 10_000
"""The same for the first try, before another order is tried."""
_MOST_UNDER_WAY = 5_000_000
"""Most operations under way at the answers of a key, all in all. A client has one at a time."""


class Model(Protocol[S]):
    """What one key does when its operations come one after the other."""

    @property
    def initial(self) -> S: ...

    def step(self, state: S, operation: Operation) -> S | None:
        """The state after an operation, or None if the operation cannot have had its result in this state. The result
        of an unknown operation (``ended_s`` None) says nothing: what is asked is the state if it has happened. An
        operation that changes nothing in a state in which it can come is needed in no later one: it is a reading, or
        its result names what it has changed."""
        ...


class Undecided(Exception):
    """A history is too entangled to be decided within the limit: fewer clients a key, or a shorter one."""


@dataclass(frozen=True)
class UnexplainedHistory:
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


def check(model: Model[S], history: Iterable[Operation], *, max_steps: int = MAX_STEPS) -> list[UnexplainedHistory]:
    """The keys whose operations cannot be put in order, each with why. Raises Undecided where a search
    takes more than ``max_steps`` steps, and ValueError for an operation that ends before it begins."""
    by_key = defaultdict[str, list[Operation]](list)
    for operation in history:
        if operation.ended_s is not None and operation.ended_s < operation.began_s:
            raise ValueError(f"an operation ends before it begins: {operation}")
        by_key[operation.key].append(operation)
    searches = [_Search(model, key, operations, max_steps) for key, operations in sorted(by_key.items())]
    return [found for search in searches if (found := search.run()) is not None]


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer of a history, the next one that is to be explained."""

    operation: int
    """Number of its operation."""
    under_way: tuple[int, ...]
    """Numbers of the other operations that are under way then and are answered later."""
    unknown: int
    """How many of those that are never answered were called before."""


@dataclass(eq=False, slots=True)
class _Frame(Generic[S]):
    """An order of some operations, and what is tried next after it."""

    before: _Frame[S] | None
    came: Operation | None
    """The last one of the order."""
    length: int
    answer: int
    """Number of the first answer that it does not explain."""
    state: S
    ahead: frozenset[int]
    """Those of the order that are answered later."""
    unknown: int
    """Those of the order that are never answered, as bits by the order of their calls."""
    tried: int = 0
    """How many of the operations with answers were tried next."""
    tried_unknown: int = 0
    """Those without answers that were, as bits."""


@dataclass(repr=False)
class _Search(Generic[S]):
    model: Model[S]
    key: str
    operations: Sequence[Operation]
    max_steps: int
    _unknown: list[int] = field(default_factory=list)
    """Numbers of the operations without answers, by their calls."""
    _vain: dict[tuple[int, S, frozenset[int]], list[int]] = field(default_factory=dict)
    """Answer, state and those ahead of it, from which no order explains the rest → the unknown ones that had come: with
    more of them gone there is none either, since none of those needs to happen."""
    _steps: int = 0

    def run(self) -> UnexplainedHistory | None:
        answers, budget = self._answers(), min(_FIRST_BUDGET, self.max_steps)
        while True:
            # Either order finds what the other one finds, and where one gets lost the other one mostly does not.
            for eager in (True, False):
                with suppress(Undecided):
                    return self._search(answers, budget, eager=eager)
            if budget == self.max_steps:
                raise Undecided(f"{self.key}: {len(self.operations)} operations, {budget} steps of the search")
            budget = min(8 * budget, self.max_steps)

    def _search(self, answers: Sequence[_Answer], budget: int, *, eager: bool) -> UnexplainedHistory | None:
        """``eager``: whether operations without answers are tried first: they have mostly happened when they were
        called. Else they are tried last: to explain what nothing else does. Raises Undecided."""
        begin = _Frame(None, None, 0, 0, self.model.initial, frozenset[int](), 0)
        frame: _Frame[S] | None = begin
        longest, self._steps = begin, 0
        self._vain.clear()
        while frame is not None:
            if frame.answer == len(answers):
                return None  # what is left was never answered, and need not have happened
            if (further := self._further(frame, answers, eager=eager)) is not None:
                frame = further
                continue
            if self._steps >= budget:
                raise Undecided
            self._vain.setdefault((frame.answer, frame.state, frame.ahead), []).append(frame.unknown)
            longest = frame if frame.length >= longest.length else longest
            frame = frame.before
        return self._violation(longest, answers[longest.answer])

    def _further(self, frame: _Frame[S], answers: Sequence[_Answer], *, eager: bool) -> _Frame[S] | None:
        """The order with one operation more, which was not tried yet; None where none can come next."""
        for number, bit in self._candidates(frame, answers[frame.answer], eager=eager):
            operation = self.operations[number]
            self._steps += 1 + answers[frame.answer].unknown // 64  # a word of each set of them
            state = self.model.step(frame.state, operation)
            if state is None or bit and state == frame.state:
                continue  # one that is never answered, and changes nothing, need not have happened
            if state == frame.state:  # whatever can come without a reading can come after it
                frame.tried, frame.tried_unknown = 1 + len(answers[frame.answer].under_way), -1
            following, ahead, unknown = frame.answer, frame.ahead, frame.unknown | bit
            if number == answers[following].operation:
                following += 1
            elif not bit:
                ahead |= {number}
            while following < len(answers) and answers[following].operation in ahead:
                ahead -= {answers[following].operation}
                following += 1
            in_vain = self._vain.get((following, state, ahead), ())
            self._steps += len(in_vain)
            if not any(vain & unknown == vain for vain in in_vain):
                return _Frame(frame, operation, frame.length + 1, following, state, ahead, unknown)
        return None

    def _candidates(self, frame: _Frame[S], answer: _Answer, *, eager: bool) -> Iterator[tuple[int, int]]:
        """The numbers of the operations that were not tried yet, each of those without answers with its bit."""
        if eager:
            yield from self._unanswered(frame, answer, eager=True)
        known = (answer.operation, *answer.under_way)
        while frame.tried < len(known):
            number, frame.tried = known[frame.tried], frame.tried + 1
            if number not in frame.ahead:
                yield number, 0
        if not eager:
            yield from self._unanswered(frame, answer, eager=False)

    def _unanswered(self, frame: _Frame[S], answer: _Answer, *, eager: bool) -> Iterator[tuple[int, int]]:
        """Those without answers, the oldest ones first if ``eager``, else the newest."""
        while left := ((1 << answer.unknown) - 1) & ~(frame.unknown | frame.tried_unknown):
            bit = left & -left if eager else 1 << left.bit_length() - 1
            frame.tried_unknown |= bit
            yield self._unknown[bit.bit_length() - 1], bit

    def _answers(self) -> list[_Answer]:
        """The answers in the order of time. A call comes before the answers of its moment: those two operations
        overlap."""
        moments = [(o.began_s, 0, number) for number, o in enumerate(self.operations)]
        moments += [(o.ended_s, 1, number) for number, o in enumerate(self.operations) if o.ended_s is not None]
        under_way, found, kept = dict[int, None](), list[_Answer](), 0
        for _, is_answer, number in sorted(moments):
            if is_answer:
                del under_way[number]
                if (kept := kept + len(under_way)) > _MOST_UNDER_WAY:
                    raise Undecided(f"{self.key}: {len(self.operations)} operations, of which {len(under_way)} overlap")
                found.append(_Answer(number, tuple(under_way), len(self._unknown)))
            elif self.operations[number].ended_s is None:
                self._unknown.append(number)
            else:
                under_way[number] = None
        return found

    def _violation(self, longest: _Frame[S], answer: _Answer) -> UnexplainedHistory:
        order, frame = list[Operation](), longest
        while frame.before is not None and frame.came is not None:
            order.append(frame.came)
            frame = frame.before
        came = longest.ahead | {number for nth, number in enumerate(self._unknown) if longest.unknown >> nth & 1}
        open_ = [answer.operation, *answer.under_way, *self._unknown[:answer.unknown]]
        return UnexplainedHistory(self.key, order[::-1], [self.operations[n] for n in sorted(open_) if n not in came])
