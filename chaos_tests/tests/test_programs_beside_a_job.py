"""The traffic of programs that publish and pull a stream of their own: what they were told is a history that its model
explains, whatever happens to their node and their epoch, and a read that is stale or torn is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from evidence import broken_rules, observed
from support.dcs_nodes import Nodes
from support.etcd_server import EtcdServers
from support.waiting import wait_until

from chaos_tests.history import Recorder
from chaos_tests.model.number import READ
from chaos_tests.traffic.stream_programs import TORN, StreamPrograms
from elastic_rl.dcs.service_access import ServiceAccess
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys

CLIENTS = {"publisher", "puller-0", "puller-1"}


def await_answers(recorder: Recorder) -> None:
    """Returns once each program has had an answer to what it asked from now on."""
    since = recorder.now()
    wait_until(lambda: {o.client for o in recorder.operations() if o.began_s > since and o.ended_s} == CLIENTS,
               what="an answer for each program")


@pytest.mark.timeout(300)
def test_programs_go_on_after_a_lost_node_and_another_epoch_and_see_the_newest_version(
        etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> None:
    nodes = Nodes(etcd_servers=etcd_servers, etcd=etcd, keys=keys, folder=tmp_path)
    access = ServiceAccess(job=keys.job, etcd_endpoints=etcd_servers.endpoints,
                           settings={"etcd": {"call_timeout_s": 2}})
    recorder = Recorder()
    programs = StreamPrograms(lambda: access, pause_s=0.05, recorder=recorder)
    try:
        nodes.start_node("a")
        fencing.raise_epoch(etcd, keys, "first")
        programs.start()
        await_answers(recorder)
        nodes.kill("a")
        nodes.start_node("a")
        await_answers(recorder)
        fencing.raise_epoch(etcd, keys, "second")
        await_answers(recorder)
    finally:
        programs.close()
        nodes.close()
    history = recorder.operations()
    events = observed(etcd, keys, 1)
    assert broken_rules(events, history) == []

    told = [o for o in history if o.call == READ and o.ended_s is not None]
    newest, oldest = max(told, key=lambda o: o.result[1]), min(told, key=lambda o: o.result[1])
    assert newest.result != oldest.result
    for wrong in ((TORN, newest.result[1]), (newest.result[0], newest.result[1] + 1), oldest.result):
        later = replace(newest, began_s=recorder.now(), ended_s=recorder.now() + 1, result=wrong)
        assert {violation[:2] for violation in broken_rules(events, [*history, later])} == {"I3"}, wrong
