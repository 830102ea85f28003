"""Alerts over a real etcd and through real Apprise services."""

from __future__ import annotations

import http.server
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import http_servers
from support.coordinators import Replicas
from support.etcd_server import EtcdServers
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.coordinator.alerts import alert_test, receivers, silences
from elastic_rl.coordinator.alerts.alert_test import DeliveryStatus
from elastic_rl.coordinator.alerts.notifier import Notifier
from elastic_rl.coordinator.alerts.receivers import receiver_name
from elastic_rl.coordinator.alerts.state_machine import Alert
from elastic_rl.coordinator.election.election import Election
from elastic_rl.coordinator.election.leader_gap import LeaderGap
from elastic_rl.coordinator.etcd_health import EtcdProbe
from elastic_rl.coordinator.problems import Problem
from elastic_rl.coordinator.reconciler import Reconciler
from elastic_rl.coordinator.records import LastSeen
from elastic_rl.coordinator.snapshot import SnapshotReader
from elastic_rl.errors import EtcdFull
from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.records import DcsNode, Engine, EngineState, JobStatus, Silence, Version, VersionState

pytestmark = pytest.mark.usefixtures("forked_senders")


class Service:
    """A notification service that records what is posted to each of its paths, except those of ``refuses``."""

    def __init__(self) -> None:
        self.got: dict[str, list[str]] = {}
        self.refuses: set[str] = set()
        service = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                path = self.path.strip("/")
                if path not in service.refuses:
                    service.got.setdefault(path, []).append(f"{body['title']}\n{body['message']}")
                self.send_response(500 if path in service.refuses else 200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        http_servers.serve(self.server)

    def url(self, path: str) -> str:
        return f"json://127.0.0.1:{self.server.server_port}/{path}"

    def about(self, path: str, word: str, subject: str = "") -> list[str]:
        return [m for m in self.got.get(path, []) if m.startswith(f"[{word}]") and subject in m]


def _silences(etcd: EtcdClient, keys: Keys) -> list[Silence]:
    return [Silence.decode(kv.value) for kv in etcd.range(keys.silences_prefix())[0]]


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    http_servers.close(made.server)


class Leader:
    """The leader's loop in this process."""

    def __init__(self, etcd: EtcdClient, keys: Keys, **alerts: Any) -> None:
        self.cfg = config.parse({"job": keys.job, "alerts": {"group_wait_s": 0.2, "send_timeout_s": 10.0, **alerts},
                                 "coordinator": {"reconcile_interval_s": 0.2}})
        self.notifier = Notifier(keys.job, self.cfg.alerts)
        self.election = Election(etcd, ClusterKeys(keys.job), "a", "http://a", 3).start()
        self.reconciler = Reconciler(etcd, keys, self.cfg, self.election, self.notifier)
        self.reconciler.start()
        wait_until(lambda: self.election.is_leader, what="the leadership")

    def close(self) -> None:
        self.election.stop()
        self.reconciler.stop()
        self.notifier.close()


def known(etcd: EtcdClient, keys: Keys) -> list[Alert]:
    return [Alert.decode(kv.value) for kv in etcd.range(keys.alerts_prefix())[0]]


def registered(etcd: EtcdClient, keys: Keys, name: str) -> str:
    """Registers a DCS node and waits until the leader knows it. Returns the key to delete for the node to be dead."""
    node = DcsNode(id=name, host="h", port=1, pid=1, arena_path="/x", arena_bytes=100)
    etcd.put(keys.dcs_node(name), node.encode())
    wait_until(lambda: etcd.get(keys.registry_entry("dcs", name)), what="the registry entry")
    return keys.dcs_node(name)


def test_simultaneous_deaths_are_one_notification_across_leaders(
        etcd: EtcdClient, keys: Keys, etcd_servers: EtcdServers, service: Service, tmp_path: Path) -> None:
    hanging = socket.create_server(("127.0.0.1", 0))  # accepts, and never answers
    replicas = Replicas(tmp_path, keys, etcd_servers.endpoints, {"alerts": {
        "urls": [f"json://127.0.0.1:{hanging.getsockname()[1]}", service.url("chat")], "send_timeout_s": 10.0,
        "routes": [{"url": service.url("pager"), "tags": ["dcs"]}, {"url": service.url("none"), "tags": ["info"]}]}})
    try:
        replicas.start("a", "b")
        node = DcsNode(id="n", host="h", port=1, pid=1, arena_path="/x", arena_bytes=1)
        lease, names = etcd.grant(60), [f"n{i:02}" for i in range(12)]
        for name in names:
            etcd.put(keys.dcs_node(name), node.replace(id=name).encode(), lease=lease)
        wait_until(lambda: etcd.count(f"{keys.registry_prefix()}dcs/") == 12,
                           what="the registry entries")
        etcd.revoke(lease)
        for path in ("chat", "pager"):
            wait_until(lambda p=path: service.about(p, "FIRING", "dcs.dead"), what="the alerts")
        old = replicas.leader()
        replicas.kill(old)
        for name in names:
            etcd.put(keys.dcs_node(name), node.replace(id=name, pid=2).encode())
        for path in ("chat", "pager"):
            wait_until(lambda p=path: service.about(p, "RESOLVED", "dcs.dead"), what="the ends")
            got = service.got[path]
            # A leader that died before it wrote the delivery down sends the same message again.
            fired = {m for m in got if m.startswith("[FIRING]") and "dcs.dead" in m}
            (ids,) = {re.search(r"ids=(\S+)", m)[1] for m in fired}
            assert len(set(ids.split(","))) == 12 and len({re.search(r"message=(\w+)", m)[1] for m in fired}) == 1
            ends = "\n".join(service.about(path, "RESOLVED", "dcs.dead"))
            assert set(re.findall(r"[0-9a-f]{12}", re.search(r"ids=(\S+)", ends)[1])) == set(ids.split(","))
        wait_until(lambda: service.about("chat", "FIRING", f"coordinator.dead {old}"),
                             what="the dead leader's own")
        assert "coordinator.dead" not in "".join(service.got["pager"]) and not service.got.get("none")
    finally:
        replicas.close()
        hanging.close()


def test_finished_job_is_notified_once_over_passes_and_a_change_of_the_leader(
        etcd: EtcdClient, keys: Keys, service: Service) -> None:
    etcd.put(keys.job_status(), JobStatus(phase="finished", step=3).encode())
    for n in range(3):
        leader = Leader(etcd, keys, urls=[service.url("chat")])
        try:
            wait_until(lambda: service.about("chat", "EVENT", "job.finished"), what="the event")
            for _ in range(2):  # each takes several passes from its event to its notification
                name = f"queue-{n}-{len(service.got['chat'])}"
                events.emit(etcd, keys, event_kinds.QUEUE_REPLACED, name, "m")
                wait_until(lambda x=name: service.about("chat", "EVENT", x), what="the next")
        finally:
            leader.close()
    assert len(service.about("chat", "EVENT", "job.finished")) == 1
    assert [a.phase for a in known(etcd, keys) if a.kind == "job.finished"] == ["firing"]


def test_silence_holds_alerts_back_and_a_test_reports_delivery_by_receiver(
        etcd: EtcdClient, keys: Keys, service: Service) -> None:
    service.refuses.add("broken")
    leader = Leader(etcd, keys, urls=[service.url("chat")], routes=[
        {"url": service.url("broken"), "tags": ["nothing"], "name": "broken"},
        {"url": service.url("quiet"), "tags": ["nothing"]}])
    try:
        with pytest.raises(Problem) as e:
            silences.create_silence(etcd, keys, leader.election, duration_s=0, kind="", by="ada")
        assert e.value.status == 422 and [x["pointer"] for x in e.value.members["errors"]] == ["/duration_s", "/kind"]
        silence = silences.create_silence(etcd, keys, leader.election, kind="dcs.*", subject="n*", duration_s=3600,
                                          by="ada", comment="moving")
        assert _silences(etcd, keys) == [silence]
        for name in ("n0", "m0"):
            etcd.delete(registered(etcd, keys, name))
        wait_until(lambda: service.about("chat", "FIRING", "dcs.dead m0"), what="the other")
        assert {a.subject: a.silenced_by for a in known(etcd, keys)} == {"n0": silence.id, "m0": ""}

        test_id = alert_test.begin(etcd, keys, leader.election, by="ada")

        def delivery() -> dict[str, tuple[DeliveryStatus, bool]]:
            found = alert_test.result(etcd, keys, receivers.names(leader.cfg.alerts), test_id)
            return {r.receiver: (r.status, bool(r.detail)) for r in found.receivers}

        wait_until(lambda: all(s is not DeliveryStatus.WAITING for s, _ in delivery().values()),
                           what="an attempt for each receiver")
        quiet, chat = receiver_name(service.url("quiet")), receiver_name(service.url("chat"))
        assert delivery() == {
            chat: (DeliveryStatus.DELIVERED, False), quiet: (DeliveryStatus.DELIVERED, False),
            "broken": (DeliveryStatus.FAILED, True)}
        assert [len(service.about(p, "TEST")) for p in ("chat", "quiet", "broken")] == [1, 1, 0]

        assert not service.about("chat", "FIRING", "n0")
        silences.delete_silence(etcd, keys, leader.election, silence.id, by="ada")
        wait_until(lambda: service.about("chat", "FIRING", "dcs.dead n0"), what="the alert")
        with pytest.raises(Problem) as e:
            silences.delete_silence(etcd, keys, leader.election, silence.id)
        assert e.value.status == 404
        kinds = [x.kind for x in events.recent(etcd, keys)]
        assert kinds.count("alerts.silenced") == kinds.count("alerts.unsilenced") == 1
    finally:
        leader.close()
    with pytest.raises(Problem) as e:
        alert_test.begin(etcd, keys, leader.election)
    assert e.value.kind == "no-leader"


def test_lagging_engine_and_durable_store_are_read_from_etcd(etcd: EtcdClient, keys: Keys, service: Service) -> None:
    versions = [Version(stream="policy", number=n, state=VersionState.COMMITTED, epoch=1, committed_at=1000.0 * n)
                for n in (1, 2, 3)]
    for version in versions:
        etcd.put(keys.version("policy", version.number), version.encode())
    etcd.put(keys.stream_head("policy"), versions[-1].encode())
    etcd.put(keys.durable("policy", 2), b"{}")
    etcd.put(keys.job_status(), JobStatus(phase="rl").encode())
    engine = Engine(id="e1", pool="rollout", state=EngineState.READY, epoch=1, version=1)
    cfg = config.parse({"job": keys.job, "dcs": {"durable_url": "file:///x", "durable_streams": ["policy"]}})
    etcd.put(keys.engine("e1"), engine.encode())
    behind = SnapshotReader(etcd, keys, cfg).read()
    assert behind.durable == {"policy": 2} and behind.committed == {"policy": {1: 1000.0, 2: 2000.0, 3: 3000.0}}
    etcd.put(keys.durable("policy", 3), b"{}")
    etcd.put(keys.engine("e1"), engine.replace(version=3).encode())
    etcd.put(keys.engine("e2"), engine.replace(id="e2", state=EngineState.DEAD).encode())
    assert SnapshotReader(etcd, keys, cfg).read().committed == {}, "nothing that serves lags"
    etcd.delete(keys.engine("e2"))

    etcd.put(keys.engine("e1"), engine.encode())
    leader = Leader(etcd, keys, urls=[service.url("chat")])
    try:
        wait_until(lambda: service.about("chat", "FIRING", "engine.lagging e1"), what="alert")
        etcd.put(keys.engine("e1"), engine.replace(version=3).encode())
        wait_until(lambda: service.about("chat", "RESOLVED", "engine.lagging e1"), what="end")
    finally:
        leader.close()


def test_leader_deletes_a_silence_that_has_ended(etcd: EtcdClient, keys: Keys) -> None:
    leader = Leader(etcd, keys)
    try:
        silences.create_silence(etcd, keys, leader.election, duration_s=0.5)
        wait_until(lambda: not _silences(etcd, keys), what="its end")
    finally:
        leader.close()


def test_next_leader_reports_how_long_there_was_none_unless_the_last_one_closed(etcd: EtcdClient, keys: Keys) -> None:
    now = [1000.0]

    def lead(name: str) -> Election:
        """One pass of a leader, which then vanishes."""
        with_it = Election(etcd, ClusterKeys(keys.job), name, "", 3).start()
        wait_until(lambda: with_it.is_leader, what="the leadership")
        LeaderGap(etcd, keys, with_it, 15.0, lambda c, ops: etcd.txn(c, ops).succeeded, lambda: now[0]).update()
        with_it.stop()
        return with_it

    def gaps() -> list[float]:
        return [e.data["seconds"] for e in events.recent(etcd, keys) if e.kind == "leader.absent"]

    there = LastSeen(role="coordinator", id="a", incarnation="1", first_seen=1.0)
    etcd.put(keys.registry_entry("coordinator", "a"), there.encode())
    lead("a")
    now[0] += 5.0
    lead("b")
    assert gaps() == []
    etcd.put(keys.registry_entry("coordinator", "b"), there.replace(id="b").encode())
    now[0] += 60.0
    lead("a")
    assert gaps() == [60.0]
    etcd.delete(keys.registry_entry("coordinator", "a"))  # it deregistered
    now[0] += 90.0
    lead("b")
    assert gaps() == [60.0]


def test_probe_finds_a_silent_member_and_a_full_etcd(tmp_path: Path) -> None:
    servers = EtcdServers(tmp_path, 3, ["--quota-backend-bytes", "400000"]).start()
    try:
        with EtcdClient(servers.endpoints, call_timeout_s=2.0) as etcd:
            probe = EtcdProbe(etcd, Keys("t"))
            try:
                wait_until(lambda: probe.health().members, what="the first probe")
                assert not [m for m in probe.health().members if m.error or m.alarms]
                with pytest.raises(EtcdFull, match="space"):
                    for n in range(1000):  # its size is known a moment late
                        etcd.put(f"/fill/{n}", bytes(50_000))
                wait_until(lambda: max(m.db_bytes for m in probe.health().members) > 300_000,
                                     what="the size")
                wait_until(lambda: any("NOSPACE" in m.alarms for m in probe.health().members),
                                     what="the alarm")
                servers.kill(1)
                wait_until(lambda: [m.endpoint for m in probe.health().members if m.error]
                                     == [servers.endpoints[1]], what="the silence")
            finally:
                probe.close()
    finally:
        servers.close()
