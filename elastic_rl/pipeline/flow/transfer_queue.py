"""The group queue on TransferQueue (PyPI): groups are held by Ray actors, and not by the actor.

Its controller knows which group is where, and its storage units hold the bytes. Neither is replicated or restarted:
what an actor held is gone with it, and a client that asks a dead one waits for minutes. So every call has a time limit
here, a failed one asks Ray whether all actors live, and if one does not, all are replaced, with an empty queue: groups
are lost, which the flow has generated again. While they live, only the client is made again, and whoever called tries
again: that is safe, since each attempt writes and drops rows of its own (``row_attempts``). The rows that a failed call
leaves behind, whenever it writes them, are dropped with those of the next groups that are not needed. A clean-up that
fails is tried again, from the second time on after a pause, in which it keeps no group out; where as many groups as the
queue may hold cannot be dropped, the actors are replaced. The package's own ``init`` is not used, since it names the
actors for the whole cluster and keeps one queue in each process.

Trust: its sockets take pickles from whoever connects, without a password. They are bound to the loopback address of the
host of the run; where its ranks may be on others (``coordinator.insecure_network``), to the host's address in the
cluster. What is written and read is bytes of numbers and JSON for each sample (``data.queue.row_client``).
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any, TypeVar

from elastic_rl.data.queue.row_client import (
    Connection,
    RowClient,
    RowName,
    address_of,
    encode_rows,
    import_package,
    require_none_lost,
    with_attempts,
)
from elastic_rl.data.queue.step_groups import SampleRef, StepReader
from elastic_rl.data.queue.summary import GroupSummary
from elastic_rl.data.samples import Group, Prompt, Sample
from elastic_rl.errors import ConfigError, GroupsLost, IllegalTransition, QueueUnavailable
from elastic_rl.pipeline.flow.group_queue import QueueLoss
from elastic_rl.pipeline.flow.row_attempts import RowAttempts
from elastic_rl.runtime.abandonable import AbandonableCall, AbandonableCalls, CallRefused
from elastic_rl.runtime.backoff import RetryBackoff
from elastic_rl.runtime.process import SOME_CPU

log = logging.getLogger(__name__)
T = TypeVar("T")

_START_S = 120.0
"""Longest start of the queue's actors; Ray may have to start workers for them."""
_GIVE_UP_START_S = 2 * _START_S
"""A start that has not ended by then, since Ray or the package hangs in it, is left to its thread, and another one is
begun."""
_MAX_LEFT = 4
"""Starts that were given up, and whose threads have not ended."""
_SHOWN_AFTER_S = 1.0
"""Whoever puts a group is told then that the actors start, so that it can say what it waits for."""
_PING_S = 10.0
_LOOK_EVERY_S = 2.0
"""Whether all actors live is asked this often while nothing fails."""
_MAX_TIMEOUTS = 3
"""Calls in a row that took too long, although all actors live by what Ray says: they are replaced then, since what they
hold cannot be reached."""


_CLEAN_AGAIN_S = (1.0, 60.0)
"""First and longest pause after a clean-up that failed once more. Whoever puts a group waits for one that takes long.
"""


