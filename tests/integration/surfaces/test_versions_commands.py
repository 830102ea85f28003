"""``elastic-rl versions`` against a real etcd and a real node."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.dcs_nodes import await_node, spawn_node
from support.etcd_server import EtcdServers
from transformers import AutoModelForCausalLM

from elastic_rl import config
from elastic_rl.cli import main
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.data.tiny_model import make_model_dir
from elastic_rl.dcs import catalog
from elastic_rl.dcs.catalog.garbage_collector import GarbageCollector
from elastic_rl.dcs.catalog.retention import RetentionPolicy
from elastic_rl.dcs.fetch.puller import Puller
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import Membership
from elastic_rl.etcd.records import DcsNode
from elastic_rl.host.processes import stop
from elastic_rl.runtime import wait_until


@dataclass
class Desk:
    """A cluster as ``elastic-rl up`` would have left it, with two versions of a small model in it."""

    etcd: EtcdClient
    keys: Keys
    node: DcsNode
    process: subprocess.Popen[bytes]
    run_dir: Path
    model_dir: Path
    capsys: pytest.CaptureFixture[str]

    def run(self, *args: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of ``elastic-rl versions ARGS``."""
        code = 0
        try:
            main.main(["versions", *args, f"--job={self.keys.job}", f"--run_dir={self.run_dir}",
                      f"--etcd.endpoints=[{','.join(self.etcd.endpoints)}]", "--etcd.call_timeout_s=2"])
        except SystemExit as e:
            code = int(e.code or 0)
        found = self.capsys.readouterr()
        return code, found.out, found.err

    def json(self, *args: str) -> object:
        code, out, err = self.run(*args, "-o", "json")
        assert code == 0, err
        return json.loads(out)


@pytest.fixture
def desk(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
         ) -> Iterator[Desk]:
    cfg = config.parse({"job": keys.job, "run_dir": str(tmp_path / "runs")})
    cfg.cluster_dir.mkdir(parents=True)
    ClusterInfo(keys.job, etcd_servers.endpoints, [], "", "", str(cfg.cluster_dir)).save()
    model_dir = make_model_dir(cfg.job_dir / "model", cfg)
    process = spawn_node(etcd_servers.endpoints, keys, "node-0", tmp_path)
    try:
        node = await_node(etcd, keys, process)
        epoch = fencing.raise_epoch(etcd, keys, "test").number
        weights = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).state_dict()
        with Publisher(etcd, keys, "policy", epoch=epoch, owner="test", chunk_bytes=64 << 10, staging_ttl_s=5,
                       io_timeout_s=10) as publisher:
            publisher.publish(weights.items(), meta={"step": 0})
            weights["model.norm.weight"] = weights["model.norm.weight"].clone()
            weights["model.norm.weight"][5] += 0.25
            publisher.publish(weights.items(), meta={"step": 1})
        capsys.readouterr()
        yield Desk(etcd, keys, node, process, tmp_path / "runs", model_dir, capsys)
    finally:
        stop(process.pid)
        process.wait(timeout=10)


def test_the_listing_shows_every_version_and_which_is_the_head(desk: Desk) -> None:
    rows = desk.json("ls")
    assert [(r["number"], r["head"], r["step"], r["nodes"]) for r in rows] == [  # type: ignore[attr-defined]
        (1, False, 0, ["node-0"]), (2, True, 1, ["node-0"])]
    code, out, _ = desk.run()  # a bare `versions` is `versions ls`
    assert code == 0 and "head" in out.splitlines()[2] and "KiB" in out


def test_show_tells_tensors_and_what_is_shared_with_the_version_before(desk: Desk) -> None:
    shown = desk.json("show", "policy")
    assert shown["version"]["number"] == 2  # type: ignore[index]
    assert {t["name"] for t in shown["tensors"]} >= {"model.norm.weight", "lm_head.weight"}  # type: ignore[index]
    assert 0 < shown["shared_bytes"] < sum(shown["chunks"].values())  # type: ignore[index]
    code, out, _ = desk.run("show", "policy/-1")
    assert code == 0 and "policy/1" in out


