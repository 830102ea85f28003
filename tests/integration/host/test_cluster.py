"""The durable plane on one machine with real processes: up, repair, down, and preflight errors."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from support.commands import run as _run
from support.etcd_server import EtcdServers
from support.tiers import full, parametrize
from support.waiting import wait_until

from elastic_rl.cli import main, run
from elastic_rl.cli.exit_codes import Exit
from elastic_rl.config import Config, parse
from elastic_rl.config.fixed_settings import fixed_settings
from elastic_rl.coordinator.client.admin_client import AdminClient
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.dcs.catalog import reads
from elastic_rl.dcs.fetch.puller import Puller
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.errors import DeadlineExceeded, EtcdUnavailable, PreflightFailed
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import JobSpec, JobStatus, PoolSpec
from elastic_rl.host import cluster_settings, etcd_server, local_cluster, processes
from elastic_rl.host.job_secrets import dcs_security
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.paths import JobPaths
from elastic_rl.host.processes import OWNER_ENV
from elastic_rl.job import check as job_check
from elastic_rl.net import http_client
from elastic_rl.net.addresses import free_port

ARENA_BYTES = 32 << 20
Make = Callable[..., Cluster]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes clusters, each of a job of its own, and takes them down."""
    made: list[Cluster] = []

    def cluster(**more: object) -> Cluster:
        made.append(Cluster(_config(tmp_path, **more)))
        return made[-1]

    yield cluster
    for each in made:
        each.down()


def _config(tmp_path: Path, **more: object) -> Config:
    return parse({"job": f"t-{secrets.token_hex(4)}", "run_dir": str(tmp_path), "dcs": {"arena_bytes": ARENA_BYTES},
                  **more})


def _pids(cluster: Cluster) -> dict[str, int]:
    return {r.name: r.pid for r in cluster.services.running()}


