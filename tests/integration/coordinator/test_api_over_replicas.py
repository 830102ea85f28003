"""The admin API over several replicas: idempotency, streams, TLS, and the client that retries."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from support import http_servers
from support.api_cluster import ApiCluster, Reader, problem
from support.certificates import Authority
from support.coordinators import AUTH, write_tokens
from support.etcd_server import EtcdServers
from support.waiting import wait_until

from elastic_rl.coordinator.api import idempotency, tls
from elastic_rl.coordinator.api.idempotency import Done
from elastic_rl.coordinator.client.admin_client import AdminClient, Changed, NotFound, OperationFailed
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.errors import ConfigError, DeadlineExceeded, EtcdUnavailable
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.etcd.records import Engine, EngineState, Leader, Member, OperationState
from elastic_rl.net import http_client

Build = Callable[..., ApiCluster]


@pytest.fixture
def build(etcd_servers: EtcdServers, tmp_path: Path) -> Iterator[Build]:
    made: list[ApiCluster] = []

    def one(*names: str, before: Callable[[ApiCluster], None] = lambda cluster: None, **settings: Any) -> ApiCluster:
        made.append(ApiCluster(etcd_servers, tmp_path, **settings))
        before(made[-1])
        made[-1].start(*names)
        return made[-1]

    yield one
    for cluster in made:
        cluster.close()


def client_of(cluster: ApiCluster, ca_file: str = "", **options: float) -> AdminClient:
    urls = list(cluster.replicas.urls.values())
    return AdminClient(ClusterInfo(cluster.keys.job, [], urls, str(cluster.replicas.credentials), ca_file),
                       **options)


def test_repeated_request_counts_once_and_streams_resume_under_a_new_leader(build: Build) -> None:
    cluster = build("a", "b")
    old = cluster.replicas.leader()
    new = "b" if old == "a" else "a"
    headers = {**AUTH, "Idempotency-Key": "over-the-change"}

    def scale(replica: str, desired: int) -> httpx.Response:
        return http_client.request("POST", f"{cluster.replicas.job_url(replica)}/pools/rollout/scale",
                                   json={"desired": desired},
                          headers=headers, timeout=15)

    with Reader(cluster.replicas.job_url(old)) as reader:
        assert reader.next().event == "snapshot"
        first = scale(new, 4)  # through the follower
        assert first.status_code == 202
        last = reader.until(lambda f: f.data["kind"] == "operation" and f.data["id"] == first.json()["id"]).id
    cluster.replicas.kill(old)
    assert cluster.replicas.leader(not_=old) == new
    wait_until(lambda: scale(new, 4).status_code == 202, what="the new leader's answer")
    again = scale(new, 4)
    assert again.headers["location"] == first.headers["location"]
    assert again.headers["idempotency-replayed"] == "true"
    assert len(cluster.operations("rollout")) == 1
    problem(scale(new, 5), 422, "idempotency-key-reused")
    with Reader(cluster.replicas.job_url(new), last) as reader:
        assert reader.next().event == "change"
        elected = reader.until(lambda f: f.data["kind"] == "job" and f.data["object"]["leader"])
        assert elected.data["object"]["leader"]["replica"] == new and all(f.event == "change" for f in reader.seen)


def test_last_of_racing_scales_holds_and_every_other_one_is_told_so(build: Build) -> None:
    """Clients of all replicas scale one pool at once: each without a condition, and each with that of the same ETag."""
    cluster = build("a", "b", "c")
    pool = "pools/rollout"
    cluster.replicas.leader()
    with contextlib.ExitStack() as held:
        apis = [held.enter_context(cluster.client(name)) for name in "abc" for _ in range(2)]
        read = wait_until(lambda: apis[0].get(pool).headers.get("etag"), what="the pool")

        def scale(n: int, at_once: threading.Barrier) -> list[httpx.Response]:
            at_once.wait(60)
            conditions = ({"If-Match": read}, {}) if n % 2 else ({}, {"If-Match": read})
            return [apis[n].post(f"{pool}/scale", json={"desired": 3 + 2 * n + i}, headers=headers)
                    for i, headers in enumerate(conditions)]

        at_once = threading.Barrier(len(apis))
        with ThreadPoolExecutor(len(apis)) as clients:
            answers = [answer for future in [clients.submit(scale, n, at_once) for n in range(len(apis))]
                       for answer in future.result()]
        refused = [answer for answer in answers if answer.status_code != 202]
        for answer in refused:
            problem(answer, 412, "precondition-failed")
        assert len(answers) - len(refused) in (6, 7) and len(refused) in (5, 6), "one reader of the ETag may be first"

        ended = wait_until(lambda: (found := {op.id: op for op in cluster.operations("rollout")}) and sum(
            op.state is OperationState.RUNNING for op in found.values()) == 1 and found, what="the end of all but one")
        assert ended.keys() == {answer.json()["id"] for answer in answers if answer not in refused}
        holds, = [op for op in ended.values() if op.state is OperationState.RUNNING]
        begun = cluster.etcd.range(cluster.keys.operations_prefix())[0]
        assert max(begun, key=lambda kv: kv.create_revision).key == cluster.keys.operation(holds.id)
        assert holds.params["desired"] == apis[-1].get(pool).json()["desired"]
        assert all(op.state is OperationState.CANCELLED and "superseded" in op.error
                   for op in ended.values() if op is not holds)


class _Sink(BaseHTTPRequestHandler):
    """Records the Authorization header of every request."""

    received: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.received.append(self.headers.get("Authorization", ""))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_follower_forwards_no_token_to_an_unregistered_url(build: Build) -> None:
    cluster = build("a", "b")
    leader = cluster.replicas.leader()
    follower = "b" if leader == "a" else "a"
    with http_servers.serving(HTTPServer(("127.0.0.1", 0), _Sink)) as sink:
        record = cluster.etcd.get(ClusterKeys(cluster.keys.job).leader(leader))
        assert record is not None
        forged = Leader.decode(record.value).replace(url=f"http://127.0.0.1:{sink.server_port}")
        cluster.etcd.put(record.key, forged.encode(), lease=record.lease)
        with cluster.client(follower) as api:
            answer = api.post("pools/rollout/scale", json={"desired": 3})
    assert _Sink.received == []
    problem(answer, 503, "no-leader")
    assert "registered" in answer.json()["detail"]


def test_leader_deletes_keys_after_a_day(build: Build) -> None:
    def write(cluster: ApiCluster) -> None:
        for name, age_s in (("old", idempotency.KEPT_S + 1), ("young", idempotency.KEPT_S - 3600)):
            done = Done(request="r", location="operations/x", at=time.time() - age_s)
            cluster.etcd.put(cluster.keys.idempotency(name), done.encode())

    cluster = build("a", before=write)
    prefix = cluster.keys.idempotency_prefix()
    wait_until(lambda: cluster.etcd.count(prefix) < 2, what="the trimming")
    assert [kv.key for kv in cluster.etcd.range(prefix)[0]] == [cluster.keys.idempotency("young")]


def test_replicas_and_clients_speak_tls_and_refuse_other_authorities(build: Build, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "cluster")
    mine = authority.issue("replica", hosts=["127.0.0.1"])
    cluster = build("a", "b", coordinator={"tls_cert": str(mine.cert), "tls_key": str(mine.key),
                                         "tls_ca": str(authority.cert)})
    assert all(url.startswith("https://") for url in cluster.replicas.urls.values())
    follower = "b" if cluster.replicas.leader() == "a" else "a"
    ca = tls.trust(str(authority.cert))
    with cluster.client(follower, verify=ca) as api:
        scaled = api.post("pools/rollout/scale", json={"desired": 3})
        assert scaled.status_code == 202, "forwarded to the leader over TLS"
        assert api.get("").json()["leader"]["url"].startswith("https://")
    client = client_of(cluster, ca_file=str(authority.cert))
    assert client.operation(scaled.json()["id"])["target"] == "pools/rollout"
    with Reader(cluster.replicas.job_url(follower), verify=ca) as reader:
        assert reader.next().event == "snapshot"
    for stranger in (tls.trust(""), tls.trust(str(Authority(tmp_path, "other").cert))):
        with pytest.raises(httpx.ConnectError, match="(?i)certificate"):
            http_client.request("GET", f"{cluster.replicas.urls[follower]}/healthz", verify=stranger)
    with pytest.raises(EtcdUnavailable, match="(?i)certificate"):
        client_of(cluster, ca_file=str(tmp_path / "other.pem"), retry_budget_s=0.0).get("")
    with pytest.raises(httpx.HTTPError):
        http_client.request("GET", f"http://{cluster.replicas.urls[follower].removeprefix('https://')}/healthz")
    with pytest.raises(ConfigError, match="tls_ca"):
        tls.trust(str(tmp_path / "none.pem"))


def test_withdrawn_token_ends_its_streams(build: Build, etcd_servers: EtcdServers, tmp_path: Path) -> None:
    cluster = ApiCluster(etcd_servers, tmp_path)
    write_tokens(cluster.replicas.token_table, eve="viewer", bob="viewer")
    try:
        cluster.start("a")
        url, headers = f"{cluster.replicas.job_url('a')}/changes", {"Authorization": "Bearer eve"}
        problem(http_client.request("GET", url, timeout=10), 401, "unauthorized")
        with http_client.stream("GET", url, headers=headers, timeout=30) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("retry")
            write_tokens(cluster.replicas.token_table, bob="viewer")
            assert all(not line.startswith("nothing") for line in lines), "it ends"
        problem(http_client.request("GET", url, headers=headers, timeout=10), 401, "unknown-token")
    finally:
        cluster.close()


def test_renewed_certificates_and_authority_are_used_without_a_restart(build: Build, tmp_path: Path) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    live = {name: tmp_path / f"live-{name}.pem" for name in ("cert", "key", "ca")}

    def install(authority: Authority) -> None:
        identity = authority.issue("replica", hosts=["127.0.0.1"])
        for name, source in (("cert", identity.cert), ("key", identity.key), ("ca", authority.cert)):
            partial = live[name].with_suffix(".partial")
            shutil.copy(source, partial)
            partial.rename(live[name])

    install(old)
    cluster = build("a", "b", coordinator={f"tls_{name}": str(path) for name, path in live.items()})
    follower = "b" if cluster.replicas.leader() == "a" else "a"
    client = client_of(cluster, ca_file=str(live["ca"]))
    assert client.get("")["leader"]
    with cluster.client(follower, verify=tls.trust(str(old.cert))) as api:
        forwarded = api.post("pools/rollout/scale", json={"desired": 3})
        assert forwarded.status_code == 202, "the follower has a connection to the leader with the old authority"
    with Reader(cluster.replicas.job_url(follower), verify=tls.trust(str(old.cert))) as reader:
        assert reader.next().event == "snapshot"
        install(new)

        def renewed(replica: str) -> bool:
            try:
                with cluster.client(replica, verify=tls.trust(str(new.cert))) as api:
                    return api.post("pools/rollout/scale", json={"desired": 4}).status_code == 202
            except httpx.ConnectError:
                return False

        for replica in ("a", "b"):  # the follower's connection to the leader is new as well
            wait_until(lambda r=replica: renewed(r), what=f"the new certificate of {replica}")
        with pytest.raises(httpx.ConnectError, match="(?i)certificate"):
            http_client.request("GET", f"{cluster.replicas.urls[follower]}/healthz", verify=tls.trust(str(old.cert)),
                                timeout=20)
        wait_until(lambda: _answers(client), what="the client, which follows its file too")
        reader.until(lambda f: f.data["kind"] == "pool" and f.data["object"]["desired"] == 4)


def _answers(client: AdminClient) -> bool:
    try:
        return bool(client.get(""))
    except EtcdUnavailable:
        return False


# -- the client --------------------------------------------------------------------------------------------------------
def test_client_applies_a_change_once_over_the_death_of_the_leader(build: Build) -> None:
    cluster = build("a", "b")
    client = client_of(cluster)
    old = cluster.replicas.leader()
    threading.Timer(0.2, cluster.replicas.kill, (old,)).start()
    done = [client.scale("rollout", n)["id"] for n in range(3, 9)]
    wait_until(lambda: old not in cluster.replicas.running, what="the leader's end")
    done.append(client.scale("rollout", 9)["id"])
    assert sorted(op.id for op in cluster.operations("rollout")) == sorted(done), "each one exists once"
    assert client.get("pools/rollout")["desired"] == 9


def test_client_follows_listings_and_operations_and_raises_typed_refusals(build: Build) -> None:
    cluster = build("a")
    client, keys = client_of(cluster), cluster.keys
    cluster.bulk([(keys.member("many", f"{n:04d}"), Member(role="many", id=f"{n:04d}", pid=1, host="h"))
                for n in range(1005)])
    assert [m["id"] for m in client.items("members?role=many")] == [f"{n:04d}" for n in range(1005)]
    assert len(client.items("members?role=many", limit=7)) == 7
    planned = client.scale("rollout", 5, dry_run=True)
    assert planned["params"]["desired"] == 5 and client.get("pools/rollout")["desired"] == 2
    scaled = client.scale("rollout", 5)
    with pytest.raises(DeadlineExceeded, match="cancel it"):
        client.wait(scaled, 0.3)
    over = client.cancel(scaled["id"])
    assert over["state"] == "cancelled"
    with pytest.raises(OperationFailed, match="cancelled by operator"):
        client.wait(scaled, 5.0)
    assert client.patch("pools/rollout", {"desired": 4})["desired"] == 4
    with pytest.raises(NotFound) as missing:
        client.drain_engine("none")
    assert missing.value.kind == "not-found"
    cluster.etcd.put(keys.engine("e1"), Engine(id="e1", pool="rollout", state=EngineState.READY, epoch=1).encode())
    with pytest.raises(Changed, match="drains"):
        client.cancel(client.drain_engine("e1")["id"])
