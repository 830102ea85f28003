"""Leases: grant and revoke, and a lease that a thread keeps alive and that knows by its own clock when it is lost."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from typing import Self

from elastic_rl.errors import ElasticRLError, EtcdRefused, EtcdUnavailable, LeaseLost
from elastic_rl.etcd.call_errors import AttemptFailed
from elastic_rl.etcd.channels import GRANT, KEEPALIVE, REVOKE, Channels
from elastic_rl.etcd.pb import etcd_pb2 as pb
from elastic_rl.runtime.clock import boottime_s

log = logging.getLogger(__name__)


def grant(channels: Channels, ttl_s: int) -> int:
    """Grants a lease and returns its id. The id is ours, so that a request that is sent twice grants one lease.

    Raises EtcdUnavailable; EtcdFull while etcd is at its quota.
    """
    lease = secrets.randbits(62) | 1
    try:
        channels.call(GRANT, pb.LeaseGrantRequest(TTL=ttl_s, ID=lease))
    except EtcdRefused as e:
        if "already exists" not in e.message:
            raise
    return lease


def revoke(channels: Channels, lease: int, *, budget_s: float | None = None) -> None:
    """Ends a lease and deletes its keys; one that has ended already is fine."""
    with contextlib.suppress(LeaseLost):
        channels.call(REVOKE, pb.LeaseRevokeRequest(ID=lease), budget_s=budget_s)


def renew(channels: Channels, lease: int, member: str, *, timeout_s: float) -> int | None:
    """Extends a lease by its time to live, in one attempt on one member; also works while etcd is at its quota.

    Returns the seconds that the server grants from now on, 0 when it does not know the lease, None without an answer.
    Raises as ``Channels.attempt``, but AttemptFailed.
    """
    try:
        # A stream of one request and one answer is a call, and takes no thread.
        return int(channels.attempt(KEEPALIVE, pb.LeaseKeepAliveRequest(ID=lease), member, timeout_s=timeout_s).TTL)
    except AttemptFailed:
        return None


class KeptLease:
    """A lease that a background thread keeps alive. ``lost`` is set once its keys are gone or will be, for good.

    Time is counted from when the last answered keep-alive was *sent*, so ``lost`` is never set later than the server
    lets the lease end. Time in which the machine was suspended counts. A process that was stopped may notice it late: a
    lease alone is not a fence.
    """

    def __init__(self, channels: Channels, lease: int, ttl_s: int, *, granted_at: float) -> None:
        """``granted_at``: when the grant was requested (``boottime_s``)."""
        self.id = lease
        self.ttl_s = ttl_s
        self.lost = threading.Event()
        self._channels = channels
        self._member = channels.current
        self._stopping = threading.Event()
        self.renewed_at = granted_at
        """When the last answered keep-alive, or the grant, was sent (``boottime_s``)."""
        self._thread = threading.Thread(target=self._run, name=f"lease-{lease:x}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the last keep-alive still holds by this process's clock; unlike ``lost``, never late."""
        return not self.lost.is_set() and boottime_s() - self.renewed_at < self.ttl_s

    def _run(self) -> None:
        pause = 0.0  # the first keep-alive is sent at once: the grant may have taken long
        while not self._stopping.wait(pause):
            sent = boottime_s()
            ttl = self._renew()
            if ttl:
                self.renewed_at, pause = sent, self.ttl_s / 3
                self._channels.follow_members()
            elif ttl is None and boottime_s() - self.renewed_at < self.ttl_s:
                pause = min(0.05, self.ttl_s / 20)
            else:
                break
        if not self._stopping.is_set():
            self.lost.set()

    def _renew(self) -> int | None:
        """Renews the lease as ``renew`` does, on the member that answered last. 0 also when the client was closed."""
        timeout_s = min(self._channels.call_timeout_s, self.ttl_s / 4)
        try:
            ttl = renew(self._channels, self.id, self._member, timeout_s=timeout_s)
        except ElasticRLError as e:
            if self._channels.closed.is_set():
                return 0
            log.warning("lease %x cannot be kept alive: %s", self.id, e)
            ttl = None
        if ttl is None:
            self._member = self._channels.after(self._member)
        return ttl

    def stop(self) -> None:
        """Stops the thread. The lease and its keys stay until it expires."""
        self._stopping.set()
        self._thread.join(timeout=2 * self._channels.call_timeout_s)

    def close(self) -> None:
        """Stops the thread and revokes the lease, which deletes its keys. Without etcd the lease expires."""
        if self._stopping.is_set():
            return
        self.stop()
        # Also when it is lost: by our clock it is, but the server may let it live longer and keep the keys.
        with contextlib.suppress(EtcdUnavailable, EtcdRefused):
            revoke(self._channels, self.id, budget_s=2 * self._channels.call_timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
