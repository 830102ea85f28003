"""One gRPC channel per etcd member, short deadlines, and rotation to the next member on an error.

A single load-balanced channel over all members is not enough: a member that is stopped, and not closed, keeps its
connection and swallows the calls that are sent to it.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
from grpc import _common

from elastic_rl.errors import ConfigError, ElasticRLError, EtcdUnavailable, OutcomeUnknown
from elastic_rl.etcd.access import Access, MemberChannels
from elastic_rl.etcd.call_errors import AUTH_IS_OFF, AttemptFailed, Failure, no_answer_hint, refusal, untrusted
from elastic_rl.etcd.known_members import known_members
from elastic_rl.etcd.liveness import MemberLife, member_life
from elastic_rl.etcd.pb import etcd_pb2 as pb
from elastic_rl.runtime.backoff import backoff_s

log = logging.getLogger(__name__)
_NEED_LEADER = (("hasleader", "true"),)  # a member cut off from the majority answers with an error instead of waiting
_MAX_SIGN_INS = 3
"""Sign-ins of one call: members learn of an auth token, and of changed users, one after the other."""
PAUSES_S = (0.02, 0.2)
"""First and longest pause between two attempts."""
STREAM_WAIT_S = 5.0
# A thread that reads a stream waits for an answer in steps of a tenth of a second, so that a main thread sees its
# signals (grpc#19464). No main thread of ours reads one, and with a watch or two a thousand idle processes would wake
# twenty thousand times a second. gRPC has no setting for it; an answer ends the wait at once, whatever the step.
_common.MAXIMUM_WAIT_TIMEOUT = STREAM_WAIT_S


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
MEMBER_LIST = Method("/etcdserverpb.Cluster/MemberList", pb.MemberListRequest, pb.MembersResponse)
MEMBER_ADD = Method("/etcdserverpb.Cluster/MemberAdd", pb.MemberAddRequest, pb.MemberAddResponse)
MEMBER_REMOVE = Method("/etcdserverpb.Cluster/MemberRemove", pb.MemberRemoveRequest, pb.MembersResponse)
MEMBER_UPDATE = Method("/etcdserverpb.Cluster/MemberUpdate", pb.MemberUpdateRequest, pb.MembersResponse)
MEMBER_PROMOTE = Method("/etcdserverpb.Cluster/MemberPromote", pb.MemberPromoteRequest, pb.MembersResponse)
STATUS = Method("/etcdserverpb.Maintenance/Status", pb.StatusRequest, pb.StatusResponse)
DEFRAGMENT = Method("/etcdserverpb.Maintenance/Defragment", pb.DefragmentRequest, pb.DefragmentResponse)
ALARM = Method("/etcdserverpb.Maintenance/Alarm", pb.AlarmRequest, pb.AlarmResponse)
WATCH = Method("/etcdserverpb.Watch/Watch", pb.WatchRequest, pb.WatchResponse)
AUTHENTICATE = Method("/etcdserverpb.Auth/Authenticate", pb.AuthenticateRequest, pb.AuthenticateResponse)


@dataclass
class Ambiguity:
    """Whether an attempt at a call may have taken effect, or still may, although no answer says so."""

    any: bool = False


class Channels:
    """The members of one etcd cluster. Sticky: calls go to the member that answered last. Thread-safe.

    A member is named by its ``host:port``.
    """

    def __init__(self, endpoints: Sequence[str], *, call_timeout_s: float, retry_budget_s: float,
                 access: Access | None = None, follow_members_s: float = 0.0) -> None:
        """``follow_members_s``: seconds after which etcd's list of its members takes the place of ``endpoints`` again;
        0: never, where these may be those of a proxy, or the members know each other by addresses that this client
        cannot reach."""
        self._access = access or Access()
        self._known = known_members(self._access.addresses(endpoints), self._access, follow_members_s)
        self.call_timeout_s, self.retry_budget_s = call_timeout_s, retry_budget_s
        self._members = MemberChannels(self._access)
        self._lives: dict[str, MemberLife] = {}
        self._current = random.choice(self.endpoints)
        self._auth_token: str | None = None if self._access.user else ""
        """Token from etcd, for each call; None: sign in first, empty: etcd asks for none."""
        self._lock = threading.Lock()
        self.closed = threading.Event()

    @property
    def endpoints(self) -> Sequence[str]:
        """The members."""
        return self._known.endpoints

    @property
    def current(self) -> str:
        """The member that calls go to now."""
        with self._lock:
            if self._current not in self.endpoints:  # it was removed
                self._current = random.choice(self.endpoints)
                self._members.keep_only(self.endpoints)
            return self._current

    def after(self, member: str) -> str:
        """The member to try when this one has failed."""
        endpoints = self.endpoints
        return endpoints[(endpoints.index(member) + 1) % len(endpoints)] if member in endpoints else endpoints[0]

    def life(self, member: str) -> MemberLife:
        """What this process has heard of a member; a call that is answered is a sign of its life."""
        if (life := self._lives.get(member)) is None:
            life = self._lives[member] = member_life(member)
        return life

    def rotate(self, failed: str) -> None:
        """Moves on from a member, unless another thread already did."""
        with self._lock:
            if self._current == failed:
                self._current = self.after(failed)

    def follow_members(self) -> None:
        """Asks for the members of etcd, if it is time to, so that calls go to those that have joined since, and no
        more to those that were removed. Called after each call that was answered, and by what holds a lease for long.
        """
        if self._known.is_due():
            try:
                self.take_members(self.attempt(MEMBER_LIST, pb.MemberListRequest(), self.current).members)
            except (AttemptFailed, ElasticRLError) as e:
                log.debug("etcd's members are not known: %s", e)

    def take_members(self, members: Iterable[Any]) -> None:
        """Has calls go to the members of an answer from now on, if they are followed. Those without a vote yet too,
        which refuse calls: they may have it once the others are gone."""
        urls = [url for member in members for url in member.clientURLs]
        with suppress(ConfigError):  # none has started, or with TLS and without
            self._known.take(self._access.addresses(urls))

    def attempt(self, method: Method, request: Any, member: str, *, timeout_s: float | None = None) -> Any:
        """One attempt on one member. Raises AttemptFailed, a typed refusal of our user, EtcdUnavailable if closed."""
        token = self._signed_in(member)
        try:
            return self._unary(method, request, member, timeout_s or self.call_timeout_s, token)
        except AttemptFailed as e:
            if e.failure is Failure.NOT_SIGNED_IN:
                self.sign_out(token)
            raise

    def stream(self, method: Method, requests: Iterator[Any], member: str) -> Any:
        """Opens a bidirectional stream on one member. Raises as ``attempt``, and grpc.RpcError while it is read."""
        token = self._signed_in(member)
        try:
            call = self._members[member].stream_stream(
                method.path, request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString)
            return call(requests, metadata=_metadata(token))
        except ValueError as e:  # what gRPC raises for a closed channel
            raise _closed() from e

    def call(self, method: Method, request: Any, *, ambiguity: Ambiguity | None = None, budget_s: float | None = None,
             timeout_s: float | None = None, max_timeout_s: float = 0.0,
             on_timeout: Callable[[Any], None] | None = None) -> Any:
        """Sends one request until a member answers; only for requests that may safely arrive more than once.

        ``ambiguity``, given for requests whose effect matters, records attempts that may have taken effect.
        ``budget_s``: seconds after which no further attempt is made, but at members that were not tried yet, until one
        does not answer in time; 0: a single attempt. ``timeout_s``: deadline of one attempt; both default to the
        client's. After an attempt that missed its deadline the next one has twice the time, up to
        ``max_timeout_s``, and ``on_timeout`` may change the request.
        Raises EtcdUnavailable when the budget is spent (OutcomeUnknown where there is ambiguity), or the typed refusal
        at once.
        """
        budget_s = self.retry_budget_s if budget_s is None else budget_s
        end = time.monotonic() + budget_s
        timeout_s = timeout_s or self.call_timeout_s
        writes, ambiguity = ambiguity is not None, ambiguity or Ambiguity()
        untrusted_members, tried, failures = set[str](), set[str](), 0
        sign_ins = _MAX_SIGN_INS if self._access.user else 0
        while True:
            member = self.current
            try:
                answer = self.attempt(method, request, member, timeout_s=timeout_s)
                self.follow_members()
                return answer
            except AttemptFailed as e:
                failed = e
            if failed.failure is Failure.NOT_SIGNED_IN and sign_ins and time.monotonic() < end:
                sign_ins -= 1
                continue  # the same member, with a new auth token
            if failed.failure in (Failure.REFUSED, Failure.NOT_SIGNED_IN):
                raise _or_unknown(writes and ambiguity.any, refusal(failed.code, failed.details))
            if failed.failure is Failure.UNTRUSTED:
                untrusted_members.add(member)
                if untrusted_members.issuperset(self.endpoints):
                    raise _or_unknown(writes and ambiguity.any, untrusted(failed.details))
            ambiguity.any |= failed.failure is Failure.UNKNOWN
            self.rotate(member)
            if self.closed.is_set():
                raise _closed()
            tried.add(member)
            if time.monotonic() > end and (not budget_s or failed.timed_out or tried.issuperset(self.endpoints)):
                raise (OutcomeUnknown if writes and ambiguity.any else EtcdUnavailable)(
                    f"no etcd member of {', '.join(self.endpoints)} answered; last error: {failed}",
                    hint=no_answer_hint(failed.details, tls=self._access.tls is not None))
            if failed.timed_out:
                timeout_s = max(timeout_s, min(2 * timeout_s, max_timeout_s))
                if on_timeout is not None:
                    on_timeout(request)
            failures += 1
            self.closed.wait(backoff_s(failures, *PAUSES_S))

    # -- authentication ----------------------------------------------------------------------------------------------
    def sign_out(self, token: str | None = None) -> None:
        """Makes the next call sign in again: etcd no longer accepts this auth token (None: whichever we have)."""
        if self._access.user and token in (None, self._auth_token):
            self._auth_token = None

    def _signed_in(self, member: str) -> str:
        """The auth token of our user. Several threads may sign in at once; each token is valid."""
        token = self._auth_token
        if token is not None:
            return token
        request = pb.AuthenticateRequest(name=self._access.user, password=self._access.password())
        try:
            token = str(self._unary(AUTHENTICATE, request, member, self.call_timeout_s, "").token)
        except AttemptFailed as e:
            if AUTH_IS_OFF in e.details:
                log.warning("etcd.user is set, but authentication is off in this etcd: %s", e.details)
                token = ""
            elif e.failure is Failure.REFUSED:
                raise refusal(e.code, e.details) from e
            else:  # the request itself was not sent
                failure = Failure.NOT_SENT if e.failure is Failure.UNKNOWN else e.failure
                raise AttemptFailed(e.code, e.details, failure) from e
        self._auth_token = token
        return token

    def _unary(self, method: Method, request: Any, member: str, timeout_s: float, token: str) -> Any:
        try:
            call = self._members[member].unary_unary(
                method.path, request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString)
            answer = call(request, timeout=timeout_s, metadata=_metadata(token))
        except grpc.RpcError as e:
            raise AttemptFailed.from_rpc_error(e) from e
        except ValueError as e:
            raise _closed() from e
        self.life(member).heard(time.monotonic())
        return answer

    def close(self) -> None:
        self.closed.set()
        self._members.close()


def _closed() -> EtcdUnavailable:
    return EtcdUnavailable("this etcd client is closed")


def _or_unknown(ambiguous: bool, refused: ElasticRLError) -> ElasticRLError:
    """What a refusal means after an attempt that may have been applied: etcd checks users and its quota before it
    checks the write token. Any other refusal holds for each copy of the request."""
    if ambiguous and isinstance(refused, EtcdUnavailable):
        return OutcomeUnknown(f"an earlier attempt may have been applied, and now {refused.message}", hint=refused.hint)
    return refused


def _metadata(token: str) -> tuple[tuple[str, str], ...]:
    return (*_NEED_LEADER, ("token", token)) if token else _NEED_LEADER
