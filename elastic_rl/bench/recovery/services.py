"""service-kill-*: kill -9 of a service of a cluster without a run, until it and the API work again.

A service that ends again soon after its restart is started again later and later. So each kill follows a time in which
the service ran long enough for its end to be the first in a row; the services are killed in turn, to share that time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx

from elastic_rl.bench.measurement import Row
from elastic_rl.bench.options import Options
from elastic_rl.bench.recovery import bare_starts, trials
from elastic_rl.bench.recovery.testbed import CALL_S, TRIAL_S, Testbed, alive
from elastic_rl.bench.recovery.trials import Trial, follow
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.records import DcsNode
from elastic_rl.faults.context import kill
from elastic_rl.host import etcd_server
from elastic_rl.host.agent.restart_policy import RestartLimits
from elastic_rl.host.service_files import ServiceRecord
from elastic_rl.net import http_client
from elastic_rl.runtime.waiting import wait_until

API = "the API answers with a leader"
_QUIET_S = RestartLimits().stable_s + 1.0
"""Time for which a service runs before it is killed again; the host agent saw its start a moment later."""


@dataclass(frozen=True)
class _Service:
    what: str
    works: str
    """What holds once it works again, in words."""
    victim: Callable[[Testbed], str]
    """The name of the service to kill."""
    is_working: Callable[[Testbed, str], object]
    bare: Callable[[Options, int], list[float]]
    """Takes so many bare starts of it."""


def measure(testbed: Testbed) -> Iterator[Row]:
    chosen = [name for name in SERVICES if testbed.options.selects(f"service-kill-{name}", f"service-kill-{name}-max")]
    found: dict[str, list[Trial]] = {name: [] for name in chosen}
    quiet_at = dict.fromkeys(chosen, 0.0)
    for _ in range(testbed.trials):
        for name in chosen:
            _await_whole(testbed)
            time.sleep(max(0.0, quiet_at[name] - time.monotonic()))
            found[name].append(_trial(testbed, SERVICES[name]))
            quiet_at[name] = time.monotonic() + _QUIET_S
    for name in chosen:
        testbed.options.say(f"bare starts: {name}")
        yield from rows(name, found[name], SERVICES[name].bare(testbed.options, testbed.trials))


def rows(name: str, found: Sequence[Trial], bare: Sequence[float]) -> list[Row]:
    """Pure."""
    service = SERVICES[name]
    return trials.rows(f"service-kill-{name}", f"kill -9 of {service.what}", found, (API, service.works), bare=bare,
                       goal=trials.SPARE_S)


def _trial(testbed: Testbed, service: _Service) -> Trial:
    name = service.victim(testbed)
    kill(_record(testbed, name).pid)
    return follow({API: lambda: _leads(testbed), service.works: lambda: service.is_working(testbed, name)},
                  (API, service.works), timeout_s=TRIAL_S)


def _await_whole(testbed: Testbed) -> None:
    """Returns when every service works."""
    coordinators = [f"coordinator-{i}" for i in range(len(testbed.info.coordinators))]
    needed: dict[str, Callable[[], object]] = {
        "etcd is healthy": lambda: _etcd_works(testbed), "the node has registered": lambda: _node_works(testbed),
        API: lambda: _leads(testbed), **{f"{name} is ready": partial(_coordinator_works, testbed, name)
                                         for name in coordinators}}
    follow(needed, needed, timeout_s=TRIAL_S)


# -- what works -------------------------------------------------------------------------------------------------------
def _record(testbed: Testbed, name: str) -> ServiceRecord:
    return wait_until(lambda: next((r for r in testbed.cluster.services.running() if r.name == name and r.pid), None),
                      timeout_s=TRIAL_S, what=name)


def _etcd_works(testbed: Testbed, _name: str = "") -> bool:
    return etcd_server.healthy(testbed.info.etcd_endpoints[0])


def _node_works(testbed: Testbed, _name: str = "") -> bool:
    """Whether the record of the node is that of a process that runs: it registers once it serves."""
    node = readable_one(testbed.etcd.get(testbed.context.keys.dcs_node(testbed.cluster.host.node)), DcsNode)
    return node is not None and alive(node.pid)


def _coordinator_works(testbed: Testbed, name: str) -> bool:
    record = testbed.cluster.services.get(name)
    return record is not None and record.running and bool(_ready(record.url))


def _leads(testbed: Testbed) -> bool:
    """Whether the API of the leader answers that it leads. The record of a dead one is there until its lease ends."""
    leader = testbed.context.leader()
    return leader is not None and alive(leader.pid) and _ready(leader.url).get("leader") == leader.replica


def _ready(url: str) -> dict[str, Any]:
    """The answer of a coordinator that is ready; empty while there is none."""
    try:
        answer = http_client.request("GET", f"{url}/readyz", timeout=CALL_S)
    except httpx.HTTPError:
        return {}
    return dict(answer.json()) if answer.status_code == httpx.codes.OK else {}


def _leading(testbed: Testbed) -> str:
    return wait_until(testbed.context.leader, timeout_s=TRIAL_S, what="a leading coordinator").replica


SERVICES: Mapping[str, _Service] = {
    "etcd": _Service("etcd", "etcd is healthy", lambda _: etcd_server.FIRST, _etcd_works, bare_starts.etcd),
    "coordinator": _Service("the leading coordinator", "the killed replica is ready", _leading, _coordinator_works,
                            bare_starts.coordinator),
    "dcs": _Service("the only DCS node", "the node has registered", lambda testbed: testbed.cluster.node, _node_works,
                    bare_starts.dcs_node)}
