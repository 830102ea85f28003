"""The clock by which leases are counted."""

from __future__ import annotations

import time


def boottime_s() -> float:
    """Seconds since this machine's boot. They never go back, and count on while the machine is suspended, as the leases
    that etcd has given to its processes do; ``time.monotonic`` stands still meanwhile."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
