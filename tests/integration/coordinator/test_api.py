"""The admin API of one replica on a real etcd: listings, changes, limits and streams."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.api_cluster import ApiCluster, Reader, items, problem, running, walk
from support.coordinators import AUTH, OPERATOR
from support.etcd_server import EtcdServers
from support.waiting import wait_until

from elastic_rl.coordinator.api.app import APP
from elastic_rl.coordinator.api_paths import OF_JOB, job_path
from elastic_rl.coordinator.records import LastSeen
from elastic_rl.etcd.client import Op
from elastic_rl.etcd.cluster_records import HostPhase, HostState
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.etcd.records import (
    DcsNode,
    Engine,
    EngineState,
    Event,
    ExternalEngine,
    Member,
    Operation,
    OperationKind,
    OperationState,
    PoolSpec,
    SampleRecord,
    StepMetrics,
    Version,
    VersionState,
)
from elastic_rl.net import http_client
from elastic_rl.net.addresses import free_port

OPERATIONS = [(path, method, operation) for path, methods in APP.openapi()["paths"].items()
              for method, operation in methods.items()]
LIMITS: dict[str, Any] = {"max_body_bytes": 2000, "request_timeout_s": 1.0, "max_streams": 3, "max_requests": 12}


@pytest.fixture(scope="module")
def cluster(etcd_servers: EtcdServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiCluster]:
    with running(etcd_servers, tmp_path_factory.mktemp("api"), "a",
                 coordinator=LIMITS, alerts={"urls": [f"json://127.0.0.1:{free_port()}"]}) as made:
        yield made


@pytest.fixture
def api(cluster: ApiCluster) -> Iterator[httpx.Client]:
    with cluster.client("a") as client:
        yield client


@pytest.fixture
def pool(cluster: ApiCluster) -> str:
    """A pool of this test's own, with 2 desired engines."""
    name = f"p-{secrets.token_hex(4)}"
    cluster.etcd.put(cluster.keys.pool_spec(name), PoolSpec(name=name, desired=2).encode())
    return name


@pytest.fixture
def engine(cluster: ApiCluster, pool: str) -> str:
    """A ready engine of that pool."""
    name = f"e-{secrets.token_hex(4)}"
    cluster.etcd.put(cluster.keys.engine(name), Engine(id=name, pool=pool, state=EngineState.READY, epoch=1).encode())
    return name


# -- listings ----------------------------------------------------------------------------------------------------------
def test_pages_of_every_listing_hold_everything_once(cluster: ApiCluster, api: httpx.Client) -> None:
    keys, names = cluster.keys, [f"page-{n:02d}" for n in range(25)]
    cluster.bulk(
        [(keys.engine(n), Engine(id=n, pool="x", state=EngineState.READY, epoch=1)) for n in names]
        + [(keys.pool_spec(n), PoolSpec(name=n, desired=1)) for n in names]
        + [(keys.member("page", n), Member(role="page", id=n, pid=1, host="h")) for n in names]
        + [(keys.step_metrics(n), StepMetrics(step=n, at=n, reward=0.5)) for n in range(25)])
    assert [m["id"] for m in walk(api, "members?role=page", 7)] == names
    assert [e["id"] for e in walk(api, "engines", 6) if e["id"] in names] == names
    assert [p["name"] for p in walk(api, "pools", 4) if p["name"] in names] == names
    assert [s["step"] for s in walk(api, "steps", 10)] == list(range(25))[::-1]
    assert len(items(api, "engines?limit=3")) == 3
    for bad in ("after=%21", "after=bm8", "limit=0", "limit=1001", "limit=x"):
        assert api.get(f"{'versions' if bad == 'after=bm8' else 'engines'}?{bad}").status_code == 422, bad
    problem(api.get("engines?limt=3"), 422, "unknown-parameter")


def test_nodes_of_the_checkpoint_service_are_members_by_their_role(cluster: ApiCluster, api: httpx.Client) -> None:
    names = [f"node-{n:02d}" for n in range(5)]
    cluster.bulk([(cluster.keys.dcs_node(n), DcsNode(id=n, host="h", port=1, pid=7, arena_path="/dev/shm/x",
                                                     arena_bytes=8, chunks=3)) for n in names])
    found = walk(api, "members?role=dcs", 2)
    assert [m["id"] for m in found] == names
    assert {(m["role"], m["pid"], m["info"]["chunks"]) for m in found} == {("dcs", 7, 3)}


