"""Who may talk to the admin API: raw requests as a program, a broken client or a foreign page would send them."""

from __future__ import annotations

import re
import secrets
import socket
from collections.abc import Iterator

import pytest
from support.api_cluster import ApiCluster, problem, running
from support.coordinators import AUTH, OPERATOR, VIEWER
from support.etcd_server import EtcdServers
from support.tiers import parametrize
from support.waiting import wait_until

from elastic_rl.coordinator.api.app import APP
from elastic_rl.coordinator.api_paths import job_path
from elastic_rl.etcd.records import Engine, EngineState, PoolSpec
from elastic_rl.net import http_client


@pytest.fixture(scope="module")
def cluster(etcd_servers: EtcdServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiCluster]:
    with running(etcd_servers, tmp_path_factory.mktemp("access"), "a", "b",
                 coordinator={"allowed_hosts": ["rl.example", "*.cluster.local"]}) as made:
        yield made


@pytest.fixture
def engine(cluster: ApiCluster) -> str:
    """A ready engine in a pool of its own."""
    name = f"e-{secrets.token_hex(4)}"
    cluster.etcd.put(cluster.keys.pool_spec(name), PoolSpec(name=name, desired=2).encode())
    cluster.etcd.put(cluster.keys.engine(name), Engine(id=name, pool=name, state=EngineState.READY, epoch=1).encode())
    return name


def state_of(cluster: ApiCluster, engine: str) -> EngineState:
    found = cluster.etcd.get(cluster.keys.engine(engine))
    assert found is not None
    return Engine.decode(found.value).state


# -- tokens ------------------------------------------------------------------------------------------------------------
def test_loopback_api_requires_token(cluster: ApiCluster, engine: str) -> None:
    with cluster.client("a", headers={}) as api:
        for path in ("", "engines", "changes", "/metrics"):
            problem(api.get(path), 401, "unauthorized")
        problem(api.post(f"engines/{engine}/drain", json={}), 401, "unauthorized")
        problem(api.post("restarts", json={"target": "job"}), 401, "unauthorized")
        assert api.get("/healthz").status_code == api.get("/readyz").status_code == 200
    assert state_of(cluster, engine) is EngineState.READY


def test_every_route_of_the_cluster_and_of_a_job_requires_a_token_and_every_change_an_operators(
        cluster: ApiCluster) -> None:
    """But for the probes, the document and the sign-in; a viewer changes nothing but its own session."""
    with cluster.client("a", headers={}) as stranger, cluster.client("a", headers={
            "Authorization": f"Bearer {VIEWER}"}) as viewer:
        asked = 0
        for path, methods in APP.openapi()["paths"].items():
            filled = re.sub(r"\{\w+\}", "x", path.replace("{job}", cluster.keys.job))
            for method, operation in methods.items():
                if operation["tags"] == ["probes"] and path != "/metrics":
                    continue
                asked += 1
                body = {"json": {}} if method != "get" else {}
                problem(stranger.request(method, filled, **body), 401, "unauthorized")
                if method != "get" and operation["tags"] != ["access"]:
                    problem(viewer.request(method, filled, **body), 403, "forbidden")
        assert asked > 25


# -- requests that break off -------------------------------------------------------------------------------------------
def changes_answered(cluster: ApiCluster) -> float:
    """POST requests that replica a has dealt with, whatever it answered."""
    text = http_client.request("GET", f"{cluster.replicas.urls['a']}/metrics", headers=AUTH, timeout=20).text
    return sum(float(n) for n in re.findall(r'^elastic_rl_api_requests_total\{method="POST".*\} (\S+)', text, re.M))


@pytest.mark.parametrize("body", [
    "Content-Length: 18\r\n\r\n", 'Content-Length: 18\r\n\r\n{"replace"', "Transfer-Encoding: chunked\r\n\r\n",
    'Transfer-Encoding: chunked\r\n\r\nb\r\n{"replace":\r\n',
    "Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\nnonsense\r\n"],
    ids=["no body", "half a body", "no chunk", "half the chunks", "a broken chunk"])
