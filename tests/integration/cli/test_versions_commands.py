"""``elastic-rl versions`` against a real etcd and a real node."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import transformers
from safetensors.torch import save_file
from support.cluster_files import make_secret
from support.dcs_nodes import await_node, spawn_node
from support.etcd_server import EtcdServers
from support.waiting import wait_until

from elastic_rl import config, dcs
from elastic_rl.cli import main
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.data.tiny_model import make_model_dir
from elastic_rl.dcs.catalog import pins
from elastic_rl.dcs.catalog.garbage_collector import GarbageCollector
from elastic_rl.dcs.catalog.retention import RetentionPolicy
from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.fetch.puller import Puller
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.dcs.security import Security
from elastic_rl.errors import ConfigError
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import Membership
from elastic_rl.etcd.records import DcsNode
from elastic_rl.host.local_host import LocalHost
from elastic_rl.host.paths import ClusterPaths, JobPaths
from elastic_rl.host.processes import stop


@dataclass
class VersionsCommand:
    """A cluster as ``elastic-rl up`` leaves it, with two versions of a small model in it."""

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
def command(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
         ) -> Iterator[VersionsCommand]:
    cfg = config.parse({"job": keys.job, "run_dir": str(tmp_path / "runs")})
    JobPaths.of(cfg).private.mkdir(parents=True)
    make_secret(cfg)
    ClusterInfo(keys.job, etcd_servers.endpoints, [], "").save(ClusterPaths.of(cfg).info)
    model_dir = make_model_dir(JobPaths.of(cfg).model, cfg)
    process = spawn_node(etcd_servers.endpoints, keys, "node-0", tmp_path)
    try:
        node = await_node(etcd, keys, process)
        epoch = fencing.raise_epoch(etcd, keys, "test").number
        weights = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).state_dict()
        with Publisher(etcd, keys, "policy", epoch=epoch, owner="test", chunk_bytes=64 << 10, staging_ttl_s=5,
                       io_timeout_s=10) as publisher:
            publisher.publish(weights.items(), meta={"step": 0})
            weights["model.norm.weight"] = weights["model.norm.weight"].clone()
            weights["model.norm.weight"][5] += 0.25
            publisher.publish(weights.items(), meta={"step": 1})
        capsys.readouterr()
        yield VersionsCommand(etcd, keys, node, process, tmp_path / "runs", model_dir, capsys)
    finally:
        stop(process.pid)
        process.wait(timeout=60)


def test_ls_shows_every_version_and_the_head(command: VersionsCommand) -> None:
    rows = command.json("ls")
    assert [(r["number"], r["head"], r["step"], r["sources"]) for r in rows] == [  # type: ignore[attr-defined]
        (1, False, 0, ["node-0"]), (2, True, 1, ["node-0"])]
    assert {(r["copies"], r["copies_wanted"]) for r in rows} == {(1, 1)}  # type: ignore[attr-defined]
    short = command.json("ls", "--dcs.replicas=2")
    assert {(r["copies"], r["copies_wanted"]) for r in short} == {(1, 2)}  # type: ignore[attr-defined]
    assert "1 of 2" in command.run("ls", "--dcs.replicas=2")[1]
    code, out, _ = command.run()  # a bare `versions` is `versions ls`
    assert code == 0 and "head" in out.splitlines()[2] and "KiB" in out


def test_show_lists_tensors_and_bytes_shared_with_the_previous_version(command: VersionsCommand) -> None:
    shown = command.json("show", "policy")
    assert shown["version"]["number"] == 2  # type: ignore[index]
    assert {t["name"] for t in shown["tensors"]} >= {"model.norm.weight", "lm_head.weight"}  # type: ignore[index]
    assert 0 < shown["shared_bytes"] < sum(shown["chunks"].values())  # type: ignore[index]
    code, out, _ = command.run("show", "policy/-1")
    assert code == 0 and "policy/1" in out


def test_diff_finds_the_changed_element(command: VersionsCommand) -> None:
    [change] = command.json("diff", "policy/1", "policy/2")  # type: ignore[misc]
    assert (change["name"], change["changed"], change["max_abs"]) == ("model.norm.weight", 1, 0.25)
    assert command.run("diff", "policy", "policy/2")[1] == "no difference\n"


def test_verify_finds_a_flipped_byte_and_exits_with_one(command: VersionsCommand) -> None:
    assert command.run("verify", "policy")[0] == 0
    with Puller(command.etcd, command.keys, "test", io_timeout_s=10) as puller, puller.pull("policy") as pulled:
        digest, offset, _ = pulled.chunks()[1]
    with open(command.node.arena_path, "r+b") as arena:
        arena.seek(offset)
        byte = arena.read(1)
        arena.seek(offset)
        arena.write(bytes([byte[0] ^ 1]))
    code, out, _ = command.run("verify", "policy")
    assert code == 1 and digest in out and ("corrupt" in out or "missing" in out)


def test_pin_keeps_a_version_until_it_expires_or_is_removed(command: VersionsCommand) -> None:
    assert command.run("pin", "policy/1", "--for", "3s")[0] == 0
    collector = GarbageCollector(command.etcd, command.keys, RetentionPolicy(1))
    assert collector.sweep([]) == []
    assert command.json("ls")[0]["pins"]  # type: ignore[index]
    wait_until(lambda: any("released policy version 1" in line for line in collector.sweep([])),
               what="the end of the pin", poll_s=0.3)
    assert command.run("pin", "policy/2", "--for", "1h")[0] == 0
    assert command.run("unpin", "policy/2")[0] == 0
    assert pins.pinned(command.etcd, command.keys, "policy") == set()
    code, _, err = command.run("unpin", "policy/2")
    assert code == 1 and "pinned by: no reader" in err
    code, _, err = command.run("show", "policy/1")
    assert code == 1 and "gone" in err and "committed: 2" in err
    collector.close()


def test_pin_of_a_version_that_is_not_there_leaves_no_lease(command: VersionsCommand,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    granted, revoked = list[int](), list[int]()
    grant, revoke = EtcdClient.grant, EtcdClient.revoke

    def counted_grant(client: EtcdClient, ttl_s: int) -> int:
        lease = grant(client, ttl_s)
        if ttl_s == 123457:
            granted.append(lease)
        return lease

    def counted_revoke(client: EtcdClient, lease: int) -> None:
        revoked.append(lease)
        revoke(client, lease)

    monkeypatch.setattr(EtcdClient, "grant", counted_grant)
    monkeypatch.setattr(EtcdClient, "revoke", counted_revoke)
    assert command.run("pin", "policy/999", "--for", "123457s")[0] == 1
    assert set(granted) <= set(revoked)
    assert command.run("pin", "policy/1", "--for", "123457s")[0] == 0
    assert len(granted) == 1 and not set(granted) & set(revoked), "the pin of a version that exists has its lease"
    assert command.run("unpin", "policy/1")[0] == 0


def test_export_and_import_keep_the_model(command: VersionsCommand, tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    code, out, err = command.run("export", "policy/1", str(folder), "--shard", "0.001")
    assert code == 0, err
    original = transformers.AutoModelForCausalLM.from_pretrained(command.model_dir, dtype=torch.float32).eval()
    exported = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(original(tokens).logits, exported(tokens).logits)
    assert (folder / "tokenizer.json").read_bytes() == (command.model_dir / "tokenizer.json").read_bytes()
    assert command.run("export", "policy/1", str(folder))[0] == 2, "a folder with something in it was written over"
    code, out, err = command.run("import", str(folder), "policy")
    assert code == 0 and "policy/3" in out, err
    assert command.run("diff", "policy/1", "policy/3")[1] == "no difference\n"


def test_import_into_a_running_job_needs_yes(command: VersionsCommand) -> None:
    with Membership(command.etcd, command.keys, "trainer", "rank-0", ttl_s=5).start():
        code, _, err = command.run("import", str(command.model_dir), "policy")
        assert code == 2 and "--yes" in err
        assert command.run("import", str(command.model_dir), "policy", "--yes")[0] == 0


def test_import_of_what_is_no_version_of_the_stream_changes_nothing(command: VersionsCommand, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    save_file({"a": torch.ones(3)}, other / "model.safetensors")
    before = command.etcd.range(command.keys.root)[0]
    for stream, folder, said in (("policy", other, "other weights than policy/2"),
                                 ("trainer_state", command.model_dir, "only the run"),
                                 ("../../x", command.model_dir, "not the name of a stream")):
        code, _, err = command.run("import", str(folder), stream)
        assert code == 2 and said in err and "hint:" in err
    assert command.run("ls", "--stream=../../x")[0] == 2
    keys = {kv.key for kv in before}
    assert {kv.key for kv in command.etcd.range(command.keys.root)[0]} == keys
    assert command.run("import", str(other), "candidate")[0] == 0
    assert command.run("show", "candidate/1")[0] == 0


def test_follow_prints_the_newest_version_and_ends_when_no_newer_one_comes(command: VersionsCommand) -> None:
    code, out, err = command.run("follow", "policy", "--timeout=0", "-o", "json")
    assert code == 0, err
    assert [(v["number"], v["meta"]["step"]) for v in map(json.loads, out.splitlines())] == [(2, 1)]
    code, out, _ = command.run("follow", "policy", "--timeout=0")
    assert code == 0 and out.startswith("policy/2  ") and "step=1" in out
    assert command.run("follow", "policy", "--timeout=0", "--after=2") == (0, "", "")
    code, _, err = command.run("follow", "policy/1", "--timeout=0")
    assert code == 2 and "name of a stream" in err


def test_access_file_is_all_that_another_program_needs(command: VersionsCommand, tmp_path: Path) -> None:
    path = tmp_path / "access.json"
    code, out, err = command.run("access", str(path), "--dcs.chunk_bytes=65536")
    assert code == 0 and str(path) in out, err
    assert json.loads(path.read_text())["token"], "the job's token is missing"
    with dcs.connect(path) as service:
        assert service.publish("mine", {"a": torch.arange(3)}, meta={"by": "me"}).name == "mine/1"
        assert service.pull("mine").tensors["a"].tolist() == [0, 1, 2]
        assert set(service.pull("policy").tensors) == set(transformers.AutoModelForCausalLM.from_pretrained(
            command.model_dir).state_dict())
    code, _, err = command.run("access", str(tmp_path / "gone" / "access.json"))
    assert code != 0 and "cannot be written" in err and "Traceback" not in err


def test_versions_of_a_cluster_with_an_address_are_asked_for_with_its_certificates(
        command: VersionsCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its etcd and nodes take nobody without one, and the settings that are stored name none."""
    cluster = ClusterPaths.of(config.parse({"job": command.keys.job, "run_dir": str(command.run_dir)}))
    LocalHost(name="h", address="10.0.0.7").save(cluster)
    asked: list[config.Config] = []

    def service(cfg: config.Config, *_: object) -> NoReturn:
        asked.append(cfg)
        raise ConfigError("seen")

    monkeypatch.setattr("elastic_rl.dcs.versions.service.VersionService", service)
    monkeypatch.setattr("elastic_rl.host.job_secrets.dcs_security", lambda cfg: Security())
    cfg = config.parse({"job": command.keys.job, "run_dir": str(command.run_dir)})
    with pytest.raises(SystemExit):
        main.main(["versions", "ls", f"--job={cfg.job}", f"--run_dir={command.run_dir}"])
    assert [c.etcd.tls_ca for c in asked] == [str(cluster.tls.ca)]