class TransferQueueQueue:
    """A queue with actors of its own, which end with it or with the process that made it. Thread-safe."""

    def __init__(self, capacity: int, *, units: int, call_s: float, host: str) -> None:
        """``capacity``: in groups. ``units``: storage actors. ``call_s``: limit of one call. ``host``: the address that
        all actors bind. Nothing is started before the first group. Raises ConfigError where the package is missing."""
        if importlib.util.find_spec("transfer_queue") is None:
            raise ConfigError("train.queue=transfer_queue needs the package TransferQueue",
                              hint="install 'elastic-rl[transfer-queue]' on every host, or set train.queue to embedded")
        self._capacity, self._units, self._call_s, self._host = capacity, units, call_s, host
        self._lock = threading.RLock()
        """Guards what is below; never held during a call of the queue."""
        self._actors: _Actors | None = None
        self._starts = AbandonableCalls("transfer-queue-start", _MAX_LEFT)
        self._starting: AbandonableCall[None] | None = None
        self._started_at = 0.0
        self._generation = 0
        self._attempts = RowAttempts()
        self._loss: QueueLoss | None = None
        self._timeouts = 0
        """Calls that took too long since one succeeded."""
        self._dead = 0
        """Number of attempts of whose rows, which are of no use, the storage units may have some."""
        self._put_failed = False
        """Whether a put has failed since the last clean-up."""
        self._clean_again = RetryBackoff(*_CLEAN_AGAIN_S)
        self._cleans_failed = 0
        """Clean-ups in a row that failed."""
        self._cleaning = False
        """Whether a thread drops such rows. Two would be in each other's way: the package drops by numbers, which it
        gives to other rows afterwards."""
        self._closed = False
        self._looked_at = 0.0

    def put(self, group: Group) -> None:
        """Raises QueueUnavailable; IllegalTransition beyond the capacity; PluginFailed for metadata that is no JSON."""
        with self._lock:
            held = self._attempts.held
            if len(held) >= self._capacity and group.ordinal not in held:
                raise IllegalTransition(f"the queue is full: it holds {self._capacity} groups")
            attempt, sent = self._attempts.begin(), threading.Event()
        try:
            rows = encode_rows(group, attempt)  # here, since what is wrong with a group is no fault of the actors
            generation, actors = self._started()
            # Of what failed attempts have left: tries of one group must not add up.
            if self._put_failed and (failure := self._clean()):
                raise QueueUnavailable(failure)
            self._call(generation, actors, partial(_put, rows, sent))
            with self._lock:
                if generation != self._generation:
                    raise QueueUnavailable("the queue was replaced while a group was put into it")
                self._dead += group.ordinal in self._attempts.held
                self._attempts.arrived(GroupSummary.from_group(group, attempt))
        except BaseException:
            with self._lock:
                self._attempts.end(attempt)
                if sent.is_set():  # not in the pause of the connection after a call that failed
                    self._dead += 1
                    self._put_failed = True
            raise
        self._clean()  # last: after a call that fails the connection pauses

    def get(self, ordinals: Sequence[int]) -> Mapping[int, GroupSummary]:
        with self._lock:
            held = self._attempts.held
            return {ordinal: held[ordinal] for ordinal in ordinals if ordinal in held}

    def reader(self, groups: Collection[GroupSummary]) -> StepReader:
        return _AttemptReader(self, {group.ordinal: group.attempt for group in groups})

    def address(self) -> Mapping[str, Any] | None:
        """The address by which other processes reach the queue; None while its actors start."""
        with self._lock:
            return None if self._actors is None else self._actors.address

    def read(self, names: Sequence[RowName]) -> list[tuple[Prompt, Sample]]:
        """The samples of these rows, in order. Raises QueueUnavailable and GroupsLost."""
        with self._lock:
            generation, actors = self._generation, self._actors
        self._require_held(names)
        if actors is None:
            raise QueueUnavailable("the actors of TransferQueue start")
        found = self._call(generation, actors, lambda client: client.get(names))
        try:
            require_none_lost(name.ordinal for name in names if name not in found)
        except GroupsLost as e:
            log.warning("although the actors of TransferQueue live, %s", e)
            with self._lock:
                self._attempts.lose(name for name in names if name not in found)
                self._dead += 1
            raise
        return [found[name] for name in names]

    def require(self, names: Sequence[RowName]) -> None:
        """Raises GroupsLost for rows that are known to be gone."""
        self._look_for_dead()
        self._require_held(names)

    def _require_held(self, names: Sequence[RowName]) -> None:
        with self._lock:
            require_none_lost(name.ordinal for name in names if not self._attempts.holds(name))

    def drop(self, ordinals: Collection[int]) -> None:
        with self._lock:
            self._dead += len(self._attempts.held.keys() & set(ordinals))
            self._attempts.drop(ordinals)
        self._clean()

    def _clean(self) -> str:
        """Drops the rows that are of no use, if there may be any and this is not in the pause after failures; a thread
        that is at it does so for others too. Returns why it failed, "" if it did not: they are dropped later then."""
        while (found := self._begin_clean()) is not None:
            generation, actors, dead = found
            failure, asked = "it was interrupted", threading.Event()
            try:
                self._call(generation, actors, partial(self._drop_dead, asked))
                failure = ""
            except QueueUnavailable as e:
                failure = str(e)
            finally:
                self._end_clean(generation, dead, failure, was_asked=asked.is_set())
            if failure:
                return failure
        return ""

    def _begin_clean(self) -> tuple[int, _Actors, int] | None:
        """The generation and its actors, and of how many attempts rows are dropped."""
        with self._lock:
            if (self._cleaning or not self._dead or self._actors is None
                    or not self._clean_again.is_due(time.monotonic())):
                return None
            self._cleaning, dead, self._dead = True, self._dead, 0
            return self._generation, self._actors, dead

    def _end_clean(self, generation: int, dead: int, failure: str, *, was_asked: bool) -> None:
        """``was_asked``: whether the actors were; not in the pause of the connection after a call that failed."""
        with self._lock:
            self._cleaning = False
            if not failure:
                self._put_failed = False
                self._cleans_failed = 0
                self._clean_again.reset()
                return
            if generation != self._generation:  # they are gone with their actors
                return
            self._dead += dead
            if not was_asked:
                return
            self._clean_again.failed(time.monotonic())
            self._cleans_failed += 1
            if self._cleans_failed == 1:  # which may have been chance
                self._clean_again.try_now()
            log.warning("rows of %d groups that are of no use could not be dropped yet: %s", self._dead, failure)
            if self._dead <= self._capacity:
                return
            why = f"{self._dead} groups that are of no use cannot be dropped: {failure}"
        self._replace(generation, why)

    def _drop_dead(self, asked: threading.Event, client: RowClient) -> None:
        asked.set()
        names = client.names()
        with self._lock:  # afterwards: what is listed and dead now stays so
            dead = self._attempts.dead(names)
        if dead:
            client.drop(dead)

    def take_loss(self) -> QueueLoss | None:
        self._look_for_dead()
        with self._lock:
            loss, self._loss = self._loss, None
            return loss

    def _look_for_dead(self) -> None:
        """Now and then: replaces the actors when one is dead."""
        with self._lock:
            generation, actors = self._generation, self._actors
            look = actors is not None and time.monotonic() - self._looked_at >= _LOOK_EVERY_S
            if look:
                self._looked_at = time.monotonic()
        if look and actors is not None and (dead := actors.dead()):
            self._replace(generation, dead)

    def close(self) -> None:
        with self._lock:
            actors, self._actors = self._actors, None
            self._attempts.lose_all()
            self._closed = True
            self._generation += 1
        if actors is not None:
            actors.close()

    def _started(self) -> tuple[int, _Actors]:
        with self._lock:
            if self._closed:
                raise QueueUnavailable("the queue is closed")
            if self._actors is not None:
                return self._generation, self._actors
            starting = self._starting
            if starting is None:
                try:
                    starting = self._starts.begin_with(partial(self._start, self._generation))
                except CallRefused as e:
                    if self._starts.held_s is None:  # no thread can be started now
                        raise QueueUnavailable(f"TransferQueue does not start: {e.message}") from e
                    # No outage that this process can wait for: it ends, and another replica of the actor begins.
                    raise RuntimeError(f"{_MAX_LEFT} starts of TransferQueue hang in this process") from e
                self._starting, self._started_at = starting, time.monotonic()
        if not wait([starting.future], _SHOWN_AFTER_S).done:
            self._give_up_late(starting)
            raise QueueUnavailable("the actors of TransferQueue start")
        starting.future.result()
        with self._lock:
            if self._actors is not None:
                return self._generation, self._actors
        raise QueueUnavailable("the queue was closed or replaced while it started")

    def _give_up_late(self, starting: AbandonableCall[None]) -> None:
        with self._lock:
            if self._starting is starting and time.monotonic() - self._started_at > _GIVE_UP_START_S:
                log.warning("a start of TransferQueue is given up: it has taken %.0f s", _GIVE_UP_START_S)
                starting.abandon()
                self._starting = None
                self._generation += 1  # what it makes after all is of no use

    def _start(self, generation: int, starting: AbandonableCall[None]) -> None:
        """Starts the actors, in the thread of the call. Raises QueueUnavailable where they do not start."""
        made: _Actors | None = None
        failure: QueueUnavailable | None = None
        try:
            made = _Actors(self._units, self._call_s, self._host)
        except BaseException as e:  # of Ray, of the package: there is no room, a host is gone, Ray is away
            failure = QueueUnavailable(f"TransferQueue does not start: {type(e).__name__}: {e}")
        with self._lock:
            if self._starting is starting:
                self._starting = None
            wanted = generation == self._generation and self._actors is None
            if wanted:
                self._actors = made
        if made is not None and not wanted:
            made.close()
        if failure is not None:
            raise failure

    def _call(self, generation: int, actors: _Actors, call: Callable[[RowClient], T]) -> T:
        """What the call returns. Raises QueueUnavailable. Replaces the actors when one of them is dead or does not
        answer, and when several calls in a row took too long: for a single one all groups would be lost."""
        try:
            found = actors.run(call)
        except Exception as e:  # of the package: whatever it raises for an actor that is gone
            why = actors.dead()
            with self._lock:
                self._timeouts += isinstance(e, TimeoutError) and generation == self._generation
                if not why and self._timeouts >= _MAX_TIMEOUTS:
                    why = f"{self._timeouts} calls in a row took too long: {e}"
            if why:
                self._replace(generation, why)
            if isinstance(e, QueueUnavailable):
                raise
            raise QueueUnavailable(f"TransferQueue failed: {type(e).__name__}: {e}") from e
        with self._lock:
            self._timeouts = 0
        return found

    def _replace(self, generation: int, why: str) -> None:
        with self._lock:
            if generation != self._generation or self._actors is None:
                return
            actors, lost = self._actors, self._attempts.lose_all()
            self._actors = None
            self._timeouts, self._dead, self._put_failed, self._cleans_failed = 0, 0, False, 0
            self._clean_again.reset()
            self._generation += 1
            self._loss = QueueLoss((*(self._loss.groups if self._loss else ()), *lost), why)
        log.warning("TransferQueue is replaced, and %d groups are lost with it: %s", len(lost), why)
        actors.close()


