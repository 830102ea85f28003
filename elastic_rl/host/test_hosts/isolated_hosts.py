"""Hosts that share neither network, processes, mounts, names nor memory with one another, on a bridge of this machine.

Nothing about them is stored: a host is found by the mark in the environment of its init, which all commands know, and a
link by its name. So what a command that was killed has left is found by the next one. The network namespace of a host
and its link end with the last of its processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import psutil

from elastic_rl.errors import DeadlineExceeded, PreflightFailed
from elastic_rl.host import processes
from elastic_rl.host.test_hosts import impaired_link
from elastic_rl.host.test_hosts.bridge import AS_ROOT, Bridge, interfaces, ip, routes
from elastic_rl.host.test_hosts.impaired_link import Impairment
from elastic_rl.host.test_hosts.naming import Subnet, bridge_name, choose_subnet, is_of_tag, link_name
from elastic_rl.runtime.process import runs
from elastic_rl.runtime.waiting import wait_until
from elastic_rl.telemetry.log_files import tail

MARK = "ELASTIC_RL_TEST_HOST"
"""Environment variable of the init of a host, and of nothing that runs on the host: tag and name."""
DEVICE = "eth0"
"""The host's end of its link."""
PRIVATE = (Path("/tmp"), Path("/dev/shm"))
"""Folders that each host has for itself."""
_NOBODY = "02:00:00:00:00:01"
"""An address of Ethernet that no device has."""
_PROGRAMS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_NAMESPACES = ("--net", "--pid", "--mount", "--ipc", "--uts")
_ON = "on"
"""What the init of a host is called once the host is set up."""
_START_S, _END_S = 30.0, 30.0
"""Longest waits for namespaces to be set up, and for all processes of a host to end; both take milliseconds."""
_PROBE_S = 10.0
# The init: a shell reaps the processes whose parents have ended. $1: name; $2: the only folder below $3 that the host
# has; empty: it has all of them.
_SET_UP = """
printf '%s' "$1" > /proc/sys/kernel/hostname
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /tmp
if [ "$2" ]; then
  mkdir -p "$2" /tmp/own
  mount --bind "$2" /tmp/own
  mount -t tmpfs -o mode=0755 tmpfs "$3"
  mkdir -p "$2"
  mount --move /tmp/own "$2"
  rmdir /tmp/own
fi
exec sh -c 'while :; do sleep infinity & wait; done' on
"""


def require() -> None:
    """Raises PreflightFailed where no test host can be made here."""
    for program, package in _PROGRAMS.items():
        if shutil.which(program) is None:
            raise PreflightFailed(f"hosts on this machine need the program {program}", hint=f"install {package}")
    try:
        done = subprocess.run(["unshare", *_NAMESPACES, "--fork", "--mount-proc", "true"], capture_output=True,
                              timeout=_PROBE_S, encoding="utf-8", errors="replace")
        why = done.stderr.strip() if done.returncode else ""
    except subprocess.TimeoutExpired:
        why = f"`unshare` has not ended in {_PROBE_S:g} s"
    if why:
        raise PreflightFailed(f"no host can be made on this machine: {why}", hint=AS_ROOT)