def test_errors_say_what_to_do(command: VersionsCommand, tmp_path: Path) -> None:
    for args, word in ((["show", "policy/99"], "no such number"), (["show", "Policy!"], "STREAM"),
                       (["pin", "policy", "--for", "soon"], "duration"), (["import", str(tmp_path), "policy"], "safe")):
        code, _, err = command.run(*args)
        assert code in (1, 2) and word in err and "Traceback" not in err


def test_recover_rebuilds_a_lost_catalog(command: VersionsCommand) -> None:
    client = DcsClient(command.etcd, command.keys, io_timeout_s=10)
    with contextlib.closing(client):
        assert client.connect("node-0").mark().versions, "the node has noted no version"
    command.etcd.delete_prefix(f"{command.keys.root}dcs/streams/")
    command.etcd.delete_prefix(f"{command.keys.root}dcs/replica_sets/")
    command.etcd.delete(command.keys.dcs_catalog())
    assert command.json("ls") == []
    assert command.run("show", "policy")[0] == 1

    code, out, err = command.run("recover", "--dry-run")
    assert code == 0 and "nothing was changed" in out, err
    assert command.json("ls") == []
    with Membership(command.etcd, command.keys, "trainer", "rank-0", ttl_s=5).start():
        code, _, err = command.run("recover")
        assert code == 2 and "--yes" in err
    done = command.json("recover")
    assert [(v["stream"], v["number"], v["found"]) for v in done["versions"]] == [  # type: ignore[index]
        ("policy", 1, "whole"), ("policy", 2, "whole")]
    assert [r["head"] for r in command.json("ls")] == [False, True]  # type: ignore[attr-defined]
    assert command.run("verify", "policy")[0] == 0


def test_recover_without_anything_to_recover_from_says_what_is_needed(command: VersionsCommand) -> None:
    stop(command.process.pid)
    command.process.wait(timeout=60)
    command.etcd.delete_prefix(f"{command.keys.root}dcs/")
    code, _, err = command.run("recover")
    assert code == 2 and "dcs.disk_dir" in err and "dcs.durable_url" in err
