"""The files of a model on another host than the run's: published once, and brought by the engines of the host, of which
one does it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.dcs_cluster import DcsCluster
from support.etcd_server import EtcdServers
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.config import ROLLOUT_POOL, Stream
from elastic_rl.dcs import model_files
from elastic_rl.dcs.catalog import reads
from elastic_rl.dcs.publish.growing_stream import GrowingStream, NewTensor
from elastic_rl.engine.host_model import HostModel
from elastic_rl.errors import ConfigError, EngineFailed
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.net.addresses import LOOPBACK


@pytest.fixture
def dcs(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> Iterator[DcsCluster]:
    with DcsCluster.open(etcd_servers, etcd, keys, tmp_path) as out:
        out.start("a", disk_bytes=64 << 20)
        yield out


@pytest.fixture
def stream(dcs: DcsCluster) -> Iterator[GrowingStream]:
    epoch = fencing.current_epoch(dcs.etcd, dcs.keys)
    made = GrowingStream(dcs.etcd, dcs.keys, Stream.MODEL, config.parse({}).dcs, epoch=epoch, owner="test",
                         token=FencedWriter.of_epoch(dcs.etcd, dcs.keys, epoch), security=None)
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The model on the host of the run."""
    (made := tmp_path / "model").mkdir()
    for name, text in {"config.json": "{}", "tokenizer.json": "x" * 200_000, "model.safetensors": "weights"}.items():
        (made / name).write_text(text)
    return made


def on_host(dcs: DcsCluster, tmp_path: Path, model_dir: str = "/none/model", **settings: str) -> HostModel:
    """The model as an engine finds it on a host that has a folder of its own for the run."""
    cfg = config.parse({"job": dcs.keys.job, "run_dir": str(tmp_path / "host"), **settings})
    ctx = RunContext(config=cfg, etcd_endpoints=dcs.etcd_servers.endpoints, job=cfg.job, model_dir=model_dir,
                     epoch=fencing.current_epoch(dcs.etcd, dcs.keys), host=LOOPBACK)
    return HostModel(ctx, ctx.pool(ROLLOUT_POOL))


def bring(dcs: DcsCluster, model: HostModel, pause: Callable[[float], bool] = lambda seconds: True) -> None:
    with EtcdClient(dcs.etcd_servers.endpoints) as etcd:
        model.bring(etcd, pause)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def test_files_are_published_once_and_replaced_where_they_have_changed(
        dcs: DcsCluster, stream: GrowingStream, folder: Path, tmp_path: Path) -> None:
    assert model_files.publish(stream, folder) and not model_files.publish(stream, folder)
    model = on_host(dcs, tmp_path)
    assert not model.is_here and not model.has_weights
    bring(dcs, model)
    assert names(model.folder) == {"config.json", "tokenizer.json"}
    assert (model.folder / "tokenizer.json").read_text() == "x" * 200_000
    before = model.folder.stat().st_ino
    bring(dcs, model)
    assert model.folder.stat().st_ino == before, "what is there is used"

    (folder / "config.json").write_text('{"changed": true}')
    (named := folder / "additional_chat_templates").mkdir()
    (named / "tool_use.jinja").write_text("T")
    assert model_files.publish(stream, folder)
    bring(dcs, model)
    assert (model.folder / "config.json").read_text() == '{"changed": true}'
    assert (model.folder / "additional_chat_templates" / "tool_use.jinja").read_text() == "T"
    assert [v.number for v in reads.list_versions(dcs.etcd, dcs.keys, Stream.MODEL)] == [1, 2]
    assert names(model.folder.parent) == {"engine_model", "engine_model.lock"}, "nothing else is left"


def test_files_that_the_nodes_have_lost_are_given_to_them_again(
        dcs: DcsCluster, stream: GrowingStream, folder: Path, tmp_path: Path) -> None:
    model_files.publish(stream, folder)
    dcs.start("b", disk_bytes=64 << 20)  # as on the host that the run moves to
    dcs.kill("a")
    wait_until(lambda: [node.id for node in dcs.client().nodes()] == ["b"], what="the end of a's lease")
    model_files.publish(stream, folder)
    model = on_host(dcs, tmp_path)
    bring(dcs, model)
    assert names(model.folder) == {"config.json", "tokenizer.json"}


def test_engines_of_a_host_wait_until_the_files_are_published_and_one_brings_them(
        dcs: DcsCluster, stream: GrowingStream, folder: Path, tmp_path: Path) -> None:
    waits, brought = threading.Barrier(4), list[str]()

    def engine() -> None:
        model, first = on_host(dcs, tmp_path), True

        def pause(seconds: float) -> bool:
            nonlocal first
            if first:
                first = False
                waits.wait(timeout=60)
            return False

        bring(dcs, model, pause)
        brought.append((model.folder / "tokenizer.json").read_text())

    engines = [threading.Thread(target=engine) for _ in range(3)]
    for one in engines:
        one.start()
    waits.wait(timeout=60)
    model_files.publish(stream, folder)
    wait_until(lambda: len(brought) == 3, what="the engines")
    assert set(brought) == {"x" * 200_000}
    for one in engines:
        one.join()


def test_folder_is_whole_or_not_there(dcs: DcsCluster, stream: GrowingStream, folder: Path, tmp_path: Path,
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    model_files.publish(stream, folder)
    model = on_host(dcs, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(model_files.os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "no room")))
        bring(dcs, model)  # which is told to give up
    assert not model.folder.exists() and list(model.folder.parent.glob("*.partial"))
    bring(dcs, model)
    assert names(model.folder) == {"config.json", "tokenizer.json"} and not list(model.folder.parent.glob("*.partial"))


@pytest.mark.parametrize("name", ["../config.json", "/etc/x", "a/b", ".hidden", "..", ".",
                                  "additional_chat_templates/../x.jinja", "additional_chat_templates/config.json"])
def test_file_whose_name_leads_elsewhere_is_refused(dcs: DcsCluster, stream: GrowingStream, tmp_path: Path, name: str
                                                    ) -> None:
    stream.publish(None, [NewTensor(name, b"x")], meta={"files_digest": "d"})
    (host := tmp_path / "h" / "model").parent.mkdir()
    with pytest.raises(ConfigError, match="only names without folders|has the file"):
        model_files.bring(stream, host)
    assert not host.exists()


def test_folder_of_the_job_is_used_where_it_is_and_needed_by_a_pool_that_serves_its_weights(
        dcs: DcsCluster, folder: Path, tmp_path: Path) -> None:
    here = on_host(dcs, tmp_path, str(folder))
    bring(dcs, here)
    assert here.is_here and here.has_weights and here.folder == folder
    elsewhere = on_host(dcs, tmp_path, placement="colocated")
    assert not elsewhere.is_here and not elsewhere.has_weights, "the trainer has made a folder of its own there"

    cfg = config.parse({"job": dcs.keys.job, "run_dir": str(tmp_path), "pools": {"judge": {"model": "/none/judge"}}})
    ctx = RunContext(config=cfg, etcd_endpoints=dcs.etcd_servers.endpoints, job=cfg.job, model_dir=str(folder),
                     epoch=1, host=LOOPBACK)
    with pytest.raises(EngineFailed, match="no model in /none/judge on host"):
        bring(dcs, HostModel(ctx, ctx.pool("judge")))
