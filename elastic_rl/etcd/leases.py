"""A lease that a thread keeps alive, and that knows by its own clock when it must be taken for lost."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Self

import grpc

from elastic_rl.errors import ElasticRLError, EtcdRefused, EtcdUnavailable
from elastic_rl.etcd import deduplication
from elastic_rl.etcd.call_errors import AttemptFailed, Failure
from elastic_rl.etcd.channels import KEEPALIVE, Channels
from elastic_rl.etcd.pb import etcd_pb2 as pb

log = logging.getLogger(__name__)


class KeptLease:
    """A lease under a background thread. When ``lost`` is set, its keys are gone or will be, and it is over for good.

    Time is counted from when the last answered keep-alive was *sent*, so ``lost`` is never set later than the server
    lets the lease end. It may be noticed late by a process that was stopped: a lease alone is not a fence.
    """

    def __init__(self, channels: Channels, lease: int, ttl_s: int, *, granted_at: float) -> None:
        """``granted_at``: monotonic time before the grant was asked for."""
        self.id = lease
        self.ttl_s = ttl_s
        self.lost = threading.Event()
        self._channels = channels
        self._member = channels.at
        self._done = threading.Event()
        self._alive_at = granted_at
        self._thread = threading.Thread(target=self._keep, name=f"lease-{lease:x}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the last keep-alive still holds by this process's clock; unlike ``lost``, never late."""
        return not self.lost.is_set() and time.monotonic() - self._alive_at < self.ttl_s

    def _keep(self) -> None:
        pause = 0.0  # the first beat at once: the grant may have gone from member to member for a while
        while not self._done.wait(pause):
            sent = time.monotonic()
            ttl = self._beat()
            if ttl:
                self._alive_at, pause = sent, self.ttl_s / 3
            elif ttl is None and time.monotonic() - self._alive_at < self.ttl_s:
                pause = min(0.05, self.ttl_s / 20)
            else:
                break
        if not self._done.is_set():
            self.lost.set()

    def _beat(self) -> int | None:
        """Seconds that the server gives from now on; 0 when it does not know the lease, None without an answer."""
        timeout_s = min(self._channels.call_timeout_s, self.ttl_s / 4)
        try:
            call = self._channels.stream(KEEPALIVE, iter([pb.LeaseKeepAliveRequest(ID=self.id)]), self._member,
                                         timeout_s=timeout_s)
            for answer in call:
                return int(answer.TTL)
        except grpc.RpcError as e:
            if AttemptFailed.of(e).failure is Failure.NOT_SIGNED_IN:
                self._channels.sign_out()
        except AttemptFailed:
            pass
        except ElasticRLError as e:
            if self._channels.closed.is_set():
                return 0
            log.warning("lease %x cannot be kept alive: %s", self.id, e)
        self._member = (self._member + 1) % len(self._channels.endpoints)
        return None

    def close(self) -> None:
        """Stops the thread and revokes the lease, which deletes its keys. If etcd is away, the lease just runs out."""
        if self._done.is_set():
            return
        self._done.set()
        self._thread.join(timeout=2 * self._channels.call_timeout_s)
        # Also when it is lost: by our clock it is, the server may give it longer and keep the keys.
        with contextlib.suppress(EtcdUnavailable, EtcdRefused):
            deduplication.revoke(self._channels, self.id, budget_s=2 * self._channels.call_timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
