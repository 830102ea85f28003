"""On which hosts engines and replicas of roles are placed, by the labels of hosts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from ray.serve.schema import ApplicationStatus

from elastic_rl.driver.host_selection import Selection, select
from elastic_rl.driver.hosts_of_ray import RayHosts
from elastic_rl.driver.placement import among_hosts
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


# -- roles -------------------------------------------------------------------------------------------------------------
RUNS = DeployedRole(ApplicationStatus.RUNNING, hosts=among_hosts("bc"), nodes=frozenset({"node-b"}))


def test_role_is_deployed_when_serve_does_not_have_it_or_has_given_up() -> None:
    failed = replace(RUNS, status=ApplicationStatus.DEPLOY_FAILED)
    for selection in (None, Selection(among=frozenset("bc"))):
        assert is_due(ABSENT, selection, ()) and is_due(failed, selection, ()) and not is_due(RUNS, selection, ())
    assert not is_due(ABSENT, Selection(among=frozenset(), waits_for="no host"), ())


def test_role_that_runs_moves_only_when_a_host_of_it_is_to_be_emptied() -> None:
    others = Selection(among=frozenset("c"))
    assert not is_due(RUNS, others, {"node-c"})
    assert is_due(RUNS, others, {"node-b"})
    assert not is_due(replace(RUNS, hosts=among_hosts("c")), others, {"node-b"}), "it is on its way"
    assert not is_due(RUNS, Selection(among=frozenset(), waits_for="no host"), {"node-b"}), "there is nowhere to go"
    assert is_due(replace(RUNS, status=ApplicationStatus.UNHEALTHY), others, ())


def test_hosts_of_a_role_are_read_from_the_details_of_serve() -> None:
    details: dict[str, Any] = {"status": "RUNNING", "message": "", "deployments": {"genrm": {
        "deployment_config": {"ray_actor_options": {"label_selector": {"host": "in(b,c)"}}},
        "replicas": [{"node_id": "node-b"}, {"node_id": None}]}}}
    assert deployed_role("genrm", details) == RUNS
    assert deployed_role("genrm", {"status": "DEPLOYING"}) == DeployedRole(ApplicationStatus.DEPLOYING)