def test_members_that_are_suspected_have_a_listing_of_their_own(cluster: ApiCluster, api: httpx.Client) -> None:
    keys, names = cluster.keys, [f"{n:02d}" for n in range(10)]
    # The leader clock never comes so far that they are dead.
    quiet = LastSeen(role="quiet", id="", incarnation="i", first_seen=1.0, suspected_at=2.0, suspected_leader_s=1e9)
    cluster.bulk([(keys.registry_entry("quiet", n), quiet.replace(id=n, dead_at=3.0 * (int(n) % 2))) for n in names]
                 + [(keys.member("quiet", "well"), Member(role="quiet", id="well", pid=1, host="h"))])
    found = walk(api, "members?role=quiet&suspected=true", 2)
    assert [(m["id"], m["phase"]) for m in found] == [(n, "suspected") for n in names[::2]]
    assert {m["id"] for m in walk(api, "members?suspected=true", 3)} >= set(names[::2])
    assert [m["id"] for m in walk(api, "members?role=quiet", 3)] == ["well"]


def test_pages_repeat_and_omit_nothing_while_items_come_and_go(cluster: ApiCluster, api: httpx.Client) -> None:
    keys, names = cluster.keys, [f"{n:02d}" for n in range(10)]
    cluster.bulk([(keys.member("moving", n), Member(role="moving", id=n, pid=1, host="h")) for n in names])
    first = api.get("members?role=moving&limit=4").json()
    for gone in ("01", "03"):
        cluster.etcd.delete(keys.member("moving", gone))
    cluster.etcd.put(keys.member("moving", "00a"), Member(role="moving", id="00a", pid=1, host="h").encode())
    rest = api.get(f"members?role=moving&limit=100&after={first['next']}").json()
    assert [m["id"] for m in first["items"] + rest["items"]] == names and rest["next"] is None


def test_versions_of_all_streams_come_newest_first_over_gaps(cluster: ApiCluster, api: httpx.Client) -> None:
    keys = cluster.keys

    def version(stream: str, number: int, at: float) -> tuple[str, Version]:
        return keys.version(stream, number), Version(stream=stream, number=number, state=VersionState.COMMITTED,
                                                     epoch=1, created_at=at)

    policy = [n for n in range(1, 400) if n < 20 or n > 300]
    cluster.bulk([version("policy", n, float(n)) for n in policy])
    cluster.bulk([version("trainer_state", n, 10.0 * n + 0.5) for n in range(1, 40)])
    cluster.etcd.put(keys.stream_next("policy"), b"399")
    assert [v["number"] for v in walk(api, "versions?stream=policy", 50)] == policy[::-1]
    assert [v["number"] for v in walk(api, "versions?stream=policy", 2)][:9] == policy[::-1][:9]
    both = walk(api, "versions", 30)
    assert [v["created_at"] for v in both] == sorted((v["created_at"] for v in both), reverse=True)
    assert len({(v["stream"], v["number"]) for v in both}) == len(both) == len(policy) + 39
    assert items(api, "versions?stream=none") == []


def test_many_events_come_newest_first_and_completely(cluster: ApiCluster, api: httpx.Client) -> None:
    at = [1.7e12 - n * n * 50 for n in range(1500)]  # ever farther apart, so that the spans have to grow
    cluster.bulk([(cluster.keys.event(f"{int(ms):015d}-{n:04x}"), Event(
        id=f"{int(ms):015d}-{n:04x}", at=ms / 1000, kind="test.many", subject=str(n), message="m"))
        for n, ms in enumerate(at)])
    seen = [e for e in walk(api, "events", 400) if e["kind"] == "test.many"]
    assert [e["subject"] for e in seen] == [str(n) for n in range(1500)]


def test_operations_are_filtered_by_state(cluster: ApiCluster, api: httpx.Client) -> None:
    ended = [Operation(id=f"op-{n:013d}-x", kind=OperationKind.RESTART, target="trainer",
                       state=OperationState.FAILED if n % 3 else OperationState.SUCCEEDED) for n in range(30)]
    cluster.bulk([(cluster.keys.operation(op.id), op) for op in ended])
    assert [o["id"] for o in walk(api, "operations?state=succeeded", 4)] == [
        op.id for op in ended[::-1] if op.state is OperationState.SUCCEEDED]
    assert {o["id"] for o in walk(api, "operations", 7)} >= {op.id for op in ended}
    assert api.get("operations?state=none").status_code == 422


def test_job_is_listed_and_another_one_is_not_found(cluster: ApiCluster, api: httpx.Client) -> None:
    listed = api.get("/v1/jobs").json()
    assert [job["name"] for job in listed["items"]] == [cluster.keys.job] and listed["next"] is None
    assert listed["items"] == [api.get("").json()]
    problem(api.get("/v1/jobs?limt=3"), 422, "unknown-parameter")
    for path, method, _ in OPERATIONS:
        if path.startswith(OF_JOB):
            other = re.sub(r"\{\w+\}", "x", path.replace("{job}", "another"))
            body = problem(api.request(method, other, json={} if method in ("post", "patch", "put") else None),
                           404, "not-found")
            assert body["instance"] == other and "'another'" in body["detail"], (method, other)


