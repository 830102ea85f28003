"""The group queue on the real TransferQueue, with its actors on a real Ray, which are killed."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from support.actor_runs import WAIT_S
from support.etcd_server import EtcdServers
from support.ray_cluster import start_ray
from support.simulated_job import SimulatedJob

from elastic_rl.data.queue.summary import GroupSummary
from elastic_rl.data.queue.transfer_queue import RemoteSamples
from elastic_rl.data.samples import Group, Prompt, Sample, Segment
from elastic_rl.errors import GroupsLost, IllegalTransition, QueueUnavailable
from elastic_rl.etcd import events
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import StepMetrics
from elastic_rl.pipeline.fully_async import transfer_queue
from elastic_rl.pipeline.fully_async.group_queue import QueueLoss
from elastic_rl.pipeline.fully_async.transfer_queue import TransferQueueQueue
from elastic_rl.runtime import wait_until

pytest.importorskip("transfer_queue", reason="pip install 'elastic-rl[transfer-queue]'")


@pytest.fixture(scope="module", autouse=True)
def ray_cluster() -> Iterator[None]:
    start_ray(2)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def shared_queue(ray_cluster: None) -> Iterator[TransferQueueQueue]:
    """Its actors start once: that takes longer than a test."""
    made = TransferQueueQueue(4, units=2, call_s=20.0, host="127.0.0.1")
    yield made
    made.close()


@pytest.fixture
def queue(shared_queue: TransferQueueQueue, monkeypatch: pytest.MonkeyPatch) -> TransferQueueQueue:
    """Empty."""
    monkeypatch.setattr(transfer_queue, "_SHOWN_AFTER_S", WAIT_S)  # nobody here tries again
    shared_queue.drop(list(shared_queue._held))
    shared_queue.take_loss()
    return shared_queue


def _group(ordinal: int, tokens: int = 3) -> Group:
    segments = (Segment(tuple(range(tokens)), (-0.1,) * tokens, version=7), Segment((1, 2), loss=False))
    return Group(ordinal, Prompt((1, 2), "text", (3,), {"a": [1]}), (Sample(segments, reward=0.5),) * 2)


def _kill(queue: TransferQueueQueue, number: int) -> None:
    """0: the controller; others: storage units."""
    actors = queue._actors
    assert actors is not None
    ray.kill(actors._all()[number])


def test_groups_of_any_length_come_back_as_they_were_until_they_are_dropped(queue: TransferQueueQueue) -> None:
    groups = [_group(0), _group(1, tokens=5000), _group(2, tokens=1)]
    for group in groups:
        queue.put(group)
    assert queue.get([2, 0, 1, 9]) == {group.ordinal: GroupSummary.from_group(group) for group in groups}
    refs = [(2, 1), (0, 0), (1, 1), (0, 1)]
    assert queue.read(refs) == [(groups[ordinal].prompt, groups[ordinal].samples[n]) for ordinal, n in refs]
    queue.drop([0, 2])
    assert list(queue.get([0, 1, 2])) == [1] and queue.take_loss() is None
    for ordinal in (3, 4, 5):
        queue.put(_group(ordinal))
    with pytest.raises(IllegalTransition, match="full"):
        queue.put(_group(6))


def test_group_that_is_gone_although_all_actors_live_is_lost_when_it_is_read(queue: TransferQueueQueue) -> None:
    queue.put(_group(0))
    queue.put(_group(1))
    assert queue._actors is not None
    queue._actors.rows.drop([(0, 1)])
    assert queue.read([(0, 0)]) == [(_group(0).prompt, _group(0).samples[0])]
    with pytest.raises(GroupsLost) as lost:
        queue.read([(0, 0), (0, 1), (1, 0)])
    assert lost.value.ordinals == (0,) and list(queue.get([0, 1])) == [1]


def test_another_process_reads_samples_by_the_address_of_the_queue(queue: TransferQueueQueue) -> None:
    """As a rank does, which is no process of Ray."""
    queue.put(_group(0))
    queue.put(_group(1))
    program = ("import json, sys; from elastic_rl.data.queue.transfer_queue import RemoteSamples; import ray; "
               "at, refs = json.loads(sys.argv[1]); found = RemoteSamples(20.0).at(at).read(list(map(tuple, refs))); "
               "print(ray.is_initialized(), [(p.token_ids, s.response_ids, s.versions) for p, s in found])")
    answer = subprocess.run([sys.executable, "-c", program, json.dumps([queue.address, [(1, 1), (0, 0)]])],
                            capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert answer.stdout.splitlines()[-1] == f"False {[((1, 2), (0, 1, 2, 1, 2), (7,))] * 2}"


def test_reader_of_a_queue_whose_actors_are_gone_says_so_within_its_limit(queue: TransferQueueQueue) -> None:
    queue.put(_group(0))
    samples = RemoteSamples(3.0).at(queue.address or {})
    assert len(samples.read([(0, 0)])) == 1
    with pytest.raises(GroupsLost):
        samples.read([(0, 0), (7, 0)])
    _kill(queue, 1)
    _kill(queue, 2)
    with pytest.raises(QueueUnavailable):
        samples.read([(0, 0)])


def test_actors_of_a_cluster_of_one_host_listen_on_its_loopback_address_only(queue: TransferQueueQueue) -> None:
    """Its sockets take pickles from whoever connects; Ray knows the host by its address in the network."""
    queue.put(_group(0))
    assert queue._actors is not None and not ipaddress.ip_address(ray.util.get_node_ip_address()).is_loopback
    pids = ray.get([actor.__ray_call__.remote(lambda _: os.getpid()) for actor in queue._actors._all()])
    zmq_ports = {port for actor in queue._actors._all()
                 for port in ray.get(actor.get_zmq_server_info.remote()).ports.values()}
    listening = [c.laddr for pid in pids for c in psutil.Process(pid).net_connections("inet")
                 if c.status == psutil.CONN_LISTEN and c.laddr.port in zmq_ports]
    assert len(zmq_ports) >= 3 and {at.port for at in listening} == zmq_ports
    assert {at.ip for at in listening} == {"127.0.0.1"}


@pytest.mark.parametrize("killed", [0, 1], ids=["controller", "storage"])
def test_queue_whose_actor_died_says_what_it_lost_and_goes_on_with_new_ones(
        queue: TransferQueueQueue, killed: int) -> None:
    for ordinal in range(3):
        queue.put(_group(ordinal))
    _kill(queue, killed)
    found: list[QueueLoss] = []

    def says_so() -> bool:
        with contextlib.suppress(QueueUnavailable, GroupsLost):
            queue.read([(0, 0), (1, 0), (2, 0)])
        found.extend(loss for loss in [queue.take_loss()] if loss is not None)
        return bool(found)

    wait_until(says_so, timeout_s=WAIT_S, what="the loss")
    assert [loss.groups for loss in found] == [(0, 1, 2)]
    assert ("controller", "storage unit 0")[killed] in found[0].why and queue.take_loss() is None
    queue.put(_group(0))
    assert list(queue.get([0, 1])) == [0]


@pytest.mark.parametrize("killed", [0, 1], ids=["controller", "storage"])
def test_groups_that_died_with_an_actor_in_mid_run_are_generated_again_and_trained_exactly_once(
        etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path, killed: int) -> None:
    job = SimulatedJob(etcd, etcd_servers.endpoints, keys, tmp_path, **{
        "train.schedule": "fully_async", "train.max_staleness": "1", "train.queue": "transfer_queue",
        "train.queue_call_timeout_s": "20"})
    try:
        job.start_actor()
        job.wait_for(1)
        job.trainer.frozen.set()  # so that groups wait in the queue
        background = job.runs[-1].pipeline.background
        assert background is not None
        queue = background.flow._queue
        assert isinstance(queue, TransferQueueQueue)
        wait_until(lambda: len(queue._held) >= 12, timeout_s=WAIT_S, what="groups in the queue")
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
