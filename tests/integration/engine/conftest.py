"""One testbed for all tests of engines: a start of an engine is most of what such a test costs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.engine_testbed import EngineTestbed
from support.etcd_server import EtcdServers


@pytest.fixture(scope="session")
def testbed(etcd_servers: EtcdServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineTestbed]:
    testbed = EngineTestbed(etcd_servers, tmp_path_factory.mktemp("engines"))
    try:
        yield testbed
    finally:
        testbed.close()