def test_encoded_slash_reaches_no_other_route(cluster: ApiCluster, api: httpx.Client, engine: str) -> None:
    problem(api.post(f"engines/{engine}%2fdrain", json={}), 404, "not-found")
    problem(api.get(f"/v1/jobs/{cluster.keys.job}%2Fengines"), 404, "not-found")
    assert api.get(f"engines/{engine}").json()["state"] == "ready"
    assert api.get(f"engines/{engine.replace('e', '%65')}").json()["id"] == engine, "other escapes are decoded"


# -- changes -----------------------------------------------------------------------------------------------------------
def test_samples_come_newest_step_first_are_filtered_and_paged(cluster: ApiCluster, api: httpx.Client) -> None:
    keys = cluster.keys
    cluster.bulk([(keys.sample(slot), SampleRecord(step=step, group=group, index=index, reward=reward,
                                                   finish_reason="length" if index else "stop"))
                  for slot, (step, group, index, reward) in enumerate([
                      (9, 72, 0, 0.5), (8, 64, 1, None), (10, 80, 3, 1.0), (10, 80, 0, 0.0), (10, 79, 5, -1.5)])])
    cluster.etcd.put(keys.sample(7), b"no record")  # of a newer release, or damaged
    try:
        ordered = [(10, 79, 5), (10, 80, 0), (10, 80, 3), (9, 72, 0), (8, 64, 1)]

        def found(query: str = "") -> list[tuple[int, int, int]]:
            return [(s["step"], s["group"], s["index"]) for s in walk(api, f"samples{query}", 2)]

        assert found() == ordered
        assert found("?step=10") == ordered[:3]
        assert found("?step=10&group=80") == ordered[1:3]
        assert found("?min_reward=0.5") == [(10, 80, 3), (9, 72, 0)]
        assert found("?max_reward=-1") == [(10, 79, 5)]
        assert found("?finish_reason=stop") == [(10, 80, 0), (9, 72, 0)]
        for bad in ("min_reward=nan", "max_reward=inf", "step=-1", "group=x", "after=bm8", "after=MTox", "rewards=1"):
            assert api.get(f"samples?{bad}").status_code == 422, bad
        assert api.get("samples", headers={"Authorization": "Bearer nobody's"}).status_code == 401
    finally:
        cluster.etcd.txn([], [Op.delete_prefix(keys.samples_prefix())])


def test_dry_run_of_each_change_changes_nothing(cluster: ApiCluster, api: httpx.Client, pool: str, engine: str) -> None:
    begun = api.post(f"pools/{pool}/scale", json={"desired": 3}).json()["id"]
    before = cluster.requested_changes()
    answers = {
        "patch": api.patch(f"pools/{pool}?dry_run=true", json={"desired": 4}, headers={"If-Match": "*"}),
        "scale": api.post(f"pools/{pool}/scale?dry_run=true", json={"desired": 4},
                          headers={"Idempotency-Key": "d"}),
        "drain": api.post(f"engines/{engine}/drain?dry_run=true", json={}),
        "restart": api.post("restarts?dry_run=true", json={"target": f"engines/{engine}"}),
        "adopt": api.post("engines?dry_run=true", json={"url": "http://10.0.0.9:30000", "pool": pool}),
        "cancel": api.delete(f"operations/{begun}?dry_run=true")}
    assert {name: a.status_code for name, a in answers.items()} == dict.fromkeys(answers, 200)
    assert not any("location" in a.headers for a in answers.values())
    assert answers["patch"].json()["desired"] == 4 and answers["scale"].json()["params"]["desired"] == 4
    assert answers["drain"].json()["target"] == f"engines/{engine}" and answers["cancel"].json()["state"] == "cancelled"
    assert cluster.requested_changes() == before
    problem(api.patch(f"pools/{pool}?dry_run=true", json={"desired": 4}, headers={"If-Match": '"1"'}), 412,
            "precondition-failed")


def test_operations_are_created_followed_and_cancelled(cluster: ApiCluster, api: httpx.Client, pool: str,
                                                       engine: str) -> None:
    scaled = api.post(f"pools/{pool}/scale", json={"desired": 5})
    assert scaled.status_code == 202
    assert scaled.headers["location"] == job_path(cluster.keys.job, "operations", scaled.json()["id"])
    assert api.get(scaled.headers["location"]).json()["target"] == f"pools/{pool}"
    gone = api.delete(scaled.headers["location"])
    assert gone.status_code == 202 and gone.json()["state"] == "cancelled"
    assert api.get(f"pools/{pool}").json()["desired"] == 2
    tag = api.get(f"pools/{pool}").headers["etag"]
    assert api.post(f"pools/{pool}/scale", json={"desired": 3}, headers={"If-Match": tag}).status_code == 202
    problem(api.post(f"pools/{pool}/scale", json={"desired": 4}, headers={"If-Match": tag}), 412,
            "precondition-failed")
    drained = api.post(f"engines/{engine}/drain", json={"replace": True})
    assert drained.status_code == 202 and api.get(f"engines/{engine}").json()["state"] == "draining"
    problem(api.delete(drained.headers["location"]), 409, "conflict")
    problem(api.post(f"engines/{engine}/drain", json={}), 409, "conflict")
    for path, body in (("engines/none/drain", {}), ("restarts", {"target": "roles/none"}),
                       ("pools/none/scale", {"desired": 1})):
        problem(api.post(path, json=body), 404, "not-found")
    problem(api.delete("operations/none"), 404, "not-found")
    problem(api.post("restarts", json={"target": "moon"}), 422, "invalid")


