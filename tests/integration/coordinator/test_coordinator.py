"""Coordinator replicas as processes, on a real etcd."""

from __future__ import annotations

import http.server
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import http_servers
from support.coordinators import AUTH, Replicas, write_tokens
from support.waiting import wait_until

from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import Membership
from elastic_rl.etcd.records import DcsNode, Engine, EngineState, Event, PoolSpec, PoolStatus, Severity
from elastic_rl.net import http_client
from elastic_rl.net.addresses import free_port

Start = Callable[..., Replicas]


@pytest.fixture
def start(etcd_servers: Any, keys: Keys, etcd: EtcdClient, tmp_path: Path) -> Iterator[Start]:
    made: list[Replicas] = []

    def make(*names: str, **settings: Any) -> Replicas:
        etcd.put(keys.pool_spec("rollout"), PoolSpec(name="rollout", desired=2).encode())
        made.append(Replicas(tmp_path, keys, etcd_servers.endpoints, settings))
        made[-1].start(*names)
        return made[-1]

    yield make
    for replicas in made:
        replicas.close()


def events_of(etcd: EtcdClient, keys: Keys, kind: str, subject: str = "") -> list[Event]:
    return [e for e in events.recent(etcd, keys, 1000) if e.kind == kind and subject in ("", e.subject)]


def items(api: httpx.Client, what: str) -> list[dict[str, Any]]:
    return list(api.get(what).json()["items"])


def alerts(replicas: Replicas, name: str = "a") -> list[dict[str, Any]]:
    with replicas.client(name) as api:
        return items(api, "alerts")


