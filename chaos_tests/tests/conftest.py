"""Fixtures of the chaos suite; it shares the helpers of ``tests/`` that start real parts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))

from support.collection import pytest_collection  # noqa: F401
from support.etcd_server import EtcdServers
from support.shared_fixtures import etcd, keys  # noqa: F401


@pytest.fixture(scope="session")
def etcd_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    """One etcd member for tests that leave it alone; they keep apart by their own ``keys``."""
    servers = EtcdServers(tmp_path_factory.mktemp("etcd"), 1)
    try:
        yield servers.start()
    finally:
        servers.close()
