"""What the driver tells the engines of a host whose time is over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_rl.driver.hosts_of_ray import RayHosts
from elastic_rl.driver.pool import EnginePool


class Placed:
    def __init__(self, node: str) -> None:
        self.node, self.asked = node, list[str]()

    def ask(self, method: str) -> None:
        self.asked.append(method)


@pytest.mark.parametrize(("node", "draining", "asked"), [
    ("over", True, ["hurry"]), ("over", False, []), ("in-time", True, []), ("stays", True, [])])
def test_engine_that_leaves_is_told_once_when_the_time_of_its_host_is_over(
        node: str, draining: bool, asked: list[str]) -> None:
    pool: Any = EnginePool.__new__(EnginePool)
    placed = Placed(node)
    pool._slots = {"a": SimpleNamespace(placed=placed, draining=draining, hurried=False)}
    hosts = RayHosts(leaving={"over": "host-1", "in-time": "host-2"}, overdue=frozenset({"host-1"}))
    for _ in range(2):
        pool._hurry(hosts)
    assert placed.asked == asked
