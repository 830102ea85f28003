"""The manifests in ops/kubernetes, against the schemas of Kubernetes and the commands that they call."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
import yaml
from support.launchers import ENDS_S, OPS, options_of, seconds, words_of

from elastic_rl.host.agent.status import WRITE_EVERY_S

FOLDER = OPS / "kubernetes"
HOSTS = ("elastic-rl", "elastic-rl-host")
"""The first host, and further ones."""
VERSIONS = ("1.27", kubernetes_validate.latest_version())
"""The oldest release that has all fields that are used, and the newest one with a schema."""

hosts = pytest.mark.parametrize("name", HOSTS)


def documents() -> Iterator[dict[str, Any]]:
    for path in sorted((FOLDER / "base").glob("*.yaml")):
        if path.name != "kustomization.yaml":
            yield from yaml.safe_load_all(path.read_text())


def pod_of(name: str, found: Iterator[dict[str, Any]] | None = None) -> dict[str, Any]:
    sets = {d["metadata"]["name"]: d for d in found or documents() if d["kind"] == "StatefulSet"}
    spec: dict[str, Any] = sets[name]["spec"]["template"]["spec"]
    return spec


def command_of(name: str) -> list[str]:
    """The command line of elastic-rl in the container of a host."""
    container = pod_of(name)["containers"][0]
    assert container["command"] == ["tini", "--"], "who is process 1 has to reap, and to forward SIGTERM"
    args: list[str] = container["args"]
    return args if args[0] == "elastic-rl" else words_of(args[2].partition("exec ")[2])


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_follow_the_schemas(version: str) -> None:
    kinds = []
    for document in documents():
        kubernetes_validate.validate(document, version, strict=True)
        kinds.append(document["kind"])
    assert sorted(kinds) == ["Namespace", "PodDisruptionBudget", "Service", "Service", "StatefulSet", "StatefulSet"]


def test_schemas_refuse_a_misspelt_field() -> None:
    document = next(d for d in documents() if d["kind"] == "StatefulSet")
    document["spec"]["template"]["spec"]["terminationGraceSeconds"] = 5
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, VERSIONS[-1], strict=True)


def test_containers_call_commands_that_exist() -> None:
    up, node = (options_of(command_of(name)) for name in HOSTS)
    assert "--foreground" in up and up["--run_dir"] == node["--run_dir"] == "/data/runs"
    ports = yaml.safe_load(up["--coordinator.ports"])
    service = next(d for d in documents() if d["kind"] == "Service" and d["metadata"]["name"] == "elastic-rl")
    assert [port["port"] for port in service["spec"]["ports"]] == ports
    container = pod_of("elastic-rl")["containers"][0]
    assert [port["hostPort"] for port in container["ports"]] == ports
    assert container["readinessProbe"]["httpGet"]["port"] in ports
    assert f"/data/runs/_clusters/{up['--cluster']}/agent.json" in str(pod_of("elastic-rl-host")["containers"][0])


@hosts
def test_pod_ends_after_all_has_had_time_to_end(name: str) -> None:
    grace_s = seconds(options_of(command_of(name)))
    assert pod_of(name)["terminationGracePeriodSeconds"] >= grace_s + ENDS_S


@hosts
def test_pod_has_what_a_host_needs_and_no_more(name: str) -> None:
    pod = pod_of(name)
    container = pod["containers"][0]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory" and mounts["/data"] == "data"
    assert set(mounts.values()) == {*volumes, "data"}
    assert pod["hostNetwork"] and pod["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert "livenessProbe" not in container, "its restart would end all that runs on the host"


def test_host_is_ready_while_its_agent_is_heard() -> None:
    probe = pod_of("elastic-rl-host")["containers"][0]["readinessProbe"]
    assert "-60 seconds" in probe["exec"]["command"][2] and WRITE_EVERY_S < 60


def test_hosts_take_the_join_file_of_a_secret() -> None:
    pod = pod_of("elastic-rl-host")
    secret = next(volume["secret"] for volume in pod["volumes"] if "secret" in volume)
    assert secret["secretName"] == "elastic-rl-join" and not secret.get("optional")
    args = pod["containers"][0]["args"][2]
    assert args.startswith("install -m 600 /etc/elastic-rl/cluster.join /run/elastic-rl/cluster.join && ")
    assert options_of(command_of("elastic-rl-host"))["--join"] == "/run/elastic-rl/cluster.join"


def test_monitor_selects_the_first_host() -> None:
    (monitor,) = yaml.safe_load_all((FOLDER / "monitoring.yaml").read_text())
    service = next(d for d in documents() if d["kind"] == "Service" and d["metadata"]["name"] == "elastic-rl")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert ([endpoint["port"] for endpoint in monitor["spec"]["endpoints"]]
            == [port["name"] for port in service["spec"]["ports"]])


@pytest.mark.skipif(not shutil.which("kubectl"), reason="there is no kubectl")
@pytest.mark.parametrize("folder", ["base", "gpu"])
def test_kustomize_builds_the_manifests(folder: str) -> None:
    done = subprocess.run(["kubectl", "kustomize", FOLDER / folder], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    built = list(yaml.safe_load_all(done.stdout))
    for document in built:
        kubernetes_validate.validate(document, VERSIONS[-1], strict=True)
    for name in HOSTS:
        pod = pod_of(name, iter(built))
        container = pod["containers"][0]
        assert container["image"].startswith("registry.example/elastic-rl:")
        assert ("nvidia.com/gpu" in container["resources"]["limits"]) == (folder == "gpu")
        assert {v["name"]: v for v in pod["volumes"]}["shm"]["emptyDir"]["medium"] == "Memory"
