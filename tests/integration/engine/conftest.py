"""One testbed for all tests of engines, whose servers are forked: to import SGLang is most of what a start costs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from support.engine_testbed import EngineTestbed, spawn_sglang
from support.etcd_server import EtcdServers

from elastic_rl.engine.server import sglang_server


@pytest.fixture(autouse=True)
def group_may_write() -> Iterator[None]:
    """The umask of the user, which none of what engines make may follow."""
    before = os.umask(0o002)
    yield
    os.umask(before)


@pytest.fixture(scope="module", autouse=True)
def forked_servers() -> Iterator[None]:
    """Servers that start are forked, in the modules of this package only: the process runs others after them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sglang_server, "spawn", spawn_sglang)
        yield


@pytest.fixture(scope="session")
def testbed(etcd_servers: EtcdServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineTestbed]:
    testbed = EngineTestbed(etcd_servers, tmp_path_factory.mktemp("engines"))
    try:
        yield testbed
    finally:
        testbed.close()
