"""What etcd's API does not say about a member before 3.6, and its metrics page does: its quota, and whether its history
is ever compacted."""

from __future__ import annotations

import contextlib
import http.client
import time
from dataclasses import dataclass

from elastic_rl.errors import ConfigError
from elastic_rl.etcd.access import Access

_MAX_BYTES = 8 << 20
_FRESH_S, _RETRY_S = 600.0, 60.0
_QUOTA = "etcd_server_quota_backend_bytes"
_COMPACTED = "etcd_debugging_mvcc_compact_revision"
_CURRENT = "etcd_debugging_mvcc_current_revision"


@dataclass(frozen=True)
class MemberMetrics:
    """0 where the page does not have it."""

    quota_bytes: int = 0
    """``--quota-backend-bytes``, or etcd's default."""
    current_revision: int = 0
    compacted_revision: int = 0
    """Older ones are not kept; 0 before the first compaction."""


def parse(page: str) -> MemberMetrics:
    """Reads a page in the Prometheus text format."""
    found = {}
    for line in page.splitlines():
        name, _, value = line.partition(" ")
        if name in (_QUOTA, _COMPACTED, _CURRENT):
            with contextlib.suppress(ValueError):
                found[name] = max(0, int(float(value)))
    return MemberMetrics(found.get(_QUOTA, 0), found.get(_CURRENT, 0), found.get(_COMPACTED, 0))


def read(address: str, access: Access, *, timeout_s: float) -> MemberMetrics | None:
    """Reads the metrics page of the member at ``host:port``; None where it has none that we can read."""
    try:
        if access.tls is None:
            connection = http.client.HTTPConnection(address, timeout=timeout_s)
        else:
            connection = http.client.HTTPSConnection(address, timeout=timeout_s, context=access.tls.context())
        with contextlib.closing(connection):
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            return parse(answer.read(_MAX_BYTES).decode(errors="replace")) if answer.status == 200 else None
    except (OSError, http.client.HTTPException, ConfigError):
        return None


class QuotaReader:
    """Quotas of members by their address, each read once in a while. Safe to share between threads."""

    def __init__(self, access: Access, *, timeout_s: float) -> None:
        self._access, self._timeout_s = access, timeout_s
        self._known: dict[str, tuple[float, int]] = {}

    def quota_bytes(self, address: str) -> int:
        """0 if unknown."""
        until, quota = self._known.get(address, (0.0, 0))
        if time.monotonic() >= until:
            found = read(address, self._access, timeout_s=self._timeout_s)
            quota = found.quota_bytes if found else 0
            self._known[address] = (time.monotonic() + (_FRESH_S if quota else _RETRY_S), quota)
        return quota
