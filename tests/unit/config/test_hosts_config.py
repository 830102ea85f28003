"""Settings of where engines and roles are, and of how many engines update at once."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_rl import config
from elastic_rl.cli.run import _labels
from elastic_rl.errors import ConfigError

SELECTOR = {"host_selector": {"zone": "a"}}


@pytest.mark.parametrize("settings", [
    {"rollout": SELECTOR}, {"pools": {"judge": {"model": "/judge", **SELECTOR}}}, {"roles": {"genrm": SELECTOR}}])
def test_selector_of_hosts_needs_a_cluster_with_a_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cluster with a name"):
        config.parse(settings)
    cfg = config.parse({**settings, "cluster": "lab"})
    assert cfg.selects_hosts and not config.parse({}).selects_hosts


def test_selector_reaches_the_pool_and_the_role() -> None:
    cfg = config.parse({"cluster": "lab", "rollout": SELECTOR, "pools": {"judge": {"model": "/judge", **SELECTOR}},
                        "roles": {"advantages": {"replicas": 3, "gpus": 0.5}}})
    assert {pool.host_selector["zone"] for pool in cfg.pool_settings("").values()} == {"a"}
    assert (cfg.role_settings("advantages").replicas, cfg.role_settings("teacher").replicas) == (3, 1)


@pytest.mark.parametrize(("settings", "says"), [
    ({"cluster": "lab", "placement": "colocated", "rollout": SELECTOR}, "leave one of them out"),
    ({"cluster": "lab", "rollout": {"host_selector": {"a b": "c"}}}, "rollout.host_selector"),
    ({"roles": {"actor": {"replicas": 2}}}, "roles"),
    ({"engine": {"max_unavailable": "0%"}}, "max_unavailable"), ({"engine": {"max_unavailable": 0}}, "max_unavailable"),
    ({"engine": {"max_unavailable": "many"}}, "max_unavailable"),
    ({"pools": {"judge": {"model": "/judge", "engine": {"max_unavailable": 2}}}}, "bounds nothing")])
def test_what_cannot_be_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config.parse(settings)


@pytest.mark.parametrize(("given", "limit"), [("auto", None), (3, 3), ("50%", "50%")])
def test_engines_update_all_at_once_unless_a_limit_is_set(given: int | str, limit: int | str | None) -> None:
    cfg = config.parse({"train": {"max_staleness": 2}, "engine": {"max_unavailable": given}})
    assert cfg.pool_settings("")["rollout"].max_unavailable == limit


def test_labels_of_a_host_are_replaced_kept_or_removed() -> None:
    assert _labels(["zone=a", "disk=nvme"]) == {"zone": "a", "disk": "nvme"}
    assert _labels(None) is None and _labels([""]) == {}
    with pytest.raises(ConfigError, match="no label"):
        _labels(["zone"])


QUEUE = {"train": {"schedule": "fully_async", "queue": "transfer_queue"}}
TRUSTED = {"coordinator": {"insecure_network": True}}


@pytest.mark.parametrize(("settings", "spread"), [
    ({}, True), (QUEUE, False), ({**QUEUE, **TRUSTED}, True), ({"placement": "colocated"}, True)])
def test_ranks_leave_the_host_of_an_open_queue_only_where_the_network_is_trusted(settings: dict[str, Any], spread: bool
                                                                                 ) -> None:
    assert config.parse({"cluster": "lab", **settings}).ranks_may_spread is spread
    assert not config.parse(settings).ranks_may_spread, "a cluster of the job's own has one host"
