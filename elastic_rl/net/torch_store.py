"""torch.distributed's TCP store on one address.

The store takes commands from whoever connects, without a password, and torch has it listen on every interface of the
machine. Here it listens on the address only by which the ranks find it.
"""

from __future__ import annotations

import importlib
import ipaddress
import socket
from typing import Any

from torch.distributed import TCPStore


def install() -> None:
    """Has ``init_process_group`` of this process make such stores, for ``env://`` and ``tcp://``."""
    # Not an attribute of the package: that is the function of this name.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    rendezvous.TCPStore = bound_store


def bound_store(host_name: str, port: int, *, is_master: bool, **options: Any) -> TCPStore:
    """The store of these arguments of ``TCPStore``, whose server listens on ``host_name`` only. Where that is a name or
    an address of another machine, and where the port is taken (it may be by a store of this process, which torch then
    shares), torch decides."""
    listening = _listen(host_name, port) if is_master else None
    if listening is None:
        return TCPStore(host_name, port, is_master=is_master, **options)
    port = listening.getsockname()[1]
    return TCPStore(host_name, port, is_master=True, master_listen_fd=listening.detach(), **options)  # which it closes


def _listen(host: str, port: int) -> socket.socket | None:
    try:
        # The address of a name may be a loopback one on this machine only, and ranks of other machines would not come.
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return None
    found = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ranks that start again take their port again
        found.bind((str(address), port))
        found.listen()  # so that another server of this port fails here, and not later
    except OSError:
        found.close()
        return None
    return found
