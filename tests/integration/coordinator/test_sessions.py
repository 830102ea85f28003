"""Browser sessions over two replicas on a real etcd: one-time links, cookies, and how they end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from support.api_cluster import ApiCluster, problem, running
from support.coordinators import AUTH, VIEWER, write_tokens
from support.etcd_server import EtcdServers
from support.tiers import parametrize

from elastic_rl.config import CoordinatorConfig
from elastic_rl.coordinator.api import sessions
from elastic_rl.coordinator.api.auth import TokenTable, digest
from elastic_rl.coordinator.api.sessions import SessionStore
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.net import http_client

AS_VIEWER = {"Authorization": f"Bearer {VIEWER}"}


@pytest.fixture(scope="module")
def cluster(etcd_servers: EtcdServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiCluster]:
    with running(etcd_servers, tmp_path_factory.mktemp("sessions"), "a", "b") as made:
        yield made


def create_link(cluster: ApiCluster, replica: str = "a", headers: dict[str, str] = AUTH, **body: Any) -> httpx.Response:
    return http_client.request("POST", f"{cluster.replicas.urls[replica]}/v1/session-links", json=body,
                               headers=headers, timeout=20)


def browser(cluster: ApiCluster, replica: str = "a", **headers: str) -> httpx.Client:
    """A client that keeps cookies and sends what a browser sends from the dashboard's own page."""
    url = cluster.replicas.urls[replica]
    return cluster.client(replica, headers={"Origin": url, "Sec-Fetch-Site": "same-origin", **headers})


@contextmanager
def open_session(cluster: ApiCluster, replica: str = "a", **link: Any) -> Iterator[httpx.Client]:
    """A browser with a session; ``link``: arguments of create_link."""
    with browser(cluster, replica) as page:
        code = create_link(cluster, **link).json()["link"]
        assert page.post("/v1/session", json={"link": code}).status_code == 200
        yield page


def test_link_opens_a_session_on_any_replica_and_works_once(cluster: ApiCluster) -> None:
    made = create_link(cluster, "a")
    assert made.status_code == 201 and made.json()["role"] == "operator"
    link = {"link": made.json()["link"]}
    with browser(cluster, "b") as page, browser(cluster, "a") as other:
        opened = page.post("/v1/session", json=link)
        assert opened.status_code == 200 and opened.json()["name"] == opened.json()["role"] == "operator"
        assert page.get("/v1/session").json() == opened.json()
        for client in (page, other):
            problem(client.post("/v1/session", json=link), 401, "unknown-link")
        assert page.get("").status_code == 200, "a link that was used does not end the session"
        problem(other.get(""), 401, "unauthorized")
        # Cookies are shared by the ports of a host, so the other replica of this machine has it too.
        assert other.get("", cookies=dict(page.cookies)).status_code == 200


def test_one_of_many_that_use_a_link_at_once_gets_a_session(cluster: ApiCluster) -> None:
    link = {"link": create_link(cluster).json()["link"]}

    def use(n: int) -> int:
        with browser(cluster, "ab"[n % 2]) as page:
            return page.post("/v1/session", json=link).status_code

    with ThreadPoolExecutor(8) as threads:
        assert sorted(threads.map(use, range(16))) == [200] + [401] * 15


def test_cookie_is_kept_from_scripts_and_other_sites_and_etcd_has_no_secret(cluster: ApiCluster) -> None:
    code = create_link(cluster).json()["link"]
    link = cluster.etcd.get(ClusterKeys(cluster.keys.job).session_links_prefix() + digest(code))
    assert link is not None and code.encode() not in link.value and link.lease
    assert cluster.etcd.lease_left(link.lease) <= CoordinatorConfig().link_ttl_s
    with browser(cluster) as page:
        cookie = page.post("/v1/session", json={"link": code}).headers["set-cookie"]
        name, _, secret = cookie.partition(";")[0].partition("=")
        assert {part.strip() for part in cookie.split(";")[1:]} == {
            "HttpOnly", "SameSite=strict", "Path=/", f"Max-Age={CoordinatorConfig().session_ttl_s}"}
    kvs, _ = cluster.etcd.range(cluster.keys.root)
    assert not [kv.key for kv in kvs if secret in kv.key or secret.encode() in kv.value or code.encode() in kv.value]
    session = cluster.etcd.get(ClusterKeys(cluster.keys.job).sessions_prefix() + digest(secret))
    assert session is not None and 0 < cluster.etcd.lease_left(session.lease) <= CoordinatorConfig().session_ttl_s
    assert name.startswith("elastic-rl-")


