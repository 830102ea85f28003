"""The interface for other programs (``elastic_rl.dcs.api``) on a real etcd and real nodes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.dcs_cluster import CHUNK, DcsCluster, flip_a_byte, model
from support.etcd_server import EtcdServers
from support.waiting import wait_until

from elastic_rl import dcs as checkpoints
from elastic_rl.dcs.codecs.tensors import checksum
from elastic_rl.errors import ConfigError, Fenced, TensorMismatch, VersionNotFound
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Version


class Service(DcsCluster):
    """Nodes a and b of one host, without a run: no epoch was begun by anybody."""

    def connect(self, node: str = "a") -> checkpoints.CheckpointService:
        access = checkpoints.ServiceAccess(job=self.keys.job, etcd_endpoints=self.etcd_servers.endpoints, settings={
            "dcs": {"chunk_bytes": CHUNK}, "etcd": {"call_timeout_s": 2}})
        return self.stack.enter_context(checkpoints.connect(access, node=node))


@pytest.fixture
def dcs(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> Iterator[Service]:
    with Service.open(etcd_servers, etcd, keys, tmp_path) as out:
        etcd.delete(keys.epoch())
        out.start("a", "b")
        yield out


def assert_equal(found: checkpoints.PulledTensors, expected: dict[str, torch.Tensor]) -> None:
    assert list(found.tensors) == list(expected)
    for name, tensor in found.tensors.items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape), name
        assert checksum(tensor) == checksum(expected[name]), name


def test_published_state_is_followed_and_pulled_into_new_and_existing_tensors(dcs: Service) -> None:
    trainer, reader = dcs.connect("a"), dcs.connect("b")
    first = trainer.publish("policy", model(1), meta={"step": 7, "note": "ü"})
    assert (first.name, first.meta) == ("policy/1", {"step": 7, "note": "ü"})
    versions = reader.follow("policy", timeout_s=60)
    assert next(versions) == first
    new = reader.pull("policy")
    assert new.version == first
    assert_equal(new, model(1))

    trainer.publish("policy", model(2).items())
    third = trainer.publish("policy", model(3))
    followed = next(versions)
    assert followed.number in (2, 3)
    if followed.number == 2:  # it was asked between the two
        followed = next(versions)
    into = model(1)
    addresses = {name: t.data_ptr() for name, t in into.items()}
    assert_equal(reader.pull(followed, into=into), model(3))
    assert {name: t.data_ptr() for name, t in into.items()} == addresses
    assert_equal(reader.pull("policy/-1"), model(2))

    assert [v.version.number for v in reader.list_versions("policy")] == [1, 2, 3]
    assert [v.is_head for v in reader.list_versions()] == [False, False, True]
    assert {v.copies for v in reader.list_versions()} == {2}
    assert list(reader.follow("policy", after=third.number, timeout_s=0)) == []


def test_module_is_updated_in_place_on_its_parameters(dcs: Service) -> None:
    service, source, target = dcs.connect(), torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    service.publish("policy", source.state_dict())
    service.pull("policy", into=target.state_dict())
    assert torch.equal(target.weight, source.weight) and target.weight.requires_grad
    service.pull("policy", into=dict(torch.nn.Linear(4, 3).named_parameters()))


def test_tensors_of_other_shapes_are_refused_before_any_is_changed(dcs: Service) -> None:
    service = dcs.connect()
    service.publish("policy", {"a": torch.ones(3), "b": torch.ones(3)})
    into = {"a": torch.zeros(3), "b": torch.zeros(4)}
    with pytest.raises(TensorMismatch, match=r"b is float32\[3\] in the version and float32\[4\]"):
        service.pull("policy", into=into)
    assert not into["a"].any()
    with pytest.raises(TensorMismatch, match="b is in the version only"):
        service.pull("policy", into={"a": into["a"]})
    service.pull("policy", into={"a": into["a"]}, strict=False)
    assert into["a"].all()


def test_open_version_is_shared_memory_that_is_valid_in_its_block(dcs: Service) -> None:
    service = dcs.connect()
    service.publish("policy", model(1))
    with service.open("policy") as opened:
        found = dict(opened.tensors())
        assert [e.name for e in opened.entries] == list(found) == list(model(1))
        assert checksum(found["big"]) == checksum(model(1)["big"])
        assert dcs.stat()["used_bytes"] > 0
        [version] = service.list_versions()
        assert version.pinned_by, "nobody keeps what is being read"


# -- several ranks -----------------------------------------------------------------------------------------------------
def test_shards_of_two_nodes_become_one_version(dcs: Service) -> None:
    ranks = [dcs.connect("a"), dcs.connect("b")]
    own = [{f"{r}.{name}": t for name, t in model(r).items()} for r in (0, 1)]
    with ranks[0].write_shard(own[0]) as shard, ranks[1].write_shard(own[1]) as other:
        own[1]["1.big"].zero_()  # it was copied
        assert ranks[0].list_versions() == []
        version = ranks[0].commit("policy", [shard, other.describe()], meta={"step": 1})
    own[1]["1.big"] = model(1)["big"]
    assert_equal(ranks[1].pull(version), own[0] | own[1])
    assert dcs.parts(version.number) == [["a", "b"], ["b", "a"]]


def test_shards_that_do_not_fit_together_take_no_number(dcs: Service) -> None:
    service = dcs.connect()
    with service.write_shard({"w": torch.ones(3)}) as one, service.write_shard({"w": torch.zeros(3)}) as two:
        with pytest.raises(ConfigError, match="tensor name 'w'"):
            service.commit("policy", [one, two])
        with pytest.raises(ConfigError, match="cannot be decoded"):
            service.commit("policy", [{"node": "a"}])
        with pytest.raises(ConfigError, match="no shards"):
            service.commit("policy", [])
        assert service.commit("policy", [one]).number == 1


# -- who may publish ---------------------------------------------------------------------------------------------------
def test_program_that_was_taken_over_can_no_longer_publish(dcs: Service) -> None:
    old, new = dcs.connect(), dcs.connect()
    old.publish("policy", model(1))
    assert new.take_over() == dcs.epoch == 2
    new.publish("policy", model(2))
    for _ in range(2):  # it is over for good: its next try is no program that begins
        with pytest.raises(Fenced, match=r"taken over by .*take_over\(\)"):
            old.publish("policy", model(3))
    assert_equal(old.pull("policy"), model(2))
    old.take_over()
    assert old.publish("policy", model(3)).number == new.list_versions("policy")[-1].version.number


def test_programs_that_publish_first_at_once_share_the_first_epoch(dcs: Service) -> None:
    services, met = [dcs.connect("a"), dcs.connect("b")], threading.Barrier(2)

    class Together(EtcdClient):
        """Lets both programs see that there is no epoch before either begins one."""

        def get(self, key: str, **kwargs: Any) -> Any:
            found = EtcdClient.get(self, key, **kwargs)
            if key == dcs.keys.epoch() and found is None:
                met.wait(60)
            return found

    for service in services:
        service._etcd.__class__ = Together
    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(s.publish, f"mine_{i}", model(i)) for i, s in enumerate(services)]
        assert [d.result(120).number for d in done] == [1, 1]
    assert dcs.epoch == 1


def test_weights_of_another_model_are_refused_after_a_version_unless_asked_for(dcs: Service) -> None:
    first, second, other = dcs.connect("a"), dcs.connect("b"), {"w": torch.ones(3), "b": torch.ones(2)}
    first.publish("policy", {"w": torch.ones(3), "b": torch.ones(3)})
    with pytest.raises(TensorMismatch, match=r"than policy/1: b is float32\[3\] in it and float32\[2\] here"):
        second.publish("policy", other)
    with second.write_shard(other) as shard, pytest.raises(TensorMismatch, match="than policy/1"):
        second.commit("policy", [shard])
    with pytest.raises(TensorMismatch, match="b is in it only"):
        second.publish("policy", {"w": torch.ones(3)})
    assert [v.version.number for v in second.list_versions("policy")] == [1]
    second.publish("mine", {"w": torch.ones(3)})
    second.publish("mine", other)
    changed = second.publish("policy", other, other_model=True)
    assert_equal(first.pull(changed), other)
    with pytest.raises(TensorMismatch, match=f"than {changed.name}"):  # of a program that saw the version before
        first.publish("policy", {"w": torch.ones(3), "b": torch.ones(3)})
    first.publish("policy", other)


def test_version_with_a_trace_of_another_form_is_pulled(dcs: Service) -> None:
    service = dcs.connect()
    version = service.publish("policy", model(1))
    key = dcs.keys.version("policy", version.number)
    for odd in ("x", 3, ["a"], {"traceparent": 3}):
        found = dcs.etcd.get(key)
        assert found is not None
        record = Version.decode(found.value)
        dcs.etcd.put(key, record.replace(meta={**record.meta, "trace": odd}).encode())
        assert_equal(service.pull(version), model(1))


def test_streams_of_a_run_are_refused_while_its_trainer_lives(dcs: Service) -> None:
    service, member = dcs.connect(), dcs.keys.member("trainer", "rank-0")
    dcs.etcd.put(member, b"{}")
    for call in (lambda: service.publish("policy", model(1)), service.take_over):
        with pytest.raises(ConfigError, match="trainer of job"):
            call()
    assert service.publish("mine", model(1)).number == 1
    dcs.etcd.delete(member)
    assert service.publish("policy", model(1)).number == 1
    dcs.etcd.put(member, b"{}")  # a run that begins later, under the same epoch
    with pytest.raises(ConfigError, match="trainer of job"):
        service.publish("policy", model(1))


def test_stream_that_no_command_could_name_is_refused(dcs: Service) -> None:
    service = dcs.connect()
    for stream in ("policy/3", "../x", "", "Policy", "a b"):
        with pytest.raises(ConfigError, match="is not the name of a stream"):
            service.publish(stream, model(1))
        with pytest.raises(ConfigError, match="is not the name of a stream"):
            next(iter(service.follow(stream)))


def test_publish_that_fails_leaves_nothing_visible_and_the_next_one_succeeds(dcs: Service) -> None:
    service = dcs.connect()

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(100_000)
        raise KeyError("the model is gone")

    with pytest.raises(KeyError):
        service.publish("policy", broken())
    with pytest.raises(ConfigError, match="two tensors"):
        service.publish("policy", [("a", torch.ones(1)), ("a", torch.ones(1))])
    assert service.list_versions() == []
    with pytest.raises(VersionNotFound):
        service.pull("policy")
    assert service.publish("policy", model(1)).number == 3


# -- keep and check ----------------------------------------------------------------------------------------------------
def test_pinned_version_outlives_those_that_are_kept(dcs: Service) -> None:
    service, collector = dcs.connect(), dcs.collector(keep_versions=1)
    pinned = service.pin(service.publish("policy", model(1)), "1h")
    for seed in (2, 3):
        service.publish("policy", model(seed))

    def swept() -> list[int]:
        collector.sweep([])
        return [v.version.number for v in service.list_versions("policy")]

    wait_until(lambda: swept() == [1, 3], what="the release of version 2")
    assert "@" in service.list_versions("policy")[0].pinned_by[0]
    service.unpin(pinned)
    wait_until(lambda: swept() == [3], what="the release of version 1")
    with pytest.raises(VersionNotFound):
        service.unpin("policy/3")


def test_verify_finds_the_node_with_a_damaged_chunk(dcs: Service) -> None:
    service = dcs.connect()
    service.publish("policy", model(1))
    assert service.verify("policy") == []
    with service.open("policy") as opened:
        digest, offset, _ = opened._pulled.chunks()[0]
        path = opened._pulled.arena_path
    flip_a_byte(path, offset)
    assert [(f.node, f.digest, f.what) for f in service.verify("policy")] == [("a", digest, "corrupt")]


def test_follower_waits_for_the_next_commit(dcs: Service) -> None:
    service, found = dcs.connect(), list[str]()
    thread = threading.Thread(target=lambda: found.append(next(service.follow("policy", timeout_s=60)).name))
    thread.start()
    dcs.connect("b").publish("policy", model(1))
    thread.join(60)
    assert found == ["policy/1"]


# -- in programs of other people ---------------------------------------------------------------------------------------
EXAMPLES = Path(__file__).parents[3] / "examples"


def test_example_of_torchrun_publishes_the_shares_of_two_ranks_to_a_reader(dcs: Service, tmp_path: Path) -> None:
    dcs.stop("b")  # the example is for one node a host
    access, script = tmp_path / "access.json", str(EXAMPLES / "dcs_torchrun.py")
    checkpoints.ServiceAccess(job=dcs.keys.job, etcd_endpoints=dcs.etcd_servers.endpoints, settings={
        "etcd": {"call_timeout_s": 2}}).save(access)
    reader = subprocess.Popen([sys.executable, script, "read", str(access), "1"], stdout=subprocess.PIPE, text=True)
    try:
        trained = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, "train",
             str(access), "3"], capture_output=True, text=True, timeout=300)
        assert trained.returncode == 0, trained.stderr
        read = reader.communicate(timeout=120)[0]
    finally:
        reader.kill()
        reader.wait()
    assert [line.split(",")[0] for line in trained.stdout.splitlines()] == [
        f"committed policy/{n} of step {n - 1}" for n in (1, 2, 3)]
    assert read.startswith("pulled policy/")
    found = dcs.connect().pull("policy")
    shapes = {name: tuple(t.shape) for name, t in found.tensors.items()}
    assert shapes == {"0.weight": (64, 16), "0.bias": (64,), "2.weight": (1, 64), "2.bias": (1,)}
    assert found.version.meta["step"] == 2


def test_interface_imports_neither_ray_nor_the_compute_plane() -> None:
    code = ("import sys; from elastic_rl import dcs; assert 'torch' not in sys.modules; dcs.connect; "
            "print(*({'ray', 'megatron', 'sglang', 'transformers', 'transfer_queue'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == ""
