"""Fixtures shared by all tests. Nothing starts before a test asks for it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# Run in the background of a script, this process would ignore Ctrl-C, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

sys.path.insert(0, str(Path(__file__).parent))  # helpers of the tests, such as etcd_server

from support.collection import pytest_collection  # noqa: E402, F401
from support.shared_fixtures import etcd, forked_plugins, forked_senders, keys  # noqa: E402, F401

if TYPE_CHECKING:
    from support.etcd_server import EtcdServers


@pytest.fixture(scope="session")
def etcd_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    """One etcd member for the whole session; tests keep apart by their own ``keys``. ``.endpoints``: host:port list."""
    from support.etcd_server import EtcdServers

    servers = EtcdServers(tmp_path_factory.mktemp("etcd"), 1)
    try:
        yield servers.start()
    finally:
        servers.close()


@pytest.fixture
def etcd3_cluster(tmp_path: Path) -> Iterator[EtcdServers]:
    """Three members of this test's own: ``.kill(i)``, ``.restart(i)``, ``.stop(i)``, ``.cont(i)``, ``.leader()``."""
    from support.etcd_server import EtcdServers

    servers = EtcdServers(tmp_path / "etcd3", 3)
    try:
        yield servers.start()
    finally:
        servers.close()
