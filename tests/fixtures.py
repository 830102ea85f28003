"""Fixtures that the tests and the chaos suite share; each has an ``etcd`` fixture of its own."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
from etcd_server import EtcdServers

from elastic_rl.coordinator.keys import Keys
from elastic_rl.coordinator.store import Store


@pytest.fixture
def store(etcd: EtcdServers) -> Iterator[Store]:
    """A connected store."""
    # A longer attempt than in production: tests share their cores with much else, and one member has no other to try.
    with Store(etcd.endpoints, call_timeout_s=2.0) as connected:
        yield connected


@pytest.fixture
def keys() -> Keys:
    """The keyspace of a job of this test's own."""
    return Keys(f"t-{secrets.token_hex(6)}")