def test_autoscaling_is_set_shown_and_disabled_and_its_bounds_hold(cluster: ApiCluster, api: httpx.Client, pool: str
                                                                   ) -> None:
    path, any_of = f"pools/{pool}/autoscaling", {"If-Match": "*"}
    before = api.get(path)
    assert (before.json()["mode"], before.json()["source"], before.headers["etag"]) == ("disabled", "settings", '"0"')
    wanted = {"mode": "external", "min_engines": 2, "max_engines": 4}
    problem(api.put(path, json=wanted), 428, "precondition-required")
    problem(api.put(path, json=wanted, headers={"If-Match": '"1"'}), 412, "precondition-failed")
    would_be = api.put(f"{path}?dry_run=true", json=wanted, headers={"If-Match": before.headers["etag"]})
    assert would_be.json()["mode"] == "external" and api.get(path).json()["mode"] == "disabled"
    done = api.put(path, json=wanted, headers={"If-Match": before.headers["etag"]})
    assert done.status_code == 200 and done.json()["source"] == "api" and done.json()["by"]
    assert done.json().items() >= wanted.items() and done.json()["token_usage_high"] == 0.85
    assert api.put(path, json=wanted, headers=any_of).headers["etag"] == done.headers["etag"], "it is so already"
    for change in (api.patch(f"pools/{pool}", json={"desired": 5}, headers=any_of),
                   api.post(f"pools/{pool}/scale", json={"desired": 1})):
        assert "autoscaled from 2 to 4" in problem(change, 409, "conflict")["detail"]
    scaled = [api.post(f"pools/{pool}/scale", json={"desired": 4}, headers={"Idempotency-Key": f"keda-{pool}"})
              for _ in range(2)]
    assert scaled[0].status_code == 202 and scaled[0].json()["id"] == scaled[1].json()["id"]
    assert pool in {a["pool"]: a for a in walk(api, "autoscaling", 3)}
    told = [e for e in items(api, "events") if e["subject"] == pool and e["kind"] == "pool.autoscaling_changed"]
    assert [e["data"]["max_engines"] for e in told] == [4]
    off = api.delete(path)
    assert (off.json()["mode"], off.json()["max_engines"]) == ("disabled", 4)
    assert api.post(f"pools/{pool}/scale", json={"desired": 5}).status_code == 202
    for wrong in ({"mode": "on"}, {"min_engines": 5, "max_engines": 4}, {"max_engines": 10_000}, {"max_engines": "4"},
                  {"token_usage_low": 0.9}, {"x": 1}):
        problem(api.put(path, json=wrong, headers=any_of), 422, "invalid")
    problem(api.get("pools/none/autoscaling"), 404, "not-found")
    problem(api.put("pools/none/autoscaling", json=wanted, headers=any_of), 404, "not-found")


def test_external_engine_is_registered_once_and_cancelled(cluster: ApiCluster, api: httpx.Client, pool: str) -> None:
    body, key = {"url": f"http://{pool}:30000/", "pool": pool}, {"Idempotency-Key": f"register-{pool}"}
    first, again = (api.post("engines", json=body, headers=key) for _ in range(2))
    assert first.status_code == again.status_code == 202
    assert first.headers["location"] == again.headers["location"] and again.headers["idempotency-replayed"] == "true"
    assert (first.json()["kind"], first.json()["params"]["url"]) == ("register", f"http://{pool}:30000")
    problem(api.post("engines", json=body), 409, "conflict")
    problem(api.post("engines", json={**body, "pool": "none"}), 404, "not-found")
    for wrong in ({}, {"url": "moon"}, {"url": "ftp://a:1"}, {"url": 1}, {**body, "via": 1}, {**body, "x": 1}):
        problem(api.post("engines", json=wrong), 422, "invalid")
    assert api.delete(first.headers["location"]).json()["state"] == "cancelled"
    assert cluster.etcd.get(cluster.keys.external_engine(f"http://{pool}:30000")) is None
    assert api.post("engines", json=body).status_code == 202


