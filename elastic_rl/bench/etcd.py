"""etcd for a bench: one member, or several that can be killed and stopped."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from pathlib import Path

from elastic_rl.host import etcd_server
from elastic_rl.host.address import own_address
from elastic_rl.host.processes import spawn, stop
from elastic_rl.net.addresses import free_port
from elastic_rl.runtime.waiting import wait_until

_START_S = 60.0


def start_etcd(folder: Path, stack: contextlib.ExitStack) -> tuple[str, int]:
    """Starts a member with its data in ``folder`` that ends with ``stack``; returns ``host:port`` and pid."""
    client, peer = free_port(), free_port()
    process = spawn(etcd_server.command(etcd_server.find_binary(), folder / "etcd", own_address(), client, peer),
                    log=folder / "etcd.log")
    stack.callback(end, process)
    endpoint = f"{own_address()}:{client}"
    wait_until(lambda: etcd_server.healthy(endpoint), timeout_s=_START_S, what="etcd",
               alive=lambda: process.poll() is None)
    return endpoint, process.pid


def end(process: subprocess.Popen[bytes]) -> None:
    """Stops a child and waits for it."""
    stop(process.pid)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)


class Members:
    """A cluster with etcd's own default timings (heartbeats every 100 ms, an election after 1,000 ms without)."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack, count: int = 3) -> None:
        ports = [(free_port(), free_port()) for _ in range(count)]
        cluster = ",".join(f"m{i}=http://{own_address()}:{peer}" for i, (_, peer) in enumerate(ports))
        binary = etcd_server.find_binary()
        self.endpoints = [f"{own_address()}:{client}" for client, _ in ports]
        self._folder = folder
        self._commands = [etcd_server.command(binary, folder / f"m{i}", own_address(), client, peer, name=f"m{i}",
                                              cluster=cluster)
                          for i, (client, peer) in enumerate(ports)]
        self._running = [self._spawn(i) for i in range(count)]
        stack.callback(self._end)
        self.wait()

    def wait(self) -> None:
        """Waits until each member answers and has a leader."""
        wait_until(lambda: all(etcd_server.healthy(e) for e in self.endpoints), timeout_s=_START_S, what="etcd",
                   alive=lambda: all(p.poll() is None for p in self._running))

    def signal(self, i: int, number: signal.Signals) -> None:
        self._running[i].send_signal(number)

    def restore(self, i: int) -> None:
        """Resumes a stopped member, or restarts a killed one on its data; waits until all are healthy."""
        self.signal(i, signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._running[i].wait(0.2)
            self._running[i] = self._spawn(i)
        self.wait()

    def _end(self) -> None:
        for process in self._running:
            end(process)

    def _spawn(self, i: int) -> subprocess.Popen[bytes]:
        return spawn(self._commands[i], log=self._folder / f"m{i}.log")
