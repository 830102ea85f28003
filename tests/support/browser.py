"""A real browser for the tests of the dashboard."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import pytest

from elastic_rl.net import http_client
from support.api_cluster import ApiCluster
from support.coordinators import AUTH

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: bash ops/setup.sh")
expect = sync_api.expect
Page = sync_api.Page
Open = Callable[..., "Page"]



def find_chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


needs_chromium = pytest.mark.skipif(find_chromium() is None,
                                    reason="there is no Chromium: `bash ops/setup.sh` as root installs it")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
          "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
          "--host-resolver-rules=MAP *.example 127.0.0.1"]
"""Every name under .example is this machine, as after DNS rebinding."""
LONG_MS = 40_000


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sync_api.Browser]:
    expect.set_options(timeout=LONG_MS)
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS, env={
            "HOME": str(tmp_path_factory.mktemp("home")), "PATH": "/usr/bin:/bin"})
        yield launched
        launched.close()


def job_page(cluster: ApiCluster, replica: str) -> str:
    """Address of the job's page on a replica."""
    return f"{cluster.replicas.urls[replica]}/jobs/{cluster.keys.job}"


def dashboard_link(cluster: ApiCluster, replica: str, role: str = "operator") -> str:
    """A one-time link to the job's page on a replica."""
    url = cluster.replicas.urls[replica]
    made = http_client.request("POST", f"{url}/v1/session-links", json={"role": role}, headers=AUTH, timeout=20)
    return f"{job_page(cluster, replica)}#link={made.json()['link']}"


def is_live(page: Page) -> None:
    expect(page.locator("body")).to_have_attribute("data-connection", "live")


@dataclass
class Pages:
    """Opens pages, each in a context of its own, and collects their errors."""

    browser: sync_api.Browser
    cluster: ApiCluster
    errors: list[str] = field(default_factory=list)
    _contexts: list[Any] = field(default_factory=list)
    _expected: dict[Page, str] = field(default_factory=dict)
    _shown: tuple[tuple[object, ...], Page] | None = None

    def context(self, width: int = 1400, height: int = 900, **more: object) -> Any:
        """A browser profile without cookies, whose user wants no animations: without a GPU they take a core."""
        made = self.browser.new_context(viewport={"width": width, "height": height}, reduced_motion="reduce", **more)
        made.set_default_timeout(LONG_MS)
        made.add_init_script("""document.addEventListener('securitypolicyviolation',
            (e) => console.error('CSP ' + e.violatedDirective + ' ' + e.blockedURI));""")
        self._contexts.append(made)
        return made

    def page(self, context: Any, expected: str = "") -> Page:
        """A new tab. Errors that match ``expected`` do not count."""
        page = context.new_page()
        self._expected[page] = expected
        page.on("pageerror", lambda e: self.errors.append(f"pageerror: {e}"))
        page.on("console", lambda m: self.errors.append(f"{m.type}: {m.text}") if m.type in ("error", "warning")
                and not ((known := self._expected[page]) and re.search(known, m.text)) else None)
        return page

    def open(self, replica: str = "a", *, role: str = "operator", live: bool = True, expected: str = "",
             **context: Any) -> Page:
        """The dashboard of a replica in a new tab of a new profile; ``role`` "": without a session."""
        page = self.page(self.context(**context), expected)
        page.goto(dashboard_link(self.cluster, replica, role) if role else job_page(self.cluster, replica))
        if live:
            is_live(page)
        return page

    def show(self, replica: str = "a", *, role: str = "operator", expected: str = "", width: int = 1400,
             color_scheme: str = "light") -> Page:
        """The dashboard as ``open`` does, in the tab of the last call if that was for this replica, role, width and
        scheme: to open a tab takes three CPU seconds, and one that stays open goes on drawing. Tests leave it without
        dialogs and filters."""
        wanted = (replica, role, width, color_scheme)
        if self._shown is None or self._shown[0] != wanted:
            self.close()
            self._shown = wanted, self.open(replica, role=role, width=width, color_scheme=color_scheme)
        page = self._shown[1]
        self._expected[page] = expected
        return page

    def close(self) -> None:
        while self._contexts:
            self._contexts.pop().close()
        self._shown = None

    @contextmanager
    def without_errors(self) -> Iterator[Self]:
        """Errors that pages log meanwhile fail the test."""
        yield self
        errors, self.errors = self.errors, []
        assert errors == []


@contextmanager
def pages(browser: sync_api.Browser, cluster: ApiCluster) -> Iterator[Pages]:
    """Pages whose errors fail the test at the end."""
    made = Pages(browser, cluster)
    try:
        with made.without_errors():
            yield made
    finally:
        made.close()