def test_external_engine_is_registered_via_a_host_that_takes_more(cluster: ApiCluster, api: httpx.Client, pool: str
                                                                 ) -> None:
    hosts, url = ClusterKeys(cluster.keys.job), "https://10.0.0.9:30000"
    for phase in (HostPhase.READY, HostPhase.LOST, HostPhase.LEFT):  # which the leader lets be
        cluster.etcd.put(hosts.host_state(f"{pool}-{phase}"), HostState(
            phase=phase, incarnation="1", since_s=0.0).encode())

    def register(host: str) -> httpx.Response:
        return api.post("engines", json={"url": url, "pool": pool, "via": f"{pool}-{host}"})

    problem(register("none"), 404, "not-found")
    for phase in ("lost", "left"):
        assert f"{pool}-{phase}" in problem(register(phase), 409, "conflict")["detail"]
    registered = register("ready").json()
    assert registered["params"]["host"] == f"{pool}-ready"
    found = ExternalEngine.decode(cluster.etcd.get(cluster.keys.external_engine(url)).value)
    assert found.host == f"{pool}-ready"

    # Its host has not joined the run: nothing serves it yet, and it can leave.
    left = api.delete(f"engines/{found.engine}")
    assert left.status_code == 202 and left.json()["kind"] == "drain"
    assert cluster.etcd.get(cluster.keys.external_engine(url)) is None
    problem(api.delete(f"engines/{found.engine}"), 404, "not-found")


def test_server_is_registered_once_under_any_spelling(cluster: ApiCluster, api: httpx.Client, pool: str) -> None:
    own, external = free_port(), free_port()
    cluster.etcd.put(cluster.keys.engine(f"{pool}-own"), Engine(
        id=f"{pool}-own", pool=pool, state=EngineState.READY, epoch=1, url=f"http://127.0.0.1:{own}").encode())
    answer = api.post("engines", json={"url": f"http://localhost:{external}", "pool": pool})
    assert answer.status_code == 202 and answer.json()["params"]["url"] == f"http://127.0.0.1:{external}"
    for port in (own, external):
        for host in ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "[::1]"):
            problem(api.post("engines", json={"url": f"http://{host}:{port}", "pool": pool}), 409, "conflict")


def test_external_engine_is_deregistered_once_and_others_are_not(cluster: ApiCluster, api: httpx.Client, pool: str,
                                                                 engine: str) -> None:
    external, key = f"x-{pool}", {"Idempotency-Key": f"leave-{pool}"}
    cluster.etcd.put(cluster.keys.engine(external), Engine(
        id=external, pool=pool, state=EngineState.READY, epoch=1, external=True, url="http://10.0.0.9:1").encode())
    assert api.delete(f"engines/{external}?dry_run=true").status_code == 200
    assert api.get(f"engines/{external}").json()["state"] == "ready"
    first, again = (api.delete(f"engines/{external}", headers=key) for _ in range(2))
    assert first.status_code == again.status_code == 202 and first.json()["id"] == again.json()["id"]
    assert again.headers["idempotency-replayed"] == "true" and first.json()["kind"] == "drain"
    assert api.get(f"engines/{external}").json()["state"] == "draining"
    assert api.get(f"pools/{pool}").json()["desired"] == 2
    problem(api.delete(f"engines/{external}"), 409, "conflict")
    assert "scale the pool" in problem(api.delete(f"engines/{engine}"), 409, "conflict")["detail"]
    assert api.get(f"engines/{engine}").json()["state"] == "ready"
    problem(api.delete("engines/none"), 404, "not-found")


# -- idempotency -------------------------------------------------------------------------------------------------------
def test_same_request_with_the_same_key_counts_once(cluster: ApiCluster, api: httpx.Client, pool: str) -> None:
    def scale(desired: int, key: str, **more: Any) -> httpx.Response:
        return api.post(f"pools/{pool}/scale", json={"desired": desired}, headers={"Idempotency-Key": key}, **more)

    first, again = scale(3, "one"), scale(3, "one")
    assert first.status_code == again.status_code == 202
    assert first.headers["location"] == again.headers["location"] and first.json()["id"] == again.json()["id"]
    assert again.headers["idempotency-replayed"] == "true" and "idempotency-replayed" not in first.headers
    assert len(cluster.operations(pool)) == 1
    problem(scale(4, "one"), 422, "idempotency-key-reused")
    assert scale(4, "two").json()["id"] != first.json()["id"]
    problem(api.post("pools/none/scale", json={"desired": 1}, headers={"Idempotency-Key": "refused"}), 404,
            "not-found")
    assert scale(5, "refused").status_code == 202, "a refused request leaves no key behind"
    cluster.etcd.delete(cluster.keys.operation(first.json()["id"]))
    problem(scale(3, "one"), 410, "gone")


