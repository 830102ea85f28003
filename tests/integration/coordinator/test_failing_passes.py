"""Unreadable records and failing reconcile passes, on a real etcd: the leader continues, or another one takes over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.coordinators import AUTH, Replicas
from support.etcd_server import EtcdServers
from support.leader import Leader
from support.waiting import wait_until

from elastic_rl.config import Config, parse
from elastic_rl.coordinator.alerts.state_machine import Alert, Phase
from elastic_rl.errors import EtcdFull
from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.records import Engine, EngineState, Operation, OperationKind, OperationState, PoolSpec, PoolStatus
from elastic_rl.net import http_client
from elastic_rl.telemetry import metrics

POOL = "rollout"
Lead = Callable[..., Leader]


@pytest.fixture
def cfg() -> Config:
    return parse({"job": "x", "coordinator": {"lease_ttl_s": 2, "reconcile_interval_s": 0.1, "replicas": 1,
                                              "reconcile_deadline_s": 2.0},
                  "etcd": {"retry_budget_s": 1.0, "reclaim_space": False}})


@pytest.fixture
def lead(etcd: EtcdClient, keys: Keys, cfg: Config) -> Iterator[Lead]:
    made: list[Leader] = []

    def make(name: str, **more: Any) -> Leader:
        made.append(Leader(etcd, keys, cfg, name, **more))
        return made[-1]

    etcd.put(keys.pool_spec(POOL), PoolSpec(name=POOL, desired=1).encode())
    etcd.put(keys.pool_status(POOL), PoolStatus(name=POOL, ready=1, starting=0, draining=0).encode())
    etcd.put(keys.engine("e0"), Engine(id="e0", pool=POOL, state=EngineState.READY, epoch=1).encode())
    yield make
    for leader in made:
        leader.close()


def alerts_of(etcd: EtcdClient, keys: Keys, kind: str) -> dict[str, Phase]:
    """Phase of the alerts of a kind, by subject."""
    found = (Alert.decode(kv.value) for kv in etcd.range(keys.alerts_prefix() + kind)[0])
    return {alert.subject: alert.phase for alert in found}


def scale(leader: Leader, etcd: EtcdClient, keys: Keys) -> None:
    """Begins a scale-out, has the engine appear, and sees that the leader ends the operation."""
    n = etcd.count(keys.engines_prefix())
    op = leader.operations.scale(POOL, 2, by="ann")
    etcd.put(keys.engine(f"new-{n}"), Engine(id=f"new-{n}", pool=POOL, state=EngineState.READY, epoch=1).encode())
    wait_until(lambda: leader.operation(op.id).state is OperationState.SUCCEEDED,
               what="the end of the operation")


def test_unreadable_records_are_skipped_with_an_alert_each(lead: Lead, etcd: EtcdClient, keys: Keys) -> None:
    bad = [keys.engine("broken"), keys.member("rollout", "broken"), keys.operation("broken"), keys.fault("broken"),
           keys.restart("broken"), keys.dcs_node("broken"), keys.registry_entry("rollout", "broken"),
           keys.pool_status("broken"), keys.silence("broken")]
    for key in bad:
        etcd.put(key, b'{"id": "broken"')
    misplaced = keys.engine("elsewhere")
    etcd.put(misplaced, Engine(id="e7", pool=POOL, state=EngineState.READY, epoch=1).encode())
    leader = lead("a")
    scale(leader, etcd, keys)
    subjects = {key.removeprefix(keys.root) for key in [*bad, misplaced]}
    wait_until(lambda: alerts_of(etcd, keys, "record.unreadable") == dict.fromkeys(subjects, Phase.FIRING),
               what="an alert for each record")
    for key in bad:
        etcd.delete(key)
    etcd.put(misplaced, Engine(id="elsewhere", pool=POOL, state=EngineState.DEAD, epoch=1).encode())
    wait_until(lambda: Phase.FIRING not in alerts_of(etcd, keys, "record.unreadable").values(),
               what="the end of the alerts")
    assert leader.health.problem() == ""


def test_unreadable_records_of_the_leader_itself_are_replaced(lead: Lead, etcd: EtcdClient, keys: Keys) -> None:
    events.emit(etcd, keys, event_kinds.POOL_SCALED, "s", "m")
    own = [keys.event_cursor(), keys.leadership(), keys.leader_heartbeat(), keys.progress_intervals("rollout")]
    for key in own:
        etcd.put(key, b"garbage")
    etcd.put(keys.event("999999999999999-zz"), b"garbage")
    leader = lead("a")
    scale(leader, etcd, keys)
    wait_until(lambda: alerts_of(etcd, keys, "record.unreadable") == {"events/999999999999999-zz": Phase.FIRING},
               what="the alert about the event")
    assert all(etcd.get(key).value != b"garbage" for key in own[:3])


def test_values_of_a_newer_release_are_tolerated_and_kept(lead: Lead, etcd: EtcdClient, keys: Keys) -> None:
    etcd.put(keys.engine("future"), b'{"id":"future","pool":"rollout","state":"hibernating","epoch":1,"depth":3}')
    etcd.put(keys.operation("op-future"), Operation(id="op-future", kind=OperationKind.SCALE, target=f"pools/{POOL}"
                                                    ).encode().replace(b'"scale"', b'"defragment"'))
    etcd.put(keys.operation("op-odd"), Operation(id="op-odd", kind=OperationKind.SCALE, target=f"pools/{POOL}",
                                                 params={"desired": "many"}, deadline_at=1e12).encode())
    leader = lead("a")
    scale(leader, etcd, keys)
    assert "parameters" in wait_until(lambda: leader.operation("op-odd").error, what="its end")
    assert leader.operation("op-future").kind == "defragment"
    assert not leader.operation("op-future").state.ended
    assert Engine.decode(etcd.get(keys.engine("future")).value).state == "hibernating"
    assert alerts_of(etcd, keys, "record.unreadable") == {} and leader.health.problem() == ""


def test_failing_stage_gives_an_alert_and_the_others_run(lead: Lead, etcd: EtcdClient, keys: Keys,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    leader = lead("a")
    failures = leader.reconciler._failures

    def broken(snapshot: object) -> None:
        raise ValueError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(failures, "act", broken)
        scale(leader, etcd, keys)
        wait_until(lambda: alerts_of(etcd, keys, "reconcile.failing") == {"failure_policy": Phase.FIRING},
                   what="the alert about the stage")
    wait_until(lambda: Phase.FIRING not in alerts_of(etcd, keys, "reconcile.failing").values(),
               what="the end of the alert")


def test_leader_whose_passes_fail_resigns_and_another_decides(
        lead: Lead, etcd: EtcdClient, keys: Keys, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = lead("a")
    second = lead("b", await_leadership=False)

    def broken() -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(first.reconciler, "reconcile_once", broken)
    second.await_leadership()
    assert not first.election.is_leader and first.health.problem() == "", "a replica that does not lead is ready"
    assert "a bug" in next(r.message for r in caplog.records if "resigns" in r.message)
    scale(second, etcd, keys)


def test_passes_are_counted_by_job_until_its_loop_ends(lead: Lead, etcd: EtcdClient, keys: Keys,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    leader = lead("a")

    def exported() -> bool:
        text = metrics.render().decode()
        return (f'elastic_rl_reconcile_seconds_count{{job_name="{keys.job}"}}' in text
                and f'elastic_rl_reconcile_failures_total{{error="ValueError",job_name="{keys.job}"}}' in text)

    def broken() -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(leader.reconciler, "reconcile_once", broken)
    wait_until(exported, what="the failed passes of the job")
    leader.close()
    assert f'"{keys.job}"' not in metrics.render().decode()


def test_leader_whose_pass_hangs_resigns_and_stays_out_until_it_returns(lead: Lead, etcd: EtcdClient, keys: Keys,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    first = lead("a")
    second = lead("b", await_leadership=False)
    release = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(first.reconciler, "reconcile_once", lambda: release.wait(60))
        second.await_leadership()
        assert not first.health.may_lead()
        scale(second, etcd, keys)
        second.close()
        with pytest.raises(Exception, match="leadership of a"):
            first.await_leadership(timeout_s=3.0)
    release.set()
    first.await_leadership()
    etcd.delete(keys.engine("new-1"))
    scale(first, etcd, keys)


def test_leader_is_not_ready_while_etcd_takes_no_writes_and_keeps_its_term(keys: Keys, tmp_path: Path) -> None:
    """No other replica could do better on a full etcd, which would not even grant a lease for a new term."""
    servers = EtcdServers(tmp_path / "etcd", 1, ["--quota-backend-bytes", str(4 << 20)]).start()
    replicas = Replicas(tmp_path, keys, servers.endpoints, {
        "coordinator": {"reconcile_deadline_s": 3.0}, "etcd": {"retry_budget_s": 1.0, "reclaim_space": False}})
    try:
        replicas.start("a")
        with EtcdClient(servers.endpoints, call_timeout_s=2.0) as etcd:
            term = etcd.get(ClusterKeys(keys.job).leader("a")).create_revision
            with pytest.raises(EtcdFull):
                for n in range(1000):
                    etcd.put(f"/fill/{n}", bytes(50_000))
            url = replicas.urls["a"]

            def refused() -> str:
                answer = http_client.request("GET", f"{url}/readyz", timeout=15)
                return str(answer.json()["detail"]) if "not-reconciling" in answer.text else ""

            assert "EtcdFull" in wait_until(refused, what="a replica that is not ready")
            assert http_client.request("GET", f"{url}/healthz", timeout=15).status_code == 200

            def failures() -> str:
                text = http_client.request("GET", f"{url}/metrics", headers=AUTH, timeout=15).text
                return text if "EtcdFull" in text else ""

            failed = wait_until(failures, what="the failures in the metrics")
            assert "elastic_rl_is_leader 1.0" in failed
            assert etcd.get(ClusterKeys(keys.job).leader("a")).create_revision == term
    finally:
        replicas.close()
        servers.close()