def _runs(pid: int) -> bool:
    """Whether a process runs. A zombie does not: this process is the services' parent here and does not wait."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _crash(cluster: Cluster, *names: str) -> None:
    """Kills services, and before them the host agent, which would start them again."""
    def no_agent() -> bool:
        for record in cluster.agents.running():  # one that is being killed may just have started the other one
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(record.pid).kill()
        return not cluster.agents.running()

    wait_until(no_agent, what="the end of the host agent")
    pids = _pids(cluster)
    for name in names:
        psutil.Process(pids[name]).kill()
    wait_until(lambda: not set(names) & set(_pids(cluster)), what="the end of the services")


def _make_pool(info: ClusterInfo) -> None:
    """Creates the pool, as the driver of a run does first."""
    etcd = EtcdClient(info.etcd_endpoints)
    etcd.put(Keys(info.job).pool_spec("rollout"), PoolSpec(name="rollout", desired=2).encode())
    etcd.close()


def _refuses(endpoint: str) -> bool:
    host, _, port = endpoint.removeprefix("http://").rpartition(":")
    with socket.socket() as s:
        return s.connect_ex((host, int(port))) != 0


def _assert_nothing_is_left(cluster: Cluster, info: ClusterInfo, pids: dict[str, int]) -> None:
    assert not [pid for pid in pids.values() if _runs(pid)]
    assert not cluster.segments()
    assert all(map(_refuses, [*info.etcd_endpoints, *info.coordinators]))
    assert not list(cluster.services.folder.glob("*.json"))
    assert not processes.marked(str(cluster.dir)) and not processes.marked(str(cluster.dir), OWNER_ENV)


def test_up_starts_and_repairs_a_cluster_and_down_leaves_nothing(make: Make) -> None:
    cluster = make(telemetry={"log_max_bytes": 4096})
    info = cluster.up()
    first = _pids(cluster)
    assert sorted(first) == ["coordinator-0", "coordinator-1", cluster.node, "etcd-0"]
    for name in first:  # services write little; this stands for weeks of it
        with (JobPaths.of(cluster.cfg).log(name)).open("ab") as log:
            log.write(b"a line of a log\n" * 300)
    assert len(cluster.segments()) == 1
    assert Path(info.tokens_file).stat().st_mode & 0o777 == 0o600
    roles = {m["role"] for m in AdminClient(info).items("members")}
    assert "coordinator" in roles

    assert cluster.up() == info, "up again changes nothing"
    assert _pids(cluster) == first

    _crash(cluster, "coordinator-0")
    repaired = cluster.up()
    second = _pids(cluster)
    assert second["coordinator-0"] != first["coordinator-0"], "only the killed one is restarted"
    assert {k: v for k, v in second.items() if k != "coordinator-0"} == {
        k: v for k, v in first.items() if k != "coordinator-0"}
    assert repaired == info, "clients find it at the address that it had"
    assert all(http_client.request("GET", f"{url}/healthz", timeout=5).status_code == 200
               for url in repaired.coordinators)

    for name in first:
        rotated = JobPaths.of(cluster.cfg).logs / f"{name}.log.1"
        wait_until(rotated.exists, what=f"the rotation of {name}'s log")
    assert set(cluster.down()) >= set(second)
    _assert_nothing_is_left(cluster, repaired, {**first, **second})
    assert cluster.down() == [], "down again is harmless"


@full(proved_in="tests/integration/host/test_cluster.py", why="the loss of etcd alone, in place of everything")
def test_killed_etcd_is_restarted_with_its_data_on_its_port(make: Make) -> None:
    cluster = make(coordinator={"replicas": 1})
    info = cluster.up()
    _make_pool(info)
    AdminClient(info).post("pools/rollout/scale", {"desired": 3})
    _crash(cluster, "etcd-0")
    assert cluster.up().etcd_endpoints == info.etcd_endpoints
    pools = wait_until(lambda: _pools(info), what="the coordinator to reach etcd again")
    assert next(p for p in pools if p["name"] == "rollout")["desired"] == 3


def _pools(info: ClusterInfo) -> list[dict]:
    try:
        return AdminClient(info).items("pools")
    except EtcdUnavailable:
        return []


def test_up_after_a_crash_of_everything_continues_with_the_saved_versions(make: Make) -> None:
    cluster = make(coordinator={"replicas": 1})
    info = cluster.up()
    tensor = torch.arange(1000.0)
    security = dcs_security(cluster.cfg)
    with EtcdClient(info.etcd_endpoints) as etcd:
        keys = Keys(info.job)
        epoch = fencing.raise_epoch(etcd, keys, "test").number
        with Publisher(etcd, keys, "policy", epoch=epoch, owner="test", chunk_bytes=4096, staging_ttl_s=5,
                       security=security) as publisher:
            publisher.publish([("w", tensor)], meta={})
        wait_until(lambda: len([p for p in (cluster.dir / "disk").rglob("??/*") if not p.suffix]) == 2,
                             what="the chunk and the manifest on disk")
    _crash(cluster, *_pids(cluster))

    again = cluster.up()
    assert len(cluster.segments()) == 1, "the dead node's segment is still there"
    with EtcdClient(again.etcd_endpoints) as etcd, Puller(etcd, keys, "test", io_timeout_s=10,
                                            security=security) as puller, puller.pull("policy") as pulled:
        assert pulled.version.number == 1 and torch.equal(dict(pulled.tensors())["w"], tensor)
    cluster.down(purge=True)
    assert not list((cluster.dir / "disk").rglob("??/*"))
    cluster.up()
    with EtcdClient(ClusterInfo.load(cluster.paths.info).etcd_endpoints) as etcd:  # type: ignore[union-attr]
        assert reads.head(etcd, keys, "policy") is None, "after a purge a job starts afresh"


def test_interrupted_train_keeps_its_versions_and_the_next_one_resumes_with_them(
        make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = make(coordinator={"replicas": 1})
    keys, tensor, found = Keys(cluster.cfg.job), torch.arange(1000.0), []

    def first(cfg: Config, info: ClusterInfo, **_: object) -> int:
        security = dcs_security(cluster.cfg)
        with EtcdClient(info.etcd_endpoints) as etcd:
            epoch = fencing.raise_epoch(etcd, keys, "test").number
            with Publisher(etcd, keys, "policy", epoch=epoch, owner="test", chunk_bytes=4096, staging_ttl_s=5,
                           security=security) as publisher:
                publisher.publish([("w", tensor)], meta={})
        os.kill(os.getpid(), signal.SIGTERM)  # at once: the node has not saved the version yet
        return 0

    def second(cfg: Config, info: ClusterInfo, **_: object) -> int:
        security = dcs_security(cluster.cfg)
        with EtcdClient(info.etcd_endpoints) as etcd, Puller(
                etcd, keys, "test", io_timeout_s=10, security=security) as puller, puller.pull("policy") as pulled:
            found.append(dict(pulled.tensors())["w"].clone())
        return 1

    arguments = ["train", "--with-cluster", f"--job={cluster.cfg.job}", f"--run_dir={tmp_path}"]
    monkeypatch.setattr(job_check, "require", lambda *_, **__: [])
    monkeypatch.setattr(run, "_train", first)
    with pytest.raises(SystemExit) as e:
        main.main([*arguments, f"--dcs.arena_bytes={ARENA_BYTES}", "--coordinator.replicas=1"])
    assert e.value.code == Exit.INTERRUPTED
    said = capsys.readouterr().out
    assert str(cluster.dir / "etcd") in said and " ".join(arguments) in said
    assert not processes.marked(str(cluster.dir), OWNER_ENV), "stopping ends every process"

    monkeypatch.setattr(run, "_train", second)
    with pytest.raises(SystemExit) as e:
        main.main(arguments)  # the line that was printed
    assert e.value.code == 1 and torch.equal(found[0], tensor)
    assert "continuing with what job" in capsys.readouterr().out


def test_start_that_fails_leaves_no_empty_etcd_behind(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = make(coordinator={"replicas": 1})

    def fail(*_: object) -> None:
        raise PreflightFailed("no")

    with monkeypatch.context() as patched, pytest.raises(PreflightFailed):
        patched.setattr(cluster, "_start_coordinators", fail)
        cluster.up()
    assert not (cluster.dir / "etcd").exists() and not cluster.known
    cluster.up()
    cluster.down()
    with monkeypatch.context() as patched, pytest.raises(PreflightFailed):
        patched.setattr(cluster, "_start_coordinators", fail)
        cluster.up()
    assert (cluster.dir / "etcd" / "member").is_dir() and cluster.known, "what the job has is not the failed start's"


def test_down_after_a_crash_removes_what_it_left(make: Make) -> None:
    cluster = make(coordinator={"replicas": 1})
    info, pids = cluster.up(), _pids(cluster)
    assert cluster.segments(), "a node that is killed cannot unlink its arena"
    _crash(cluster, cluster.node, "etcd-0")
    cluster.down()
    _assert_nothing_is_left(cluster, info, pids)


@full(proved_in="tests/integration/host/test_cluster.py tests/integration/cli/test_cli_control.py "
                "tests/integration/coordinator/test_api.py tests/unit/coordinator/test_pools.py",
      why="commands on a cluster of their own")
def test_commands_bring_up_list_scale_and_take_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [f"--run_dir={tmp_path}", f"--job=t-{secrets.token_hex(4)}", f"--dcs.arena_bytes={ARENA_BYTES}"]

    def run(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as e:
            main.main([*args, *settings])
        seen = capsys.readouterr()
        return int(e.value.code or 0), seen.out, seen.err

    try:
        code, said, _ = run("up")
        assert code == 0
        assert "elastic-rl scale 3" in said
        for listing in ("status", "engines", "versions", "events"):
            assert run(listing)[0] == 0
            assert run(listing, "-o", "json")[1].lstrip()[0] in "[{"
        code, _, said = run("scale", "3")
        assert code == Exit.REFUSED
        assert "no pool" in said, "no run has made it yet"
        info = ClusterInfo.load(next(tmp_path.glob("*/cluster/cluster.json")))
        assert info
        _make_pool(info)
        assert run("scale", "3")[0] == 0
        code, _, said = run("scale", "100000")
        assert code == Exit.REFUSED
        assert "64" in said
    finally:
        assert run("down")[0] == 0


def test_running_cluster_keeps_its_settings_and_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = [f"--run_dir={tmp_path}", f"--job=t-{secrets.token_hex(4)}"]
    file = tmp_path / "settings.yaml"
    file.write_text(f"dcs: {{arena_bytes: {ARENA_BYTES}}}\ncoordinator: {{replicas: 1}}\ntrain: {{steps: 7}}\n")
    folder = tmp_path / job[1].removeprefix("--job=") / "cluster"
    try:
        code, said = _run(capsys, "up", "-c", str(file), *job)
        assert code == 0 and "elastic-rl scale 3" in said
        info = ClusterInfo.load(folder / "cluster.json")
        assert info is not None
        private = [folder / "config.yaml", *(folder / "logs").iterdir()]
        assert {p.stat().st_mode & 0o777 for p in private} == {0o600} and folder.stat().st_mode & 0o777 == 0o700

        assert _run(capsys, "up", *job)[0] == 0  # without -c
        assert ClusterInfo.load(folder / "cluster.json") == info, "one coordinator, on the same etcd"
        stored = parse(yaml.safe_load((folder / "config.yaml").read_text()))
        assert (stored.train.steps, stored.coordinator.replicas) == (7, 1)

        code, said = _run(capsys, "up", "--etcd.endpoints=[127.0.0.1:1]", *job)
        assert code == Exit.USAGE and "etcd.endpoints" in said and "elastic-rl down" in said
        assert ClusterInfo.load(folder / "cluster.json") == info

        (folder / "cluster.json").unlink()  # as if the first `up` had been interrupted
        assert _run(capsys, "up", *job)[0] == 0
        assert ClusterInfo.load(folder / "cluster.json") == info, "the etcd that runs is found by its record"

        shutil.rmtree(folder / "services")
        code, said = _run(capsys, "up", *job)
        assert code == Exit.PREFLIGHT and "without a record" in said and "elastic-rl down" in said
        assert etcd_server.healthy(info.etcd_endpoints[0]) and etcd_server.data_in_use(folder / "etcd")
    finally:
        assert _run(capsys, "down", *job)[0] == 0
    assert not processes.marked(str(folder))
    assert not processes.marked(str(folder), OWNER_ENV) and _refuses(info.etcd_endpoints[0])


def test_cluster_on_an_external_etcd_needs_no_settings_again(
        tmp_path: Path, etcd_servers: EtcdServers, capsys: pytest.CaptureFixture[str]) -> None:
    job = [f"--run_dir={tmp_path}", f"--job=t-{secrets.token_hex(4)}"]
    file = tmp_path / "settings.yaml"
    file.write_text(f"dcs: {{arena_bytes: {ARENA_BYTES}}}\ncoordinator: {{replicas: 1}}\n"
                    f"etcd: {{endpoints: [{', '.join(etcd_servers.endpoints)}], call_timeout_s: 2}}\n")
    folder = tmp_path / job[1].removeprefix("--job=") / "cluster"
    try:
        assert _run(capsys, "up", "-c", str(file), *job)[0] == 0
        info = ClusterInfo.load(folder / "cluster.json")
        assert _run(capsys, "up", *job)[0] == 0
        assert ClusterInfo.load(folder / "cluster.json") == info and not (folder / "etcd").exists()
        assert _run(capsys, "status", *job)[0] == 0
        chunk = folder / "disk" / "node-0" / "ab" / "chunk"
        chunk.parent.mkdir(parents=True, exist_ok=True)
        chunk.touch()
    finally:
        assert _run(capsys, "down", *job)[0] == 0
    assert chunk.exists(), "the external etcd still lists it"
    code, said = _run(capsys, "up", "--etcd.endpoints=[]", *job)
    assert code == Exit.USAGE and "belongs to that one" in said
    try:
        assert _run(capsys, "up", *job)[0] == 0, "the settings are kept too"
    finally:
        assert _run(capsys, "down", "--purge", "--yes", *job)[0] == 0
    assert not chunk.exists()


def test_train_that_is_refused_leaves_the_cluster_that_was_there(make: Make, tmp_path: Path,
                                                                 capsys: pytest.CaptureFixture[str]) -> None:
    """Taking it down would delete everything that the job has."""
    cluster = make(coordinator={"replicas": 1})
    info, keys = cluster.up(), Keys(cluster.cfg.job)
    pids = _pids(cluster)
    with EtcdClient(info.etcd_endpoints) as etcd:
        etcd.put(keys.job_spec(), JobSpec(settings=fixed_settings(cluster.cfg)).encode())
        etcd.put(keys.job_status(), JobStatus(phase="rl", step=3, steps=150).encode())
    job = [f"--job={cluster.cfg.job}", f"--run_dir={tmp_path}"]
    code, said = _run(capsys, "train", "--with-cluster", "--seed=1", *job)
    assert code == Exit.USAGE and "seed was 0 and is now 1" in said and "--from-job" in said
    assert cluster_settings.stored(cluster.paths.settings)["seed"] == 0, "the next start would be refused too"
    assert _pids(cluster) == pids, "the cluster was taken down"


def test_another_command_is_waited_for_and_down_goes_on_without_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    cluster = make(coordinator={"replicas": 1})
    cluster._say = said.append
    cluster._make_folder(cluster.dir)
    monkeypatch.setattr(local_cluster, "_LOCK_TIMEOUT_S", 0.2)
    monkeypatch.setattr(local_cluster, "_DOWN_LOCK_TIMEOUT_S", 0.2)
    with cluster._locked(0.0):
        with pytest.raises(DeadlineExceeded, match="another command is starting or stopping the services"):
            cluster.up()
        assert not _pids(cluster) and not (cluster.dir / "config.yaml").exists()
        assert cluster.down() == [] and "another command" in said[0]
    with cluster._locked(0.0):
        pass


def test_taken_port_is_reported_with_its_setting(make: Make) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cluster = make(coordinator={"replicas": 1, "ports": [port]})
        with pytest.raises(PreflightFailed, match=rf"port {port} .*coordinator\.ports\[0\]"):
            cluster.up()
    assert not _pids(cluster)


def test_too_little_shared_memory_is_reported_with_numbers_and_a_fix(make: Make) -> None:
    cluster = make(dcs={"arena_bytes": 1 << 50})
    with pytest.raises(PreflightFailed, match=r"MiB free, and the arena needs 1073741824 MiB") as e:
        cluster.up()
    assert "dcs.arena_bytes" in e.value.hint
    assert not _pids(cluster)


def test_unavailable_etcd_is_reported_by_its_endpoint(make: Make) -> None:
    gone = f"127.0.0.1:{free_port()}"
    cluster = make(etcd={"endpoints": [gone]})
    with pytest.raises(EtcdUnavailable, match=gone):
        cluster.up()
    assert not _pids(cluster)


@parametrize("error", [PreflightFailed("no room"), OSError("no room"), KeyboardInterrupt("no room")],
                         ids=lambda e: type(e).__name__,
             proved_in="tests/integration/host/test_cluster.py",
             why="each further kind of error")
def test_failed_up_stops_what_it_started(make: Make, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    cluster = make()
    started: list[str] = []
    spawn = cluster._spawn

    def fail_at_the_node(name: str, cmd: list[str], **more: object) -> int:
        started.append(name)
        if not name.startswith("etcd-"):
            raise error
        return spawn(name, cmd, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(cluster, "_spawn", fail_at_the_node)
    with pytest.raises(PreflightFailed if isinstance(error, OSError) else type(error), match="no room"):
        cluster.up()
    assert "etcd-0" in started, "it had come as far as etcd"
    assert not _pids(cluster)