def test_one_of_many_concurrent_repetitions_is_carried_out(cluster: ApiCluster, api: httpx.Client, pool: str) -> None:
    def scale(_: int) -> httpx.Response:
        return api.post(f"pools/{pool}/scale", json={"desired": 6}, headers={"Idempotency-Key": f"race-{pool}"})

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(scale, range(16)))
    assert {a.status_code for a in answers} == {202}, [a.text for a in answers]
    assert len({a.headers["location"] for a in answers}) == 1 and len(cluster.operations(pool)) == 1


def test_silence_is_created_once_and_ended(cluster: ApiCluster, api: httpx.Client) -> None:
    body = {"duration_s": 3600, "kind": "engine.*", "comment": "new kernel"}
    assert api.post("silences?dry_run=true", json=body).json()["kind"] == "engine.*"
    assert items(api, "silences") == []
    made, again = (api.post("silences", json=body, headers={"Idempotency-Key": "silence"}) for _ in range(2))
    assert made.status_code == again.status_code == 201 and made.headers["location"] == again.headers["location"]
    assert items(api, "silences") == [made.json()] and made.json()["by"] == "operator"
    assert api.delete(f"{made.headers['location']}?dry_run=true").json() == made.json() == items(api, "silences")[0]
    assert api.delete(made.headers["location"]).json() == made.json()
    problem(api.delete(made.headers["location"]), 404, "not-found")
    for wrong in ({}, {"duration_s": 0}, {"duration_s": "60"}, {"duration_s": 1e9}, {"duration_s": 1, "kind": ""}):
        problem(api.post("silences", json=wrong), 422, "invalid")


def test_alert_test_is_sent_once_per_key_and_can_be_followed(cluster: ApiCluster, api: httpx.Client) -> None:
    [planned] = api.post("alerts/test?dry_run=true", json={}).json()["receivers"]
    assert planned["status"] == "waiting"
    begun, again = (api.post("alerts/test", json={}, headers={"Idempotency-Key": "ring"}) for _ in range(2))
    assert begun.status_code == again.status_code == 202 and begun.headers["location"] == again.headers["location"]

    def ended() -> str:
        [receiver] = api.get(begun.headers["location"]).json()["receivers"]
        assert receiver["receiver"] == planned["receiver"]
        return "" if receiver["status"] == "waiting" else str(receiver["status"])

    odd = cluster.keys.receiver("odd")
    cluster.etcd.put(odd, b"{}")
    try:
        assert wait_until(ended, what="the receiver's answer") == "failed", "no server listens there"
    finally:
        cluster.etcd.delete(odd)
    problem(api.get("alerts/tests/none"), 404, "not-found")


# -- limits and methods ------------------------------------------------------------------------------------------------
def test_large_malformed_and_non_json_bodies_are_refused(api: httpx.Client, pool: str) -> None:
    path, kind = f"pools/{pool}/scale", {"content-type": "application/json"}
    problem(api.post(path, content=b"x" * 2001, headers=kind), 413, "body-too-large")
    problem(api.post(path, content=iter([b"x" * 1500] * 2), headers=kind), 413, "body-too-large")
    problem(api.post(path, content=b'{"desired": 3}', headers={"content-type": "text/plain"}), 415,
            "unsupported-media-type")
    problem(api.post(path, content=b'{"desired": 3}'), 415, "unsupported-media-type")
    for broken in (b"{", b"\xff\xfe", b"[" * 1900):
        problem(api.post(path, content=broken, headers=kind), 400, "malformed")
    for wrong in (b'{"desired": 3, "x": 1}', b'{"\\ud800": 1, "desired": 3}', b"[]", b"null", b'{"desired": 1e2}'):
        problem(api.post(path, content=wrong, headers=kind), 422, "invalid")
    problem(api.post(path, headers=kind), 422, "invalid")


