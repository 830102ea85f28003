"""The rows of TransferQueue under calls that were given up and are carried out later, in any order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.data.queue.row_client import RowName, address_of, decode_row, with_attempts, without_attempts
from elastic_rl.data.queue.summary import GroupSummary
from elastic_rl.data.samples import Group, Prompt, Sample, Segment
from elastic_rl.errors import ConfigError, GroupsLost, QueueUnavailable
from elastic_rl.net.addresses import LOOPBACK
from elastic_rl.pipeline.flow import transfer_queue
from elastic_rl.pipeline.flow.row_attempts import RowAttempts
from elastic_rl.pipeline.flow.transfer_queue import TransferQueueQueue
from elastic_rl.runtime.backoff import RetryBackoff

_GROUPS, _SAMPLES = 3, 2


class Storage:
    """Keeps rows as the package does: a name gets a number, which another name gets once the row was dropped. Each call
    consists of effects, of which those behind a failure come later."""

    def __init__(self) -> None:
        self.numbers: dict[RowName, int] = {}
        self.data: dict[int, bytes] = {}
        self.done_before_failure: int | None = None
        """Effects of the next call that writes that are carried out before it fails; None: it does not fail."""
        self.late: list[Callable[[], object]] = []
        """Effects of failed calls that have not been carried out."""

    def _carry_out(self, effects: Iterator[Callable[[], object]]) -> None:
        if (left := self.done_before_failure) is None:
            for effect in effects:
                effect()
            return
        self.done_before_failure = None
        for _, effect in zip(range(left), effects, strict=False):
            effect()
        self.late += effects
        raise OSError("no answer")

    def put(self, rows: Mapping[RowName, bytes]) -> None:
        def effects() -> Iterator[Callable[[], object]]:
            for name, row in rows.items():
                number = self.numbers[name] = min({*range(99)} - {*self.numbers.values()})
                yield lambda number=number, row=row: self.data.update({number: row})  # type: ignore[misc]

        self._carry_out(effects())

    def drop(self, names: Collection[RowName]) -> None:
        def effects() -> Iterator[Callable[[], object]]:
            found = {name: self.numbers[name] for name in names if name in self.numbers}
            for number in found.values():
                yield lambda number=number: self.data.pop(number, None)  # type: ignore[misc]
            for name in found:
                yield lambda name=name: self.numbers.pop(name, None)  # type: ignore[misc]

        self._carry_out(effects())

    def names(self) -> list[RowName]:
        return [*self.numbers]

    def get(self, names: Sequence[RowName]) -> dict[RowName, tuple[Prompt, Sample]]:
        rows = [self.data.get(self.numbers[name], b"") for name in names if name in self.numbers]
        return {name: (prompt, sample) for name, prompt, sample in map(decode_row, filter(None, rows))}


class Actors:
    """``pauses``: a call that follows a failed one is refused, as by a connection in its pause."""

    def __init__(self, units: int, call_s: float, host: str) -> None:
        self.storage = Storage()
        self.address = {"units": {}, "partition": "groups-1"}
        self.pauses = self._is_paused = False

    def run(self, call: Callable[[Any], Any]) -> Any:
        if self._is_paused:
            self._is_paused = False
            raise QueueUnavailable("it is tried again soon")
        try:
            return call(self.storage)
        except OSError:
            self._is_paused = self.pauses
            raise

    def dead(self) -> str:
        return ""

    def close(self) -> None:
        pass


def group(ordinal: int, number: int) -> Group:
    """``number``: tells the group from other attempts at the same one."""
    return Group(ordinal, Prompt((1,)), tuple(
        Sample((Segment((number, index), (-0.1, -0.1), version=1),)) for index in range(_SAMPLES)))


def queue_with(first: Group, capacity: int = 99) -> tuple[TransferQueueQueue, Storage]:
    """A queue whose failed clean-ups are tried again without a pause."""
    with (patch.object(transfer_queue, "_Actors", Actors), patch.object(transfer_queue, "_SHOWN_AFTER_S", 60.0),
          patch.object(transfer_queue, "_CLEAN_AGAIN_S", (0.0, 0.0)),
          patch.object(transfer_queue.importlib.util, "find_spec", lambda name: object())):
        queue = TransferQueueQueue(capacity, units=1, call_s=1.0, host=LOOPBACK)
        queue.put(first)
    assert isinstance(actors := queue._actors, Actors)
    return queue, actors.storage


_FAILS = st.none() | st.integers(0, 2 * _SAMPLES)
_ORDINALS = st.integers(0, _GROUPS - 1)
_CALLS = st.lists(st.one_of(
    st.tuples(st.just("put"), _ORDINALS, _FAILS), st.tuples(st.just("drop"), _ORDINALS, _FAILS),
    st.tuples(st.just("late"), st.integers(0, 99), st.none()), st.tuples(st.just("lose"), _ORDINALS, st.none())),
    max_size=40)


@settings(max_examples=seeds(200), deadline=None)
@given(_CALLS)
def test_no_late_effect_of_an_attempt_is_read_as_another_one(
        calls: Sequence[tuple[str, int, int | None]]) -> None:
    queue, storage = queue_with(group(0, 0))
    held, readers = {0: 0}, list[tuple[int, int, Any]]()
    for number, (call, which, done) in enumerate(calls, 1):
        if call == "late":
            if storage.late:
                storage.late.pop(which % len(storage.late))()
            continue
        storage.done_before_failure = done
        if call == "put":
            try:
                queue.put(group(which, number))
                held[which] = number
            except QueueUnavailable:
                pass
        elif call == "drop":
            queue.drop([which])
            held.pop(which, None)
        else:  # a row that is gone
            for name in [name for name in storage.numbers if name.ordinal == which][:1]:
                storage.data.pop(storage.numbers[name], None)
        storage.done_before_failure = None
        for ordinal, summary in queue.get(range(_GROUPS)).items():
            assert ordinal in held
            readers.append((ordinal, held[ordinal], queue.reader([summary])))
        for ordinal, attempt, reader in readers:  # those of earlier steps, too
            try:
                found = reader.read([(ordinal, index) for index in range(_SAMPLES)])
            except GroupsLost as e:
                assert e.ordinals == (ordinal,)
            else:
                assert [s.response_ids for _, s in found] == [(attempt, index) for index in range(_SAMPLES)]
    for effect in storage.late:
        effect()
    left = queue.get(range(_GROUPS))
    queue._dead = 1
    queue.drop([])
    assert set(storage.numbers) <= {RowName(summary.attempt, ordinal, index) for ordinal, summary in left.items()
                                    for index in range(_SAMPLES)}, "rows of dead attempts stay"


def without_names(storage: Storage) -> Any:
    """Meanwhile nothing can be dropped, since nobody says what there is."""
    return patch.object(storage, "names", side_effect=OSError("no answer"))


def test_failing_clean_up_keeps_no_group_out_and_is_done_later() -> None:
    queue, storage = queue_with(group(0, 0))
    assert isinstance(actors := queue._actors, Actors)
    actors.pauses = True
    with without_names(storage):
        queue.drop([0])
        actors._is_paused = False  # the pause after that is over
        queue.put(group(1, 1))
        actors._is_paused = False
        queue.put(group(2, 2))
        actors._is_paused = False
        assert len(storage.numbers) == 3 * _SAMPLES and set(queue.get(range(3))) == {1, 2}
    queue.put(group(3, 3))
    assert {name.ordinal for name in storage.numbers} == {1, 2, 3} and queue.take_loss() is None


def test_clean_up_that_fails_again_pauses() -> None:
    queue, storage = queue_with(group(0, 0))
    queue._clean_again = RetryBackoff(1000.0, 1000.0)
    with without_names(storage) as names:
        queue.drop([0])
        for number in range(1, 9):
            queue.put(group(number, number))
    assert names.call_count == 2


def test_clean_up_that_goes_on_failing_after_a_failed_put_keeps_groups_out_for_one_call_a_pause() -> None:
    queue, storage = queue_with(group(0, 0))
    queue._clean_again = RetryBackoff(1000.0, 1000.0)
    with patch.object(storage, "put", side_effect=OSError("no answer")), pytest.raises(QueueUnavailable):
        queue.put(group(1, 1))
    with without_names(storage):
        for _ in range(2):
            with pytest.raises(QueueUnavailable, match="no answer"):
                queue.put(group(1, 1))
        queue.put(group(1, 1))
        queue.put(group(2, 2))
    assert set(queue.get(range(3))) == {0, 1, 2}


def test_tries_of_a_group_that_fail_do_not_add_up() -> None:
    queue, storage = queue_with(group(0, 0))

    def written_without_an_answer(rows: Mapping[RowName, bytes]) -> None:
        Storage.put(storage, rows)
        raise OSError("no answer")

    with patch.object(storage, "put", written_without_an_answer):
        for _ in range(9):
            with pytest.raises(QueueUnavailable):
                queue.put(group(1, 1))
    assert len(storage.numbers) == 2 * _SAMPLES, "of the group that is held, and of the last try"


def test_actors_that_drop_nothing_are_replaced_once_they_have_as_much_of_no_use_as_groups_fit() -> None:
    queue, storage = queue_with(group(9, 9), _GROUPS)
    with without_names(storage):
        for number in range(_GROUPS + 1):
            assert queue.take_loss() is None
            queue.put(group(number, number))
            queue.drop([number])
    assert (loss := queue.take_loss()) is not None and loss.groups == (9,) and "cannot be dropped" in loss.why


def test_samples_stay_although_a_put_and_a_drop_of_an_earlier_attempt_come_late() -> None:
    """They were replaced, and were gone then, while rows had no attempt in their names."""
    queue, storage = queue_with(group(0, 1))
    earlier = {name: storage.data[number] for name, number in storage.numbers.items()}
    queue.drop([0])
    queue.put(group(0, 5))
    refs = [(0, 0), (0, 1)]
    reader = queue.reader(queue.get([0]).values())
    storage.put(earlier)
    assert [s.response_ids for _, s in reader.read(refs)] == [(5, 0), (5, 1)]
    storage.drop([*earlier])
    assert [s.response_ids for _, s in reader.read(refs)] == [(5, 0), (5, 1)]


def test_loss_of_an_earlier_attempts_row_is_none_of_the_later_one() -> None:
    attempts = RowAttempts()
    first, second = attempts.begin(), attempts.begin()
    for attempt in (first, second):
        attempts.arrived(GroupSummary.from_group(group(0, attempt), attempt))
    attempts.lose([RowName(first, 0, 0)])
    assert attempts.holds(RowName(second, 0, 0))
    attempts.lose([RowName(second, 0, 1)])
    assert not attempts.held


def test_address_of_samples_names_their_attempts() -> None:
    server: Any = type("Server", (), {"id": "c", "ip": LOOPBACK, "ports": {"p": 1}})
    address = address_of(server, {"0": server}, "groups-1")
    assert without_attempts(with_attempts(address, {3: 1, 4: 9})) == (address, {3: 1, 4: 9})
    for wrong in (address, {**address, "attempts": [1]}, {**address, "attempts": {"a": 1}}):
        with pytest.raises(ConfigError, match="not the address"):
            without_attempts(wrong)


@given(st.builds(RowName, *[st.integers(0, 2**63)] * 3))
def test_name_of_a_row_is_its_key(name: RowName) -> None:
    assert RowName.from_key(name.key) == name
    for wrong in (name.key + "/1", name.key.partition("/")[0], "a/b/c", ""):
        with pytest.raises(ValueError):
            RowName.from_key(wrong)
