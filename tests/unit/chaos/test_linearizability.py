"""The check of histories, against all orders of small ones, and against a register that is right by construction."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos_tests import history
from chaos_tests.history import Operation, Recorder, Refused, Unknown
from chaos_tests.model.linearizability import Undecided, check
from chaos_tests.model.number import READ, WRITE, State, VersionedNumber

MODEL = VersionedNumber(State(0, 1))


def by_all_orders(model: VersionedNumber, operations: Sequence[Operation]) -> bool:
    """Whether one order of some of the operations, all of the answered ones among them, is right. What was answered
    before another one began comes before it."""
    answered = [o for o in operations if o.ended_s is not None]
    unknown = [o for o in operations if o.ended_s is None]
    return any(_right(model, order)
               for n in range(len(unknown) + 1) for happened in itertools.combinations(unknown, n)
               for order in itertools.permutations((*answered, *happened)))


def _right(model: VersionedNumber, order: Sequence[Operation]) -> bool:
    for i, later in enumerate(order):
        if any(o.ended_s is not None and later.began_s > o.ended_s for o in order[i + 1:]):
            return False
    state: State | None = model.initial
    for operation in order:
        if state is None:
            return False
        state = model.step(state, operation)
    return state is not None


moments = st.integers(0, 6).map(float)
values = st.integers(0, 2)
results = st.tuples(values, st.integers(1, 4)).map(list)


@st.composite
def any_operation(draw: st.DrawFn) -> Operation:
    began_s = draw(moments)
    ended_s = draw(st.none() | st.just(began_s + draw(moments)))
    call = draw(st.sampled_from([READ, WRITE]))
    argument = draw(st.one_of(values, st.tuples(values, st.sampled_from("ab")).map(list))) if call == WRITE else None
    return Operation("c", "k", call, argument, began_s, ended_s, draw(results) if ended_s is not None else None)


@given(st.lists(any_operation(), max_size=5))
def test_check_agrees_with_all_orders(operations: list[Operation]) -> None:
    assert (check(MODEL, operations) == []) == by_all_orders(MODEL, operations)


def register_history(seed: int, *, clients: int = 4, operations: int = 60, lost: float = 0.15) -> list[Operation]:
    """The history of a number that changes at one moment of each operation. Some answers are lost, and some of those
    operations never happen."""
    choose = random.Random(seed)
    pending: list[tuple[float, str, int]] = []  # (moment, what, number)
    drafts = list[Operation]()
    free_at = [0.0] * clients
    for number in range(operations):
        client = choose.randrange(clients)
        began_s = free_at[client] + choose.random()
        ended_s = began_s + choose.random() * 3
        free_at[client] = ended_s
        call = choose.choice([READ, WRITE])
        value = choose.randrange(4)
        argument = None if call == READ else choose.choice([value, [value, f"key-{choose.randrange(8)}"]])
        drafts.append(Operation(str(client), "k", call, argument, began_s, ended_s))
        pending.append((choose.uniform(began_s, ended_s), call, number))
    value, revision, keys, results = 0, 1, set[str](), dict[int, list[int]]()
    never = {n for n in range(operations) if choose.random() < lost / 2}
    for _, call, number in sorted(pending):
        if number in never:
            continue
        if call == WRITE:
            argument = drafts[number].argument
            wanted, key = argument if isinstance(argument, list) else (argument, "")
            if key not in keys:
                if wanted != value:
                    value, revision = wanted, revision + 1 + choose.randrange(3)
                keys |= {key} if key else set()
        results[number] = [value, revision]
    out = list[Operation]()
    for number, o in enumerate(drafts):
        known = number not in never and choose.random() > lost / 2
        out.append(Operation(o.client, o.key, o.call, o.argument, o.began_s, o.ended_s if known else None,
                             results[number] if known else None))
    return out


def by_sets(model: VersionedNumber, operations: Sequence[Operation]) -> bool:
    """The same by the sets of operations that can have come, with each state after them."""
    def before(o: Operation, n: int) -> bool:
        ended_s = operations[n].ended_s
        return ended_s is not None and ended_s < o.began_s

    reached: set[tuple[frozenset[int], State]] = {(frozenset(), model.initial)}
    open_ = [*reached]
    for came, state in open_:
        for n, o in enumerate(operations):
            if n not in came and all(m in came for m in range(len(operations)) if before(o, m)):
                after = model.step(state, o)
                if after is not None and (now := (came | {n}, after)) not in reached:
                    reached.add(now)
                    open_.append(now)
    answered = {n for n, o in enumerate(operations) if o.ended_s is not None}
    return any(answered <= came for came, _ in reached)


@given(st.integers(0, 2**32), st.integers(1, 4), st.booleans())
def test_check_agrees_with_all_sets_of_operations(seed: int, clients: int, swapped: bool) -> None:
    """``swapped``: two answers of a right history are exchanged, after which it may be right or not."""
    operations = register_history(seed, clients=clients, operations=14)
    answered = [n for n, o in enumerate(operations) if o.ended_s is not None]
    if swapped and len(answered) > 1:
        a, b = random.Random(seed).sample(answered, 2)
        results = operations[a].result, operations[b].result
        operations[a], operations[b] = replace(operations[a], result=results[1]), replace(
            operations[b], result=results[0])
    assert (check(MODEL, operations) == []) == by_sets(MODEL, operations)


class _Counting(VersionedNumber):
    """Counts how often it is asked."""

    asked = 0

    def step(self, state: State, operation: Operation) -> State | None:
        _Counting.asked += 1
        return super().step(state, operation)


@pytest.mark.parametrize("lost", [0, 3, 30])
def test_cost_of_operations_one_after_the_other_is_in_proportion_to_them(lost: int) -> None:
    """``lost``: writes whose answers are lost, of which each second one has happened."""
    operations, value, revision, length = list[Operation](), 0, 1, 3000
    for n in range(length):
        at, turn = 2.0 * n, lost and n % (length // (lost + 1)) == 1
        if turn:
            operations.append(Operation("a", "k", WRITE, n + length, at))
        if turn and len(operations) % 2:
            value, revision = n + length, revision + 1
        elif n % 3 == 0:
            value, revision = n + 1, revision + 1
            operations.append(Operation("b", "k", WRITE, value, at, at + 1, [value, revision]))
        else:
            operations.append(Operation("b", "k", READ, None, at, at + 1, [value, revision]))
    model = _Counting(State(0, 1))
    _Counting.asked = 0
    assert check(model, operations) == [] and _Counting.asked < (2 + lost) * length
    wrong = [*operations[:-1], replace(operations[-1], result=[99_999, revision])]
    _Counting.asked = 0
    assert len(check(model, wrong)) == 1 and _Counting.asked < 20 * (1 + lost) ** 2 * length


@given(st.integers(0, 2**32))
def test_history_of_a_right_register_has_no_violation(seed: int) -> None:
    assert check(MODEL, register_history(seed)) == []


@given(st.integers(0, 2**32))
def test_number_that_was_never_written_is_a_violation(seed: int) -> None:
    operations = register_history(seed)
    answered = [n for n, o in enumerate(operations) if o.call == READ and o.ended_s is not None]
    if not answered:
        return
    n = random.Random(seed).choice(answered)
    operations[n] = Operation(**{**operations[n].__dict__, "result": [99, operations[n].result[1]]})
    [found] = check(MODEL, operations)
    assert found.key == "k" and len(found.longest) < len(operations)


def test_stale_read_is_a_violation_that_says_where_it_is() -> None:
    a_write = Operation("a", "pool", WRITE, 7, 0.0, 1.0, [7, 5])
    stale = Operation("b", "pool", READ, None, 2.0, 3.0, [0, 1])
    [found] = check(MODEL, [a_write, stale])
    assert found.longest == [a_write] and found.stuck == [stale]
    assert "b read(None) → [0, 1]" in str(found) and "none of these can come next" in str(found)
    assert check(MODEL, [a_write, Operation("b", "pool", READ, None, 1.0, 3.0, [0, 1])]) == [], "the two overlap"


def test_write_whose_answer_was_lost_may_come_late_or_never_but_not_be_undone() -> None:
    lost = Operation("a", "pool", WRITE, 7, 0.0)

    def read(at: float, *result: int) -> Operation:
        return Operation("b", "pool", READ, None, at, at + 1, list(result))

    assert check(MODEL, [lost, read(1, 0, 1)]) == []
    assert check(MODEL, [lost, read(1, 0, 1), read(3, 7, 4)]) == []
    assert check(MODEL, [lost, read(1, 7, 4), read(3, 0, 1)]) != []
    assert check(MODEL, [lost, read(1, 7, 4), read(3, 7, 9)]) != [], "nothing has changed it since"


def test_two_writes_have_no_revision_in_common() -> None:
    first, other = (Operation("a", "pool", WRITE, n, float(n), n + 0.5, [n, 5]) for n in (2, 3))
    assert check(MODEL, [first]) == [] and check(MODEL, [first, other]) != []


def test_idempotency_key_counts_once() -> None:
    first = Operation("a", "pool", WRITE, [7, "key"], 0.0)
    other = Operation("b", "pool", WRITE, 3, 2.0, 3.0, [3, 9])
    again = Operation("a", "pool", WRITE, [7, "key"], 4.0, 5.0, [3, 9])
    assert check(MODEL, [first, other, again]) == [], "carried out before, or else it would be 7 now"
    assert check(MODEL, [other, again]) != [], "it was answered with what it never did"


def test_keys_are_checked_one_by_one() -> None:
    wrong = Operation("a", "x", READ, None, 0.0, 1.0, [5, 1])
    right = Operation("a", "y", READ, None, 0.0, 1.0, [0, 1])
    assert [v.key for v in check(MODEL, [wrong, right])] == ["x"]


def test_history_that_is_too_entangled_is_undecided_and_not_right() -> None:
    writes = [Operation(str(n), "k", WRITE, n + 1, 0.0, 1.0, [n + 1, n + 2]) for n in range(12)]
    wrong = Operation("r", "k", READ, None, 2.0, 3.0, [50, 99])
    with pytest.raises(Undecided):
        check(MODEL, [*reversed(writes), wrong], max_steps=5)
    assert len(check(MODEL, [*reversed(writes), wrong])) == 1


def test_writes_without_answers_take_no_more_steps_than_allowed() -> None:
    """Each of them may have happened at any later time: nearly all orders are compared, and none explains the end."""
    lost = [Operation(f"lost {n}", "k", WRITE, n + 1, float(n)) for n in range(400)]
    wrong = Operation("r", "k", READ, None, 400.0, 401.0, [500, 99])
    seen = [Operation("r", "k", READ, None, n + .5, n + .6, [n, 1 + n]) for n in range(0, 400, 7)]
    with pytest.raises(Undecided, match="steps of the search"):
        check(MODEL, [*lost, *seen, wrong], max_steps=100_000)


def test_readings_that_overlap_are_not_tried_in_all_orders() -> None:
    readings = [Operation(str(n), "k", READ, None, 0.0, 9.0, [0, 1]) for n in range(60)]
    lost = [Operation(f"lost {n}", "k", WRITE, 0, 0.0) for n in range(60)]  # of the number that is there
    wrong = Operation("r", "k", READ, None, 10.0, 11.0, [50, 99])
    assert check(MODEL, [*readings, *lost], max_steps=1000) == []
    [found] = check(MODEL, [*readings, *lost, wrong], max_steps=1000)
    assert found.stuck[-1] == wrong


def test_calls_that_all_overlap_are_undecided_before_they_are_held() -> None:
    """No client has two calls under way, and no run thousands of clients."""
    calls = [Operation(str(n), "k", READ, None, 0.0, 9.0 + n, [0, 1]) for n in range(4_000)]
    with pytest.raises(Undecided, match="overlap"):
        check(MODEL, calls)
    assert check(MODEL, calls[:300]) == []


def test_operation_that_ends_before_it_begins_is_no_history() -> None:
    with pytest.raises(ValueError, match="ends before it begins"):
        check(MODEL, [Operation("a", "k", READ, None, 2.0, 1.0, [0, 1])])


def test_recorder_keeps_what_is_unknown_and_leaves_out_what_was_refused(tmp_path: Path) -> None:
    ticks = itertools.count()
    recorder = Recorder(tmp_path / "history", clock=lambda: float(next(ticks)))
    with recorder.operation("a", "k", READ) as answer:
        answer.is_([0, 1])
    with recorder.operation("a", "k", WRITE, 3):
        raise Unknown
    with recorder.operation("a", "k", WRITE, 4):
        raise Refused
    with pytest.raises(KeyError), recorder.operation("a", "k", WRITE, 5):
        raise KeyError
    with recorder.operation("b", "k", READ) as answer:
        under_way = recorder.operations()
        answer.is_(None)  # a result too
    assert [(o.call, o.argument, o.ended_s) for o in under_way] == [
        (READ, None, 1.0), (WRITE, 3, None), (WRITE, 5, None), (READ, None, None)]
    assert recorder.operations()[-1].ended_s is not None
    recorder.close()
    assert history.read(tmp_path / "history") == recorder.operations()
    with (tmp_path / "history").open("a") as file:
        file.write('[9, {"client"')  # it was killed here
    assert history.read(tmp_path / "history") == recorder.operations()
    with (tmp_path / "history").open("a") as file:
        file.write("\n")
    with pytest.raises(ValueError, match="delimiter|Expecting"):
        history.read(tmp_path / "history")