def problem(response: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert body["type"] == f"urn:elastic-rl:problem:{kind}" and body["status"] == status and body["detail"]
    return body


def test_api_serves_reads_and_changes_and_explains_refusals(start: Start, etcd: EtcdClient, keys: Keys) -> None:
    replicas = start("a")
    etcd.put(keys.engine("e1"), Engine(id="e1", pool="rollout", state=EngineState.READY, epoch=1).encode())
    etcd.put(keys.pool_status("rollout"), PoolStatus(name="rollout", ready=2, starting=0, draining=0).encode())
    with replicas.client("a") as api:
        job = api.get("").json()
        assert job["name"] == keys.job and job["leader"]["replica"] == "a" and job["status"] is None
        assert [p["name"] for p in items(api, "pools")] == ["rollout"]
        assert [e["id"] for e in items(api, "engines")] == ["e1"]
        assert api.get("engines/e1").json()["state"] == "ready"
        assert items(api, "versions") == []
        assert [m["role"] for m in items(api, "members")] == ["coordinator"]
        assert {e["kind"] for e in items(api, "events")} <= {"leader.elected"}
        problem(api.get("engines/none"), 404, "not-found")
        problem(api.get("pools/none"), 404, "not-found")
        problem(api.get("nothing"), 404, "not-found")
        assert api.get("/openapi.json").status_code == 200

        pool = api.get("pools/rollout")
        tag = pool.headers["etag"]
        assert pool.json()["desired"] == 2 and pool.json()["ready"] == 2 and pool.json()["etag"] == tag
        patched = api.patch("pools/rollout", json={"desired": 3}, headers={"If-Match": tag})
        assert patched.status_code == 200 and patched.json()["desired"] == 3
        assert patched.headers["etag"] != tag
        assert api.get("pools/rollout").headers["etag"] == patched.headers["etag"]
        problem(api.patch("pools/rollout", json={"desired": 4}, headers={"If-Match": tag}), 412,
                "precondition-failed")
        problem(api.patch("pools/rollout", json={"desired": 4}), 428, "precondition-required")
        problem(api.patch("pools/none", json={"desired": 4}, headers={"If-Match": "*"}), 404, "not-found")
        for absurd in (-1, 10**6, 10**30, 0, "3", 2.5, True, None):
            problem(api.patch("pools/rollout", json={"desired": absurd}, headers={"If-Match": "*"}), 422, "invalid")
        problem(api.patch("pools/rollout", json={}, headers={"If-Match": "*"}), 422, "invalid")
        problem(api.patch("pools/rollout", content=b"{", headers={
            "If-Match": "*", "content-type": "application/json"}), 400, "malformed")
        scaled = api.post("pools/rollout/scale", json={"desired": 2})
        assert scaled.status_code == 202 and scaled.json()["params"] == {"desired": 2, "previous": 3}
        assert api.get(scaled.headers["location"]).json()["id"] == scaled.json()["id"]
        scalings = [(e.data["previous"], e.data["desired"]) for e in events_of(etcd, keys, "pool.scaled")]
        assert scalings == [(2, 3), (3, 2)]
        scraped = api.get("/metrics").text
        assert f'elastic_rl_pool_desired{{job_name="{keys.job}",pool="rollout"}} 2.0' in scraped
        assert "elastic_rl_is_leader 1.0" in scraped
        assert re.search(r'api_requests_total\{.*route="/v1/jobs/\{job\}/pools/\{name\}".*status="412"', scraped)


def test_role_of_a_token_limits_its_requests(start: Start, tmp_path: Path, keys: Keys) -> None:
    write_tokens(tmp_path / keys.job / "cluster" / "tokens.json", eve="viewer", ada="operator")
    replicas = start("a")

    def call(method: str, token: str | None, **more: Any) -> httpx.Response:
        headers = {"If-Match": "*"} | ({"Authorization": f"Bearer {token}"} if token else {})
        return http_client.request(method, f"{replicas.job_url('a')}/pools/rollout", headers=headers, timeout=10,
                                   **more)

    problem(call("GET", None), 401, "unauthorized")
    assert "Bearer" in call("GET", "wrong").headers["www-authenticate"]
    problem(call("GET", "wrong"), 401, "unknown-token")
    assert call("GET", "eve").status_code == 200
    problem(call("PATCH", "eve", json={"desired": 3}), 403, "forbidden")
    assert call("PATCH", "ada", json={"desired": 3}).json()["desired"] == 3
    assert http_client.request("GET", f"{replicas.urls['a']}/healthz").status_code == 200


def test_follower_forwards_writes_and_leads_after_the_leader_is_killed(start: Start, etcd: EtcdClient, keys: Keys
                                                                          ) -> None:
    replicas = start("a", "b")
    old = replicas.leader()
    new = "b" if old == "a" else "a"

    def patch(desired: int, etag: str = "*") -> httpx.Response:
        """The answer of a leader; a busy one answers too late (504), and then the same change is asked for again."""
        def answered() -> httpx.Response | None:
            answer = http_client.request("PATCH", f"{replicas.job_url(new)}/pools/rollout", json={"desired": desired},
                                         headers={**AUTH, "If-Match": etag}, timeout=60)
            return answer if answer.status_code < 500 else None

        return wait_until(answered, what="an answer of the leader")

    answer = patch(5)
    assert answer.status_code == 200 and answer.headers["etag"], answer.text
    assert events_of(etcd, keys, "pool.scaled")[-1].data["replica"] == old
    problem(patch(6, '"1"'), 412, "precondition-failed")
    replicas.kill(old)
    assert replicas.leader(not_=old) == new
    wait_until(lambda: events_of(etcd, keys, "coordinator.dead", old), what="the death's event")
    wait_until(lambda: len(events_of(etcd, keys, "leader.elected", new)) == 1, what="its event")
    assert len(events_of(etcd, keys, "leader.elected", old)) == 1
    assert patch(2).status_code == 200
    wait_until(lambda: [(a["kind"], a["subject"], a["phase"]) for a in alerts(replicas, new)]
               == [("coordinator.dead", old, "firing")], what="the alert of the death")
    replicas.start(old)
    wait_until(lambda: not alerts(replicas, new), what="the end of the alert")
    assert len(events_of(etcd, keys, "coordinator.returned", old)) == 1
    assert len(events_of(etcd, keys, "coordinator.dead")) == 1


def test_stopped_replica_hands_over_the_leadership_without_an_alert(start: Start, etcd: EtcdClient, keys: Keys) -> None:
    replicas = start("a", "b")
    old = replicas.leader()
    process = replicas.running[old]
    replicas.kill(old, signal.SIGTERM)
    assert process.wait(60) == 0
    del replicas.running[old]
    assert etcd.get(keys.member("coordinator", old)) is None, "it waits for the end of its lease"
    replicas.leader(not_=old)
    wait_until(lambda: len(events_of(etcd, keys, "leader.elected")) == 2, what="the new leader")
    replicas.close()
    assert not events_of(etcd, keys, "coordinator.dead")


class Receiver:
    """An alert receiver: what was posted to it."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.got.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"json://127.0.0.1:{self.server.server_port}"
        http_servers.serve(self.server)

    def close(self) -> None:
        http_servers.close(self.server)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


def test_death_without_a_leader_is_reported_and_resolved_once(start: Start, etcd: EtcdClient, keys: Keys,
                                                                etcd_servers: Any,
                                                                receiver: Receiver) -> None:
    hanging = socket.create_server(("127.0.0.1", 0))  # accepts, and never answers
    replicas = start("a", alerts={"urls": [f"json://127.0.0.1:{hanging.getsockname()[1]}", receiver.url],
                                  "send_timeout_s": 10.0}, coordinator={"replicas": 1})

    def told(notification: dict[str, Any]) -> str:
        return f"{notification['title']}\n{notification['message']}"

    node = DcsNode(id="n0", host="h", port=1, pid=1, arena_path="/x", arena_bytes=1)
    lease = etcd.keepalive(2)
    etcd.put(keys.dcs_node("n0"), node.encode(), lease=lease.id)
    wait_until(lambda: etcd.get(keys.registry_entry("dcs", "n0")), what="the registry entry")
    replicas.kill("a")
    lease.close()
    assert etcd.get(keys.dcs_node("n0")) is None
    events.emit(etcd, keys, event_kinds.COORDINATOR_RESTARTED, "a", "a ended and was started again",
                severity=Severity.WARNING, started_at=time.time())
    replicas.start("a")
    wait_until(lambda: any("dcs.dead" in told(g) for g in receiver.got), what="the alert")
    assert len(events_of(etcd, keys, "dcs.dead")) == 1
    etcd.put(keys.dcs_node("n0"), node.replace(pid=2).encode())
    wait_until(lambda: any("RESOLVED" in g["title"] and "dcs" in g["title"] for g in receiver.got),
                         what="the end")
    about = [told(g) for g in receiver.got if "dcs.dead" in told(g)]
    assert ["FIRING" in about[0], "RESOLVED" in about[-1], len(about)] == [True, True, 2]
    told_of = [re.search(r"dcs\.dead n0.*?id=(\w+)", text, re.DOTALL) for text in about]
    assert len({m[1] for m in told_of}) == 1
    assert events_of(etcd, keys, "coordinator.dead", "a")
    assert sum(told(g).count("coordinator.restarted a") for g in receiver.got) == 1, "by the word of its host"
    assert "coordinator.dead" not in "".join(map(told, receiver.got)), "a second alert of one death"
    hanging.close()


def test_closed_members_are_not_dead_and_a_dead_engine_is_reported_once(start: Start, etcd: EtcdClient,
                                                                                keys: Keys
                                                                                ) -> None:
    replicas = start("a")
    engine = Engine(id="e1", pool="rollout", state=EngineState.READY, epoch=1)
    etcd.put(keys.engine("e1"), engine.encode())
    clean = Membership(etcd, keys, "actor", "actor-1", ttl_s=2).start()
    lease = etcd.keepalive(2)
    clean_seen = keys.registry_entry("actor", "actor-1")
    from elastic_rl.etcd.records import Member
    etcd.put(keys.member("engine", "e1"), Member(role="engine", id="e1", pid=7, host="h", incarnation="i").encode(),
              lease=lease.id)
    wait_until(lambda: etcd.get(clean_seen) and etcd.get(keys.registry_entry("engine", "e1")),
                         what="both sightings")
    clean.close()
    assert etcd.get(clean_seen) is None
    lease.close()
    wait_until(lambda: events_of(etcd, keys, "engine.dead"), what="the death's event")
    assert Engine.decode(etcd.get(keys.engine("e1")).value).state is EngineState.DEAD
    events.emit(etcd, keys, event_kinds.ENGINE_REPLACED, "e1", "its driver saw it too", severity=Severity.WARNING,
                incarnation="i")
    wait_until(lambda: len(alerts(replicas)) == 1, what="the alert")
    assert len(events_of(etcd, keys, "engine.dead")) == 1 and not events_of(etcd, keys, "actor.dead")
    # A runner that reports its server's death and then closes is told once as well.
    runner = Membership(etcd, keys, "engine", "e2", ttl_s=2).start()
    wait_until(lambda: etcd.get(keys.registry_entry("engine", "e2")), what="the registry entry")
    events.emit(etcd, keys, event_kinds.ENGINE_DEAD, "e2", "server died", severity=Severity.ERROR,
                incarnation=runner.incarnation)
    runner.close()
    wait_until(lambda: {a["subject"] for a in alerts(replicas)} == {"e1", "e2"}, what="its alert")
    assert len(events_of(etcd, keys, "engine.dead", "e2")) == 1


def test_engine_with_outlier_weights_is_quarantined_and_reported_once(start: Start, etcd: EtcdClient, keys: Keys
                                                                             ) -> None:
    def put(name: str, checksum: str) -> None:
        etcd.put(keys.engine(name), Engine(id=name, pool="rollout", state=EngineState.READY, epoch=1, version=3,
                                            layout="float32/tp1", checksum=checksum).encode())

    def states() -> dict[str, EngineState]:
        return {e.id: e.state for kv in etcd.range(keys.engines_prefix())[0] if (e := Engine.decode(kv.value))}

    put("e1", "aa")
    put("e2", "bb")
    start("a")
    wait_until(lambda: events_of(etcd, keys, "leader.elected"), what="a leader")
    put("e3", "aa")
    wait_until(lambda: events_of(etcd, keys, "engine.quarantined"), what="the event")
    assert states() == {"e1": EngineState.READY, "e2": EngineState.QUARANTINED, "e3": EngineState.READY}
    put("e4", "aa")
    wait_until(lambda: etcd.get(keys.event_cursor()), what="another look")
    assert [e.subject for e in events_of(etcd, keys, "engine.quarantined")] == ["e2"]


def read_stream(url: str, count: int, headers: dict[str, str] | None = None) -> list[tuple[int, str]]:
    """The first ``count`` events of a stream as (id, event)."""
    got: list[tuple[int, str]] = []
    with http_client.stream("GET", url, headers={**AUTH, "Accept": "text/event-stream", **(headers or {})},
                      timeout=httpx.Timeout(15)) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        number = 0
        for line in response.iter_lines():
            if line.startswith("id: "):
                number = int(line[4:])
            elif line.startswith("event: "):
                got.append((number, line[7:]))
                if len(got) == count:
                    break
    return got


def test_event_stream_resumes_from_a_revision_on_another_replica(start: Start, etcd: EtcdClient, keys: Keys) -> None:
    replicas = start("a", "b")
    wait_until(lambda: events_of(etcd, keys, "leader.elected"), what="the first event")
    kinds = [event_kinds.POOL_SCALED, event_kinds.POOL_REMOVED, event_kinds.ALERTS_SILENCED,
             event_kinds.ALERTS_UNSILENCED]
    for kind in kinds[:3]:
        events.emit(etcd, keys, kind, "s", "m")
    first = read_stream(f"{replicas.job_url('a')}/events", 3)
    assert [k for _, k in first] == ["leader.elected", "pool.scaled", "pool.removed"]
    threading.Timer(0.5, lambda: events.emit(etcd, keys, kinds[3], "s", "m")).start()
    rest = read_stream(f"{replicas.job_url('b')}/events", 2, {"Last-Event-ID": str(first[-1][0])})
    assert [k for _, k in rest] == ["alerts.silenced", "alerts.unsilenced"]
    assert [n for n, _ in first + rest] == sorted({n for n, _ in first + rest})


def test_events_beyond_max_events_are_deleted(start: Start, etcd: EtcdClient, keys: Keys) -> None:
    for n in range(130):
        events.emit(etcd, keys, event_kinds.POOL_SCALED, str(n), "m")
    start("a", coordinator={"max_events": 20})
    wait_until(lambda: etcd.count(keys.events_prefix()) <= 22, what="the trimming")
    assert any(e.subject == "129" for e in events.recent(etcd, keys, 100))


def end(replicas: Replicas, port: int) -> tuple[int, str]:
    """How a replica that cannot run ends: its exit code, and the last message in its log."""
    code = replicas.spawn("a", port).wait(timeout=120)
    return code, json.loads(replicas.log("a").read_text().splitlines()[-1])["message"]


def test_taken_port_and_missing_etcd_have_an_error_that_says_so(etcd_servers: Any, keys: Keys, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, message = end(Replicas(tmp_path, keys, etcd_servers.endpoints), port)
        assert code == 2 and str(port) in message and "coordinator.ports" in message
    nobody = f"127.0.0.1:{free_port()}"
    code, message = end(Replicas(tmp_path, keys, [nobody], {
        "etcd": {"call_timeout_s": 0.3, "retry_budget_s": 1.0}}), free_port())
    assert code == 3 and nobody in message
    code, message = end(Replicas(tmp_path, keys, etcd_servers.endpoints, {"coordinator": {"lease_ttl": 3}}), 0)
    assert code == 2 and "lease_ttl_s" in message


def test_replica_is_alive_but_not_ready_while_etcd_is_stopped(etcd3_cluster: Any, keys: Keys, tmp_path: Path) -> None:
    replicas = Replicas(tmp_path, keys, etcd3_cluster.endpoints)
    try:
        replicas.start("a")
        for i in range(3):
            etcd3_cluster.stop(i)
        with replicas.client("a") as api:
            problem(api.get("/readyz"), 503, "etcd-unavailable")
            problem(api.get("pools"), 503, "etcd-unavailable")
            assert api.get("/healthz").status_code == 200
            assert "elastic_rl_etcd_up 0.0" in api.get("/metrics").text
        for i in range(3):
            etcd3_cluster.cont(i)
        wait_until(lambda: replicas.ready("a"), what="readiness")
        replicas.leader()
    finally:
        replicas.close()
