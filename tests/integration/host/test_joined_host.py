"""A second host: it joins by a file, has a DCS node for each job, takes the run of a host that drains, and leaves.

Both hosts are folders of one machine, at one address: they have different names, files and ports."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from support.commands import run
from support.commands import run_in_one_line as _run
from support.run_log_terms import Term
from support.stub_run import put_stub_in_place
from support.synthetic_run import records
from support.tiers import full
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.cli.exit_codes import Exit
from elastic_rl.coordinator.client.admin_client import AdminClient
from elastic_rl.errors import EtcdUnavailable
from elastic_rl.etcd import fencing
from elastic_rl.etcd.cluster_records import JobPhase
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.records import JobStatus
from elastic_rl.host import kept_state, processes
from elastic_rl.host.agent.status import AgentStatus
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.paths import JobPaths
from elastic_rl.net.addresses import LOOPBACK, reachable_address
from elastic_rl.net.cluster_secret import ClusterSecret
from elastic_rl.report.build import Record

ADDRESS = reachable_address("0.0.0.0")
pytestmark = pytest.mark.skipif(ADDRESS == LOOPBACK, reason="this machine has no address but loopback")
JOB = f"j-{secrets.token_hex(3)}"


def cluster_in(run_dir: Path, job: str = JOB) -> Cluster:
    return Cluster(config.parse({"run_dir": str(run_dir), "cluster": "lab", "job": job,
                                 "coordinator": {"replicas": 1}, "dcs": {"arena_bytes": 32 << 20}}))


@pytest.fixture
def first(tmp_path: Path) -> Iterator[Cluster]:
    cluster = cluster_in(tmp_path / "first")
    cluster.up(name="gpu-1", address=ADDRESS)
    yield cluster
    cluster_in(tmp_path / "first").down()


class Node:
    """The command `elastic-rl node`, as systemd or Slurm runs it."""

    def __init__(self, first: Cluster, run_dir: Path) -> None:
        self.cluster = cluster_in(run_dir)
        self._log = run_dir.parent / "node.log"
        self._command = processes.python(
            "elastic_rl.cli.main", "node", f"--join={first.paths.join_file}", "--name=gpu-0", f"--address={ADDRESS}",
            "--label=zone=a", f"--run_dir={run_dir}", f"--preemption-notice={run_dir.parent}/notice")
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        return self.process

    @property
    def said(self) -> str:
        return self._log.read_text()


@pytest.fixture
def node(first: Cluster, tmp_path: Path) -> Iterator[Node]:
    made = Node(first, tmp_path / "second")
    yield made
    made.process.kill()
    made.process.wait()
    cluster_in(tmp_path / "second").down()


def hosts(cluster: Cluster) -> dict[str, dict[str, Any]]:
    with contextlib.suppress(EtcdUnavailable):
        return {host["id"]: host for host in AdminClient(cluster.connect(), retry_budget_s=1.0).hosts()}
    return {}


def _names(cluster: Cluster) -> list[str]:
    """The host names in the certificate of a host."""
    found = x509.load_pem_x509_certificate(cluster.paths.tls.cert.read_bytes())
    return found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(x509.DNSName)


def phase(cluster: Cluster, host: str) -> str:
    return str(hosts(cluster).get(host, {}).get("phase", ""))


def holder(cluster: Cluster) -> str:
    return next((name for name, host in hosts(cluster).items() if host["assignments"]), "")


def nodes(cluster: Cluster) -> set[str]:
    prefix = Keys(JOB).dcs_nodes_prefix()
    with cluster.etcd(cluster.connect()) as etcd:
        return {kv.key.removeprefix(prefix) for kv in etcd.range(prefix)[0]}


def test_host_joins_takes_over_a_run_and_leaves(
        first: Cluster, node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
        ) -> None:
    put_stub_in_place(tmp_path, monkeypatch)
    wait_until(lambda: phase(first, "gpu-0") == "ready", what="the second host")
    assert hosts(first)["gpu-0"]["labels"] == {"zone": "a"}
    wait_until(lambda: "host gpu-0: ready" in node.said, what="the command to say so")

    # A job that is submitted on the first host is carried out there, and has a DCS node on both.
    first.admit()
    options = [f"--job={JOB}", "--cluster=lab", f"--run_dir={first.cfg.run_dir}"]
    assert _run(capsys, "train", "--detach", *options)[0] == Exit.OK
    wait_until(lambda: first.run.look().phase is JobPhase.RUNNING, what="the run")
    assert holder(first) == "gpu-1" and first.run.pid
    wait_until(lambda: nodes(first) == {"node-0", "host-gpu-0"}, what="a DCS node on each host")

    # The command is killed: what it has started runs on, and the next one finds it.
    agents = {r.name: r.pid for r in node.cluster.agents.running()}
    node.process.kill()
    node.process.wait()
    node.start()
    assert {r.name: r.pid for r in node.cluster.agents.running()} == agents

    # The first host is drained: the run goes on on the second one, in its folder.
    assert _run(capsys, "drain", "gpu-1", "--within=0", "--wait", "--timeout=120", *options)[0] == Exit.OK
    assert holder(first) == "gpu-0"
    wait_until(lambda: bool(node.cluster.run.pid), what="the run on the second host")
    wait_until(lambda: first.run.look().phase is JobPhase.RUNNING and not first.run.pid, what="the run to have moved")

    # The second one is told to end: it gives the run back first.
    assert _run(capsys, "uncordon", "gpu-1", *options)[0] == Exit.OK
    wait_until(lambda: phase(first, "gpu-1") == "ready", what="the first host")
    wait_until(lambda: node.said.count("host gpu-0: ready") == 2, what="the second command to say so")
    node.process.send_signal(signal.SIGTERM)
    assert node.process.wait(150) == 0, node.said
    assert holder(first) == "gpu-1" and phase(first, "gpu-0") == "left"
    wait_until(lambda: first.run.look().phase is JobPhase.RUNNING and bool(first.run.pid), what="the run at home again")
    assert not node.cluster.agents.running() and not node.cluster.services.running()

    # It comes back, and is used again.
    node.start()
    wait_until(lambda: phase(first, "gpu-0") == "ready", what="the second host's return")
    wait_until(lambda: nodes(first) == {"node-0", "host-gpu-0"}, what="its DCS node")

    # A job that is taken off the cluster has no node there any more; its chunks stay.
    assert _run(capsys, "down", "--purge", "--yes", *options)[0] == Exit.OK
    wait_until(lambda: node.cluster.services.get(node.cluster.node) is None, what="the end of its node")
    with first.etcd(first.connect()) as etcd:
        assert etcd.get(ClusterKeys("lab").job(JOB)) is None
    chunks = kept_state.chunks(node.cluster.cfg)
    assert chunks.is_dir() and not list(chunks.parent.glob(f"{chunks.name}.*"))

    # Its certificate has no name of the first host.
    assert "gpu-1" not in _names(node.cluster) and "gpu-0" in _names(node.cluster)

    # Another job of the name begins without them.
    cluster_in(first.cfg.run_dir).admit()
    assert _run(capsys, "train", "--detach", *options)[0] == Exit.OK
    wait_until(lambda: nodes(first) == {"node-0", "host-gpu-0"}, what="a DCS node on each host")
    assert list(chunks.parent.glob(f"{chunks.name}.*")), "those of the earlier one are set aside"

    # `down` ends what runs, also where the file with the host's name is damaged.
    node.process.kill()
    node.cluster.paths.local_host.write_text("{")
    cluster_in(node.cluster.cfg.run_dir).down()
    assert not node.cluster.agents.running() and not node.cluster.services.running()


def test_logs_of_all_hosts_are_read_on_any_of_them(
        first: Cluster, node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
        ) -> None:
    put_stub_in_place(tmp_path, monkeypatch)
    wait_until(lambda: phase(first, "gpu-0") == "ready", what="the second host")
    first.admit()
    on_first = [f"--job={JOB}", "--cluster=lab", f"--run_dir={first.cfg.run_dir}"]
    on_second = [f"--job={JOB}", "--cluster=lab", f"--run_dir={node.cluster.cfg.run_dir}"]
    assert _run(capsys, "train", "--detach", *on_first)[0] == Exit.OK
    wait_until(lambda: first.run.look().phase is JobPhase.RUNNING, what="the run")
    wait_until(lambda: nodes(first) == {"node-0", "host-gpu-0"}, what="a DCS node on each host")

    # The run's log is found from the second host; what each host runs is that host's.
    def shown(*command: str) -> str:
        code, said = run(capsys, "logs", *command)
        assert code == Exit.OK, said
        return said

    log = JobPaths.of(first.cfg).log("train")
    with log.open("a") as file:
        file.write("a line of the run\n")
    assert "log of train on host gpu-1" in (said := shown("train", *on_second)) and "a line of the run\n" in said
    assert "on host" not in shown("train", *on_first)
    for part in (f"dcs-{JOB}", "agent-0"):
        own, far = shown(part, "-n1000", *on_second), shown(part, "-n1000", "--host=gpu-1", *on_second)
        assert own[:200] == node.cluster.log_of(part).read_text()[:200]
        assert f"log of {part} on host gpu-1" in far and first.log_of(part).read_text()[:200] in far
    assert "log of etcd-0 on host gpu-1" in shown("etcd", "-n1", *on_second), "found by a search"

    rows = json.loads(shown("-o", "json", *on_second))
    assert {"gpu-0", "gpu-1"} == {row["host"] for row in rows if row["part"] == f"dcs-{JOB}"}
    found = next(row for row in rows if row["part"] == "train")
    assert found["host"] == "gpu-1" and found["path"] == str(log) and found["nbytes"] == log.stat().st_size
    assert {row["host"] for row in json.loads(shown("-o", "json", "--host=gpu-1", *on_second))} == {"gpu-1"}

    # What is not there, or cannot be meant, is said.
    code, said = _run(capsys, "logs", "train", "--host=gpu-7", *on_second)
    assert code == Exit.USAGE and "there is no host 'gpu-7' hint: hosts: gpu-0, gpu-1" in said
    code, said = _run(capsys, "logs", "train", "--host=gpu-0", *on_second)
    assert code == Exit.USAGE and "there is no log of 'train'" in said
    code, said = _run(capsys, "logs", "no-such-part", *on_second)
    assert code == Exit.USAGE and "there is no log of 'no-such-part'" in said

    # It is followed to the host that the run moves to.
    follower = subprocess.Popen(processes.python("elastic_rl.cli.main", "logs", "train", "-f", "-n1", *on_second),
                                stdout=subprocess.PIPE, stderr=(errors := tmp_path / "errors").open("wb"))
    try:
        assert follower.stdout is not None
        wait_until(lambda: "on host gpu-1" in errors.read_text(), what="the follower")
        with log.open("a") as file:
            file.write("last line here\n")
        while follower.stdout.readline() != b"last line here\n":
            assert follower.poll() is None, errors.read_text()
        assert _run(capsys, "drain", "gpu-1", "--within=0", "--wait", "--timeout=120", *on_first)[0] == Exit.OK
        wait_until(lambda: "train is on host gpu-0 now" in errors.read_text(), what="the follower to find the run")
        with JobPaths.of(node.cluster.cfg).log("train").open("a") as file:
            file.write("first line there\n")
        while follower.stdout.readline() != b"first line there\n":
            assert follower.poll() is None, errors.read_text()
    finally:
        follower.kill()
        follower.communicate()
    assert "log of train on host gpu-0" in shown("train", *on_first)

    # Its agent is replaced, and serves on; without any, the host's logs are on its disk, and the other's are shown.
    before = {r.name: r.pid for r in node.cluster.agents.running()}
    with first.etcd(first.connect()) as etcd:
        registered = etcd.get(ClusterKeys("lab").host("gpu-0"))
        assert registered is not None
        active = AgentStatus.load(node.cluster.paths.agent_status)
        assert active is not None and active.pid in before.values()
        os.kill(active.pid, signal.SIGKILL)
        wait_until(lambda: (kv := etcd.get(ClusterKeys("lab").host("gpu-0"))) is not None
                   and kv.mod_revision > registered.mod_revision, what="the next agent")
    wait_until(lambda: _run(capsys, "logs", "train", *on_first)[0] == Exit.OK, what="its logs")
    node.process.kill()
    node.process.wait()
    cluster_in(node.cluster.cfg.run_dir).down()
    wait_until(lambda: phase(first, "gpu-0") in ("suspected", "lost"), what="the second host to be missed")
    code, said = _run(capsys, "logs", "agent-0", "--host=gpu-0", *on_first)
    assert code == Exit.UNAVAILABLE and re.search(
        rf"host gpu-0 is (SUSPECTED|LOST) since [-0-9]+ [:0-9]+; its logs are on its disk, in "
        rf"{node.cluster.paths.logs} and {JobPaths.of(node.cluster.cfg).logs}", said), said
    said = shown("-o", "json", *on_first)
    assert "host gpu-0 is" in said and '"gpu-1"' in said

    # Without the cluster there are the files of this host.
    cluster_in(first.cfg.run_dir).down()
    said = shown("train", *on_first)
    assert "other hosts cannot be asked, this is what this one has" in said and "a line of the run" in said


def test_run_on_another_host_is_shown_and_reported_here(
        first: Cluster, node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
        ) -> None:
    put_stub_in_place(tmp_path, monkeypatch)
    wait_until(lambda: phase(first, "gpu-0") == "ready", what="the second host")
    first.admit()
    assert _run(capsys, "train", "--detach", f"--job={JOB}", "--cluster=lab", f"--run_dir={first.cfg.run_dir}"
                )[0] == Exit.OK
    wait_until(lambda: nodes(first) == {"node-0", "host-gpu-0"}, what="a DCS node on each host")
    keys, here = Keys(JOB), [f"--job={JOB}", "--cluster=lab", f"--run_dir={node.cluster.cfg.run_dir}"]
    shown = tmp_path / "shown"

    def write(term: Term, *new: Record) -> None:
        for record in new:
            term.log.write(**record)
        term.status.write("rl", step=new[-1]["step"])

    with first.etcd(first.connect()) as etcd:
        wait_until(lambda: fencing.current_epoch(etcd, keys), what="the epoch of the run")
        actor = Term(etcd, keys, tmp_path)
        steps = [record for record in records(4, faults=False) if record["kind"] == "step"]
        write(actor, *steps[:2])
        attach = processes.python("elastic_rl.cli.main", "attach", *here)
        with shown.open("wb") as out:
            follower = subprocess.Popen(attach, stdout=out, stderr=out)
        try:
            wait_until(lambda: "step 2" in shown.read_text(), what="the newest record of before",
                       alive=lambda: follower.poll() is None)
            write(actor, *steps[2:])
            wait_until(lambda: "step 4" in shown.read_text(), what="the records that are written now",
                       alive=lambda: follower.poll() is None)
            assert "step 1" not in shown.read_text() and "step 3" in shown.read_text()
            etcd.put(keys.job_status(), JobStatus(phase="finished", step=4, steps=4).encode())
            assert follower.wait(120) == Exit.OK, shown.read_text()
        finally:
            follower.kill()
            follower.wait()
        actor.end()
    paths = JobPaths.of(node.cluster.cfg)
    report = json.loads(paths.report.read_text())
    assert (report["status"], report["steps"]) == ("finished", 4) and paths.report_page.exists()
    assert f"{JOB}: finished" in shown.read_text() and not paths.steps.exists()


def _take_back(first: Cluster, tmp_path: Path) -> None:
    """Has the second host leave by a notice."""
    wait_until(lambda: phase(first, "gpu-0") == "ready", what="the second host")
    (tmp_path / "notice").write_text('{"reason": "rack b4 is switched off"}')
    wait_until(lambda: phase(first, "gpu-0") == "left", what="the drain")


def test_host_that_is_taken_back_leaves_and_says_why(
        first: Cluster, node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _take_back(first, tmp_path)
    code, said = _run(capsys, "hosts", "gpu-0", "--cluster=lab", f"--run_dir={first.cfg.run_dir}")
    assert code == Exit.OK and "drained by a notice of preemption: rack b4" in said


@full(proved_in="tests/integration/host/test_machine_taken_back.py tests/unit/coordinator/test_cluster_world.py",
      why="with the command that joins")
def test_host_that_was_taken_back_is_not_used_again_before_an_operator_says_so(
        first: Cluster, node: Node, tmp_path: Path) -> None:
    _take_back(first, tmp_path)

    # The machine is shut down, and is there again with its notice: the drain holds.
    node.process.send_signal(signal.SIGTERM)
    assert node.process.wait(150) == 0, node.said
    before = len(node.said)
    node.start()
    wait_until(lambda: "host gpu-0: left" in node.said[before:], what="the command to say how the host is")
    assert hosts(first)["gpu-0"]["spec"]["drain"] and hosts(first)["gpu-0"]["spec"]["reason"].startswith("rack b4")

    # Another machine of the name begins without it.
    node.process.send_signal(signal.SIGTERM)
    assert node.process.wait(150) == 0, node.said
    (tmp_path / "notice").unlink()
    node.cluster.paths.incarnation.unlink()
    node.start()
    wait_until(lambda: phase(first, "gpu-0") == "ready", what="the next machine")
    assert not hosts(first)["gpu-0"]["spec"]["drain"]


def test_what_cannot_join_says_why_and_changes_nothing(
        first: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, run_dir = first.paths.join_file, tmp_path / "second"
    assert file.stat().st_mode & 0o077 == 0

    def refused(*options: str, file: Path = file, run_dir: Path = run_dir) -> str:
        code, said = _run(capsys, "node", f"--join={file}", f"--run_dir={run_dir}", *options)
        assert code != Exit.OK
        if run_dir != first.cfg.run_dir:  # nothing is left of the try
            paths = cluster_in(run_dir).paths
            locks = {paths.services_lock.name, paths.foreground_lock.name}
            left = {path.name for path in paths.folder.glob("*") if path.is_file()} - locks
            assert not left and not cluster_in(run_dir).agents.running()
        return said

    assert "give --address=IP" in refused("--name=gpu-0")
    assert "no address of this machine" in refused("--address=192.0.2.7")
    assert "is no source of notices" in refused(f"--address={ADDRESS}", "--preemption-notice=awz")
    assert "and no dcs of its own" in refused(f"--address={ADDRESS}", "--dcs.replicas=2")
    assert "was started on this machine" in refused(f"--address={ADDRESS}", run_dir=first.cfg.run_dir)
    copied = tmp_path / "copied.join"
    copied.write_bytes(file.read_bytes())
    os.chmod(copied, 0o644)
    assert "others than the user" in refused(f"--address={ADDRESS}", file=copied)
    os.chmod(copied, 0o600)
    copied.write_text("{}")
    assert "is no join file" in refused(f"--address={ADDRESS}", file=copied)
    other = file.read_text().replace(ClusterSecret.read(first.paths.secret).value, ClusterSecret.generate().value)
    copied.write_text(other)
    assert "certificate" in refused(f"--address={ADDRESS}", file=copied)
