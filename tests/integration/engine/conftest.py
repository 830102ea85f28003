"""One testbed for all tests of engines: a start of an engine is most of what such a test costs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from support.engine_testbed import EngineTestbed
from support.etcd_server import EtcdServers


@pytest.fixture(autouse=True)
def group_may_write() -> Iterator[None]:
    """The umask of the user, which none of what engines make may follow."""
    before = os.umask(0o002)
    yield
    os.umask(before)


@pytest.fixture(scope="session")
def testbed(etcd_servers: EtcdServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineTestbed]:
    testbed = EngineTestbed(etcd_servers, tmp_path_factory.mktemp("engines"))
    try:
        yield testbed
    finally:
        testbed.close()
