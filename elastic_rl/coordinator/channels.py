"""One gRPC channel per etcd member, short deadlines, and rotation to the next member on an error.

A single load-balanced channel over all members is not enough: a member that is stopped, and not closed, keeps its
connection and swallows the calls that land on it.
"""

from __future__ import annotations

import enum
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from elastic_rl.coordinator.etcdpb import etcd_pb2 as pb
from elastic_rl.errors import (
    Compacted,
    ConfigError,
    ElasticRLError,
    LeaseLost,
    OutcomeUnknown,
    StoreRefused,
    StoreUnavailable,
)

_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000), ("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0),
]
_NEED_LEADER = (("hasleader", "true"),)  # a member cut off from the majority says so, instead of waiting
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.4


@dataclass(frozen=True)
class Method:
    """A call of the etcd API, by its path."""

    path: str
    request: type[Any]
    response: type[Any]


RANGE = Method("/etcdserverpb.KV/Range", pb.RangeRequest, pb.RangeResponse)
TXN = Method("/etcdserverpb.KV/Txn", pb.TxnRequest, pb.TxnResponse)
COMPACT = Method("/etcdserverpb.KV/Compact", pb.CompactionRequest, pb.CompactionResponse)
GRANT = Method("/etcdserverpb.Lease/LeaseGrant", pb.LeaseGrantRequest, pb.LeaseGrantResponse)
REVOKE = Method("/etcdserverpb.Lease/LeaseRevoke", pb.LeaseRevokeRequest, pb.LeaseRevokeResponse)
KEEPALIVE = Method("/etcdserverpb.Lease/LeaseKeepAlive", pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse)
TIME_TO_LIVE = Method("/etcdserverpb.Lease/LeaseTimeToLive", pb.LeaseTimeToLiveRequest, pb.LeaseTimeToLiveResponse)
STATUS = Method("/etcdserverpb.Maintenance/Status", pb.StatusRequest, pb.StatusResponse)
WATCH = Method("/etcdserverpb.Watch/Watch", pb.WatchRequest, pb.WatchResponse)


class Failure(enum.Enum):
    """What a failed attempt says about the request."""

    NOT_SENT = "not sent"
    """It cannot have been applied; another member may take it."""
    UNKNOWN = "unknown"
    """It may have been applied, or may still be."""
    REFUSED = "refused"
    """The cluster decided against it; another member would say the same."""


_NOT_SENT_DETAILS = ("failed to connect", "connection refused", "etcdserver: no leader", "name resolution",
                     "dns resolution", "too many requests", "etcdserver: not capable", "etcdserver: server stopped")
_REFUSED_CODES = {
    grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED,
}


def classify(code: grpc.StatusCode, details: str) -> Failure:
    """Whether a failed attempt may be repeated elsewhere, and whether it may have taken effect."""
    text = details.lower()
    if any(part in text for part in _NOT_SENT_DETAILS):
        return Failure.NOT_SENT
    return Failure.REFUSED if code in _REFUSED_CODES else Failure.UNKNOWN


def refusal(code: grpc.StatusCode, details: str) -> ElasticRLError:
    """The typed error of a request that etcd decided against."""
    text = details.lower()
    if "lease not found" in text:
        return LeaseLost(details)
    if "compacted" in text:
        return Compacted(details)
    hint = ""
    if "space exceeded" in text:
        hint = "compact and defragment etcd, or raise its --quota-backend-bytes"
    elif "too large" in text:
        hint = "records must stay small; large data belongs into the checkpoint service"
    return StoreRefused(f"etcd refused: {details} [{code.name}]", hint=hint)


def pauses(rng: Callable[[], float] = random.random) -> Iterator[float]:
    """Seconds to pause between attempts: growing up to a bound, each with jitter in [0.5, 1)."""
    pause = _FIRST_PAUSE_S
    while True:
        yield pause * (0.5 + 0.5 * rng())
        pause = min(pause * 2, _LONGEST_PAUSE_S)


class Channels:
    """The members of one etcd cluster. Sticky: calls go to the member that answered last. Thread-safe."""

    def __init__(self, endpoints: Sequence[str], *, call_timeout_s: float, retry_budget_s: float) -> None:
        if not endpoints:
            raise ConfigError("no etcd endpoint is given", hint="set etcd.endpoints, or start one with `elastic-rl up`")
        self.endpoints = [e.removeprefix("http://").rstrip("/") for e in endpoints]
        self.call_timeout_s, self.retry_budget_s = call_timeout_s, retry_budget_s
        self._channels = [grpc.insecure_channel(e, options=_OPTIONS) for e in self.endpoints]
        self._at = random.randrange(len(self.endpoints))
        self._lock = threading.Lock()
        self.closed = threading.Event()

    @property
    def at(self) -> int:
        """Index of the member that calls go to now."""
        return self._at

    def rotate(self, failed: int) -> None:
        """Moves on from a member, unless another thread already did."""
        with self._lock:
            if self._at == failed:
                self._at = (failed + 1) % len(self._channels)

    def once(self, method: Method, request: Any, member: int, *, timeout_s: float | None = None) -> Any:
        """One attempt on one member. Raises grpc.RpcError, or StoreUnavailable when closed."""
        try:
            call = self._channels[member].unary_unary(
                method.path, request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString)
            return call(request, timeout=timeout_s or self.call_timeout_s, metadata=_NEED_LEADER)
        except ValueError as e:  # what gRPC raises for a closed channel
            raise StoreUnavailable("this store is closed") from e

    def stream(self, method: Method, requests: Iterator[Any], member: int, *, timeout_s: float | None = None) -> Any:
        """Opens a bidirectional stream on one member. Raises as ``once``, also while it is read."""
        try:
            call = self._channels[member].stream_stream(
                method.path, request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString)
            return call(requests, timeout=timeout_s, metadata=_NEED_LEADER)
        except ValueError as e:
            raise StoreUnavailable("this store is closed") from e

    def call(self, method: Method, request: Any, *, writes: bool = False, budget_s: float | None = None) -> Any:
        """Sends one request until a member answers; only for requests that may safely arrive more than once.

        Raises StoreUnavailable when the budget is spent (OutcomeUnknown when the request ``writes`` and an attempt may
        have taken effect), or the typed refusal.
        """
        end = time.monotonic() + (self.retry_budget_s if budget_s is None else budget_s)
        ambiguous, rest = False, pauses()
        while True:
            member = self._at
            try:
                return self.once(method, request, member)
            except grpc.RpcError as e:
                code, details = e.code(), e.details() or ""  # type: ignore[attr-defined]
            failure = classify(code, details)
            if failure is Failure.REFUSED:
                raise refusal(code, details)
            ambiguous |= writes and failure is Failure.UNKNOWN
            self.rotate(member)
            if self.closed.is_set():
                raise StoreUnavailable("this store is closed")
            if time.monotonic() > end:
                raise (OutcomeUnknown if ambiguous else StoreUnavailable)(
                    f"no etcd member of {', '.join(self.endpoints)} answered; the last said: {details} [{code.name}]",
                    hint="check that etcd runs and that a majority of its members is healthy")
            self.closed.wait(next(rest))

    def close(self) -> None:
        self.closed.set()
        for channel in self._channels:
            channel.close()
