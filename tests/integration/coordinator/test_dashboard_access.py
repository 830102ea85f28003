"""Access to the dashboard in a real browser: sessions, and pages of other sites that attack the API."""

from __future__ import annotations

import http.server
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from support import http_servers
from support.api_cluster import ApiCluster, running
from support.browser import (
    Pages,
    browser,  # noqa: F401
    dashboard_link,
    expect,
    is_live,
    job_page,
    needs_chromium,
    pages,
)
from support.coordinators import AUTH, VIEWER, write_tokens
from support.etcd_server import EtcdServers
from support.tiers import parametrize

from elastic_rl.coordinator.api_paths import job_path
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.etcd.records import Engine, EngineState, PoolSpec
from elastic_rl.net import http_client

pytestmark = needs_chromium
REFUSED = "Failed to load|ERR_|CORS|403|401|421|415|Cross-Origin"
"""Messages of the browser about requests that fail as they should."""


@pytest.fixture(scope="module")
def cluster(etcd_servers: EtcdServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiCluster]:
    with running(etcd_servers, tmp_path_factory.mktemp("dashboard-access"), "a", "b") as made:
        yield made


@pytest.fixture
def tabs(cluster: ApiCluster, browser: Any) -> Iterator[Pages]:  # noqa: F811
    with pages(browser, cluster) as opened:
        yield opened


@dataclass
class Site:
    """A web server with pages of an attacker, on another port of this machine."""

    port: int
    html: dict[str, str] = field(default_factory=dict)

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    made = Site(0)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            html = made.html.get(self.path)
            self.send_response(200 if html else 204)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write((html or "").encode())

        def log_message(self, *_: object) -> None:
            pass

    with http_servers.serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        made.port = server.server_port
        yield made


@pytest.fixture(scope="module")
def victim(cluster: ApiCluster, browser: Any) -> Iterator[tuple[Pages, Any]]:  # noqa: F811
    """A browser profile with an operator's session on replica a, and what opens tabs in it."""
    with pages(browser, cluster) as opened:
        context = opened.context()
        page = opened.page(context, REFUSED)
        page.goto(dashboard_link(cluster, "a"))
        is_live(page)
        page.close()
        yield opened, context


def cookie(context: Any) -> dict[str, Any]:
    [found] = [c for c in context.cookies() if c["name"].startswith("elastic-rl-")]
    return dict(found)


# -- signing in --------------------------------------------------------------------------------------------------------
def test_link_opens_the_page_signed_in_until_the_session_is_ended(tabs: Pages, cluster: ApiCluster) -> None:
    context = tabs.context()
    page = tabs.page(context, "401")
    page.goto(dashboard_link(cluster, "a"))
    is_live(page)
    assert page.url == job_page(cluster, "a"), "the link is still in the address"
    found = cookie(context)
    assert found["httpOnly"] and found["sameSite"] == "Strict"
    assert page.evaluate("document.cookie + JSON.stringify(sessionStorage) + JSON.stringify(localStorage)") == "{}{}"
    page.reload()
    is_live(page)
    page.goto(job_page(cluster, "b"))  # cookies are of the host, so the replicas of one machine share them
    is_live(page)
    expect(page.locator("#pools tbody tr")).to_have_count(1)
    page.get_by_role("button", name="Access").click()
    expect(page.get_by_role("dialog", name="Access")).to_contain_text("Signed in as operator (operator) until")
    page.get_by_role("button", name="Sign out").click()
    expect(page.locator("#connection")).to_have_text("no access")
    expect(page.locator("#pools tbody tr")).to_have_count(0)
    answer = http_client.request("GET", f"{cluster.replicas.job_url('a')}",
                                 cookies={found["name"]: found["value"]}, timeout=20)
    assert answer.status_code == 401


