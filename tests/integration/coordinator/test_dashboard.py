"""The dashboard in a real browser, on real replicas and a real etcd: what is shown is true, and each button does what
it says."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.api_cluster import ApiCluster
from support.etcd_server import EtcdServers

from elastic_rl import runtime
from elastic_rl.config import Config
from elastic_rl.coordinator import dashboard
from elastic_rl.coordinator.api import auth
from elastic_rl.etcd import events
from elastic_rl.etcd.records import (
    Engine,
    EngineState,
    JobStatus,
    Member,
    OperationState,
    PoolSpec,
    PoolStatus,
    RestartRequest,
    Severity,
    Silence,
    StepMetrics,
)
from elastic_rl.host import processes

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: bash ops/setup.sh")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed: bash ops/setup.sh")
expect = sync_api.expect
Page = sync_api.Page
Open = Callable[..., "Page"]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: `bash ops/setup.sh` as root gets it")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"]
OPERATOR, VIEWER = "the-operators-own", "the-viewers-own"
LONG_MS = 40_000


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sync_api.Browser]:
    expect.set_options(timeout=LONG_MS)
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, env={
            "HOME": str(tmp_path_factory.mktemp("home")), "PATH": "/usr/bin:/bin"})
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def house(etcd_servers: EtcdServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiCluster]:
    """Two replicas that want tokens, a run, a pool of two ready engines, and a role."""
    folder = tmp_path_factory.mktemp("dashboard")
    made = ApiCluster(etcd_servers, folder, coordinator={"require_token": True})
    auth_file(Config(job=made.keys.job, run_dir=str(folder)).cluster_dir)
    keys, now = made.keys, time.time()
    made.bulk([
        (keys.pool_status("rollout"), PoolStatus(name="rollout", ready=2, starting=0, draining=0)),
        (keys.job_status(), JobStatus(phase="rl", step=40, steps=400, started_at=now - 60, updated_at=now + 3600,
                                      reward=0.5, policy_version=41)),
        (keys.member("actor", "actor"), Member(role="actor", id="actor", pid=1, host="host-a", progress_at=now)),
        *((keys.step_metrics(n), StepMetrics(step=n, at=now - 60 + n, reward=n / 80, samples=32, policy_version=n + 1,
                                         seconds={"total": 1.0, "train": 0.5})) for n in range(1, 41)),
        *((keys.engine(f"rollout-{n}"), engine(f"rollout-{n}")) for n in "ab")])
    try:
        made.start("a", "b")
        yield made
    finally:
        made.close()


def auth_file(folder: Path) -> None:
    """Both tokens, as digests, where replicas look for them."""
    table = ", ".join(f'{{"name": "{name}", "role": "{name}", "sha256": "{auth.digest(token)}"}}'
                      for name, token in (("operator", OPERATOR), ("viewer", VIEWER)))
    folder.mkdir(parents=True)
    path = folder / "tokens.json"
    path.write_text(f'{{"tokens": [{table}]}}')
    path.chmod(0o600)


def engine(name: str, pool: str = "rollout", **more: object) -> Engine:
    return Engine(id=name, pool=pool, state=EngineState.READY, epoch=1, version=41, host="host-a",
                  updated_at=time.time()).replace(**more)


@pytest.fixture
def show(house: ApiCluster, browser: sync_api.Browser) -> Iterator[Open]:
    """Opens the page of a replica in a context of its own, live. Afterwards nothing may have gone wrong in any."""
    contexts, wrong = [], []

    def opened(replica: str = "a", *, token: str = OPERATOR, house: ApiCluster = house, live: bool = True,
               width: int = 1400,
               expected: str = "", **more: object) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, **more)
        contexts.append(context)
        context.set_default_timeout(LONG_MS)
        context.add_init_script("""document.addEventListener('securitypolicyviolation',
            (e) => console.error('CSP ' + e.violatedDirective + ' ' + e.blockedURI));""")
        page = context.new_page()
        page.on("pageerror", lambda e: wrong.append(f"pageerror: {e}"))
        page.on("console", lambda m: wrong.append(f"{m.type}: {m.text}") if m.type in ("error", "warning") and not (
            expected and re.search(expected, m.text)) else None)
        if token:
            context.add_init_script(f"if (!sessionStorage.getItem('elastic-rl-token')) "
                                    f"sessionStorage.setItem('elastic-rl-token', '{token}')")
        page.goto(house.replicas.urls[replica] + "/")
        if live:
            is_live(page)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []


def is_live(page: Page) -> None:
    expect(page.locator("body")).to_have_attribute("data-connection", "live")


def until(check: Callable[[], object], what: str) -> None:
    runtime.wait_until(check, timeout_s=40, what=what)


def desired(house: ApiCluster, pool: str = "rollout") -> int:
    kv = house.etcd.get(house.keys.pool_spec(pool))
    assert kv is not None
    return PoolSpec.decode(kv.value).desired


def make_pool(house: ApiCluster, name: str, want: int = 2) -> None:
    house.bulk([(house.keys.pool_spec(name), PoolSpec(name=name, desired=want)),
                (house.keys.pool_status(name), PoolStatus(name=name, ready=want, starting=0, draining=0))])


def row(page: Page, section: str, name: str) -> sync_api.Locator:
    return page.locator(f"#{section} tbody tr").filter(has=page.get_by_role("rowheader", name=name, exact=True))


# -- the files ---------------------------------------------------------------------------------------------------------
def test_the_files_need_no_token_and_carry_a_strict_policy_and_the_data_needs_one(house: ApiCluster) -> None:
    with house.client("a") as api:
        page = api.get("/")
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        assert page.headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"<style|<script(?![^>]*src=)|\son\w+=|https?://", page.text)
        for name in re.findall(r'(?:src|href)="(dashboard/[^"]+)"', page.text):
            found = api.get(f"/{name}")
            assert found.status_code == 200 and found.headers["content-security-policy"] == policy
            again = api.get(f"/{name}", headers={"If-None-Match": found.headers["etag"]})
            assert again.status_code == 304 and not again.content
        for outside in ("__init__.py", "..%2Fauth.py", "nothing.js"):
            assert api.get(f"/dashboard/{outside}").status_code == 404, outside
        assert api.get("/v1/changes").status_code == 401
    assert Path(dashboard.__file__).parent.joinpath("app.js").is_file()


# -- access ------------------------------------------------------------------------------------------------------------
def test_without_a_token_the_page_asks_for_one_and_a_wrong_one_is_refused_in_words(show: Open) -> None:
    page = show(token="", live=False, expected="401")
    dialog = page.get_by_role("dialog", name="Access")
    expect(dialog).to_contain_text("wants a token")
    dialog.get_by_label("Token").fill("misspelt")
    dialog.get_by_role("button", name="Use it").click()
    expect(dialog).to_contain_text("misspelt, or was withdrawn")
    expect(page.locator("#connection")).to_have_text("no access")
    dialog.get_by_label("Token").fill(VIEWER)
    dialog.get_by_role("button", name="Use it").click()
    is_live(page)
    expect(row(page, "pools", "rollout")).to_be_visible()
    expect(page.locator("#banner")).to_be_hidden()


def test_a_viewer_is_told_what_is_missing_and_nothing_changes(show: Open, house: ApiCluster) -> None:
    page = show(token=VIEWER, expected="403")
    before = desired(house)
    page.get_by_role("button", name="Scale pool rollout").click()
    dialog = page.get_by_role("dialog", name="Scale pool rollout")
    dialog.get_by_label("Engines wanted").fill("7")
    dialog.get_by_role("button", name="Scale").click()
    expect(dialog.get_by_role("alert")).to_contain_text("is a viewer")
    expect(dialog.get_by_role("alert")).to_contain_text("needs the token of an operator")
    assert desired(house) == before


# -- what operators do -------------------------------------------------------------------------------------------------
def test_scaling_asks_first_is_followed_and_can_be_cancelled(show: Open, house: ApiCluster) -> None:
    make_pool(house, "scaled")
    page = show("a" if house.replicas.leader() == "b" else "b")  # a follower hands it to the leader
    page.get_by_role("button", name="Scale pool scaled").click()
    dialog = page.get_by_role("dialog", name="Scale pool scaled")
    dialog.get_by_label("Engines wanted").fill("5")
    expect(dialog).to_contain_text("3 engines will be started")
    dialog.get_by_role("button", name="Go back").click()
    expect(dialog).to_be_hidden()
    assert desired(house, "scaled") == 2 and house.operations("scaled") == []
    page.get_by_role("button", name="Scale pool scaled").click()
    dialog.get_by_label("Engines wanted").fill("5")
    dialog.get_by_role("button", name="Scale").click()
    expect(dialog).to_be_hidden()
    assert desired(house, "scaled") == 5
    [operation] = house.operations("scaled")
    assert operation.by == "operator"
    expect(row(page, "pools", "scaled").locator("td").nth(4)).to_have_text("5")
    listed = page.locator("#operations .operation").filter(has_text="Scale scaled to 5")
    expect(listed).to_contain_text("running")
    listed.get_by_role("button", name="Cancel: Scale scaled to 5").click()
    sure = page.get_by_role("dialog", name="Cancel: Scale scaled to 5")
    expect(sure).to_contain_text("back to 2 engines")
    sure.get_by_role("button", name="Cancel it").click()
    expect(listed).to_contain_text("cancelled")
    assert desired(house, "scaled") == 2
    assert [o.state for o in house.operations("scaled")] == [OperationState.CANCELLED]


def test_an_engine_is_drained_without_a_replacement_and_its_record_says_so(show: Open, house: ApiCluster) -> None:
    make_pool(house, "left")
    house.bulk([(house.keys.engine(f"left-{n}"), engine(f"left-{n}", "left")) for n in "xy"])
    page = show()
    page.get_by_role("button", name="Drain engine left-x").click()
    dialog = page.get_by_role("dialog", name="Drain engine left-x")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    assert read(house, house.keys.engine("left-x"), Engine).state is EngineState.READY
    page.get_by_role("button", name="Drain engine left-x").click()
    dialog.get_by_label("Start another engine in its place").uncheck()
    dialog.get_by_role("button", name="Drain", exact=True).click()
    expect(row(page, "engines", "left-x")).to_contain_text("draining")
    assert read(house, house.keys.engine("left-x"), Engine).state is EngineState.DRAINING
    assert desired(house, "left") == 1


def read(house: ApiCluster, key: str, record: type) -> object:
    kv = house.etcd.get(key)
    assert kv is not None, key
    return record.decode(kv.value)


def test_restarts_of_an_engine_a_role_and_the_whole_job_are_wished_for_with_their_reason(show: Open, house: ApiCluster
                                                                                          ) -> None:
    page = show()
    page.get_by_role("button", name="Restart engine rollout-a").click()
    dialog = page.locator("dialog#action")
    dialog.get_by_label("Why").fill("it is slow")
    dialog.get_by_role("button", name="Restart", exact=True).click()
    expect(dialog).to_be_hidden()
    wish = read(house, house.keys.restart("engines/rollout-a"), RestartRequest)
    assert (wish.generation, wish.reason, wish.by) == (1, "it is slow", "operator")
    page.get_by_role("button", name="Restart role actor").click()
    dialog.get_by_role("button", name="Restart", exact=True).click()
    expect(dialog).to_be_hidden()
    assert read(house, house.keys.restart("roles/actor"), RestartRequest).generation == 1
    page.locator("#restart").click()
    dialog.get_by_label("What").select_option("job")
    go = dialog.get_by_role("button", name="Restart", exact=True)
    expect(go).to_be_disabled()
    dialog.get_by_label("To restart everything").fill(house.keys.job)
    go.click()
    expect(dialog).to_be_hidden()
    assert read(house, house.keys.restart("job"), RestartRequest).generation == 1
    expect(page.locator("#operations")).to_contain_text("Restart the whole compute plane")


def test_an_error_appears_as_an_alert_and_is_silenced_by_its_button(show: Open, house: ApiCluster) -> None:
    page = show()
    event = events.build("test.broken", "thing", "it fell over", severity=Severity.ERROR)
    house.etcd.put(house.keys.event(event.id), event.encode())
    expect(page.locator("#events")).to_contain_text("it fell over")
    alert = page.locator("#alerts .alert").filter(has_text="test.broken thing")
    expect(alert).to_be_visible()
    expect(page.locator("#state")).to_have_attribute("data-level", "bad")
    alert.get_by_role("button", name="Silence").click()
    dialog = page.get_by_role("dialog", name="Silence test.broken thing")
    dialog.get_by_label("For").select_option(label="4 hours")
    dialog.get_by_label("Why").fill("known")
    dialog.get_by_role("button", name="Silence").click()
    expect(alert).to_contain_text("silenced")
    [silence] = [Silence.decode(kv.value) for kv in house.etcd.range(house.keys.silences_prefix())[0]]
    assert (silence.kind, silence.subject, silence.comment) == ("test.broken", "thing", "known")
    assert round(silence.until - silence.created_at) == 4 * 3600


def test_scaling_works_with_the_keyboard_alone(show: Open, house: ApiCluster) -> None:
    make_pool(house, "keys")
    page = show()
    button = page.get_by_role("button", name="Scale pool keys")
    expect(button).to_be_visible()
    for _ in range(100):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.getAttribute('aria-label')") == "Scale pool keys":
            break
    expect(button).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Engines wanted")).to_be_focused()
    page.keyboard.type("3")
    page.keyboard.press("Enter")
    until(lambda: desired(house, "keys") == 3, "the wish")
    expect(page.locator("dialog#action")).to_be_hidden()
    expect(button).to_be_focused()


# -- what is shown -----------------------------------------------------------------------------------------------------
def test_what_is_written_to_the_store_shows_up_by_itself(show: Open, house: ApiCluster) -> None:
    page = show("b")
    keys = house.keys
    house.etcd.put(keys.engine("fresh"), engine("fresh", "none", version=42).encode())
    expect(row(page, "engines", "fresh")).to_contain_text("ready")
    house.etcd.put(keys.engine("fresh"), engine("fresh", "none", state=EngineState.QUARANTINED).encode())
    expect(row(page, "engines", "fresh")).to_contain_text("quarantined")
    house.etcd.put(keys.step_metrics(41), StepMetrics(step=41, at=time.time(), reward=0.875, samples=32).encode())
    expect(page.locator("#curve-reward .value")).to_have_text("0.875")
    status = read(house, keys.job_status(), JobStatus)
    house.etcd.put(keys.job_status(), status.replace(step=41).encode())
    expect(page.locator("#tile-step")).to_contain_text("41 / 400")
    house.etcd.delete(keys.engine("fresh"))
    expect(row(page, "engines", "fresh")).to_have_count(0)


def test_text_from_records_is_never_markup(show: Open, house: ApiCluster) -> None:
    page = show()
    event = events.build("test.said", "<b>x</b>", "<img src=x onerror=alert(1)> said")
    house.etcd.put(house.keys.event(event.id), event.encode())
    expect(page.locator("#events")).to_contain_text("<img src=x onerror=alert(1)> said")
    assert page.locator("#events img, #events b").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_scrolling_sideways_and_the_colours_are_those_asked_for(show: Open, scheme: str) -> None:
    page = show(width=360, color_scheme=scheme)
    expect(page.locator("#engines tbody tr").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.get_by_role("button", name="Scale pool rollout").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    red = int(page.evaluate("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/)[0]"))
    assert (red < 60) == (scheme == "dark")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_that_shuts_people_out(show: Open, scheme: str) -> None:
    page = show(color_scheme=scheme)
    expect(page.locator("#engines tbody tr").first).to_be_visible()
    for step in ("the page", "a dialog"):
        if step == "a dialog":
            page.get_by_role("button", name="Scale pool rollout").click()
        found = axe.Axe().run(page).response["violations"]
        assert [(v["id"], [n["html"][:120] for n in v["nodes"][:3]]) for v in found] == [], step


# -- loss --------------------------------------------------------------------------------------------------------------
def test_a_page_whose_replica_dies_says_so_and_catches_up_when_it_is_back(show: Open, house: ApiCluster) -> None:
    page = show("b", expected="ERR_|Failed to load")
    replicas = house.replicas
    port = int(replicas.urls["b"].rpartition(":")[2])
    replicas.kill("b")
    expect(page.locator("#banner")).to_contain_text("Connection lost")
    expect(page.locator("#banner a")).to_have_attribute("href", replicas.urls["a"])
    house.etcd.put(house.keys.engine("meanwhile"), engine("meanwhile", "none").encode())
    replicas.running["b"] = processes.spawn(replicas.command("b", port), log=replicas.log("b"))
    until(lambda: replicas.ready("b"), "replica b")
    is_live(page)
    expect(page.locator("#banner")).to_be_hidden()
    expect(row(page, "engines", "meanwhile")).to_have_count(1)


# -- many --------------------------------------------------------------------------------------------------------------
def test_a_hundred_pools_and_a_thousand_engines_stay_usable(show: Open, house: ApiCluster) -> None:
    keys = house.keys
    house.bulk([(keys.pool_spec(f"p{n:03d}"), PoolSpec(name=f"p{n:03d}", desired=10)) for n in range(100)])
    house.bulk([(keys.engine(f"many-{n:04d}"), engine(f"many-{n:04d}", f"p{n % 100:03d}")) for n in range(1000)])
    page = show()
    expect(page.locator("#engines tbody tr")).to_have_count(12)
    page.get_by_label("Filter engines").fill("many-0777")
    expect(page.locator("#engines tbody tr")).to_have_count(1)
    expect(row(page, "engines", "many-0777")).to_be_visible()
    page.get_by_label("Filter engines").fill("")
    page.locator("#engines button.more").click()
    until(lambda: page.locator("#engines tbody tr").count() >= 1000, "all rows")
    house.etcd.put(keys.engine("many-0500"), engine("many-0500", "p000", state=EngineState.SYNCING).encode())
    expect(row(page, "engines", "many-0500")).to_contain_text("syncing")
    page.get_by_label("Filter pools").fill("p042")
    page.get_by_role("button", name="Scale pool p042").click()
    expect(page.get_by_role("dialog", name="Scale pool p042")).to_be_visible()
