"""A host of a cluster, for the process that keeps it there (`elastic-rl node`, and `elastic-rl up --foreground`).

The host agent does the work, and runs on when that process is killed: another one finds it as it is. Only a process
that is told to end has the host leave: what it holds moves elsewhere first. The first host, which has the cluster's
etcd, does not leave: it is suspended (``Cluster.suspend``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from elastic_rl.coordinator.hosts import changes
from elastic_rl.coordinator.hosts.state_machine import drain_within_s
from elastic_rl.coordinator.problems import Problem
from elastic_rl.errors import ElasticRLError
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.cluster_records import (
    PREEMPTION,
    Assignment,
    Drain,
    Host,
    HostPhase,
    HostSpec,
    HostState,
)
from elastic_rl.etcd.decoding import readable, readable_one
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.host.agent.host_facts import kept_incarnation
from elastic_rl.host.agent.status import AGENT, AgentWatch
from elastic_rl.host.local_cluster import Cluster

_LEAVES = "the host leaves the cluster"
"""Reason of a drain that this module has asked for, and takes back when the host returns."""
_POLL_S = 1.0
_ETCD_BUDGET_S = 2.0


class JoinedHost:
    """This host in a cluster that ``Cluster.join``, or ``Cluster.up``, has made it a host of."""

    def __init__(self, cluster: Cluster, say: Callable[[str], None], *,
                 pause: Callable[[float], None] = time.sleep) -> None:
        """``say``: gets each change, for the operator. ``pause``: waits; whoever wants this to end raises there."""
        self._cluster, self._say, self._pause = cluster, say, pause
        self._name, self._keys = cluster.host.name, ClusterKeys(cluster.cfg.cluster_name)
        self._said: dict[str, str] = {}

    def follow(self) -> None:
        """Says how the host is, and starts its agent where that has ended, until a command takes down what runs here.
        """
        agent, returned = AgentWatch(self._cluster), False
        with self._etcd() as etcd:
            while not self._cluster.taken_down:
                waiting = dict(agent.waiting())
                try:
                    returned = returned or self._withdraw_drain(etcd)
                    self._report("host", self._described(etcd))
                except ElasticRLError as e:
                    waiting.setdefault(AGENT, str(e))
                self._report("waiting", "; ".join(f"{name}: {why}" for name, why in sorted(waiting.items())))
                self._pause(_POLL_S)

    def leave(self, within_s: float) -> None:
        """Has what the host holds moved elsewhere, and returns when it holds nothing, at the latest after ``within_s``
        seconds. What runs here runs on: ``Cluster.down`` ends it."""
        if not within_s:
            return
        agent, end, hastened = AgentWatch(self._cluster), time.monotonic() + within_s, False
        while time.monotonic() < end:
            agent.waiting()  # which starts the agent again where it has ended
            try:
                with self._etcd() as etcd:
                    if not self._is_registered(etcd):
                        self._say(f"host {self._name} is not registered by this machine: nothing is to be moved")
                        return
                    spec, revision = self._spec(etcd)
                    drain = Drain(within_s=drain_within_s(within_s, self._has_run(etcd)))
                    if spec.drain is None:  # else an operator has it drained, and that request holds
                        self._change(etcd, {"drain": drain, "reason": _LEAVES}, revision)
                    elif spec.by == PREEMPTION and not hastened:
                        # The machine may have more time than this command; it is not to be used again all the same.
                        drain = drain.replace(incarnation=spec.drain.incarnation)
                        self._change(etcd, {"drain": drain, "reason": spec.reason}, revision)
                        hastened = True
                    state = self._state(etcd)
                    if state is None or state.phase in (HostPhase.LEFT, HostPhase.LOST):
                        return
                    self._report("host", self._described(etcd))
            except Problem as e:
                self._report("waiting", f"the host cannot be drained: {e}")
            except ElasticRLError as e:
                self._report("waiting", str(e))
            self._pause(_POLL_S)
        self._say(f"host {self._name} still holds something after {within_s:g} s: it moves once the host is lost")

    def _etcd(self) -> EtcdClient:
        return self._cluster.etcd(self._cluster.connect(), retry_budget_s=_ETCD_BUDGET_S)

    def _withdraw_drain(self, etcd: EtcdClient) -> bool:
        """Takes back the drain with which the host left. False while this machine is not registered yet, or the leader
        has not decided about it."""
        state = self._state(etcd)
        incarnation = kept_incarnation(self._cluster.paths.incarnation)
        if not self._is_registered(etcd) or state is None or state.incarnation != incarnation:
            return False
        spec, revision = self._spec(etcd)
        # A machine that is about to be taken back is not used again.
        if spec.drain is not None and spec.reason == _LEAVES and state.preemption is None:
            try:
                self._change(etcd, {"drain": None}, revision)
            except Problem as e:
                self._report("waiting", f"its drain cannot be taken back: {e}")
                return False
        return True

    def _change(self, etcd: EtcdClient, wanted: dict[str, Any], revision: int) -> None:
        """Changes what is wanted of the host, unless that has changed since ``revision``. Raises Problem."""
        changes.change(etcd, self._keys, self._name, wanted, by=f"node {self._name}", if_revision=revision)

    def _spec(self, etcd: EtcdClient) -> tuple[HostSpec, int]:
        """What is wanted of the host, and the revision of that."""
        found = etcd.get(self._keys.host_spec(self._name))
        return readable_one(found, HostSpec) or HostSpec(), found.mod_revision if found is not None else 0

    def _has_run(self, etcd: EtcdClient) -> bool:
        """Whether a run is assigned to the host."""
        found = readable(etcd.range(self._keys.assignments_prefix())[0], Assignment)
        return any(assignment.host == self._name for assignment, _ in found)

    def _is_registered(self, etcd: EtcdClient) -> bool:
        """Whether the agent of this machine has registered the host: another machine may have its name."""
        host = readable_one(etcd.get(self._keys.host(self._name)), Host)
        return host is not None and host.incarnation == kept_incarnation(self._cluster.paths.incarnation)

    def _state(self, etcd: EtcdClient) -> HostState | None:
        return readable_one(etcd.get(self._keys.host_state(self._name)), HostState)

    def _described(self, etcd: EtcdClient) -> str:
        state = self._state(etcd)
        if state is None:
            return f"host {self._name}: waits for a coordinator to take it in"
        return f"host {self._name}: {state.phase}" + (f", {state.reason}" if state.reason else "")

    def _report(self, topic: str, line: str) -> None:
        """Says a line that differs from the last one of its topic."""
        if line != self._said.get(topic, ""):
            self._said[topic] = line
            self._say(line or "it waits for nothing any more")
