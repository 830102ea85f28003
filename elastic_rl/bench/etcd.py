"""An etcd member of a measurement's own."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

from elastic_rl import etcd_server
from elastic_rl.processes import free_port, spawn, stop, wait_until

_START_S = 60.0


def start_etcd(folder: Path, stack: contextlib.ExitStack) -> tuple[str, int]:
    """Starts a member with its data in ``folder`` that ends with ``stack``; returns ``host:port`` and pid."""
    client, peer = free_port(), free_port()
    process = spawn(etcd_server.command(etcd_server.find_binary(), folder / "etcd", client, peer),
                    log=folder / "etcd.log")
    stack.callback(end, process)
    endpoint = f"127.0.0.1:{client}"
    wait_until(lambda: etcd_server.healthy(endpoint), timeout_s=_START_S, what="etcd",
               alive=lambda: process.poll() is None)
    return endpoint, process.pid


def end(process: subprocess.Popen[bytes]) -> None:
    """Stops a child and waits for it."""
    stop(process.pid)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