def test_slow_client_is_disconnected(cluster: ApiCluster, pool: str) -> None:
    host, port = cluster.replicas.urls["a"].removeprefix("http://").split(":")

    def end_of(start: bytes) -> bytes:
        with socket.create_connection((host, int(port)), timeout=10) as slow:
            slow.sendall(start)
            got = b""
            try:
                while chunk := slow.recv(4096):
                    got += chunk
            except ConnectionResetError:
                pass
            return got

    assert end_of(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: ") == b""
    assert end_of(b"") == b""
    answered_once = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /heal"
    assert end_of(answered_once).count(b"200 OK") == 1
    path = job_path(cluster.keys.job, "pools", pool, "scale")
    late = end_of(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {OPERATOR}\r\n"
                  "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{".encode())
    assert b" 408 " in late and b"request-timeout" in late
    assert b" 431 " in end_of(b"GET / HTTP/1.1\r\nX-Large: " + b"x" * 40_000)


def test_allowed_methods_are_named_and_head_works_where_get_does(api: httpx.Client, pool: str) -> None:
    for method in ("PUT", "DELETE", "TRACE", "NONSENSE"):
        body = problem(refused := api.request(method, f"pools/{pool}"), 405, "method-not-allowed")
        assert refused.headers["allow"] == "GET, HEAD, OPTIONS, PATCH" and "PATCH" in body["detail"]
    assert api.options(f"pools/{pool}").headers["allow"] == "GET, HEAD, OPTIONS, PATCH"
    for path in (f"pools/{pool}", "members", "changes", "/healthz", "/metrics", "/openapi.json"):
        head = api.head(path)
        assert head.status_code == 200 and head.content == b"", path
    assert api.head(f"pools/{pool}").headers["etag"] == api.get(f"pools/{pool}").headers["etag"]
    problem(api.get("nothing"), 404, "not-found")
    problem(api.get("pools/"), 404, "not-found")


# -- streams -----------------------------------------------------------------------------------------------------------
def test_change_stream_starts_with_a_snapshot_and_has_every_later_change(cluster: ApiCluster, api: httpx.Client,
                                                                          pool: str,
                                                                          engine: str) -> None:
    operation = api.post(f"pools/{pool}/scale", json={"desired": 3}).json()["id"]
    with Reader(cluster.replicas.job_url("a")) as reader:
        first = reader.next()
        assert first.event == "snapshot"
        data = first.data
        assert set(data) == {"job", "pools", "engines", "versions", "operations", "alerts", "events", "members",
                             "steps"}
        assert data["job"] == api.get("").json()
        assert next(p for p in data["pools"] if p["name"] == pool)["desired"] == 3
        assert engine in {e["id"] for e in data["engines"]} and operation in {o["id"] for o in data["operations"]}
        assert {"a"} == {m["id"] for m in data["members"] if m["role"] == "coordinator"}
        assert len(data["versions"]) <= 20 and len(data["events"]) <= 50
        tag = api.patch(f"pools/{pool}", json={"desired": 4}, headers={"If-Match": "*"}).json()["revision"]
        changed = reader.until(lambda f: f.data["kind"] == "pool" and f.data["id"] == pool)
        assert changed.id == tag > first.id and changed.data["object"] == api.get(f"pools/{pool}").json()
        told = reader.until(lambda f: f.data["kind"] == "event" and f.data["object"]["subject"] == pool)
        assert told.data["object"]["kind"] == "pool.scaled" and told.id == tag
        cluster.etcd.delete(cluster.keys.engine(engine))
        gone = reader.until(lambda f: f.data["kind"] == "engine" and f.data["id"] == engine)
        assert gone.data["object"] is None
        assert all(f.data["kind"] != "member" for f in reader.seen[1:]), "heartbeats are left out"


def test_change_stream_resumes_or_starts_with_a_new_snapshot(cluster: ApiCluster, pool: str) -> None:
    def engine(n: int) -> int:
        name = f"{pool}-{n}"
        return cluster.etcd.put(cluster.keys.engine(name), Engine(id=name, pool=pool, state=EngineState.READY,
                                                               epoch=n).encode())

    def mine(frame: Any) -> bool:
        return frame.event == "change" and frame.data["id"].startswith(f"{pool}-")

    url = cluster.replicas.job_url("a")
    with Reader(url) as reader:
        assert reader.next().event == "snapshot"
        engine(1)
        last = reader.until(mine).id
    revisions = [engine(n) for n in (2, 3, 4)]
    with Reader(url, last) as reader:
        frames = [reader.until(mine) for _ in range(4)]
        assert [f.data["object"]["epoch"] for f in frames] == [1, 2, 3, 4], "the last one comes once more"
        assert [f.id for f in frames[1:]] == revisions and all(f.event == "change" for f in reader.seen)
    for nowhere in (1, revisions[-1] + 10**6):
        with Reader(url, nowhere) as reader:
            fresh = reader.next()
            assert fresh.event == "snapshot" and f"{pool}-4" in {e["id"] for e in fresh.data["engines"]}
    problem(http_client.request("GET", f"{url}/changes",
                                headers={**AUTH, "Last-Event-ID": "yesterday"}), 422, "invalid")


def test_number_of_streams_is_limited(cluster: ApiCluster) -> None:
    url = cluster.replicas.job_url("a")
    with contextlib.ExitStack() as opened:
        def one_more() -> httpx.Response | None:
            """Streams of other tests may end only now, so it takes up to some seconds until the fourth is refused."""
            answer = opened.enter_context(http_client.stream("GET", f"{url}/changes", headers=AUTH, timeout=10))
            return answer if answer.status_code != 200 else None

        answers = [a for _ in range(4) if (a := one_more()) is not None]
        assert answers, "the fourth one at the latest is too many"
        answers[0].read()
        problem(answers[0], 503, "too-many-streams")
        assert answers[0].headers["retry-after"]
        assert http_client.request("GET", f"{url}/pools", headers=AUTH, timeout=10).status_code == 200


def test_requests_beyond_the_limit_are_refused_and_probes_are_not(cluster: ApiCluster, api: httpx.Client, pool: str
                                                                      ) -> None:
    host, port = cluster.replicas.urls["a"].removeprefix("http://").split(":")
    path = job_path(cluster.keys.job, "pools", pool, "scale")
    start = (f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {OPERATOR}\r\n"
             "Content-Type: application/json\r\nContent-Length: 9\r\n\r\n").encode()

    def refused() -> httpx.Response | None:
        """Requests whose bodies do not come hold their places, for a second."""
        with contextlib.ExitStack() as held:
            for _ in range(LIMITS["max_requests"]):
                held.enter_context(socket.create_connection((host, int(port)), timeout=10)).sendall(start)
            answers = [api.get("pools") for _ in range(20)]
            assert api.get("/healthz").status_code == 200
        return next((a for a in answers if a.status_code != 200), None)

    overloaded = wait_until(refused, what="a refused request")
    problem(overloaded, 503, "overloaded")
    wait_until(lambda: api.get("pools").status_code == 200, what="a free slot")


def test_unfinished_requests_without_a_token_take_no_slots(cluster: ApiCluster, api: httpx.Client) -> None:
    """In the second in which their bodies may still arrive."""
    host, port = cluster.replicas.urls["a"].removeprefix("http://").split(":")
    start = (b"POST /v1/session HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
             b"Content-Length: 9\r\n\r\n")
    with contextlib.ExitStack() as held:
        opened = []
        for _ in range(60):
            opened.append(held.enter_context(socket.create_connection((host, int(port)), timeout=10)))
            opened[-1].sendall(start)
        answers = [api.get("pools") for _ in range(5)] + [api.post("/v1/session", json={"link": "x"}, headers={
            "Authorization": ""})]
        assert b" 408 " in opened[-1].recv(1000), "the last of them was in progress all the time"
    assert [a.status_code for a in answers] == [200] * 5 + [401]


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "chunked"])
def test_body_of_a_sign_in_without_a_token_is_small(cluster: ApiCluster, announced: bool) -> None:
    with cluster.client("a", headers={"Content-Type": "application/json"}) as stranger:
        content = b'{"link": "' + b"x" * 1200 + b'"}'
        answer = stranger.post("/v1/session", content=content if announced else iter([content]))
    problem(answer, 413, "body-too-large")


