"""A cluster that others can reach: its servers are at this host's address, and whoever calls them has a certificate."""

from __future__ import annotations

import secrets
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from support.commands import run_in_one_line as _run
from support.stub_run import put_stub_in_place
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.cli.exit_codes import Exit
from elastic_rl.coordinator.client.admin_client import AdminClient
from elastic_rl.dcs.fetch.puller import Puller
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.dcs.security import Security
from elastic_rl.errors import AccessDenied, ConfigError, EtcdUnavailable, PreflightFailed
from elastic_rl.etcd import fencing
from elastic_rl.etcd.cluster_records import JobPhase
from elastic_rl.etcd.keys import Keys
from elastic_rl.host.agent.status import AgentStatus
from elastic_rl.host.job_secrets import dcs_security
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.net.addresses import LOOPBACK, reachable_address
from elastic_rl.net.cluster_secret import ClusterSecret

ADDRESS = reachable_address("0.0.0.0")
pytestmark = pytest.mark.skipif(ADDRESS == LOOPBACK, reason="this machine has no address but loopback")
JOB = f"a-{secrets.token_hex(3)}"


class Lab:
    """A cluster at an address, by the settings that a command line would give."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "runs"
        self.options = ["--cluster=lab", f"--run_dir={self.run_dir}"]

    def of(self, job: str = "") -> Cluster:
        from elastic_rl.cli.common import _cluster_of
        return _cluster_of({**({"job": job} if job else {}), "run_dir": str(self.run_dir), "cluster": "lab"}, None)

    def pid(self, service: str) -> int:
        return next((r.pid for r in self.of().services.running() if r.name == service), 0)

    def first(self) -> Cluster:
        return Cluster(config.parse({"run_dir": str(self.run_dir), "cluster": "lab", "coordinator": {"replicas": 1},
                                     "dcs": {"arena_bytes": 32 << 20}}))


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    out = Lab(tmp_path)
    yield out
    out.first().down()


def _phase(cluster: Cluster) -> str:
    """The phase of the cluster's host; empty while no coordinator answers."""
    try:
        return str(AdminClient(cluster.connect(), retry_budget_s=1.0).host("gpu-7")["phase"])
    except EtcdUnavailable:
        return ""


def _said_by_agent(cluster: Cluster) -> str:
    status = AgentStatus.load(cluster.paths.agent_status)
    return status.error if status is not None else ""


def _listening(pid: int) -> list[int]:
    return [c.laddr.port for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]


