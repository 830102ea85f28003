"""Hosts as the API shows them, from their records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.coordinator.hosts.view import HostAssignment, HostView, view
from elastic_rl.etcd.cluster_records import (
    Drain,
    Host,
    HostPhase,
    HostSpec,
    HostState,
    HostStatus,
    PreemptionNotice,
    RunState,
    ServiceStatus,
)
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.etcd.record import Record
from elastic_rl.etcd.transaction import KeyValue

KEYS = ClusterKeys("c")
HOST = Host(id="h", incarnation="i2", address="10.0.0.7", machine="m", cpus=8, gpus=2, memory_bytes=1 << 34,
            shm_bytes=1 << 33, labels={"rack": "b4"}, release="0.2.0")
DRIVER = ServiceStatus(state=RunState.RUNNING, pid=7, generation=3)
STATUS = HostStatus(registration=20, services={"driver/j": DRIVER}, not_ready="a process of generation 2 still ends",
                    preemption=PreemptionNotice(reason="aws: stop", deadline_at=9.0),
                    preemption_problem="there is no answer")
READY = HostState(phase=HostPhase.READY, incarnation="i2", since_s=100.0, reason="")
KEY_OF = {"host": KEYS.host("h"), "registration": KEYS.host_registration("h"), "status": KEYS.host_status("h"),
          "spec": KEYS.host_spec("h"), "state": KEYS.host_state("h")}
ALL: Mapping[str, Record] = {"host": HOST, "registration": HOST, "status": STATUS, "state": READY,
                             "spec": HostSpec(cordoned=True, drain=Drain(within_s=60.0), reason="new kernel", by="ann",
                                              at=5.0)}


def shown(records: Mapping[str, Record | bytes], *, registration: int = 20, **more: Any) -> HostView | None:
    """``registration``: mod revision of the host's registration."""
    return view(KEYS, "h", {KEY_OF[name]: KeyValue(
        KEY_OF[name], record if isinstance(record, bytes) else record.encode(), 1,
        registration if name in ("host", "registration") else 30, 1, 0) for name, record in records.items()}, **more)


def only(*names: str) -> dict[str, Record | bytes]:
    return {name: ALL[name] for name in names}


def test_host_shows_what_its_agent_the_leader_and_operators_wrote() -> None:
    driver = HostAssignment(generation=3, incarnation="i2", reason="host g is lost")
    found = shown(ALL, assigned={"driver/j": driver}, leader_s=160.5)
    assert found is not None
    assert found.model_dump(mode="json") == {
        **HOST.model_dump(mode="json", exclude={"machine", "log_port", "run_dir"}), "phase": "ready",
        "phase_age_s": 60.5, "reason": "",
        "registered": True, "not_ready": "a process of generation 2 still ends", "unreadable": {}, "etag": '"30"',
        "preemption": {"reason": "aws: stop", "deadline_at": 9.0, "warning_s": 30.0},
        "preemption_pending": False, "preemption_problem": "there is no answer",
        "spec": {"cordoned": True, "drain": {"within_s": 60.0, "incarnation": ""}, "reason": "new kernel", "by": "ann",
                 "at": 5.0},
        "services": {"driver/j": {"state": "running", "pid": 7, "generation": 3, "restarts": 0, "reason": ""}},
        "assignments": {"driver/j": driver.model_dump()}}


def test_host_is_joining_until_the_leader_has_decided() -> None:
    found = shown(only("host", "registration", "status"), leader_s=5.0)
    assert found is not None and (found.phase, found.phase_age_s) == (HostPhase.JOINING, None)
    assert found.reason == "the leader has not decided about it yet" and found.services == {"driver/j": DRIVER}


def test_host_that_has_booted_is_joining_whatever_the_leader_concluded_before() -> None:
    booted = only("host", "registration", "status") | {"state": READY.replace(incarnation="i1", reason="old")}
    found = shown(booted, leader_s=160.0)
    assert found is not None and (found.phase, found.phase_age_s) == (HostPhase.JOINING, None)
    assert "not decided" in found.reason and found.incarnation == "i2"
    gone = shown({name: record for name, record in booted.items() if name == "registration" or name == "state"})
    assert gone is not None and (gone.phase, gone.reason) == (HostPhase.READY, "old"), "its end is not decided about"


def test_host_that_is_no_longer_registered_is_shown_as_it_last_was() -> None:
    lost = READY.replace(phase=HostPhase.LOST, reason="not heard for 6 s")
    found = shown({**only("registration"), "state": lost}, leader_s=100.0)
    assert found is not None and (found.phase, found.reason, found.registered) == (
        HostPhase.LOST, "not heard for 6 s", False)
    assert (found.address, found.cpus, found.services) == ("10.0.0.7", 8, {})
    of_the_leader = shown({"state": lost})
    assert of_the_leader is not None and of_the_leader.incarnation == "i2" and of_the_leader.gpus is None


def test_etag_of_a_host_of_which_nothing_was_ever_wanted() -> None:
    found = shown(only("host"))
    assert found is not None and (found.etag, found.spec) == ('"0"', HostSpec())


def test_what_operators_want_of_a_name_makes_no_host() -> None:
    assert shown(only("spec")) is None


@given(st.integers(1, 40), st.booleans())
def test_services_are_those_of_the_present_registration(registration: int, registered: bool) -> None:
    found = shown(only(*(("host",) if registered else ()), "registration", "status"), registration=registration)
    current = registered and registration == STATUS.registration
    assert found is not None and bool(found.services) == bool(found.not_ready) == current


@given(st.one_of(st.none(), st.floats(0, 1e9)), st.floats(0, 1e9))
def test_age_of_a_phase_is_never_negative_nor_more_than_the_leader_clock(leader_s: float | None, since_s: float
                                                                          ) -> None:
    found = shown({"state": READY.replace(since_s=since_s)}, leader_s=leader_s)
    assert found is not None and (found.phase_age_s is None) == (leader_s is None)
    if leader_s is not None and found.phase_age_s is not None:
        assert 0 <= found.phase_age_s <= leader_s
        assert leader_s < since_s or found.phase_age_s == leader_s - since_s


@given(st.sets(st.sampled_from(sorted(ALL))), st.sampled_from([b"", b"{", b"[1]", b"\xff", b'{"phase": 1}', b"null"]))
def test_record_that_cannot_be_read_is_named_and_hides_no_other(broken: set[str], garbage: bytes) -> None:
    if garbage == b'{"phase": 1}':
        broken.discard("spec")  # which may have other fields and needs none
    found = shown({name: garbage if name in broken else record for name, record in ALL.items()}, leader_s=160.0)
    # The registration without a lease is looked at where the one with a lease says nothing.
    looked_at = broken if "host" in broken else broken - {"registration"}
    assert found is not None and found.registered and found.unreadable.keys() == {KEY_OF[name] for name in looked_at}
    assert all(why.startswith("no Host") for why in found.unreadable.values())
    assert (found.phase is None) == ("state" in broken)
    assert bool(found.address) == (not {"host", "registration"} <= broken)
    assert bool(found.services) == ("status" not in broken) and found.spec.cordoned == ("spec" not in broken)


def test_phase_and_state_of_a_newer_release_are_shown_as_they_are() -> None:
    paused = STATUS.replace(services={"x": DRIVER.replace(state=RunState("paused"))})
    found = shown({**only("host"), "status": paused, "state": READY.replace(phase=HostPhase("asleep"))})
    assert found is not None
    text = found.model_dump(mode="json")
    assert text["phase"] == "asleep" and text["services"]["x"]["state"] == "paused"