def test_records_are_returned_as_stored(cluster: ApiCluster, api: httpx.Client) -> None:
    """Also fields that this release does not know, which a newer replica wrote."""
    newer = b'{"id":"newer","pool":"x","state":"ready","epoch":1,"z":7}'
    cluster.etcd.put(cluster.keys.engine("newer"), newer)
    assert api.get("engines/newer").json()["z"] == 7
    assert json.loads(api.get("engines/newer").text) in items(api, "engines?limit=1000")


def test_unreadable_records_are_left_out(cluster: ApiCluster, api: httpx.Client, pool: str) -> None:
    keys = cluster.keys
    garbage = [keys.engine("garbage"), keys.operation("op-9-garbage"), keys.event("999-garbage"),
               keys.member("garbage", "m"), keys.version("policy", 10**6), keys.step_metrics(10**6),
               keys.alert("g/g/g"), keys.pool_spec("garbage")]
    for key in garbage:
        cluster.etcd.put(key, b"not json")
    cluster.etcd.put(keys.operation("op-9-newer"), b'{"id":"op-9-newer","kind":"of a newer release","target":"x",'
                                                   b'"state":"of a newer release"}')
    cluster.etcd.put(keys.operation("op-9-odd"), b'{"id":"op-9-odd","kind":"scale","target":[1],"not json":0}')
    for odd in ("operations/op-9-odd", "operations/op-9-garbage", "engines/garbage", "pools/garbage"):
        problem(api.get(odd), 404, "not-found")
    problem(api.patch("pools/garbage", json={"desired": 1}, headers={"If-Match": "*"}), 404, "not-found")
    problem(api.delete("engines/garbage"), 409, "conflict")
    try:
        for path in ("engines", "operations", "operations?state=running", "events", "members?role=garbage", "versions",
                     "steps", "alerts"):
            assert "not json" not in str(items(api, path)), path
        with Reader(cluster.replicas.job_url("a")) as reader:
            first = reader.next()
            assert "op-9-newer" in {o["id"] for o in first.data["operations"]}, "of an unknown state"
            cluster.etcd.put(garbage[0], b"[")
            cluster.etcd.put(keys.engine("after"), Engine(id="after", pool=pool, state=EngineState.READY,
                                                              epoch=1).encode())
            reader.until(lambda f: f.data["kind"] == "engine" and f.data["id"] == "after")
    finally:
        for key in garbage:
            cluster.etcd.delete(key)
        cluster.etcd.delete(keys.operation("op-9-newer"))
