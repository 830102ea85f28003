"""What a process does for itself: ends with its parent, starts children, freezes its heap, finds addresses, waits."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import ipaddress
import secrets
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import psutil

from elastic_rl.errors import DeadlineExceeded, PreflightFailed
from elastic_rl.files import PRIVATE_UMASK

_ELSEWHERE = {socket.AF_INET: "198.51.100.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses for documentation (RFC 5737, RFC 3849), which no machine has: the route to them is the default route."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PORTS = range(20_000, 30_000)
"""Below the ports that Linux gives to outgoing connections (from 32768 on), one of which could take a server's port
before the server binds it, and below those of Kubernetes' services (30000 to 32767)."""
_PORT_TRIES = 100
_given_ports: deque[tuple[int, socket.socket]] = deque(maxlen=256)
"""Each with what claims it."""
RAY_PRIORITY = {"RAY_worker_niceness": "0"}
"""Environment of what starts Ray, whose workers have a lower priority by default, and so would all below them: ranks,
whose collectives wait for the slowest one, and actors, which beside busy processes would get no time to import."""
T = TypeVar("T")
_forker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forker")
"""PR_SET_PDEATHSIG fires when the *thread* that forked ends, so every child is forked by this one."""
_libc = ctypes.CDLL(None, use_errno=True)  # resolved at import: nothing may be imported between fork and exec


def die_with_parent(sig: int = signal.SIGKILL) -> None:
    """Has the kernel signal this process when the thread that forked it ends. Call it first thing in a child."""
    _libc.prctl(_PR_SET_PDEATHSIG, sig)


def adopt_orphans() -> None:
    """Makes this process the parent of each descendant whose own parent has ended. It has to reap them."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def start_process(cmd: Sequence[str], **popen: Any) -> subprocess.Popen[bytes]:
    """Starts a process in a session of its own, with ``files.PRIVATE_UMASK``, which all that it starts inherits. Every
    process of the project is started here. ``popen``: further arguments of ``subprocess.Popen``. Raises OSError when
    the program cannot be started."""
    return subprocess.Popen(list(cmd), start_new_session=True, umask=PRIVATE_UMASK, **popen)


def start_child(cmd: Sequence[str], **popen: Any) -> subprocess.Popen[bytes]:
    """Starts a process that the kernel kills when this one ends, also after kill -9. Otherwise as ``start_process``."""
    return _forker.submit(lambda: start_process(cmd, preexec_fn=die_with_parent, **popen)).result()


def batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Splits a sequence into parts of ``size``, the last one shorter, in order."""
    for start in range(0, len(items), size):
        yield items[start:start + size]


