"""The only rank of a group exits with code 0 in the middle of its work, as a library may have it do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.elastic_group import elastic_group
from support.etcd_server import EtcdServers
from support.tiers import full

from elastic_rl.faults import ptrace

pytestmark = [
    full(proved_in="tests/unit/trainer/test_rank_watch.py", why="a group of real ranks of its own, of one rank"),
    pytest.mark.skipif(not ptrace.supported() or os.geteuid() != 0,
                       reason="needs Linux on x86-64, and the permission to debug")]


def test_group_starts_a_rank_again_that_has_exited_with_code_0(etcd_servers: EtcdServers, tmp_path: Path) -> None:
    with elastic_group(etcd_servers.endpoints, tmp_path, {
            "trainer": {"tensor_parallel": 1, "data_parallel": 1}}) as group:
        before = group.ready()
        ptrace.exit_process(group.rank(0))
        group.ready(after=before.group)
        assert "have exited with code 0" in (group.folder / "trainer.log").read_text()
        assert group.agent.poll() is None