def test_page_without_a_session_shows_nothing_until_a_token_is_typed_in(tabs: Pages) -> None:
    page = tabs.open(role="", live=False, expected="401")
    dialog = page.get_by_role("dialog", name="Access")
    expect(dialog).to_contain_text("elastic-rl dashboard")
    expect(page.locator("#connection")).to_have_text("no access")
    assert page.locator("#pools tbody tr").count() == 0
    dialog.get_by_label("token").fill("misspelt")
    dialog.get_by_role("button", name="Use the token").click()
    expect(dialog.get_by_role("alert")).to_contain_text("misspelt, or was withdrawn")
    dialog.get_by_label("token").fill(VIEWER)
    dialog.get_by_role("button", name="Use the token").click()
    is_live(page)
    expect(dialog).to_be_hidden()
    assert VIEWER not in page.evaluate("JSON.stringify(sessionStorage) + JSON.stringify(localStorage)")
    assert VIEWER not in str(page.context.cookies())


def test_used_link_opens_nothing_for_somebody_else(tabs: Pages, cluster: ApiCluster) -> None:
    link = dashboard_link(cluster, "a")
    first = tabs.page(tabs.context(), "401")
    first.goto(link)
    is_live(first)
    second = tabs.page(tabs.context(), "401")
    second.goto(link)
    expect(second.get_by_role("dialog", name="Access")).to_contain_text("used already, or has expired")
    expect(second.locator("#connection")).to_have_text("no access")
    first.goto("about:blank")
    first.goto(link)  # from the history: this browser still has its session
    is_live(first)


def test_page_whose_session_or_token_ends_asks_to_sign_in_again(tabs: Pages, cluster: ApiCluster) -> None:
    page = tabs.open(expected="401")
    dialog = page.get_by_role("dialog", name="Access")
    kvs, _ = cluster.etcd.range(ClusterKeys(cluster.keys.job).sessions_prefix())
    for kv in kvs:
        cluster.etcd.revoke(kv.lease)  # as when its time has come
    expect(dialog).to_contain_text("has expired")
    expect(dialog).to_contain_text("elastic-rl dashboard")
    page.goto(dashboard_link(cluster, "a"))
    is_live(page)
    expect(dialog).to_be_hidden()
    write_tokens(cluster.replicas.token_table, viewer="viewer")
    try:
        expect(dialog).to_contain_text("was withdrawn")
    finally:
        write_tokens(cluster.replicas.token_table, operator="operator", viewer="viewer")


# -- other sites -------------------------------------------------------------------------------------------------------
@pytest.fixture
def engine(cluster: ApiCluster) -> str:
    """A ready engine that can be drained without a body in the request."""
    name = f"e-{secrets.token_hex(4)}"
    cluster.etcd.put(cluster.keys.pool_spec(name), PoolSpec(name=name, desired=2).encode())
    cluster.etcd.put(cluster.keys.engine(name), Engine(id=name, pool=name, state=EngineState.READY, epoch=1).encode())
    return name


FORM = """([url, type]) => {
    const form = document.createElement('form');
    Object.assign(form, {method: 'POST', action: url, enctype: type});
    document.body.append(form);
    form.submit();
}"""


@parametrize(("host", "enctype"), [
    ("127.0.0.1", "text/plain"),  # another port of the page's host: the browser sends the cookie with the form
    *((host, "text/plain") for host in ("localhost", "evil.example")),
    *((host, "application/x-www-form-urlencoded") for host in ("127.0.0.1", "localhost", "evil.example"))],
             proved_in="tests/unit/coordinator/test_request_origin.py", why="further sites, in a browser")
def test_form_of_another_site_changes_nothing(victim: tuple[Pages, Any], cluster: ApiCluster, site: Site, engine: str,
                                              host: str, enctype: str) -> None:
    tabs, context = victim
    page = tabs.page(context, REFUSED)
    site.html["/form"] = "<p>attack</p>"
    before = cluster.requested_changes()
    page.goto(site.url("/form", host))
    with page.expect_navigation() as navigation:
        page.evaluate(FORM, [f"{cluster.replicas.job_url('a')}/engines/{engine}/drain", enctype])
    assert navigation.value is not None and navigation.value.status == 403
    assert cluster.requested_changes() == before
    page.close()


