"""Fixtures that the tests and the chaos suite share; each has an ``etcd`` fixture of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # every test imports this module, and few use an etcd, whose client takes half a second to import
    from elastic_rl.etcd.client import EtcdClient
    from elastic_rl.etcd.keys import Keys
    from support.etcd_server import EtcdServers


@pytest.fixture
def etcd(etcd_servers: EtcdServers) -> Iterator[EtcdClient]:
    """A connected store."""
    from elastic_rl.etcd.client import EtcdClient

    # A longer attempt than in production: tests share their cores with much else, and one member has no other to try.
    with EtcdClient(etcd_servers.endpoints, call_timeout_s=2.0) as connected:
        yield connected


@pytest.fixture
def keys() -> Keys:
    """The keyspace of a job of this test's own."""
    from elastic_rl.etcd.keys import Keys

    return Keys(f"t-{secrets.token_hex(6)}")


@pytest.fixture(scope="module")
def forked_senders() -> Iterator[None]:
    """Notifiers of this process fork their sender processes; those of coordinators start them as they always do."""
    from elastic_rl.coordinator.alerts import sender_process
    from support.forked import ForkedProcess

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sender_process, "start_child",
                      lambda _, **popen: ForkedProcess(["support.alert_sender"], **popen))
        yield


@pytest.fixture(scope="module")
def forked_plugins() -> Iterator[None]:
    """The processes of a user's code that this process starts are forked, but for those in a sandbox; processes that
    tests start, whose own these are, start them as they always do."""
    from elastic_rl.plugins import process, worker_pool
    from support.forked import ForkedProcess

    def start_child(command: Sequence[str], **popen: Any) -> subprocess.Popen[bytes]:
        _, _, _, *module_and_arguments = command  # python -P -m
        return ForkedProcess(["support.plugin_process", *module_and_arguments], **popen)

    with pytest.MonkeyPatch.context() as patch:
        for starter in (process, worker_pool):
            patch.setattr(starter, "start_child", start_child)
        yield


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own, as small as ``size`` says (such as 1M). Skips the test where none can be mounted."""
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder],
                                      capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here (needs root and CAP_SYS_ADMIN)")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