def test_servers_are_at_the_address_and_take_nobody_without_a_certificate(
        lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    put_stub_in_place(tmp_path, monkeypatch)
    info = lab.first().up(name="gpu-7", address=ADDRESS)
    cluster = lab.of(JOB)
    endpoint = info.etcd_endpoints[0]
    assert endpoint.startswith(f"{ADDRESS}:") and info.coordinators[0].startswith(f"https://{ADDRESS}:")

    # etcd: only with a certificate of the cluster's authority.
    assert cluster.etcd_healthy(endpoint, timeout_s=5.0)
    for context in (False, ssl.create_default_context(cafile=str(cluster.paths.tls.ca))):
        with pytest.raises(httpx.TransportError):
            httpx.get(f"https://{endpoint}/health", verify=context, trust_env=False, timeout=5.0)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{endpoint}/health", trust_env=False, timeout=5.0)

    # The admin API: by the authority's file, from wherever it was copied to; the host is registered there.
    copied = tmp_path / "ca.pem"
    copied.write_bytes(Path(info.ca_file).read_bytes())
    cluster.admit()
    code, said = _run(capsys, "hosts", f"--url={info.coordinators[0]}", f"--ca={copied}",
                      f"--token-file={info.tokens_file}", "-o", "json")
    assert code == Exit.OK and f'"address": "{ADDRESS}"' in said and '"id": "gpu-7"' in said

    # The job's DCS node: with token and certificate, and not with the token alone.
    security = dcs_security(cluster.cfg)
    keys = Keys(JOB)
    with cluster.etcd(info) as etcd:
        node = etcd.get(keys.dcs_node("node-0"))
        assert node is not None and f'"host":"{ADDRESS}"' in node.value.decode()
        epoch = fencing.raise_epoch(etcd, keys, "test").number
        tensor = torch.arange(1000.0)
        with Publisher(etcd, keys, "policy", epoch=epoch, owner="test", chunk_bytes=4096, staging_ttl_s=5,
                       security=security) as publisher:
            publisher.publish([("w", tensor)], meta={})
        with Puller(etcd, keys, "test", io_timeout_s=10, security=security) as puller, puller.pull("policy") as pulled:
            assert torch.equal(dict(pulled.tensors())["w"], tensor)
        with (Puller(etcd, keys, "test", io_timeout_s=2, security=Security(token=security.token)) as puller,
              pytest.raises(AccessDenied, match="speaks TLS only")):
            puller.pull("policy")

    # Another member: its peers want a certificate, too.
    peer = next(port for port in _listening(lab.pid("etcd-0")) if port != int(endpoint.rpartition(":")[2]))
    for context in (False, ssl.create_default_context(cafile=str(cluster.paths.tls.ca))):
        with pytest.raises(httpx.TransportError):
            httpx.get(f"https://{ADDRESS}:{peer}/version", verify=context, trust_env=False, timeout=5.0)

    # The agent makes a certificate anew that is gone, and none while the secret is another one.
    secret = ClusterSecret.read(cluster.paths.secret)
    ClusterSecret.generate().save(cluster.paths.secret)
    cluster.paths.tls.cert.unlink()
    wait_until(lambda: "is not the secret" in _said_by_agent(cluster), what="the agent to find another secret")
    assert not cluster.paths.tls.cert.exists()
    secret.save(cluster.paths.secret)
    wait_until(cluster.paths.tls.cert.exists, what="a certificate made anew")
    wait_until(lambda: not _said_by_agent(cluster), what="the agent to be content")

    # A run of it begins, and what ends comes back where it was.
    assert _run(capsys, "train", "--detach", f"--job={JOB}", *lab.options)[0] == 0
    wait_until(lambda: lab.of(JOB).run.look().phase is JobPhase.RUNNING, what="the run")
    for service in ("etcd-0", "coordinator-0", cluster.node):
        pid = lab.pid(service)
        psutil.Process(pid).kill()
        wait_until(lambda service=service, pid=pid: lab.pid(service) not in (0, pid), what=f"another {service}")
    wait_until(lambda: cluster.etcd_healthy(endpoint, timeout_s=5.0), what="etcd")
    wait_until(lambda: _phase(cluster) == "ready", what="the host")


def test_cluster_keeps_its_address_until_it_is_given_another(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = _run(capsys, "up", *lab.options, f"--address={ADDRESS}", "--coordinator.replicas=1")
    assert code == Exit.OK and f"https://{ADDRESS}:" in said and "authority" in said
    etcd = lab.of().connect().etcd_endpoints[0].rpartition(":")[0]
    assert etcd == ADDRESS
    code, said = _run(capsys, "up", *lab.options, f"--address={LOOPBACK}")
    assert code == Exit.USAGE and "coordinator-0" in said and "elastic-rl down --cluster=lab" in said
    lab.of().down()
    lab.run_dir = lab.run_dir.rename(lab.run_dir.with_name("moved"))
    info = lab.of().up()
    assert info.etcd_endpoints[0].startswith(ADDRESS), "as before"
    assert str(lab.run_dir) in info.ca_file
    code, said = _run(capsys, "doctor", "--cluster=lab", f"--run_dir={lab.run_dir}")
    assert "speaks TLS" in said
    lab.of().down()
    info = lab.of().up(address=LOOPBACK)
    assert info.coordinators[0].startswith(f"http://{LOOPBACK}:") and not info.ca_file
    assert info.etcd_endpoints[0].startswith(f"{LOOPBACK}:")


def test_address_that_this_machine_does_not_have_changes_nothing(lab: Lab) -> None:
    with pytest.raises(PreflightFailed, match=r"--address=192\.0\.2\.7 is no address of this machine"):
        lab.first().up(address="192.0.2.7")
    assert not lab.first().paths.local_host.exists() and not lab.first().services.all()
    own = Cluster(config.parse({"job": JOB, "run_dir": str(lab.run_dir)}))
    with pytest.raises(ConfigError, match="only a host of a cluster with a name"):
        own.up(address=ADDRESS)