@parametrize("host", ["127.0.0.1", "evil.example"],
             proved_in="tests/unit/coordinator/test_request_origin.py", why="further sites, in a browser")
def test_scripts_of_another_site_change_and_read_nothing(victim: tuple[Pages, Any], cluster: ApiCluster, site: Site,
                                                         engine: str, host: str) -> None:
    tabs, context = victim
    site.html["/fetch"] = "<p>attack</p>"
    before, url = cluster.requested_changes(), cluster.replicas.urls["a"]
    job = cluster.replicas.job_url("a")
    page = tabs.page(context, REFUSED)
    page.goto(site.url("/fetch", host))
    outcomes = page.evaluate("""async ([job, session, engine]) => {
        const attempt = async (url, options) => {
            try { const answer = await fetch(url, options); return `${answer.type} ${answer.status}`; }
            catch (error) { return error.name; }
        };
        const body = JSON.stringify({target: 'job'});
        return [
            await attempt(job + '/restarts', {method: 'POST', body, mode: 'no-cors', credentials: 'include'}),
            await attempt(`${job}/engines/${engine}/drain`, {method: 'POST', mode: 'no-cors', credentials: 'include'}),
            await attempt(job + '/restarts', {method: 'POST', body, credentials: 'include',
                                           headers: {'Content-Type': 'application/json'}}),
            await attempt(session, {method: 'DELETE', credentials: 'include'}),
            await attempt(job, {credentials: 'include'}),
        ];
    }""", [job, f"{url}/v1/session", engine])
    assert outcomes == ["opaque 0", "opaque 0", "TypeError", "TypeError", "TypeError"], "nothing can be read"
    assert cluster.requested_changes() == before
    assert context.request.get(job).status == 200, "the session is still there"
    page.close()


def test_rebound_name_reaches_nothing(victim: tuple[Pages, Any], cluster: ApiCluster) -> None:
    """DNS rebinding: the attacker's name points to the replica, so its pages are of the same origin."""
    tabs, context = victim
    port = cluster.replicas.urls["a"].rpartition(":")[2]
    page = tabs.page(context, REFUSED)
    answer = page.goto(f"http://rebound.example:{port}/")
    assert answer is not None and answer.status == 421 and "allowed_hosts" in answer.text()
    before = cluster.requested_changes()
    outcomes = page.evaluate("""async (job) => {
        const answers = await Promise.all([fetch(job), fetch('/openapi.json'), fetch(`${job}/restarts`,
            {method: 'POST', body: '{"target": "job"}', headers: {'Content-Type': 'application/json'}})]);
        return answers.map((answer) => answer.status);
    }""", job_path(cluster.keys.job))
    assert outcomes == [421, 421, 421]
    assert cluster.requested_changes() == before
    page.close()


def test_page_cannot_be_framed_and_a_link_from_elsewhere_opens_it(victim: tuple[Pages, Any], cluster: ApiCluster,
                                                                  site: Site) -> None:
    tabs, context = victim
    url = cluster.replicas.urls["a"]
    site.html["/frame"] = f'<iframe src="{url}/"></iframe><a href="{url}/">dashboard</a>'
    page = tabs.page(context, "frame|Refused|" + REFUSED)
    page.goto(site.url("/frame", "evil.example"))
    assert not [f for f in page.frames[1:] if re.search("<main", f.content())]
    page.get_by_role("link", name="dashboard").click()
    is_live(page)


def test_token_in_the_address_is_never_used(cluster: ApiCluster) -> None:
    token = AUTH["Authorization"].partition(" ")[2]
    for query in (f"token={token}", f"access_token={token}", f"authorization=Bearer%20{token}"):
        assert http_client.request("GET", f"{cluster.replicas.job_url('a')}?{query}", timeout=20).status_code == 401
