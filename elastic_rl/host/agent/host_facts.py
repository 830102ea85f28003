"""What the agent registers its host with."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

import elastic_rl
from elastic_rl.etcd.cluster_records import Host
from elastic_rl.etcd.process_state import machine_id
from elastic_rl.etcd.record import Record
from elastic_rl.host.local_cluster import SHM
from elastic_rl.host.local_host import LocalHost
from elastic_rl.host.machine_resources import usable_cpus, usable_memory_bytes
from elastic_rl.runtime.files import replace_file


class _Boot(Record):
    """The incarnation of this host, and the boot and pid namespace that it is for."""

    incarnation: str
    machine: str


class HostResources(NamedTuple):
    """What this host has for work."""

    cpus: int
    gpus: int
    memory_bytes: int
    shm_bytes: int

    @classmethod
    def of_this_host(cls, devices: Path = Path("/dev")) -> HostResources:
        """``devices``: folder of the device files, of which the driver of NVIDIA has one a GPU (a container sees only
        its own)."""
        return cls(usable_cpus(), len(list(devices.glob("nvidia[0-9]*"))), usable_memory_bytes(),
                   shutil.disk_usage(SHM).total)


def host_record(host: LocalHost, incarnation: str, *, log_port: int = 0, run_dir: str = "") -> Host:
    """This host, as it is registered. ``log_port``, ``run_dir``: as the record has them."""
    return Host(id=host.name, incarnation=incarnation, address=host.address, machine=machine_id(), labels=host.labels,
                release=elastic_rl.__version__, log_port=log_port, run_dir=run_dir,
                **HostResources.of_this_host()._asdict())


def kept_incarnation(path: Path) -> str:
    """The incarnation of this host: random, and kept in a file for this boot and pid namespace, in which what an
    earlier agent has started may live. Where the kernel does not name them, each agent has another one. Raises OSError.
    """
    machine = machine_id()
    try:
        known = _Boot.decode(path.read_bytes())
        if machine and known.machine == machine:
            return known.incarnation
    except (FileNotFoundError, ValidationError):
        pass
    boot = _Boot(incarnation=secrets.token_hex(8), machine=machine)
    replace_file(path, boot.encode(), private=True, durable=True)
    return boot.incarnation


def stored_incarnation(path: Path) -> str:
    """What ``kept_incarnation`` has stored last, on whichever host; empty where there is nothing, or it is damaged."""
    try:
        return _Boot.decode(path.read_bytes()).incarnation
    except (FileNotFoundError, ValidationError):
        return ""
