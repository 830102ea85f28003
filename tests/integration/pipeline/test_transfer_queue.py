"""The group queue on the real TransferQueue, with its actors on a real Ray, which are killed."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from support.actor_runs import WAIT_S
from support.collection import skip_module_without
from support.etcd_server import EtcdServers
from support.ray_cluster import start_ray
from support.simulated_job import SimulatedJob
from support.tiers import parametrize
from support.waiting import wait_until

from elastic_rl.data.queue.row_client import RemoteSamples, RowClient, RowName, encode_rows, with_attempts
from elastic_rl.data.queue.step_groups import SampleRef
from elastic_rl.data.queue.summary import GroupSummary
from elastic_rl.data.samples import Group, Prompt, Sample, Segment
from elastic_rl.errors import GroupsLost, IllegalTransition, QueueUnavailable
from elastic_rl.etcd import events
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import StepMetrics
from elastic_rl.pipeline.flow import transfer_queue
from elastic_rl.pipeline.flow.group_queue import GroupQueue, QueueLoss
from elastic_rl.pipeline.flow.queues import make_queue
from elastic_rl.pipeline.flow.transfer_queue import TransferQueueQueue
from elastic_rl.runtime.backoff import RetryBackoff

skip_module_without("transfer_queue", reason="pip install 'elastic-rl[transfer-queue]'")


ADDRESS = "127.0.0.3"
"""An address that neither the package nor Ray would choose."""


@pytest.fixture(scope="module", autouse=True)
def ray_cluster() -> Iterator[None]:
    start_ray(2)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def shared_queue(ray_cluster: None) -> Iterator[TransferQueueQueue]:
    """Its actors start once: that takes longer than a test."""
    made = TransferQueueQueue(4, units=2, call_s=20.0, host=ADDRESS)
    yield made
    made.close()


@pytest.fixture
def empty_queue(shared_queue: TransferQueueQueue) -> TransferQueueQueue:
    shared_queue.drop(list(shared_queue._attempts.held))
    shared_queue.take_loss()
    return shared_queue


@pytest.fixture
def queue(empty_queue: TransferQueueQueue, monkeypatch: pytest.MonkeyPatch) -> TransferQueueQueue:
    """Empty. Whoever puts a group waits until its actors have started, since nobody here tries again."""
    monkeypatch.setattr(transfer_queue, "_SHOWN_AFTER_S", WAIT_S)
    return empty_queue


def _group(ordinal: int, tokens: int = 3) -> Group:
    segments = (Segment(tuple(range(tokens)), (-0.125,) * tokens, version=7), Segment((1, 2), loss=False))
    return Group(ordinal, Prompt((1, 2), "text", (3,), {"a": [1]}), (Sample(segments, reward=0.5),) * 2)


def _read(queue: TransferQueueQueue, refs: Sequence[SampleRef]) -> list[tuple[Prompt, Sample]]:
    return queue.reader(queue.get([ordinal for ordinal, _ in refs]).values()).read(refs)


def _row(queue: TransferQueueQueue, ordinal: int, index: int) -> RowName:
    return RowName(queue.get([ordinal])[ordinal].attempt, ordinal, index)


def _address(queue: TransferQueueQueue, *ordinals: int) -> Mapping[str, Any]:
    return queue.reader(queue.get(ordinals).values()).address or {}


def _kill(queue: TransferQueueQueue, number: int) -> None:
    """0: the controller; others: storage units."""
    actors = queue._actors
    assert actors is not None
    ray.kill(actors._all()[number])


def test_groups_of_any_length_come_back_as_they_were_until_they_are_dropped(queue: TransferQueueQueue) -> None:
    groups = [_group(0), _group(1, tokens=5000), _group(2, tokens=1)]
    for group in groups:
        queue.put(group)
    found = queue.get([2, 0, 1, 9])
    assert found == {group.ordinal: GroupSummary.from_group(group, found[group.ordinal].attempt) for group in groups}
    refs = [(2, 1), (0, 0), (1, 1), (0, 1)]
    assert _read(queue, refs) == [(groups[ordinal].prompt, groups[ordinal].samples[n]) for ordinal, n in refs]
    queue.drop([0, 2])
    assert list(queue.get([0, 1, 2])) == [1] and queue.take_loss() is None
    for ordinal in (3, 4, 5):
        queue.put(_group(ordinal))
    with pytest.raises(IllegalTransition, match="full"):
        queue.put(_group(6))


def test_group_that_is_gone_while_all_actors_live_counts_as_lost(queue: TransferQueueQueue) -> None:
    queue.put(_group(0))
    queue.put(_group(1))
    assert queue._actors is not None
    gone = _row(queue, 0, 1)
    queue._actors.run(lambda client: client.drop([gone]))
    assert _read(queue, [(0, 0)]) == [(_group(0).prompt, _group(0).samples[0])]
    with pytest.raises(GroupsLost) as lost:
        _read(queue, [(0, 0), (0, 1), (1, 0)])
    assert lost.value.ordinals == (0,) and list(queue.get([0, 1])) == [1]


def test_row_without_data_is_lost_alone(queue: TransferQueueQueue) -> None:
    for ordinal in range(3):
        queue.put(_group(ordinal))
    refs = [(ordinal, index) for ordinal in range(3) for index in range(2)]
    names, cut_off, gone = [_row(queue, *ref) for ref in refs], RowName(1 << 40, 3, 0), _row(queue, 1, 0)
    assert queue._actors is not None

    def lose(client: Any) -> None:
        """What a put leaves that ended before the data was stored, and a drop that ended behind it."""
        client._meta([cut_off], create=True)
        package = client._client
        package._run_coroutine(package.storage_manager.clear_data(client._meta([gone])))

    queue._actors.run(lose)
    found = queue._actors.run(lambda client: client.get([cut_off, *names, RowName(1 << 40, 3, 1)]))
    assert set(found) == {*names} - {gone}
    with pytest.raises(GroupsLost) as lost:
        _read(queue, refs)
    assert lost.value.ordinals == (1,) and list(queue.get(range(3))) == [0, 2]
    queue.put(_group(1))
    assert len(_read(queue, refs)) == 6
    assert len(queue._actors.run(lambda client: client.names())) == 6, "the put has dropped what was left"


def test_late_put_and_drop_of_an_earlier_attempt_touch_no_row_of_the_later_one(queue: TransferQueueQueue) -> None:
    """As of a call that was given up, and that the actors carry out after all."""
    queue.put(_group(0, tokens=4))
    actors, earlier = queue._actors, queue.reader(queue.get([0]).values())
    assert actors is not None
    late = encode_rows(_group(0, tokens=4), queue.get([0])[0].attempt)
    queue.drop([0])
    queue.put(_group(0, tokens=9))
    refs, samples = [(0, 0), (0, 1)], [(_group(0, tokens=9).prompt, _group(0, tokens=9).samples[0])] * 2
    actors.run(lambda client: client.put(late))
    assert _read(queue, refs) == samples
    rank = RemoteSamples(WAIT_S)
    assert rank.at(_address(queue, 0)).read(refs) == samples
    actors.run(lambda client: client.drop([*late]))
    assert _read(queue, refs) == samples
    for reader in (earlier, rank.at(earlier.address or {})):
        with pytest.raises(GroupsLost):  # and not the samples of the later one
            reader.read(refs)
    actors.run(lambda client: client.put(late))
    queue.drop([0])
    assert actors.run(lambda client: client.names()) == []
    assert sum(_of_units(actors, lambda unit: unit.storage_data.active_key_count)) == 0


def test_client_that_cannot_be_made_leaves_no_threads_and_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    from transfer_queue import TransferQueueClient
    from transfer_queue.storage.managers import base

    made: list[Any] = []
    initialize = TransferQueueClient.initialize_storage_manager
    monkeypatch.setattr(base, "TQ_STORAGE_HANDSHAKE_MAX_RETRIES", 0)
    monkeypatch.setattr(TransferQueueClient, "initialize_storage_manager",
                        lambda self, *how: (made.append(self), initialize(self, *how)))
    nobody = {"id": "nobody", "ip": "127.0.0.1", "ports": {"handshake_socket": 1, "request_handle_socket": 1}}
    with pytest.raises(QueueUnavailable, match="Handshake"):
        RemoteSamples(WAIT_S).at(with_attempts({"controller": nobody, "units": {"0": nobody}, "partition": "groups"},
                                               {0: 1})).read([(0, 0)])
    wait_until(lambda: made[0].zmq_context.closed and not made[0]._thread.is_alive(),
               what="the end of the client")


def test_slow_call_costs_a_client_and_no_group(queue: TransferQueueQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.put(_group(0))
    actors = queue._actors
    assert actors is not None
    client = actors._connection._client
    stored = _of_units(actors, lambda unit: unit.storage_data.active_key_count)
    release = _hold_puts(actors)
    with monkeypatch.context() as patch:
        patch.setattr(actors._connection, "_call_s", 2.0)
        with pytest.raises(QueueUnavailable, match="queue_call_timeout_s"):
            queue.put(_group(1))
    release()
    assert client is not None and actors._connection._client is None
    wait_until(lambda: not any(thread.name == "transfer-queue" for thread in threading.enumerate()),
               what="the end of the stuck call")

    def taken() -> bool:
        with contextlib.suppress(QueueUnavailable):
            queue.put(_group(1))
            return True
        return False

    wait_until(taken, what="the group")
    assert queue._actors is actors and actors._connection._client is not client and queue.take_loss() is None
    refs = [(0, 0), (1, 0), (1, 1)]
    assert _read(queue, refs) == [(_group(ordinal).prompt, _group(ordinal).samples[n]) for ordinal, n in refs]
    assert sum(_of_units(actors, lambda unit: unit.storage_data.active_key_count)) == sum(stored) + 2, "put twice"
    queue.drop([1])
    assert _of_units(actors, lambda unit: unit.storage_data.active_key_count) == stored


def test_puts_that_the_pause_of_the_connection_refuses_leave_nothing_that_counts(
        queue: TransferQueueQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.put(_group(0))
    actors = queue._actors
    assert actors is not None

    def fail(*_: Any) -> None:
        raise OSError("a socket of the test")

    def refused(match: str) -> None:
        with pytest.raises(QueueUnavailable, match=match):
            queue.put(_group(1))

    with monkeypatch.context() as patch:
        # Pauses that end by the test alone.
        patch.setattr(actors._connection, "_retry", RetryBackoff(600.0, 600.0))
        patch.setattr(queue, "_clean_again", RetryBackoff(600.0, 600.0))
        patch.setattr(RowClient, "put", fail)
        refused("a socket of the test")
        patch.setattr(RowClient, "names", fail)
        for _ in range(2):  # the clean-up before a put, which pauses from the second time on
            actors._connection._retry.try_now()
            refused("a socket of the test")
        for _ in range(2 * queue._capacity):
            refused("tried again in")
        actors._connection._retry.try_now()
        queue._clean_again.try_now()
        refused("a socket of the test")
    assert queue._actors is actors and queue.take_loss() is None and list(queue.get([0, 1])) == [0]
    queue.put(_group(1))
    assert _read(queue, [(0, 1), (1, 0)]) == [(_group(n).prompt, _group(n).samples[0]) for n in range(2)]


def _of_units(actors: Any, call: Callable[[Any], Any]) -> list[Any]:
    """What the call returns in the process of each storage unit."""
    return ray.get([unit.__ray_call__.remote(call) for unit in actors._storage])


def _hold_puts(actors: Any) -> Callable[[], object]:
    """Storage units answer no put until what this returns is called; their actors answer."""
    def hold(unit: Any) -> None:
        from threading import Event

        released, put = Event(), unit.storage_data.put_data
        unit.release = released.set
        unit.storage_data.put_data = lambda *row: (released.wait(), put(*row))

    _of_units(actors, hold)
    return lambda: _of_units(actors, lambda unit: unit.release())


def test_another_process_reads_samples_by_the_address_of_the_queue(queue: TransferQueueQueue) -> None:
    """Reads as a rank does, which is no process of Ray."""
    queue.put(_group(0))
    queue.put(_group(1))
    program = ("import json, sys; from elastic_rl.data.queue.row_client import RemoteSamples; import ray; "
               "at, refs = json.loads(sys.argv[1]); found = RemoteSamples(20.0).at(at).read(list(map(tuple, refs))); "
               "print(ray.is_initialized(), [(p.token_ids, s.response_ids, s.versions) for p, s in found])")
    answer = subprocess.run([sys.executable, "-c", program, json.dumps([_address(queue, 0, 1), [(1, 1), (0, 0)]])],
                            capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert answer.stdout.splitlines()[-1] == f"False {[((1, 2), (0, 1, 2, 1, 2), (7,))] * 2}"


def test_actors_listen_at_the_address_of_the_queue_only(queue: TransferQueueQueue) -> None:
    """Its sockets take pickles from whoever connects; Ray knows the host by its address in the network."""
    queue.put(_group(0))
    assert queue._actors is not None and not ipaddress.ip_address(ray.util.get_node_ip_address()).is_loopback
    pids = ray.get([actor.__ray_call__.remote(lambda _: os.getpid()) for actor in queue._actors._all()])
    zmq_ports = {port for actor in queue._actors._all()
                 for port in ray.get(actor.get_zmq_server_info.remote()).ports.values()}
    listening = [c.laddr for pid in pids for c in psutil.Process(pid).net_connections("inet")
                 if c.status == psutil.CONN_LISTEN and c.laddr.port in zmq_ports]
    assert len(zmq_ports) >= 3 and {at.port for at in listening} == zmq_ports
    assert {at.ip for at in listening} == {ADDRESS}


@parametrize("killed", [0, 1], by_default=0, ids=["controller", "storage"],
             proved_in="tests/integration/pipeline/test_transfer_queue.py",
             why="the death of each kind of actor, without a job")
def test_queue_whose_actor_died_reports_what_it_lost_and_continues(queue: TransferQueueQueue, killed: int) -> None:
    for ordinal in range(3):
        queue.put(_group(ordinal))
    reader = queue.reader(queue.get(range(3)).values())
    _kill(queue, killed)
    found: list[QueueLoss] = []

    def says_so() -> bool:
        with contextlib.suppress(QueueUnavailable, GroupsLost):
            reader.read([(0, 0), (1, 0), (2, 0)])
        found.extend(loss for loss in [queue.take_loss()] if loss is not None)
        return bool(found)

    wait_until(says_so, what="the loss")
    assert [loss.groups for loss in found] == [(0, 1, 2)]
    assert ("controller", "storage unit 0")[killed] in found[0].why and queue.take_loss() is None
    queue.put(_group(0))
    assert list(queue.get([0, 1])) == [0]


@parametrize("killed", [0, 1], ids=["controller", "storage"],
             proved_in="tests/integration/pipeline/test_transfer_queue.py",
             why="the death of each kind of actor")
def test_groups_lost_with_an_actor_are_trained_exactly_once(
        empty_queue: TransferQueueQueue, etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path,
        killed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = empty_queue

    def make(*given: Any) -> GroupQueue:
        """The shared queue, whose actors have started, for the one that the job asks for."""
        made = make_queue(*given)
        assert isinstance(made, TransferQueueQueue) and made._units == 1
        monkeypatch.setattr(queue, "_capacity", made._capacity)
        monkeypatch.setattr(queue, "_units", made._units)  # of the actors that replace the killed ones
        monkeypatch.setattr(queue, "close", lambda: None)
        return queue

    monkeypatch.setattr("elastic_rl.pipeline.flow.background.make_queue", make)
    job = SimulatedJob(etcd, etcd_servers.endpoints, keys, tmp_path, **{
        "train.schedule": "fully_async", "train.max_staleness": "1", "train.queue": "transfer_queue",
        "train.queue_units": "1", "train.queue_call_timeout_s": "20"})
    try:
        job.start_actor()
        job.wait_for(1)
        job.trainer.frozen.set()  # so that groups wait in the queue
        wait_until(lambda: len(queue._attempts.held) >= 12, what="groups in the queue")
        _kill(queue, killed)
        job.trainer.frozen.clear()
        job.finish()
        job.assert_exactly_once()
        found = [StepMetrics.decode(kv.value) for kv in etcd.range(keys.steps_prefix())[0]]
        assert all(m.staleness <= 1 for m in found)
        [event] = [e for e in events.recent(etcd, keys) if e.kind == "queue.replaced"]
        # Those of the step that was under way at the kill were trained, and dropped, before the loss was noticed.
        assert event.data["groups"] >= sum(m.update["groups_lost"] for m in found) > 0
    finally:
        job.close()


def test_reader_of_a_queue_whose_actors_are_gone_says_so_within_its_limit(queue: TransferQueueQueue) -> None:
    queue.put(_group(0))
    samples = RemoteSamples(3.0).at(with_attempts(_address(queue, 0), {0: queue.get([0])[0].attempt, 7: 1}))
    assert len(samples.read([(0, 0)])) == 1
    with pytest.raises(GroupsLost):
        samples.read([(0, 0), (7, 0)])
    assert queue._actors is not None
    for number in range(1, len(queue._actors._all())):
        _kill(queue, number)

    def is_told() -> bool:  # a kill takes its time
        try:
            samples.read([(0, 0)])
        except QueueUnavailable:
            return True
        return False

    wait_until(is_told, what="the end of the actors")
