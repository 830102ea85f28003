"""A link of a test host that delays, loses or slows down what goes through it, where the kernel cannot do that itself
(netem is no part of every kernel).

``python -m elastic_rl.host.test_hosts.impaired_link LINK DEVICE IMPAIRMENT`` takes the machine's end of the host's link
from its bridge, puts a device of its own there, and carries Ethernet frames between the two. The frames keep the header
that says what of their checksum and segments is left to do (virtio_net_hdr), so nothing in them is to be computed. The
process ends when its device is deleted, which ``Bridge.heal`` does; when it is killed, its device goes with it, and the
host is without network until ``heal``.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import json
import math
import os
import random
import select
import socket
import struct
import sys
import time
from dataclasses import asdict, dataclass

from elastic_rl.host.test_hosts.bridge import ip

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_SOL_PACKET, _PACKET_VNET_HDR = 263, 15
_PACKET_OUTGOING = 4
_ETH_P_ALL = 3
_MOST_BYTES = 70_000
"""A frame is at most 64 KiB: several segments of TCP travel as one."""
_QUEUED_BYTES = 4 << 20
"""What a slow link holds back at most, each way, before it loses what comes further."""
_BATCH = 64


@dataclass(frozen=True)
class Impairment:
    """What happens to frames, each way."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    """Up to so much more delay, drawn for each frame; frames do not overtake one another."""
    loss: float = 0.0
    """Share of the frames that is lost."""
    bytes_per_s: float = 0.0
    """0: as fast as the link is."""

    def __post_init__(self) -> None:
        if not all(0 <= value < math.inf for value in asdict(self).values()) or self.loss > 1:
            raise ValueError(f"this is no impairment of a link: {self}")

    def __str__(self) -> str:
        jitter = f" to {1e3 * (self.delay_s + self.jitter_s):g}" if self.jitter_s else ""
        said = [f"{1e3 * self.delay_s:g}{jitter} ms of delay" if self.delay_s or self.jitter_s else "",
                f"{self.loss:.0%} lost" if self.loss else "",
                f"{self.bytes_per_s / 1024:g} KiB/s" if self.bytes_per_s else ""]
        return ", ".join(filter(None, said)) or "none"


class Way:
    """One way of an impaired link: when each frame leaves it. Has no clock; times only grow."""

    def __init__(self, impairment: Impairment, draw: random.Random) -> None:
        self._impairment, self._draw = impairment, draw
        self._free_at = self._last_at = 0.0
        self._frames: list[tuple[float, int, bytes]] = []
        self._numbers = itertools.count()
        self.queued_bytes = 0

    def enter(self, frame: bytes, now: float) -> None:
        spec = self._impairment
        if self._draw.random() < spec.loss or self.queued_bytes + len(frame) > _QUEUED_BYTES:
            return
        sent_at = now
        if spec.bytes_per_s:
            sent_at = self._free_at = max(now, self._free_at) + len(frame) / spec.bytes_per_s
        self._last_at = max(self._last_at, sent_at + spec.delay_s + self._draw.random() * spec.jitter_s)
        heapq.heappush(self._frames, (self._last_at, next(self._numbers), frame))
        self.queued_bytes += len(frame)

    def leaving(self, now: float) -> list[bytes]:
        """The frames that have arrived by now, in their order."""
        found = []
        while self._frames and self._frames[0][0] <= now:
            found.append(heapq.heappop(self._frames)[2])
            self.queued_bytes -= len(found[-1])
        return found

    @property
    def next_at(self) -> float:
        """When the next frame arrives; infinite while there is none."""
        return self._frames[0][0] if self._frames else float("inf")


def _tap(name: str) -> int:
    """A new device, as a file from which frames that are sent to it are read."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
    return tap


def _of_link(name: str) -> socket.socket:
    """All frames of a device."""
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    sock.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _QUEUED_BYTES)
    sock.setblocking(False)
    sock.bind((name, _ETH_P_ALL))
    return sock


def carry(link: str, device: str, impairment: Impairment) -> None:
    """Carries frames until the device is deleted. Raises PreflightFailed and OSError."""
    master = os.path.basename(os.path.realpath(f"/sys/class/net/{link}/master"))
    tap = _tap(device)
    ip("link", "set", device, "master", master, "up")
    sock = _of_link(link)
    ip("link", "set", link, "nomaster", "up")
    draw = random.Random()
    from_host, to_host = Way(impairment, draw), Way(impairment, draw)
    poll = select.poll()
    poll.register(tap, select.POLLIN)
    poll.register(sock, select.POLLIN)
    while os.path.exists(f"/sys/class/net/{device}"):
        pause_s = min(from_host.next_at, to_host.next_at) - time.monotonic()
        poll.poll(max(0.0, min(1e3 * pause_s + 0.5, 200.0)))
        now = time.monotonic()
        try:
            with contextlib.suppress(BlockingIOError):
                for _ in range(_BATCH):
                    to_host.enter(os.read(tap, _MOST_BYTES), now)
            with contextlib.suppress(BlockingIOError):
                for _ in range(_BATCH):
                    frame, address = sock.recvfrom(_MOST_BYTES)
                    if address[2] != _PACKET_OUTGOING:
                        from_host.enter(frame, now)
            for frame in from_host.leaving(now):
                os.write(tap, frame)
            for frame in to_host.leaving(now):
                sock.send(frame)
        except OSError:  # the device was deleted, or the host is off; a frame that cannot be sent is lost
            continue


def main() -> None:
    link, device, impairment = sys.argv[1:]
    carry(link, device, Impairment(**json.loads(impairment)))


if __name__ == "__main__":
    main()