def test_expired_link_and_session_are_refused(cluster: ApiCluster) -> None:
    code = create_link(cluster).json()["link"]
    link = cluster.etcd.get(ClusterKeys(cluster.keys.job).session_links_prefix() + digest(code))
    assert link is not None
    cluster.etcd.revoke(link.lease)
    with browser(cluster) as page:
        problem(page.post("/v1/session", json={"link": code}), 401, "unknown-link")
    with open_session(cluster) as page:
        [secret] = page.cookies.values()
        session = cluster.etcd.get(ClusterKeys(cluster.keys.job).sessions_prefix() + digest(secret))
        assert session is not None
        cluster.etcd.revoke(session.lease)
        assert "elastic-rl dashboard" in problem(page.get(""), 401, "unknown-session")["detail"]


def test_grant_has_expired_by_its_own_time_where_etcd_prolonged_its_lease(cluster: ApiCluster) -> None:
    now = 1000.0
    tokens = TokenTable(cluster.replicas.token_table)
    token = tokens.find(VIEWER)
    assert token is not None
    store = SessionStore(cluster.etcd, ClusterKeys(cluster.keys.job), tokens,
                         CoordinatorConfig(link_ttl_s=60, session_ttl_s=600),
                         clock=lambda: now)
    code, link = store.create_link(token, token.role)
    secret, session = store.open(token)
    assert (link.expires_at, session.expires_at) == (1060, 1600)
    now = 1061.0
    assert store.redeem(code) is None and store.find(secret) == session
    now = 1601.0
    assert store.find(secret) is None


def test_session_makes_changes_through_a_follower_and_outlives_its_replica_and_the_leader(etcd_servers: EtcdServers,
                                                                                          tmp_path_factory: Any
                                                                                          ) -> None:
    cluster = ApiCluster(etcd_servers, tmp_path_factory.mktemp("takeover"))
    try:
        cluster.start("a", "b")
        old = cluster.replicas.leader()
        new = "b" if old == "a" else "a"
        with open_session(cluster, new) as page:
            scaled = page.post("pools/rollout/scale", json={"desired": 3})
            assert scaled.status_code == 202 and scaled.json()["by"] == "operator"
            unused = create_link(cluster, old).json()["link"]
            cluster.replicas.kill(old)
            assert cluster.replicas.leader(not_=old) == new
            assert page.get("").json()["leader"]["replica"] == new
            assert page.delete(scaled.headers["location"]).status_code == 202
            with browser(cluster, new) as late:
                assert late.post("/v1/session", json={"link": unused}).status_code == 200
    finally:
        cluster.close()


@parametrize("headers", [
    {}, {"Origin": "http://127.0.0.1:9"}, {"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"}], by_default=2, ids=str,
             proved_in="tests/unit/coordinator/test_request_origin.py", why="further origins, sent to a replica")
def test_change_with_a_cookie_has_to_come_from_the_own_page(cluster: ApiCluster, headers: dict[str, str]) -> None:
    with open_session(cluster) as page:
        stolen = {"Cookie": "; ".join(f"{k}={v}" for k, v in page.cookies.items()), **headers}
    before = cluster.requested_changes()
    with cluster.client("a", headers=stolen) as attacker:
        for method, path, body in (("POST", "restarts", {"target": "job"}), ("DELETE", "/v1/session", None),
                                   ("POST", "pools/rollout/scale", {"desired": 9})):
            problem(attacker.request(method, path, json=body), 403, "cross-site")
    assert cluster.requested_changes() == before


def test_session_may_do_no_more_than_its_link_and_its_token(cluster: ApiCluster) -> None:
    with open_session(cluster, role="viewer") as page:
        assert page.get("/v1/session").json()["role"] == "viewer" and page.get("engines").status_code == 200
        problem(page.post("restarts", json={"target": "job"}), 403, "forbidden")
    with open_session(cluster, headers=AS_VIEWER) as page:
        assert page.get("/v1/session").json()["role"] == "viewer"
    problem(create_link(cluster, headers=AS_VIEWER, role="operator"), 403, "forbidden")
    with open_session(cluster) as page:
        problem(page.post("/v1/session-links", json={}), 403, "forbidden")


