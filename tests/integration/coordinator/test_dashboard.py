"""The dashboard in a real browser, on real replicas and a real etcd: what it shows, and what its buttons do."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urljoin

import pytest
from support.api_cluster import ApiCluster
from support.browser import (
    Open,
    Page,
    Pages,
    browser,  # noqa: F401
    dashboard_link,
    expect,
    is_live,
    job_page,
    needs_chromium,
    pages,
    sync_api,
)
from support.coordinators import VIEWER
from support.etcd_server import EtcdServers
from support.tiers import full, parametrize
from support.waiting import wait_until

from elastic_rl.coordinator import dashboard
from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.records import (
    Engine,
    EngineState,
    JobStatus,
    Member,
    OperationState,
    PoolSpec,
    PoolStatus,
    RestartRequest,
    SampleRecord,
    Severity,
    Silence,
    StepMetrics,
)
from elastic_rl.telemetry.training_metrics import THROUGHPUT, UPDATE

axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed: bash ops/setup.sh")
pytestmark = needs_chromium
Locator = sync_api.Locator


@pytest.fixture(scope="module")
def cluster(etcd_servers: EtcdServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiCluster]:
    """Two replicas, a run, a pool of two ready engines, and a role."""
    folder = tmp_path_factory.mktemp("dashboard")
    made = ApiCluster(etcd_servers, folder)
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


def engine(name: str, pool: str = "rollout", **more: object) -> Engine:
    return Engine(id=name, pool=pool, state=EngineState.READY, epoch=1, version=41, host="host-a",
                  updated_at=time.time()).replace(**more)


@pytest.fixture(scope="module")
def tabs(cluster: ApiCluster, browser: sync_api.Browser) -> Iterator[Pages]:  # noqa: F811
    with pages(browser, cluster) as opened:
        yield opened


@pytest.fixture
def show(tabs: Pages) -> Iterator[Open]:
    """Shows the dashboard of a replica, live, in a tab that tests share. No page may log an error."""
    with tabs.without_errors():
        yield tabs.show


def until(check: Callable[[], object], what: str) -> None:
    wait_until(check, what=what)


def desired(cluster: ApiCluster, pool: str = "rollout") -> int:
    kv = cluster.etcd.get(cluster.keys.pool_spec(pool))
    assert kv is not None
    return PoolSpec.decode(kv.value).desired


def make_pool(cluster: ApiCluster, name: str, want: int = 2) -> None:
    cluster.bulk([(cluster.keys.pool_spec(name), PoolSpec(name=name, desired=want)),
                (cluster.keys.pool_status(name), PoolStatus(name=name, ready=want, starting=0, draining=0))])


def row(page: Page, section: str, name: str) -> Locator:
    return page.locator(f"#{section} tbody tr").filter(has=page.get_by_role("rowheader", name=name, exact=True))


# -- the files ---------------------------------------------------------------------------------------------------------
def test_files_need_no_token_and_have_a_strict_content_security_policy(cluster: ApiCluster) -> None:
    with cluster.client("a", headers={}) as api:
        for address in ("/", "/jobs/any"):
            page = api.get(address)
            assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
            policy = page.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
            assert page.headers["x-content-type-options"] == "nosniff"
            assert not re.search(r"<style|<script(?![^>]*src=)|\son\w+=|https?://", page.text)
            names = re.findall(r'(?:src|href)="([^"#]+\.\w+)"', page.text)
            assert len(names) >= 3
            for name in names:
                found = api.get(urljoin(address, name))
                assert found.status_code == 200 and found.headers["content-security-policy"] == policy
                again = api.get(urljoin(address, name), headers={"If-None-Match": found.headers["etag"]})
                assert again.status_code == 304 and not again.content
        for outside in ("__init__.py", "..%2Fauth.py", "nothing.js"):
            assert api.get(f"/dashboard/{outside}").status_code == 404, outside
        assert api.get("changes").status_code == 401
    assert Path(dashboard.__file__).parent.joinpath("app.js").is_file()


# -- the jobs ----------------------------------------------------------------------------------------------------------
def test_first_page_goes_to_the_only_job_and_lists_several(tabs: Pages, cluster: ApiCluster) -> None:
    with tabs.without_errors():
        link = dashboard_link(cluster, "a").partition("#")[2]
        page, root = tabs.page(tabs.context(), "404"), cluster.replicas.urls["a"] + "/"
        page.goto(f"{root}#{link}")
        is_live(page)
        assert page.url == job_page(cluster, "a")
        several = [{"name": name, "status": status, "epoch": 1, "leader": None, "health": "ok", "message": "",
                    "replica": "a"} for name, status in (
            ("<b>first</b>", None), ("second", {"phase": "rl", "step": 3, "steps": 9, "updated_at": time.time()}))]
        several.append({**several[1], "name": "third", "health": "not-open", "message": "a: no such plug-in"})
        page.route("**/v1/jobs?*", lambda route: route.fulfill(json={"items": several, "next": None}))
        page.get_by_role("link", name="All jobs").click()
        expect(page.locator("#jobs .sum")).to_have_text("3 jobs")
        expect(page.locator("#jobs li").nth(0)).to_contain_text("<b>first</b>")
        expect(page.locator("#jobs li").nth(1)).to_contain_text("step 3 of 9")
        expect(page.locator("#jobs li").nth(2)).to_contain_text("not-open")
        expect(page.locator("#jobs li").nth(2)).to_contain_text("a: no such plug-in")
        assert page.url == root and axe.Axe().run(page).response["violations"] == []
        page.get_by_role("link", name="second").click()
        expect(page.locator("#banner .what")).to_contain_text("there is no job 'second'")
        page.close()


def test_first_page_asks_for_a_session(tabs: Pages, cluster: ApiCluster) -> None:
    page = tabs.page(tabs.context(), expected="401")
    page.goto(cluster.replicas.urls["a"])
    dialog = page.get_by_role("dialog", name="Access")
    dialog.get_by_label("token").fill(VIEWER)
    dialog.get_by_role("button", name="Use the token").click()
    is_live(page)
    assert page.url == job_page(cluster, "a")
    page.close()


# -- changes -----------------------------------------------------------------------------------------------------------
def test_scaling_asks_first_is_followed_and_can_be_cancelled(show: Open, cluster: ApiCluster) -> None:
    make_pool(cluster, "scaled")
    page = show("a" if cluster.replicas.leader() == "b" else "b")  # a follower forwards it to the leader
    page.get_by_role("button", name="Scale pool scaled").click()
    dialog = page.get_by_role("dialog", name="Scale pool scaled")
    dialog.get_by_label("Desired engines").fill("5")
    expect(dialog).to_contain_text("3 engines will be started")
    dialog.get_by_role("button", name="Go back").click()
    expect(dialog).to_be_hidden()
    assert desired(cluster, "scaled") == 2 and cluster.operations("scaled") == []
    page.get_by_role("button", name="Scale pool scaled").click()
    dialog.get_by_label("Desired engines").fill("5")
    dialog.get_by_role("button", name="Scale").click()
    expect(dialog).to_be_hidden()
    assert desired(cluster, "scaled") == 5
    [operation] = cluster.operations("scaled")
    assert operation.by == "operator"
    expect(row(page, "pools", "scaled").locator("td").nth(4)).to_have_text("5")
    listed = page.locator("#operations .operation").filter(has_text="Scale scaled to 5")
    expect(listed).to_contain_text("running")
    listed.get_by_role("button", name="Cancel: Scale scaled to 5").click()
    sure = page.get_by_role("dialog", name="Cancel: Scale scaled to 5")
    expect(sure).to_contain_text("returns to 2 engines")
    sure.get_by_role("button", name="Cancel it").click()
    expect(listed).to_contain_text("cancelled")
    assert desired(cluster, "scaled") == 2
    assert [o.state for o in cluster.operations("scaled")] == [OperationState.CANCELLED]


def test_engine_is_drained_without_a_replacement(show: Open, cluster: ApiCluster) -> None:
    make_pool(cluster, "left")
    cluster.bulk([(cluster.keys.engine(f"left-{n}"), engine(f"left-{n}", "left")) for n in "xy"])
    page = show()
    page.get_by_role("button", name="Drain engine left-x").click()
    dialog = page.get_by_role("dialog", name="Drain engine left-x")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    assert read(cluster, cluster.keys.engine("left-x"), Engine).state is EngineState.READY
    page.get_by_role("button", name="Drain engine left-x").click()
    dialog.get_by_label("Start another engine in its place").uncheck()
    dialog.get_by_role("button", name="Drain", exact=True).click()
    expect(row(page, "engines", "left-x")).to_contain_text("draining")
    assert read(cluster, cluster.keys.engine("left-x"), Engine).state is EngineState.DRAINING
    assert desired(cluster, "left") == 1


def read(cluster: ApiCluster, key: str, record: type) -> object:
    kv = cluster.etcd.get(key)
    assert kv is not None, key
    return record.decode(kv.value)


def test_restarts_of_an_engine_a_role_and_the_whole_job_are_requested(show: Open, cluster: ApiCluster) -> None:
    page = show()
    page.get_by_role("button", name="Restart engine rollout-a").click()
    dialog = page.locator("dialog#action")
    dialog.get_by_label("Why").fill("it is slow")
    dialog.get_by_role("button", name="Restart", exact=True).click()
    expect(dialog).to_be_hidden()
    request = read(cluster, cluster.keys.restart("engines/rollout-a"), RestartRequest)
    assert (request.generation, request.reason, request.by) == (1, "it is slow", "operator")
    page.get_by_role("button", name="Restart role actor").click()
    dialog.get_by_role("button", name="Restart", exact=True).click()
    expect(dialog).to_be_hidden()
    assert read(cluster, cluster.keys.restart("roles/actor"), RestartRequest).generation == 1
    page.locator("#restart").click()
    dialog.get_by_label("What").select_option("job")
    go = dialog.get_by_role("button", name="Restart", exact=True)
    expect(go).to_be_disabled()
    dialog.get_by_label("To restart everything").fill(cluster.keys.job)
    go.click()
    expect(dialog).to_be_hidden()
    assert read(cluster, cluster.keys.restart("job"), RestartRequest).generation == 1
    expect(page.locator("#operations")).to_contain_text("Restart the whole compute plane")


def test_alert_is_silenced_by_its_button(show: Open, cluster: ApiCluster) -> None:
    page = show()
    event = events.build(event_kinds.OPERATION_FAILED, "thing", "it fell over", severity=Severity.ERROR)
    cluster.etcd.put(cluster.keys.event(event.id), event.encode())
    expect(page.locator("#events")).to_contain_text("it fell over")
    alert = page.locator("#alerts .alert").filter(has_text="operation.failed thing")
    expect(alert).to_be_visible()
    expect(page.locator("#summary")).to_have_attribute("data-level", "bad")
    alert.get_by_role("button", name="Silence").click()
    dialog = page.get_by_role("dialog", name="Silence operation.failed thing")
    dialog.get_by_label("For").select_option(label="4 hours")
    dialog.get_by_label("Why").fill("known")
    dialog.get_by_role("button", name="Silence").click()
    expect(alert).to_contain_text("silenced")
    [silence] = [Silence.decode(kv.value) for kv in cluster.etcd.range(cluster.keys.silences_prefix())[0]]
    assert (silence.kind, silence.subject, silence.comment) == ("operation.failed", "thing", "known")
    assert round(silence.until - silence.created_at) == 4 * 3600


def test_scaling_works_with_the_keyboard_alone(show: Open, cluster: ApiCluster) -> None:
    make_pool(cluster, "keys")
    page = show()
    button = page.get_by_role("button", name="Scale pool keys")
    expect(button).to_be_visible()
    for _ in range(100):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.getAttribute('aria-label')") == "Scale pool keys":
            break
    expect(button).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Desired engines")).to_be_focused()
    page.keyboard.type("3")
    page.keyboard.press("Enter")
    until(lambda: desired(cluster, "keys") == 3, "the request")
    expect(page.locator("dialog#action")).to_be_hidden()
    expect(button).to_be_focused()


# -- data --------------------------------------------------------------------------------------------------------------
def test_text_of_records_is_never_markup(show: Open, cluster: ApiCluster) -> None:
    page = show()
    event = events.build(event_kinds.POOL_SCALED, "<b>x</b>", "<img src=x onerror=alert(1)> said")
    cluster.etcd.put(cluster.keys.event(event.id), event.encode())
    expect(page.locator("#events")).to_contain_text("<img src=x onerror=alert(1)> said")
    assert page.locator("#events img, #events b").count() == 0


HOSTILE = ("<script>window.owned = 1</script><img src=x onerror='window.owned = 2'> \x1b[2J \x00 "
           "\u202eright to left\u202c \u0634\u0643\u0631\u0627 \x9b31m ")


def put_samples(cluster: ApiCluster) -> None:
    """Three samples of steps 38 to 40, the last one hostile and long."""
    samples = [SampleRecord(step=38 + n, group=8 * n, index=n, prompt=f"2 + {n} =", response=str(2 + n), reward=n / 2,
                            advantage=n - 1.0, reward_parts={"answer": 1.0}, finish_reason="stop", versions=[39],
                            at=time.time()) for n in range(3)]
    samples[2] = samples[2].replace(response=HOSTILE + "x" * 2000, finish_reason="<b>length</b>", cut=True,
                                    reward_parts={"<i>answer</i>": 1.0})
    cluster.bulk([(cluster.keys.sample(n), sample) for n, sample in enumerate(samples)])


def test_page_says_what_the_run_waits_for(show: Open, cluster: ApiCluster) -> None:
    page, key = show(), cluster.keys.job_status()
    status = read(cluster, key, JobStatus)
    waits = status.replace(stage="generate", waiting_for="an engine that serves <b>v42</b>", waiting_kind="engines",
                           waiting_since=time.time() - 30)
    try:
        cluster.etcd.put(key, waits.encode())
        expect(page.locator("#reasons")).to_contain_text("s for an engine that serves <b>v42</b>")
        expect(page.locator("#tile-step")).to_contain_text("rl: generate")
        cluster.etcd.put(key, waits.replace(waiting_since=time.time() - 200).encode())
        expect(page.locator("#reasons")).to_contain_text("Waiting for 3 min 2")
        expect(page.locator("#verdict")).to_contain_text(re.compile("The run waits|Something is broken"))
        assert page.locator("#reasons b").count() == 0
    finally:
        cluster.etcd.put(key, status.encode())
    expect(page.locator("#reasons")).not_to_contain_text("Waiting for")


def test_evaluations_begin_with_that_before_the_first_step_and_say_what_they_are_of(show: Open, cluster: ApiCluster
                                                                                   ) -> None:
    """A fall from 0.50 to 0.38 looked like a rise."""
    page, key = show(), cluster.keys.job_status()
    status = read(cluster, key, JobStatus)
    tile, chart = page.locator("#tile-eval_accuracy"), page.locator("#metric-eval_accuracy")
    point = StepMetrics(step=42, at=time.time(), reward=0.5, samples=32, eval_accuracy=0.38)
    try:
        cluster.etcd.put(key, status.replace(eval_accuracy=0.9, eval_measure="exact_match").encode())
        expect(tile.locator("dt")).to_have_text("Eval exact match")
        cluster.etcd.put(key, status.replace(eval_accuracy=0.38, eval_measure="reward", eval_start=0.5).encode())
        cluster.etcd.put(cluster.keys.step_metrics(42), point.encode())
        expect(tile.locator("dt")).to_have_text("Eval reward")
        expect(tile).to_contain_text("from 0.500 at step 0 · after step 42")
        chart.get_by_text("as a table").click()
        expect(chart.locator("tbody tr").last).to_have_text(re.compile(r"^\s*0\s*0\.500"))
        expect(chart.locator("tbody tr").first).to_contain_text("0.380")
    finally:
        cluster.etcd.put(key, status.encode())
        cluster.etcd.delete(cluster.keys.step_metrics(42))


def test_idle_time_is_stacked_by_stage_and_lengths_are_charted(show: Open, cluster: ApiCluster) -> None:
    page = show()
    idle = page.locator("#metric-idle")
    expect(page.locator("#metric-reward")).to_be_visible()
    expect(idle).to_be_hidden()  # no step of this run has one
    waits = {"generate": 0.5, "train": 0.25, **{f"stage {n}": 0.01 * (n + 1) for n in range(6)}}
    point = StepMetrics(step=42, at=time.time(), reward=0.5, samples=32, idle_s=waits, truncated=0.25,
                        response_tokens={"mean": 12.5, "max": 32.0})
    cluster.etcd.put(cluster.keys.step_metrics(42), point.encode())
    try:
        expect(idle.locator(".value")).to_have_text("0.96 s")
        expect(idle.locator(".legend li")).to_have_count(6)
        expect(idle.locator(".legend")).to_contain_text("generate 0.50")
        expect(idle.locator(".legend")).to_contain_text("others 0.06")
        expect(idle.locator("polygon.area")).to_have_count(6)
        expect(page.locator("#metric-response-length")).to_contain_text("12.5 tokens")
        expect(page.locator("#metric-response-length")).to_contain_text("max 32")
        expect(page.locator("#metric-truncated .value")).to_have_text("25.0 %")
        idle.get_by_text("as a table").click()
        expect(idle.locator("tbody tr").first).to_contain_text("0.96, generate 0.50, train 0.25")
    finally:
        cluster.etcd.delete(cluster.keys.step_metrics(42))


def test_updates_throughput_and_parts_of_the_reward_are_charted(show: Open, cluster: ApiCluster) -> None:
    page = show()
    expect(page.get_by_role("heading", name="Throughput")).to_be_visible()
    expect(page.get_by_role("heading", name="Policy update")).to_be_hidden()  # no step of this run has one
    point = StepMetrics(step=42, at=time.time(), reward=0.5, samples=32, seconds={"total": 2.0, "publish_stall": 0.5},
                        reward_parts={"answer": -0.25, "format": 1.0},
                        update={"kl": 0.00123, "entropy": 1.5, "clip_fraction": 0.025, "advantage_std": 0.75,
                                "advantage_min": -2.5, "lr": 1e-5, "<b>own</b>": 7.0},
                        throughput={"train_tokens_per_s": 27_812.5, "mfu": 0.4125, "peak_memory_bytes": 3.0 * 2**30})
    cluster.etcd.put(cluster.keys.step_metrics(42), point.encode())
    try:
        for chart, value in {"kl": "0.0012 nats", "entropy": "1.50 nats", "clip-fraction": "2.50 %", "lr": "1.0e-5",
                             "train-rate": "27.8k tokens/s", "mfu": "41.3 %", "memory": "3 GiB",
                             "step-time": "2.00 s"}.items():
            expect(page.locator(f"#metric-{chart} .value")).to_have_text(value)
        for chart, legend in {"reward-parts": "answer -0.250", "advantage-std": "min -2.50",
                              "step-time": "publish stall 0.50"}.items():
            expect(page.locator(f"#metric-{chart} .legend")).to_contain_text(legend)
        expect(page.locator("#metric-reward-parts polyline.partLine")).to_have_count(2)
        own = page.locator("#metric-own-0")
        expect(own.locator(".name")).to_have_text("<b>own</b>")
        expect(own.locator(".value")).to_have_text("7")
        for unknown in ("kl-reference", "generate-rate", "gate-mean"):
            expect(page.locator(f"#metric-{unknown}")).to_be_hidden()
        page.locator("#metric-reward-parts").get_by_text("as a table").click()
        expect(page.locator("#metric-reward-parts tbody tr").first).to_contain_text("format 1.000, answer -0.250")
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    finally:
        cluster.etcd.delete(cluster.keys.step_metrics(42))


def test_charts_are_of_metrics_that_a_step_reports() -> None:
    script = Path(dashboard.__file__).with_name("step_metrics.js").read_text()
    charted = set(re.findall(r'(?:update|rate)\("(\w+)"', script)) | set(re.findall(r'\w+: "(\w+_\w+)"', script))
    assert charted - {"eval_accuracy"} <= UPDATE.keys() | THROUGHPUT.keys()
    shown = set(re.findall(r'"(\w+)"', re.search(r"SHOWN = new Set\(\[(.*?)\]", script, re.DOTALL)[1]))
    assert UPDATE.keys() <= charted | shown and THROUGHPUT.keys() <= charted, "each has a chart"


@parametrize("scheme", ["light", "dark"],
             proved_in="tests/integration/coordinator/test_dashboard.py",
             why="the dark scheme")
def test_axe_finds_no_accessibility_violation(show: Open, cluster: ApiCluster, scheme: str) -> None:
    page = show(color_scheme=scheme)
    expect(page.locator("#engines tbody tr").first).to_be_visible()
    put_samples(cluster)
    page.get_by_role("button", name="Show samples").click()
    expect(page.locator("#samples li.sample")).to_have_count(3)
    for step in ("the page", "a dialog"):
        if step == "a dialog":
            page.get_by_role("button", name="Scale pool rollout").click()
        found = axe.Axe().run(page).response["violations"]
        assert [(v["id"], [n["html"][:120] for n in v["nodes"][:3]]) for v in found] == [], step
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Hide samples").click()


# -- other sessions and screens ----------------------------------------------------------------------------------------
def test_viewer_reads_why_nothing_may_be_changed(show: Open, cluster: ApiCluster) -> None:
    page = show(role="viewer", expected="403")
    before = desired(cluster)
    page.get_by_role("button", name="Scale pool rollout").click()
    dialog = page.get_by_role("dialog", name="Scale pool rollout")
    dialog.get_by_label("Desired engines").fill("7")
    dialog.get_by_role("button", name="Scale").click()
    expect(dialog.get_by_role("alert")).to_contain_text("is a viewer")
    expect(dialog.get_by_role("alert")).to_contain_text("needs an operator's session")
    assert desired(cluster) == before
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()


def test_samples_are_read_on_demand_and_filtered(show: Open, cluster: ApiCluster) -> None:
    put_samples(cluster)
    page = show(role="viewer")
    asked: list[str] = []
    page.on("request", lambda r: asked.append(r.url) if "/samples?" in r.url else None)
    expect(page.locator("#samples li.sample")).to_have_count(0)
    assert asked == []  # nobody looks at them
    page.get_by_role("button", name="Show samples").click()
    expect(page.locator("#samples li.sample")).to_have_count(3)
    expect(page.locator("#samples li.sample").first).to_contain_text("Step 40, group 16, sample 2")
    page.get_by_label("Largest reward").fill("0")
    expect(page.locator("#samples li.sample")).to_have_count(1)
    expect(page.locator("#samples li.sample pre").first).to_have_text("2 + 0 =")
    page.get_by_label("Step", exact=True).fill("40")
    expect(page.locator("#samples")).to_contain_text("No sample matches")
    page.get_by_role("button", name="Hide samples").click()
    expect(page.locator("#samples-panel")).to_be_hidden()


def test_hostile_sample_is_shown_as_text(show: Open, cluster: ApiCluster) -> None:
    put_samples(cluster)
    page = show(width=360)
    page.get_by_role("button", name="Show samples").click()
    first = page.locator("#samples li.sample").first
    response = first.get_by_role("group", name="Response")
    expect(response).to_contain_text("<script>window.owned = 1</script><img src=x")
    expect(response).to_contain_text("\u241b[2J \u2400 \u27e8U+202E\u27e9right to left\u27e8U+202C\u27e9")
    expect(response).to_contain_text("\u27e8U+009B\u27e931m")
    expect(first).to_contain_text("<b>length</b>")
    expect(first).to_contain_text("<i>answer</i> 1")
    assert page.locator("#samples :is(script, img, b, i)").count() == 0
    assert page.evaluate("window.owned") is None
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert response.evaluate("node => node.clientHeight") < 400


@parametrize("scheme", ["light", "dark"],
             proved_in="tests/integration/coordinator/test_dashboard.py",
             why="the dark scheme")
def test_phone_does_not_scroll_sideways_and_colours_follow_the_system(show: Open, scheme: str) -> None:
    page = show(width=360, color_scheme=scheme)
    expect(page.locator("#engines tbody tr").first).to_be_visible()
    expect(page.locator("#metric-reward svg polyline").first).to_be_visible()
    expect(page.locator("#metric-step-time")).to_be_hidden()  # engines are below, and would be far below
    page.get_by_role("heading", name="Throughput").click()
    expect(page.locator("#metric-step-time svg polygon").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.get_by_role("button", name="Scale pool rollout").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.keyboard.press("Escape")
    red = int(page.evaluate("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/)[0]"))
    assert (red < 60) == (scheme == "dark")


# -- outages -----------------------------------------------------------------------------------------------------------
def test_changes_in_etcd_are_shown_without_a_reload(show: Open, cluster: ApiCluster) -> None:
    page = show("b")
    keys = cluster.keys
    cluster.etcd.put(keys.engine("fresh"), engine("fresh", "none", version=42).encode())
    expect(row(page, "engines", "fresh")).to_contain_text("ready")
    cluster.etcd.put(keys.engine("fresh"), engine("fresh", "none", state=EngineState.QUARANTINED).encode())
    expect(row(page, "engines", "fresh")).to_contain_text("quarantined")
    cluster.etcd.put(keys.step_metrics(41), StepMetrics(step=41, at=time.time(), reward=0.875, samples=32).encode())
    expect(page.locator("#metric-reward .value")).to_have_text("0.875")
    status = read(cluster, keys.job_status(), JobStatus)
    cluster.etcd.put(keys.job_status(), status.replace(step=41).encode())
    expect(page.locator("#tile-step")).to_contain_text("41 / 400")
    cluster.etcd.delete(keys.engine("fresh"))
    expect(row(page, "engines", "fresh")).to_have_count(0)


def test_page_whose_replica_dies_says_so_and_catches_up_when_it_is_back(show: Open, cluster: ApiCluster) -> None:
    page = show("b", expected="ERR_|Failed to load")
    replicas = cluster.replicas
    port = int(replicas.urls["b"].rpartition(":")[2])
    replicas.kill("b")
    expect(page.locator("#banner")).to_contain_text("Connection lost")
    expect(page.locator("#banner a")).to_have_attribute("href", job_page(cluster, "a"))
    cluster.etcd.put(cluster.keys.engine("meanwhile"), engine("meanwhile", "none").encode())
    replicas.running["b"] = replicas.spawn("b", port)
    until(lambda: replicas.ready("b"), "replica b")
    is_live(page)
    expect(page.locator("#banner")).to_be_hidden()
    expect(row(page, "engines", "meanwhile")).to_have_count(1)


# -- many --------------------------------------------------------------------------------------------------------------
@full(proved_in="tests/integration/coordinator/test_dashboard.py", why="the same page at size")
def test_hundred_pools_and_a_thousand_engines_stay_usable(show: Open, cluster: ApiCluster) -> None:
    keys = cluster.keys
    cluster.bulk([(keys.pool_spec(f"p{n:03d}"), PoolSpec(name=f"p{n:03d}", desired=10)) for n in range(100)])
    cluster.bulk([(keys.engine(f"many-{n:04d}"), engine(f"many-{n:04d}", f"p{n % 100:03d}")) for n in range(1000)])
    page = show()
    expect(page.locator("#engines tbody tr")).to_have_count(12)
    page.get_by_label("Filter engines").fill("many-0777")
    expect(page.locator("#engines tbody tr")).to_have_count(1)
    expect(row(page, "engines", "many-0777")).to_be_visible()
    page.get_by_label("Filter engines").fill("")
    page.get_by_role("button", name="Show 200 of").click()
    expect(page.locator("#engines tbody tr")).to_have_count(200)
    expect(page.locator("#engines")).to_contain_text("more: use the filter")
    cluster.etcd.put(keys.engine("many-0500"), engine("many-0500", "p000", state=EngineState.SYNCING).encode())
    expect(row(page, "engines", "many-0500")).to_contain_text("syncing")
    page.get_by_label("Filter pools").fill("p042")
    page.get_by_role("button", name="Scale pool p042").click()
    expect(page.get_by_role("dialog", name="Scale pool p042")).to_be_visible()
