"""On which hosts engines and replicas of roles are placed, by the labels of hosts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve.schema import ApplicationStatus

from elastic_rl.driver.host_selection import ExternalPlace, Fate, Selection, beyond_every_host, place_external, select
from elastic_rl.driver.hosts_of_ray import HostNode, RayHosts
from elastic_rl.driver.role_hosts import ABSENT, DeployedRole, deployed_role, is_due

HOSTS = RayHosts(open=frozenset("abc"), closed=frozenset("dz"), lost=frozenset("z"), labels={
    "a": {}, "b": {"zone": "1", "disk": "nvme"}, "c": {"zone": "1"}, "d": {"zone": "2"}, "e": {"zone": "3"},
    "z": {"zone": "4"}, **{f"n{i}": {"zone": "5"} for i in range(5)}})


def test_without_a_selector_only_hosts_that_take_nothing_more_are_avoided() -> None:
    assert select({}, HOSTS) == Selection(avoid=frozenset("dz"))


@pytest.mark.parametrize(("selector", "hosts"), [
    ({"zone": "1"}, "bc"), ({"zone": "1", "disk": "nvme"}, "b")])
def test_hosts_have_all_labels_of_the_selector(selector: dict[str, str], hosts: str) -> None:
    assert select(selector, HOSTS) == Selection(among=frozenset(hosts))


@pytest.mark.parametrize(("zone", "says"), [
    ("9", "no host has zone=9"), ("4", "hosts with zone=4 are cordoned, drained or lost: z"),
    ("2", "hosts with zone=2 are cordoned, drained or lost: d"),
    ("3", "hosts with zone=3 have not joined the run yet: e"), ("5", "yet: n0, n1, n2 and 2 more")])
def test_what_is_waited_for_is_said_where_no_host_fits(zone: str, says: str) -> None:
    found = select({"zone": zone}, HOSTS)
    assert says in found.waits_for and found.among == frozenset()


def test_what_waits_for_room_is_placed_anew_when_it_may_go_elsewhere() -> None:
    before = select({"zone": "1"}, HOSTS)
    assert not select({"zone": "1"}, HOSTS).allows_more_than(before)
    assert select({"zone": "1"}, replace(HOSTS, open=frozenset("ab"))).allows_more_than(before)
    closes = Selection(avoid=frozenset("ad"))
    assert closes.allows_more_than(Selection(avoid=frozenset("d")))
    assert not Selection(avoid=frozenset("d")).allows_more_than(closes), "who waits need not move for a host that opens"


# -- requests that no host can meet ------------------------------------------------------------------------------------
GIB = float(1 << 30)
OFFERS = {"a": {"CPU": 8.0, "memory": 32 * GIB}, "b": {"CPU": 2.0, "GPU": 8.0, "memory": 64 * GIB}}
OFFERING = replace(HOSTS, nodes={name: HostNode(name, name, offers=offers) for name, offers in OFFERS.items()})


def test_request_that_no_host_can_meet_is_said_with_what_the_hosts_offer() -> None:
    said = beyond_every_host({"CPU": 4.0, "GPU": 1.0, "run_host": 1.0}, OFFERING)
    assert "no host offers CPU 4, GPU 1: " in said and "a has CPU 8, GPU 0" in said and "b has CPU 2, GPU 8" in said
    assert "memory 80.0 GiB: b has memory 64.0 GiB; a has" in beyond_every_host({"memory": 80 * GIB}, OFFERING)
    assert "no host offers GPU 1: a has GPU 0; ask" in beyond_every_host({"GPU": 1.0}, OFFERING, among={"a"})


def test_host_that_offers_nothing_yet_is_not_counted() -> None:
    assert beyond_every_host({"CPU": 99.0}, HOSTS) == ""
    assert beyond_every_host({"CPU": 99.0}, OFFERING, among={"e"}) == ""


amounts = st.floats(0.0, 16.0)
offers = st.dictionaries(st.sampled_from(["CPU", "GPU"]), amounts, min_size=1)


@given(st.dictionaries(st.sampled_from("abc"), offers, min_size=1), offers)
def test_request_is_beyond_every_host_exactly_where_none_offers_all_of_it(
        found: dict[str, dict[str, float]], request: dict[str, float]) -> None:
    hosts = replace(HOSTS, nodes={name: HostNode(name, name, offers=offer) for name, offer in found.items()})
    fits = any(all(offer.get(name, 0.0) >= wanted for name, wanted in request.items()) for offer in found.values())
    assert bool(beyond_every_host(request, hosts)) is not fits


# -- external engines --------------------------------------------------------------------------------------------------
OUTSIDE, INSIDE = "https://10.0.0.9:1", "http://127.0.0.1:1"
JOINED = replace(HOSTS, nodes={name: HostNode(name, "10.0.0.9") for name in "abd"})


@pytest.mark.parametrize(("url", "host"), [(OUTSIDE, "b"), (OUTSIDE, "a"), (INSIDE, "a"), ("http://[::1]:1", "a"),
                                           (OUTSIDE, "run"), (INSIDE, "run")])
def test_external_engine_is_served_from_its_host(url: str, host: str) -> None:
    run_host = host if host == "run" or url != OUTSIDE else "run"  # which need not be among the hosts that have joined
    assert place_external(url, host, run_host, JOINED) == ExternalPlace()


def test_external_engine_waits_for_a_host_that_is_closed_or_has_not_joined() -> None:
    assert "cordoned, or not ready" in place_external(OUTSIDE, "d", "a", JOINED).waits_for
    assert "cordoned, or not ready" in place_external(OUTSIDE, "d", "d", JOINED).waits_for
    assert "not joined" in place_external(OUTSIDE, "e", "a", JOINED).waits_for


@pytest.mark.parametrize("run_host", ["a", "z"])
def test_external_engine_ends_with_its_host(run_host: str) -> None:
    place = place_external(OUTSIDE, "z", run_host, JOINED)
    assert place.fate is Fate.LOST and place.ends and "z is lost" in place.reason
    drained = replace(JOINED, closed=JOINED.closed | {"b"}, drains={"b": 1.0})
    place = place_external(OUTSIDE, "b", run_host, drained)
    assert place.fate is Fate.LEAVES and place.ends and "b is drained" in place.reason


@pytest.mark.parametrize("url", [INSIDE, "http://10.0.0.9:1"])
def test_external_engine_elsewhere_than_the_routers_needs_tls(url: str) -> None:
    place = place_external(url, "b", "a", JOINED)
    assert "in the clear" in place.waits_for and "https://" in place.waits_for and not place.ends
    assert place_external(url, "b", "b", JOINED) == ExternalPlace(), "the run is on the host again"


@pytest.mark.parametrize("url", ["https://127.0.0.1:1", "https://[::1]:1", "https://172.17.0.1:1", "https://b:1",
                                 "https://10.0.0.8:1"])
def test_external_engine_elsewhere_than_the_routers_has_the_address_of_its_host(url: str) -> None:
    place = place_external(url, "b", "a", JOINED)
    assert "register the server with 10.0.0.9" in place.waits_for and not place.ends


# -- roles -------------------------------------------------------------------------------------------------------------
RUNS = DeployedRole(ApplicationStatus.RUNNING, hosts=frozenset("bc"), nodes=frozenset({"node-b"}))


def test_role_is_deployed_when_serve_does_not_have_it_or_has_given_up() -> None:
    failed = replace(RUNS, status=ApplicationStatus.DEPLOY_FAILED)
    for selection in (None, Selection(among=frozenset("bc"))):
        assert is_due(ABSENT, selection, ()) and is_due(failed, selection, ()) and not is_due(RUNS, selection, ())
    assert not is_due(ABSENT, Selection(among=frozenset(), waits_for="no host"), ())


def test_role_that_runs_moves_only_when_a_host_of_it_is_to_be_emptied() -> None:
    others = Selection(among=frozenset("c"))
    assert not is_due(RUNS, others, {"node-c"})
    assert is_due(RUNS, others, {"node-b"})
    assert not is_due(replace(RUNS, hosts=frozenset("c")), others, {"node-b"}), "it is on its way"
    assert not is_due(RUNS, Selection(among=frozenset(), waits_for="no host"), {"node-b"}), "there is nowhere to go"


STATES = [ApplicationStatus.RUNNING, ApplicationStatus.DEPLOYING, ApplicationStatus.UNHEALTHY]
names = st.frozensets(st.sampled_from("abcde"), min_size=1)


@given(st.sampled_from(STATES), names, names, st.sampled_from([(), ("node-b",), ("node-x",)]))
def test_role_that_has_room_starts_anew_neither_for_hosts_that_join_nor_while_it_is_on_its_way(
        status: ApplicationStatus, hosts: frozenset[str], joined: frozenset[str], leaving: tuple[str, ...]) -> None:
    role = replace(RUNS, status=status, hosts=hosts)
    assert not is_due(role, Selection(among=hosts | joined), leaving)


@given(names, names)
def test_role_without_room_moves_once_there_is_a_further_host(hosts: frozenset[str], fit: frozenset[str]) -> None:
    role = replace(RUNS, status=ApplicationStatus.DEPLOYING, hosts=hosts, lacks_room=True)
    assert is_due(role, Selection(among=fit), ()) == (not fit <= hosts)


def test_role_of_which_no_host_is_fit_any_more_moves_when_it_does_not_run() -> None:
    others = Selection(among=frozenset("d"))
    assert is_due(replace(RUNS, status=ApplicationStatus.UNHEALTHY), others, ()) and not is_due(RUNS, others, ())


def test_hosts_of_a_role_are_read_from_the_details_of_serve() -> None:
    details: dict[str, Any] = {"status": "RUNNING", "message": "", "deployments": {"genrm": {
        "deployment_config": {"ray_actor_options": {"label_selector": {"host": "in(b,c)"}}},
        "replicas": [{"node_id": "node-b"}, {"node_id": None}]}}}
    assert deployed_role("genrm", details) == replace(RUNS, lacks_room=True)
    details["deployments"]["genrm"]["replicas"][1]["state"] = "STOPPING"
    assert deployed_role("genrm", details) == RUNS, "it needs no place any more"
    details["deployments"]["genrm"]["replicas"].pop()
    assert deployed_role("genrm", details) == RUNS
    assert deployed_role("genrm", {"status": "DEPLOYING"}) == DeployedRole(ApplicationStatus.DEPLOYING)