def test_request_cut_off_before_its_body_is_complete_changes_nothing(cluster: ApiCluster, engine: str, body: str
                                                                     ) -> None:
    host, port = cluster.replicas.urls["a"].removeprefix("http://").split(":")
    before, path = changes_answered(cluster), job_path(cluster.keys.job, "engines", engine, "drain")
    with socket.create_connection((host, int(port)), timeout=10) as cut:
        cut.sendall((f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer "
                     f"{OPERATOR}\r\nContent-Type: application/json\r\n{body}").encode())
    wait_until(lambda: changes_answered(cluster) > before, what="the end of the request")
    assert state_of(cluster, engine) is EngineState.READY
    assert cluster.operations(engine) == []


# -- other sites -------------------------------------------------------------------------------------------------------
@parametrize("host", ["evil.example", "evil.example:8400", "rl.example.evil.example", "xrl.example", "cluster.local",
                      "localhost.evil.example", "127.0.0.1.evil.example", ""],
             proved_in="tests/unit/coordinator/test_request_origin.py", why="further names, sent to a replica")
def test_request_for_unknown_host_name_is_refused(cluster: ApiCluster, host: str) -> None:
    for path, headers in ((job_path(cluster.keys.job), AUTH), ("/metrics", AUTH), ("/openapi.json", {}), ("/", {})):
        answer = http_client.request("GET", cluster.replicas.urls["a"] + path, headers={**headers, "Host": host},
                                     timeout=20)
        assert "allowed_hosts" in problem(answer, 421, "unknown-host")["detail"]
    assert http_client.request("GET", cluster.replicas.urls["a"] + "/healthz", headers={"Host": host},
                               timeout=20).status_code == 200


@parametrize("host", ["rl.example", "127.0.0.1", "localhost", "LOCALHOST:1", "10.1.2.3:8400", "[::1]:8400",
                      "Rl.Example.:443", "a.b.cluster.local", socket.gethostname()], by_default=2,
             proved_in="tests/unit/coordinator/test_request_origin.py", why="further names, sent to a replica")
def test_request_for_served_host_name_or_address_is_answered(cluster: ApiCluster, host: str) -> None:
    answer = http_client.request("GET", cluster.replicas.job_url("a"), headers={**AUTH, "Host": host},
                                 timeout=20)
    assert answer.status_code == 200, answer.text


@parametrize("headers", [
    {"Sec-Fetch-Site": "cross-site"}, {"Origin": "http://127.0.0.1:1"}, {"Sec-Fetch-Site": "same-site"},
    {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": "not an origin"}], by_default=2,
             proved_in="tests/unit/coordinator/test_request_origin.py", why="further origins, sent to a replica")
def test_request_of_another_site_is_refused_even_with_a_token(cluster: ApiCluster, engine: str, headers: dict[str, str]
                                                              ) -> None:
    with cluster.client("a", headers={**AUTH, **headers}) as api:
        problem(api.post(f"engines/{engine}/drain", json={}), 403, "cross-site")
        problem(api.get(""), 403, "cross-site")
    assert state_of(cluster, engine) is EngineState.READY


def test_request_of_own_page_is_answered(cluster: ApiCluster, engine: str) -> None:
    url = cluster.replicas.urls["a"]
    for headers in ({"Sec-Fetch-Site": "same-origin", "Origin": url}, {"Sec-Fetch-Site": "none"}, {"Origin": url}):
        with cluster.client("a", headers={**AUTH, **headers}) as api:
            assert api.post(f"engines/{engine}/drain?dry_run=true", json={}).status_code == 200


def test_page_may_be_linked_to_from_anywhere(cluster: ApiCluster) -> None:
    page = http_client.request("GET", cluster.replicas.urls["a"], headers={"Sec-Fetch-Site": "cross-site"}, timeout=20)
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")


@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
                                          "text/plain", ""])
def test_change_without_json_content_type_is_refused(cluster: ApiCluster, engine: str, content_type: str) -> None:
    kind = {"Content-Type": content_type} if content_type else {}
    with cluster.client("a", headers={**AUTH, **kind}) as api:
        for content in (b'{"replace": true}', b""):
            problem(api.post(f"engines/{engine}/drain", content=content), 415, "unsupported-media-type")
        problem(api.post("alerts/test", content=b""), 415, "unsupported-media-type")
    assert state_of(cluster, engine) is EngineState.READY


def test_viewer_token_scrapes_metrics(cluster: ApiCluster) -> None:
    answer = http_client.request("GET", cluster.replicas.urls["a"] + "/metrics",
                                 headers={"Authorization": f"Bearer {VIEWER}"},
                       timeout=20)
    assert answer.status_code == 200 and "elastic_rl_is_leader" in answer.text
