"""One gRPC channel per etcd member, short deadlines, and rotation to the next member on an error.

A single load-balanced channel over all members is not enough: a member that is stopped, and not closed, keeps its
connection and swallows the calls that land on it.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from elastic_rl.errors import ElasticRLError, EtcdUnavailable, OutcomeUnknown
from elastic_rl.etcd.access import Access
from elastic_rl.etcd.call_errors import AUTH_IS_OFF, AttemptFailed, Failure, refusal, silence, untrusted
from elastic_rl.etcd.pb import etcd_pb2 as pb

log = logging.getLogger(__name__)
_NEED_LEADER = (("hasleader", "true"),)  # a member cut off from the majority says so, instead of waiting
_SIGN_INS = 3
"""How often one call signs in anew: members learn of a token, and of changed users, one after the other."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.2


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
AUTHENTICATE = Method("/etcdserverpb.Auth/Authenticate", pb.AuthenticateRequest, pb.AuthenticateResponse)


@dataclass
class Ambiguity:
    """Whether an attempt of a call may have taken effect without our knowing, or still may."""

    any: bool = False


def backoff(rng: Callable[[], float] = random.random) -> Iterator[float]:
    """Seconds to pause between attempts: growing up to a bound, each with jitter in [0.5, 1)."""
    pause = _FIRST_PAUSE_S
    while True:
        yield pause * (0.5 + 0.5 * rng())
        pause = min(pause * 2, _LONGEST_PAUSE_S)


class Channels:
    """The members of one etcd cluster. Sticky: calls go to the member that answered last. Thread-safe."""

    def __init__(self, endpoints: Sequence[str], *, call_timeout_s: float, retry_budget_s: float,
                 access: Access | None = None) -> None:
        self._access = access or Access()
        self.endpoints = self._access.addresses(endpoints)
        self.call_timeout_s, self.retry_budget_s = call_timeout_s, retry_budget_s
        self._channels = [self._access.channel(e) for e in self.endpoints]
        self._at = random.randrange(len(self.endpoints))
        self._token: str | None = None if self._access.user else ""
        """From etcd, for each call; None: sign in first, empty: etcd asks for none."""
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
        """One attempt on one member. Raises AttemptFailed, a typed refusal of our user, EtcdUnavailable if closed."""
        token = self._signed_in(member)
        try:
            return self._unary(method, request, member, timeout_s or self.call_timeout_s, token)
        except AttemptFailed as e:
            if e.failure is Failure.NOT_SIGNED_IN:
                self.sign_out(token)
            raise

    def stream(self, method: Method, requests: Iterator[Any], member: int, *, timeout_s: float | None = None) -> Any:
        """Opens a bidirectional stream on one member. Raises as ``once``, and grpc.RpcError while it is read."""
        token = self._signed_in(member)
        try:
            call = self._channels[member].stream_stream(
                method.path, request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString)
            return call(requests, timeout=timeout_s, metadata=_metadata(token))
        except ValueError as e:  # what gRPC raises for a closed channel
            raise EtcdUnavailable("this store is closed") from e

    def call(self, method: Method, request: Any, *, doubt: Ambiguity | None = None,
             budget_s: float | None = None) -> Any:
        """Sends one request until a member answers; only for requests that may safely arrive more than once.

        Raises EtcdUnavailable when the budget is spent, or the typed refusal at once. ``doubt``, given for requests
        whose effect matters, learns of attempts that may have taken effect; OutcomeUnknown is raised then.
        """
        end = time.monotonic() + (self.retry_budget_s if budget_s is None else budget_s)
        writes, doubt = doubt is not None, doubt or Ambiguity()
        distrusts, rest = set[int](), backoff()
        sign_ins = _SIGN_INS if self._access.user else 0
        while True:
            member = self._at
            try:
                return self.once(method, request, member)
            except AttemptFailed as e:
                failed = e
            if failed.failure is Failure.NOT_SIGNED_IN and sign_ins and time.monotonic() < end:
                sign_ins -= 1
                continue  # the same member, with a new token
            if failed.failure in (Failure.REFUSED, Failure.NOT_SIGNED_IN):
                raise _unless(writes and doubt.any, refusal(failed.code, failed.details))
            if failed.failure is Failure.UNTRUSTED:
                distrusts.add(member)
                if len(distrusts) == len(self.endpoints):
                    raise _unless(writes and doubt.any, untrusted(failed.details))
            doubt.any |= failed.failure is Failure.UNKNOWN
            self.rotate(member)
            if self.closed.is_set():
                raise EtcdUnavailable("this store is closed")
            if time.monotonic() > end:
                raise (OutcomeUnknown if writes and doubt.any else EtcdUnavailable)(
                    f"no etcd member of {', '.join(self.endpoints)} answered; the last said: {failed}",
                    hint=silence(failed.details, tls=bool(self._access.ca)))
            self.closed.wait(next(rest))

    # -- signing in --------------------------------------------------------------------------------------------------
    def sign_out(self, token: str | None = None) -> None:
        """Has the next call sign in anew: etcd does not take this token (None: whichever we have) any more."""
        if self._access.user and token in (None, self._token):
            self._token = None

    def _signed_in(self, member: int) -> str:
        """The token of our user. Several threads may sign in at once; each token is good."""
        token = self._token
        if token is not None:
            return token
        request = pb.AuthenticateRequest(name=self._access.user, password=self._access.password())
        try:
            token = str(self._unary(AUTHENTICATE, request, member, self.call_timeout_s, "").token)
        except AttemptFailed as e:
            if AUTH_IS_OFF in e.details:
                log.warning("etcd.user is set, but this etcd asks nobody for a user: %s", e.details)
                token = ""
            elif e.failure is Failure.REFUSED:
                raise refusal(e.code, e.details) from e
            else:  # the request itself was not sent
                failure = Failure.NOT_SENT if e.failure is Failure.UNKNOWN else e.failure
                raise AttemptFailed(e.code, e.details, failure) from e
        self._token = token
        return token

    def _unary(self, method: Method, request: Any, member: int, timeout_s: float, token: str) -> Any:
        try:
            call = self._channels[member].unary_unary(
                method.path, request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString)
            return call(request, timeout=timeout_s, metadata=_metadata(token))
        except grpc.RpcError as e:
            raise AttemptFailed.of(e) from e
        except ValueError as e:
            raise EtcdUnavailable("this store is closed") from e

    def close(self) -> None:
        self.closed.set()
        for channel in self._channels:
            channel.close()


def _unless(doubtful: bool, refused: ElasticRLError) -> ElasticRLError:
    """What a refusal means after an attempt that may have been applied: etcd looks at users and at its quota before it
    looks at the token that would tell. Any other refusal holds for each copy of the request."""
    if doubtful and isinstance(refused, EtcdUnavailable):
        return OutcomeUnknown(f"an earlier attempt may have been applied, and now {refused.message}", hint=refused.hint)
    return refused


def _metadata(token: str) -> tuple[tuple[str, str], ...]:
    return (*_NEED_LEADER, ("token", token)) if token else _NEED_LEADER