def _put(rows: Mapping[RowName, bytes], sent: threading.Event, client: RowClient) -> None:
    sent.set()
    client.put(rows)


class _AttemptReader:
    """Reads the samples that certain attempts have brought. A ``StepReader``."""

    is_local = False

    def __init__(self, queue: TransferQueueQueue, attempts: Mapping[int, int]) -> None:
        """``attempts``: ordinal of a group → the attempt that brought its samples."""
        self._queue, self._attempts = queue, attempts

    @property
    def address(self) -> Mapping[str, Any] | None:
        address = self._queue.address()
        return None if address is None else with_attempts(address, self._attempts)

    def read(self, refs: Sequence[SampleRef]) -> list[tuple[Prompt, Sample]]:
        """Raises QueueUnavailable and GroupsLost."""
        return self._queue.read(self._names(refs))

    def require(self, refs: Sequence[SampleRef]) -> None:
        self._queue.require(self._names(refs))

    def _names(self, refs: Sequence[SampleRef]) -> list[RowName]:
        return [RowName(self._attempts[ordinal], ordinal, index) for ordinal, index in refs]


def _bound(actor_class: Any, host: str) -> Any:
    """The actor class, with sockets at this address. Ray knows no host by a loopback address, so the package's own
    choice would be open to the network even where all else of the cluster is not."""
    import ray

    class Bound(actor_class.__ray_metadata__.modified_class):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # The package asks this function, and the process is this actor's alone.
            ray.util.get_node_ip_address = lambda: host
            super().__init__(*args, **kwargs)

    Bound.__name__ = actor_class.__ray_metadata__.class_name  # in Ray's lists
    return ray.remote(Bound)


