"""Which host of a cluster has the log of a part, and what is said of one that is away. Pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.coordinator.hosts.view import HostView
from elastic_rl.etcd.cluster_records import Host, HostPhase
from elastic_rl.host.cluster_logs import LogHost, Places, host_of, is_on_several_hosts

PLACES = Places(here="a", run="b", engines={"main-1": "b", "main-12": "c", "other-3": "c", "far-9": ""})
NOW = 1.8e9
HOST = Host(id="b", incarnation="i", address="10.0.0.7", log_port=4711, run_dir="/data/runs", release="1.2")


@pytest.mark.parametrize(("part", "host"), [
    ("train", "b"), ("driver", "b"), ("rollout", "b"), ("router-main", "b"), ("ray-worker", "b"), ("t", "b"),
    ("engine-main-1", "b"), ("runner-main-12", "c"), ("engine-other", "c"),
    ("engine-main", ""), ("engine-far-9", ""), ("engine-gone", ""), ("eng", ""), ("", ""),
    ("dcs-j", "a"), ("agent-0", "a"), ("ray-worker-j", "a"), ("coordinator-0", "a"), ("etcd-0", "a")])
def test_host_of_a_part_follows_from_the_records(part: str, host: str) -> None:
    assert host_of(part, PLACES) == host


@given(st.text(max_size=12))
def test_host_of_a_part_is_a_known_one_or_none(part: str) -> None:
    assert host_of(part, PLACES) in ("a", "b", "c", "")
    assert host_of(part, Places("a")) in ("a", ""), "of a job without a run"


def test_what_each_host_runs_has_to_be_named_with_its_host() -> None:
    assert all(map(is_on_several_hosts, ("dcs-j", "agent-1", "ray-worker-j", "coordinator-gpu-1")))
    assert not any(map(is_on_several_hosts, ("train", "ray-worker", "engine-main-1", "driver")))


def view(phase: HostPhase | None, *, registered: bool, age_s: float | None = 120.0) -> HostView:
    return HostView(id="b", phase=phase, phase_age_s=age_s, registered=registered)


def test_host_that_is_there_is_asked_at_its_address() -> None:
    for phase in (HostPhase.READY, HostPhase.CORDONED, HostPhase.LEFT, None):
        host = LogHost.of(view(phase, registered=True), HOST, NOW)
        assert host.url == "https://10.0.0.7:4711" and host.why_away("") == ""
    local = LogHost.of(view(HostPhase.READY, registered=True), HOST.replace(address="127.0.0.1"), NOW)
    assert local.url == "http://127.0.0.1:4711", "on loopback nothing has TLS"


def test_host_that_is_away_is_said_to_be_so_with_where_its_logs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.localtime", __import__("time").gmtime)
    lost = LogHost.of(view(HostPhase.LOST, registered=False), HOST, NOW)
    assert lost.why_away(", in /x") == "host b is LOST since 2027-01-15 07:58:00; its logs are on its disk, in /x"
    unknown = LogHost.of(view(HostPhase.SUSPECTED, registered=False, age_s=None), None, NOW)
    assert unknown.why_away("") == "host b is SUSPECTED; its logs are on its disk"
    gone = LogHost.of(view(HostPhase.READY, registered=False), HOST, NOW)
    assert gone.why_away("") == "host b is away: its agent is not registered; its logs are on its disk"
    older = LogHost.of(view(HostPhase.READY, registered=True), HOST.replace(log_port=0), NOW)
    assert older.why_away("") == "the agent of host b (release 1.2) serves no logs; they are on its disk"
