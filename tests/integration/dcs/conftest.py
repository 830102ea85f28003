"""Fixtures of the tests of DCS nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.dcs_wire import Dcs
from support.etcd_server import EtcdServers

from elastic_rl.dcs.storage.arena import SHM
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys


@pytest.fixture
def dcs(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> Iterator[Dcs]:
    out = Dcs(etcd_servers=etcd_servers, etcd=etcd, keys=keys, folder=tmp_path,
              epoch=fencing.raise_epoch(etcd, keys, "test").number)
    try:
        yield out
    finally:
        out.close()
        assert not list(SHM.glob(f"elastic-rl-{keys.job}-*")), "a node left its arena behind"