def freeze_heap() -> None:
    """Excludes what this process has loaded from garbage collection; call once a long-lived process is set up. A full
    collection otherwise stops a process that has imported torch for 100 ms."""
    gc.collect()
    gc.freeze()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that is free now, and that neither this process nor another one of this project on this host, which
    still runs, was given lately: a server may bind it many seconds later. A foreign process may take it before that,
    but no outgoing connection does. Raises OSError for a host that is not this one."""
    for _ in range(_PORT_TRIES):
        port = secrets.choice(_PORTS)
        with contextlib.suppress(OSError), contextlib.ExitStack() as claimed, socket.socket(_family(host)) as s:
            claim = claimed.enter_context(socket.socket(socket.AF_UNIX))
            claim.bind(f"\0elastic-rl/port/{port}")  # an abstract name, which ends with this process
            s.bind((host, port))
            if len(_given_ports) == _given_ports.maxlen:
                _given_ports.popleft()[1].close()
            _given_ports.append((port, claim))
            claimed.pop_all()
            return port
    with socket.socket(_family(host)) as s:
        s.bind((host, 0))
        return int(s.getsockname()[1])


def reachable_address(bound: str, peers: Iterable[str] = ()) -> str:
    """The IP address under which other hosts reach a server of this process.

    That is ``bound``, the address the server listens on, unless it stands for all of them ("", 0.0.0.0, ::). Then it is
    the local address of the route to one of ``peers`` (``host:port``, such as etcd's endpoints), else of the default
    route, else of any interface that is up, and loopback only on a machine that has nothing else. The host name is not
    looked up: Debian resolves it to 127.0.1.1. No packet is sent.
    """
    if bound not in ("", "0.0.0.0", "::"):
        return bound
    families = [socket.AF_INET, socket.AF_INET6] if bound == "::" else [socket.AF_INET]
    for family in families:
        for host in [*(peer.rpartition(":")[0].strip("[]") for peer in peers), _ELSEWHERE[family]]:
            found = _source_address(family, host)
            if found and not ipaddress.ip_address(found).is_loopback:
                return found
    up = {name for name, status in psutil.net_if_stats().items() if status.isup}
    for family in families:
        for name, addresses in psutil.net_if_addrs().items():
            for found in (a.address for a in addresses if a.family == family and name in up):
                address = ipaddress.ip_address(found.partition("%")[0])
                if not address.is_loopback and not address.is_link_local:
                    return found
    return "127.0.0.1"


def _source_address(family: socket.AddressFamily, host: str) -> str:
    """The address that packets from here to a host would carry; empty when there is no route or no such host."""
    try:
        target = socket.getaddrinfo(host, 9, family, socket.SOCK_DGRAM)[0][4]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def require_port_free(host: str, port: int, *, setting: str) -> None:
    """Raises PreflightFailed, naming the setting, when the port cannot be bound."""
    with socket.socket(_family(host)) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as e:
            raise PreflightFailed(
                f"port {port} on {host} cannot be bound ({setting}): {e.strerror}",
                hint=f"stop what listens there (`ss -ltnp 'sport = :{port}'`) or set another {setting}") from e


def require_address(host: str, *, setting: str) -> None:
    """Raises PreflightFailed, naming the setting, when no server of this machine can listen on ``host``."""
    try:
        with socket.socket(_family(host)) as s:
            s.bind((host, 0))
    except (OSError, UnicodeError) as e:  # a name that no DNS could have is a UnicodeError
        raise PreflightFailed(f"{setting}={host} is no address of this machine: {getattr(e, 'strerror', None) or e}",
                              hint=f"set {setting} to one that `ip addr` lists, or to 127.0.0.1") from e


def runs(process: psutil.Process) -> bool:
    """Whether a process runs. A zombie does not, nor another process that has its number now."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two
        return False


def wait_until(check: Callable[..., T | None], *, timeout_s: float, what: str, poll_s: float = 0.05,
               alive: Callable[..., bool] | None = None) -> T:
    """Polls ``check()`` until it returns something true and returns that. ``alive()`` false ends the wait early. Both
    are called without arguments; they may have some with defaults, as a lambda in a loop does.

    Raises DeadlineExceeded, which names ``what``.
    """
    end = time.monotonic() + timeout_s
    while True:
        if value := check():
            return value
        if alive is not None and not alive():
            raise DeadlineExceeded(f"{what} ended before it was ready", hint="see its log")
        if time.monotonic() > end:
            raise DeadlineExceeded(f"{what} was not ready within {timeout_s:g} s")
        time.sleep(poll_s)


class ProgressLimit:
    """A limit on the time without progress of something that is slow on a slow machine: a start, a load, a compile.

    The caller passes numbers that grow with the work (CPU seconds, bytes of a log, bytes read). It is progress when one
    of them has grown by at least its step since the last progress. A number that falls (a process ended) counts from
    where it fell to.
    """

    def __init__(self, limit_s: float, *, steps: Mapping[str, float] | None = None, gap_s: float = 30.0,
                 clock: Callable[[], float] = time.monotonic) -> None:
        """``limit_s``: seconds without progress. ``steps``: the smallest growth that counts, by name; any where it is
        not named. ``gap_s``: the most that the time between two updates can count for, so that a caller which was
        itself suspended blames nobody."""
        self.limit_s, self._steps, self._gap_s, self._clock = limit_s, dict(steps or {}), gap_s, clock
        self._base: dict[str, float] = {}
        self._updated_at = clock()
        self._stalled_s = 0.0

    def update(self, evidence: Mapping[str, float]) -> bool:
        """Takes the numbers as they are now. Returns whether there was progress since the last update."""
        now = self._clock()
        elapsed, self._updated_at = max(0.0, now - self._updated_at), now
        grown = False
        for name, value in evidence.items():
            base = self._base.setdefault(name, value)
            if value < base:
                self._base[name] = value
            grown |= value - base > 0 and value - base >= self._steps.get(name, 0.0)
        if grown:
            self._base.update(evidence)
            self._stalled_s = 0.0
        else:
            self._stalled_s += min(elapsed, self._gap_s)
        return grown

    @property
    def stalled_s(self) -> float:
        """Seconds without progress, as of the last update."""
        return self._stalled_s

    @property
    def expired(self) -> bool:
        return self._stalled_s >= self.limit_s