class _Actors:
    """One controller, its storage units, and a connection to them. Raises whatever Ray and the package raise."""

    def __init__(self, units: int, call_s: float, host: str) -> None:
        import_package(call_s)
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
        from transfer_queue.controller import TransferQueueController
        from transfer_queue.storage.simple_storage import SimpleStorageUnit

        self._ray = ray
        config: dict[str, Any] = {"num_data_storage_units": units, "total_storage_size": None}
        # They are idle but for a copy now and then: a CPU each would be taken from the roles. They are on this host, as
        # are all who may use their sockets.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        controllers, units_of = _bound(TransferQueueController, host), _bound(SimpleStorageUnit, host)
        self._controller = controllers.options(num_cpus=SOME_CPU, scheduling_strategy=here).remote()
        self._storage = [units_of.options(num_cpus=SOME_CPU, scheduling_strategy=here).remote(config=config)
                         for _ in range(units)]
        try:
            controller, *storage = ray.get([a.get_zmq_server_info.remote() for a in self._all()], timeout=_START_S)
        except BaseException:
            self._kill()
            raise
        self.address = address_of(controller, {str(i): info for i, info in enumerate(storage)},
                                  f"groups-{secrets.token_hex(8)}")
        self._connection = Connection(f"elastic-rl-{os.getpid()}", self.address, call_s)

    def _all(self) -> list[Any]:
        return [self._controller, *self._storage]

    def run(self, call: Callable[[RowClient], T]) -> T:
        """See ``Connection.run``. Raises QueueUnavailable as soon as an actor is dead meanwhile."""
        return self._connection.run(call, self._require_alive)

    def _require_alive(self) -> None:
        if dead := self.dead():
            raise QueueUnavailable(dead)

    def dead(self) -> str:
        """Which actors are dead or do not answer, for people; "" for none."""
        try:
            return self._dead()
        except Exception as e:  # of Ray, which is away itself
            return f"Ray does not say whether its actors live ({type(e).__name__})"

    def _dead(self) -> str:
        asked = {actor.get_zmq_server_info.remote(): name for name, actor in zip(
            ["controller", *(f"storage unit {i}" for i in range(len(self._storage)))], self._all(), strict=True)}
        ready, silent = self._ray.wait(list(asked), num_returns=len(asked), timeout=_PING_S)
        found = [f"its {asked[one]} does not answer" for one in silent]
        for one in ready:
            try:
                self._ray.get(one)
            except Exception as e:  # RayActorError and its like
                found.append(f"its {asked[one]} is gone ({type(e).__name__})")
        return ", ".join(found)

    def close(self) -> None:
        self._kill()
        self._connection.close()

    def _kill(self) -> None:
        for actor in self._all():
            with contextlib.suppress(Exception):  # Ray itself may be away; they end with this process then
                self._ray.kill(actor)