class IsolatedHosts:
    """The hosts with a tag. Two objects, in one process or in two, that have the same tag and subnet have the same
    hosts."""

    def __init__(self, tag: str, subnet: Subnet, names: Sequence[str], logs: Path, *, outlive: bool = True) -> None:
        """``names``: the i-th host has the i-th address. ``logs``: folder of what their inits say. ``outlive``: whether
        hosts that are powered on outlive this process, also after kill -9."""
        self.tag, self.names, self._logs, self._outlive = tag, list(names), logs, outlive
        self.bridge = Bridge(bridge_name(tag), subnet, lambda number: link_name(tag, number))
        self._numbers = {name: number for number, name in enumerate(names, start=1)}

    @classmethod
    def new(cls, tag: str, names: Sequence[str], logs: Path) -> IsolatedHosts:
        """Hosts in a network that is free now. Raises PreflightFailed."""
        return cls(tag, choose_subnet(tag, routes()), names, logs)

    def address(self, name: str) -> str:
        return self.bridge.subnet.address(self._numbers[name])

    # -- power --------------------------------------------------------------------------------------------------------
    def power_on(self, name: str, *, own: Path | None = None, hidden: Path | None = None) -> bool:
        """Makes the host, or what of it is missing, and heals its link. ``own``: the only folder below ``hidden`` that
        is there on the host. Returns whether it was off. Raises PreflightFailed."""
        init = self.init(name)
        was_off = init is None
        if init is None:
            self.power_off(name)  # what is left of an init that was killed
            init = self._start(name, own, hidden)
        self.bridge.connect(self._numbers[name], str(init.pid), _net_of(init.pid), DEVICE)
        self.heal(name)
        return was_off

    def _start(self, name: str, own: Path | None, hidden: Path | None) -> psutil.Process:
        folders = (str(own), str(hidden)) if own is not None and hidden is not None else ("", "")
        log = self._logs / f"{name}.log"
        begun = processes.spawn(
            ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc", "sh", "-ec", _SET_UP, "sh", name,
             *folders], log=log, env={MARK: self._mark(name)}, service=self._outlive, cwd=Path("/"))
        try:
            return wait_until(lambda: self.init(name), timeout_s=_START_S, what=f"host {name}",
                              alive=lambda: begun.poll() is None or bool(self._marked(name)))
        except DeadlineExceeded as e:
            said = tail(log).strip().splitlines()
            self.power_off(name)
            raise PreflightFailed(f"host {name} cannot be made: {said[-1] if said else e.message}",
                                  hint=AS_ROOT if said and "ermi" in said[-1] else f"see {log}") from e

    def power_off(self, name: str) -> bool:
        """Ends everything on the host at once, as a power cut does, and returns once it has ended; returns whether
        there was something. Others are not told that their connections to it have ended. Raises DeadlineExceeded."""
        if not (found := self._marked(name)):
            return False
        if name in self._numbers:
            with contextlib.suppress(PreflightFailed):  # a host that was not complete has no link
                self.cut(name)  # the kernel would say goodbye on behalf of what is killed
        # The end of the init of a pid namespace is the end of all processes in it, before it counts as ended.
        processes.kill(found, grace_s=_END_S)
        if left := [process.pid for process in found if runs(process)]:
            raise DeadlineExceeded(f"processes {left} of host {name} have not ended in {_END_S:g} s after SIGKILL")
        return True

    def remove(self) -> list[str]:
        """Powers all hosts off, those that have no name here included, and removes their network. Returns the names of
        those that were on. Raises DeadlineExceeded and PreflightFailed."""
        ended = [name for name in self._on_or_left() if self.power_off(name)]
        for interface in interfaces():
            if is_of_tag(interface, self.tag) and interface != self.bridge.name:
                with contextlib.suppress(PreflightFailed):  # it has gone with its host
                    ip("link", "del", interface)
        self.bridge.remove()
        return ended

    # -- network ------------------------------------------------------------------------------------------------------
    def cut(self, name: str) -> None:
        """Raises PreflightFailed for a host that is off."""
        self.bridge.cut(self._numbers[name])

    def block(self, sender: str, receiver: str) -> None:
        """Has what a host sends to another one get lost, and nobody told. What the other one sends arrives. Raises
        PreflightFailed for a sender that is off."""
        ip("neigh", "replace", self.address(receiver), "lladdr", _NOBODY, "dev", DEVICE, "nud", "permanent",
           inside=self._net(sender))

    def impair(self, name: str, impairment: Impairment) -> None:
        """Has the link of a host be slow, late or lossy, in place of an impairment before. Raises PreflightFailed for a
        host that is off."""
        number = self._numbers[name]
        self.bridge.heal(number)
        device, log = self.bridge.impairment(number), self._logs / f"{name}-link.log"
        carrier = processes.spawn(
            processes.python(impaired_link.__name__, self.bridge.link(number), device,
                             json.dumps(asdict(impairment))), log=log, service=self._outlive, cwd=Path("/"))
        try:
            # It takes the link from the bridge once its own device is there, which carries frames from then on.
            wait_until(lambda: self.bridge.is_on_bridge(device) and not self.bridge.is_on_bridge(
                self.bridge.link(number)), timeout_s=_START_S, what=f"the impairment of {name}",
                alive=lambda: carrier.poll() is None)
        except DeadlineExceeded as e:
            self.bridge.heal(number)
            said = tail(log).strip().splitlines()
            raise PreflightFailed(f"the link of {name} cannot be impaired: {said[-1] if said else e.message}",
                                  hint=f"see {log}") from e

    def heal(self, name: str) -> None:
        """Takes back what was done to the network of a host: ``cut``, ``impair``, and ``block`` to it and from it.
        Raises PreflightFailed for a host that is off."""
        self.bridge.heal(self._numbers[name])
        for other in self.names:
            if other == name:
                ip("neigh", "flush", "dev", DEVICE, "nud", "permanent", inside=self._net(name))
            elif self.init(other) is not None:
                with contextlib.suppress(PreflightFailed):  # nothing is blocked
                    ip("neigh", "del", self.address(name), "dev", DEVICE, inside=self._net(other))

    def is_cut(self, name: str) -> bool:
        return self.bridge.is_cut(self._numbers[name])

    # -- what is there ------------------------------------------------------------------------------------------------
    def init(self, name: str) -> psutil.Process | None:
        """The first process of a host that is set up; None while it is off."""
        return next((process for process in self._marked(name) if _is_init(process)), None)

    def inside(self, name: str) -> list[str]:
        """What a command line begins with that runs on the host. Raises PreflightFailed while it is off."""
        if (init := self.init(name)) is None:
            raise PreflightFailed(f"host {name} is off")
        return ["nsenter", "--target", str(init.pid), *_NAMESPACES]

    def processes(self, name: str) -> list[psutil.Process]:
        """All processes on the host; none while it is off."""
        if (init := self.init(name)) is None:
            return []
        space = _pid_namespace(init)
        return [process for process in psutil.process_iter() if _pid_namespace(process) == space]

    def _net(self, name: str) -> list[str]:
        """What a command line begins with that runs in the network of a host. Raises PreflightFailed while it is
        off."""
        if (init := self.init(name)) is None:
            raise PreflightFailed(f"host {name} is off")
        return _net_of(init.pid)

    def _mark(self, name: str) -> str:
        return f"{self.tag}/{name}"

    def _marked(self, name: str) -> list[psutil.Process]:
        return [process for process in processes.marked(self._mark(name), MARK) if _is_ours(process)]

    def _on_or_left(self) -> list[str]:
        """Names of the hosts with the tag of which a process runs."""
        found = set[str]()
        for process, mark in processes.with_variable(MARK):
            tag, _, name = mark.partition("/")
            if tag == self.tag and _is_ours(process):
                found.add(name)
        return sorted(found)


def _net_of(pid: int) -> list[str]:
    """What a command line begins with that runs in the network of a process, with everything else as it is here."""
    return ["nsenter", "--target", str(pid), "--net"]


def _is_ours(process: psutil.Process) -> bool:
    """Whether a process is in the user namespace of this one, as all hosts are that are made here. Anybody may have a
    process with any mark in one of their own, whose other namespaces are not to be entered."""
    try:
        return os.readlink(f"/proc/{process.pid}/ns/user") == os.readlink("/proc/self/ns/user")
    except OSError:
        return False


def _is_init(process: psutil.Process) -> bool:
    """Whether a process is the first one of its pid namespace, which is not this one, and has set its host up."""
    try:
        if process.cmdline()[3:] != [_ON]:
            return False
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8", errors="replace")
        pids = re.findall(r"^NSpid:(.*)$", status, re.MULTILINE)
    except (psutil.Error, OSError):
        return False
    return len(pids) == 1 and len(pids[0].split()) > 1 and pids[0].split()[-1] == "1"


def _pid_namespace(process: psutil.Process) -> str:
    try:
        return os.readlink(f"/proc/{process.pid}/ns/pid")
    except OSError:
        return ""