def test_token_in_the_header_opens_a_session_too(cluster: ApiCluster) -> None:
    with browser(cluster) as page:
        assert page.post("/v1/session", json={}, headers=AS_VIEWER).json()["role"] == "viewer"
        assert page.get("/v1/session").json()["expires_at"] > time.time()
        problem(page.post("/v1/session", json={}, headers={"Authorization": "Bearer wrong"}), 401, "unknown-token")
        problem(page.post("/v1/session", json={}), 401, "unauthorized")
        problem(page.post("/v1/session", json={"link": "x" * 201}), 422, "invalid")
        assert http_client.request("GET", f"{cluster.replicas.urls['a']}/v1/session", headers=AUTH,
                                   timeout=20).json() == {
            "name": "operator", "role": "operator", "expires_at": None}


def test_session_ends_with_its_token_and_shrinks_with_its_role(cluster: ApiCluster) -> None:
    table = cluster.replicas.token_table
    write_tokens(table, operator="operator", viewer="viewer", ada="operator")
    try:
        with open_session(cluster, headers={"Authorization": "Bearer ada"}) as page:
            assert page.get("/v1/session").json()["role"] == "operator"
            write_tokens(table, operator="operator", viewer="viewer", ada="viewer")
            assert page.get("/v1/session").json()["role"] == "viewer"
            problem(page.post("restarts", json={"target": "job"}), 403, "forbidden")
            link = create_link(cluster, headers={"Authorization": "Bearer ada"}).json()["link"]
            write_tokens(table, operator="operator", viewer="viewer")
            problem(page.get(""), 401, "unknown-session")
            problem(page.post("/v1/session", json={"link": link}), 401, "unknown-link")
    finally:
        write_tokens(table, operator="operator", viewer="viewer")


def test_ended_session_is_gone_on_every_replica_and_closes_its_streams(cluster: ApiCluster) -> None:
    with open_session(cluster, "a") as page, browser(cluster, "b", Cookie="; ".join(
            f"{k}={v}" for k, v in page.cookies.items())) as other:
        with other.stream("GET", "changes", timeout=30) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("retry")
            ended = page.delete("/v1/session")
            assert ended.status_code == 200 and 'Max-Age=0' in ended.headers["set-cookie"]
            assert all(not line.startswith("nothing") for line in lines), "it ends"
        problem(other.get(""), 401, "unknown-session")
        assert not page.cookies
    problem(http_client.request("DELETE", f"{cluster.replicas.urls['a']}/v1/session", headers=AUTH,
                                timeout=20), 404, "not-found")


def test_new_session_of_a_browser_ends_the_one_before(cluster: ApiCluster) -> None:
    with open_session(cluster) as page:
        before = dict(page.cookies)
        assert page.post("/v1/session", json={"link": create_link(cluster).json()["link"]}).status_code == 200
        assert page.get("").status_code == 200
    with browser(cluster) as old:
        problem(old.get("", cookies=before), 401, "unknown-session")


def test_links_and_sessions_of_a_token_are_bounded(cluster: ApiCluster) -> None:
    keys = ClusterKeys(cluster.keys.job)
    cluster.etcd.put(keys.sessions_prefix() + "unreadable", b"{")
    with open_session(cluster) as oldest:
        for _ in range(sessions.MAX_GRANTS + 3):
            http_client.request("POST", f"{cluster.replicas.urls['a']}/v1/session", json={}, headers=AUTH, timeout=20)
            create_link(cluster)
        problem(oldest.get(""), 401, "unknown-session")
    cluster.etcd.delete(keys.sessions_prefix() + "unreadable")
    assert sessions.MAX_GRANTS <= cluster.etcd.count(keys.sessions_prefix()) <= 2 * sessions.MAX_GRANTS, "of two tokens"
    assert sessions.MAX_GRANTS <= cluster.etcd.count(keys.session_links_prefix()) <= 2 * sessions.MAX_GRANTS