def test_diff_finds_the_one_element_that_changed(desk: Desk) -> None:
    [change] = desk.json("diff", "policy/1", "policy/2")  # type: ignore[misc]
    assert (change["name"], change["changed"], change["max_abs"]) == ("model.norm.weight", 1, 0.25)
    assert desk.run("diff", "policy", "policy/2")[1] == "the same\n"


def test_verify_sees_a_flipped_byte_and_exits_with_one(desk: Desk) -> None:
    assert desk.run("verify", "policy")[0] == 0
    with Puller(desk.etcd, desk.keys, "test", pin_ttl_s=5, io_timeout_s=10) as puller, puller.pull("policy") as pulled:
        digest, offset, _ = pulled.reference()["chunks"][1]
    with open(desk.node.arena_path, "r+b") as arena:
        arena.seek(offset)
        byte = arena.read(1)
        arena.seek(offset)
        arena.write(bytes([byte[0] ^ 1]))
    code, out, _ = desk.run("verify", "policy")
    assert code == 1 and digest in out and ("corrupt" in out or "missing" in out)


def test_a_pin_keeps_a_version_until_it_ends_by_itself_or_by_hand(desk: Desk) -> None:
    assert desk.run("pin", "policy/1", "--for", "3s")[0] == 0
    janitor = GarbageCollector(desk.etcd, desk.keys, RetentionPolicy(1))
    assert janitor.sweep([]) == []
    assert desk.json("ls")[0]["pins"]  # type: ignore[index]
    wait_until(lambda: any("released policy version 1" in line for line in janitor.sweep([])), timeout_s=20,
               what="the end of the pin", poll_s=0.3)
    assert desk.run("pin", "policy/2", "--for", "1h")[0] == 0
    assert desk.run("unpin", "policy/2")[0] == 0
    assert catalog.pinned(desk.etcd, desk.keys, "policy") == set()
    code, _, err = desk.run("unpin", "policy/2")
    assert code == 1 and "pinned by: nobody" in err
    code, _, err = desk.run("show", "policy/1")
    assert code == 1 and "gone" in err and "committed: 2" in err
    janitor.close()


def test_an_exported_version_is_the_model_and_an_imported_one_too(desk: Desk, tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    code, out, err = desk.run("export", "policy/1", str(folder), "--shard", "0.001")
    assert code == 0, err
    original = AutoModelForCausalLM.from_pretrained(desk.model_dir, dtype=torch.float32).eval()
    exported = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(original(tokens).logits, exported(tokens).logits)
    assert (folder / "tokenizer.json").read_bytes() == (desk.model_dir / "tokenizer.json").read_bytes()
    assert desk.run("export", "policy/1", str(folder))[0] == 2, "a folder with something in it was written over"
    code, out, err = desk.run("import", str(folder), "policy")
    assert code == 0 and "policy/3" in out, err
    assert desk.run("diff", "policy/1", "policy/3")[1] == "the same\n"


def test_an_import_into_a_run_at_work_asks_first(desk: Desk) -> None:
    with Membership(desk.etcd, desk.keys, "trainer", "rank-0", ttl_s=5).start():
        code, _, err = desk.run("import", str(desk.model_dir), "policy")
        assert code == 2 and "--yes" in err
        assert desk.run("import", str(desk.model_dir), "policy", "--yes")[0] == 0


def test_what_is_not_there_is_told_with_what_to_do(desk: Desk, tmp_path: Path) -> None:
    for args, word in ((["show", "policy/99"], "no such number"), (["show", "Policy!"], "STREAM"),
                       (["pin", "policy", "--for", "soon"], "duration"), (["import", str(tmp_path), "policy"], "safe")):
        code, _, err = desk.run(*args)
        assert code in (1, 2) and word in err and "Traceback" not in err
