"""Fixtures of the chaos suite; it shares the helpers of ``tests/`` that start real parts."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))

from etcd_server import EtcdServers  # noqa: E402

from elastic_rl.coordinator.keys import Keys  # noqa: E402
from elastic_rl.coordinator.store import Store  # noqa: E402


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServers]:
    """One etcd member of this test's own."""
    servers = EtcdServers(tmp_path / "etcd", 1)
    try:
        yield servers.start()
    finally:
        servers.close()


@pytest.fixture
def store(etcd: EtcdServers) -> Iterator[Store]:
    with Store(etcd.endpoints, call_timeout_s=2.0) as connected:
        yield connected


@pytest.fixture
def keys() -> Keys:
    return Keys(f"c-{secrets.token_hex(6)}")
