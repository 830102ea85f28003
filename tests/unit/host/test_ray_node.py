"""The command line and the environment of a node of Ray, and what a process of it takes for this host's settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cluster_files import make_secret

from elastic_rl import config
from elastic_rl.config import Config
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host import cluster_settings, ray_node
from elastic_rl.host.here import context_here
from elastic_rl.host.job_secrets import engine_access, engine_tls
from elastic_rl.host.local_host import LocalHost
from elastic_rl.host.paths import ClusterPaths, JobPaths
from elastic_rl.host.processes import OWNER_ENV, RUN_MARK
from elastic_rl.host.ray_node import RUN_HOST, RayNode, RayNodeKind, compute_environment, label_of
from elastic_rl.host.service_files import ServiceFiles

FAR = "10.0.0.7"


def cluster_in(run_dir: Path, address: str) -> Config:
    """Settings of a job on a cluster whose host in this folder has an address."""
    cfg = config.parse({"job": "j", "cluster": "lab", "run_dir": str(run_dir)})
    paths = ClusterPaths.of(cfg)
    paths.folder.mkdir(parents=True)
    make_secret(cfg)
    cluster_settings.save(cfg, paths.settings)
    LocalHost(name="a", address=address).save(paths)
    return cfg


def command(cfg: Config, kind: RayNodeKind) -> list[str]:
    paths = JobPaths.of(cfg)
    node = RayNode(cfg, 1, ServiceFiles(cfg.run_dir / "services"), "n", kind, paths.ray_joined, log=paths.log("n"),
                   gcs=lambda: f"{FAR}:6379", address="127.0.0.1", host="gpu-7")
    return list(node._command()[0])


def test_head_has_no_cpus_and_only_the_worker_of_the_runs_host_has_its_resource(tmp_path: Path) -> None:
    cfg = cluster_in(tmp_path, FAR)
    head, run, other = (command(cfg, kind) for kind in (ray_node.HEAD, ray_node.RUN_WORKER, ray_node.WORKER))
    assert "--head" in head and "--num-cpus=0" in head and "--port=6379" in head
    assert "--head" not in run and f"--address={FAR}:6379" in run and f"--address={FAR}:6379" in other
    assert RUN_HOST in " ".join(run) and RUN_HOST not in " ".join([*head, *other])
    assert "--node-name=gpu-7" in other and "--node-name=gpu-7" in run and "--node-name=head@gpu-7" in head
    assert {"--labels=host=gpu-7"} <= set(head) & set(run) & set(other)


@given(st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?", fullmatch=True))
def test_name_of_every_host_can_be_a_label_of_ray(name: str) -> None:
    assert re.fullmatch(r"[a-zA-Z0-9]([a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?", label_of(name))


@pytest.mark.parametrize("address", ["127.0.0.1", FAR])
def test_ray_engines_and_routers_have_tls_where_others_reach_the_host(tmp_path: Path, address: str) -> None:
    cfg = cluster_in(tmp_path, address)
    tls, environment = ClusterPaths.of(cfg).tls, compute_environment(cfg)
    assert (environment["RAY_USE_TLS"], environment["RAY_TLS_CA_CERT"]) == (
        ("1", str(tls.ca)) if address == FAR else (None, None))
    assert (engine_tls(cfg) == tls) == (address == FAR)
    assert engine_access(cfg).authority == (str(tls.ca) if address == FAR else "")
    assert environment[OWNER_ENV] is None, "it is no service of the cluster, which `down` would miss a record of"
    assert environment[RUN_MARK] == str(JobPaths.of(cfg).private)


def test_process_on_another_host_has_that_hosts_folder_address_and_certificates(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    far, here = cluster_in(tmp_path / "far", FAR), cluster_in(tmp_path / "here", "10.0.0.8")
    far = LocalHost(name="a", address=FAR).settings_here(far, ClusterPaths.of(far).tls)
    ctx = RunContext(config=far, etcd_endpoints=[f"{FAR}:1"], job="j", epoch=3, model_dir="/m", host=FAR)
    monkeypatch.delenv(RUN_MARK, raising=False)
    assert context_here(ctx) == ctx, "a process that no run has started"
    monkeypatch.setenv(RUN_MARK, str(JobPaths.of(here).private))
    found = context_here(ctx)
    tls = ClusterPaths.of(here).tls
    assert (found.host, found.config.run_dir) == ("10.0.0.8", here.run_dir)
    assert (found.config.etcd.tls_cert, found.config.etcd.tls_ca) == (str(tls.cert), str(tls.ca))
    assert (found.epoch, found.etcd_endpoints, found.model_dir) == (3, [f"{FAR}:1"], "/m")


@pytest.mark.parametrize(("memory", "shared", "store"), [
    (2 << 30, 64 << 20, 80 << 20),  # a container: what Ray takes at least
    (64 << 30, 32 << 30, 1 << 30), (64 << 30, 4 << 30, 512 << 20), (2 << 40, 1 << 40, 8 << 30)])
def test_object_store_grows_with_the_host(memory: int, shared: int, store: int) -> None:
    assert ray_node.object_store_bytes(memory, shared) == store


def test_node_offers_the_memory_that_its_object_store_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_node, "usable_memory_bytes", lambda: 64 << 30)
    monkeypatch.setattr(ray_node, "object_store_bytes", lambda memory, shared: memory // 64)
    args = command(cluster_in(tmp_path, FAR), ray_node.WORKER)
    assert f"--object-store-memory={1 << 30}" in args and f"--memory={63 << 30}" in args
