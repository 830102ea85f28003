"""What a failed attempt at a call of etcd means: whether it may be repeated, whether it may have been applied, and what
a person can do about it.

Pure: it knows gRPC's codes and etcd's texts, and nothing else.
"""

from __future__ import annotations

import enum

import grpc

from elastic_rl.errors import Compacted, ElasticRLError, EtcdDenied, EtcdFull, EtcdRefused, LeaseLost


class Failure(enum.Enum):
    """What a failed attempt says about the request."""

    NOT_SENT = "not sent"
    """It cannot have been applied; another member may take it."""
    UNTRUSTED = "untrusted"
    """It was not sent: one side does not accept the other's certificate. Another member's may be accepted."""
    NOT_SIGNED_IN = "not signed in"
    """It was not applied: etcd does not know our auth token, or no longer knows it."""
    UNKNOWN = "unknown"
    """It may have been applied, or may still be."""
    REFUSED = "refused"
    """The cluster decided against it; another member would answer the same."""


_NOT_SENT_DETAILS = ("failed to connect", "connection refused", "etcdserver: no leader", "name resolution",
                     "dns resolution", "too many requests", "etcdserver: not capable", "etcdserver: server stopped",
                     "rpc not supported for learner")
_UNTRUSTED_DETAILS = ("tls handshake failed", "ssl handshake failed", "certificate", "verification check failed",
                      "tsi_data_corrupted", "security handshaker")
_NOT_SIGNED_IN_DETAILS = ("invalid auth token", "user name is empty", "revision of auth store is old")
_REFUSED_DETAILS = ("permission denied",)  # some calls have no code for it
_REFUSED_CODES = {
    grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DATA_LOSS,
}
AUTH_IS_OFF = "authentication is not enabled"
_CERTIFICATE_HINT = ("check etcd.tls_ca against the members' certificates (their names too: etcd.tls_server_name), and "
                     "etcd.tls_cert and tls_key where etcd asks its clients for a certificate")
_HINTS: tuple[tuple[str, type[ElasticRLError], str], ...] = (
    ("lease not found", LeaseLost, ""),
    ("compacted", Compacted, ""),
    ("space exceeded", EtcdFull,
     "compact and defragment etcd or raise its --quota-backend-bytes, then `etcdctl alarm disarm`; the coordinators do "
     "it themselves where etcd.reclaim_space is on and history can be freed"),
    ("corrupt cluster", EtcdFull, "a member's data differs from the others': see etcd's guide on data corruption"),
    ("too large", EtcdRefused, "records must stay small; store large data in the checkpoint service"),
    ("larger than max", EtcdRefused, "records must stay small; store large data in the checkpoint service"),
    ("permission denied", EtcdDenied,
     "grant the user (etcd.user, or the name in etcd.tls_cert) a role with readwrite on the prefix /elastic_rl/: "
     "`etcdctl role grant-permission`"),
    ("authentication failed", EtcdDenied, "etcd.user or the password in etcd.password_file is wrong"),
    ("user name is empty", EtcdDenied, "this etcd asks for a user: set etcd.user and etcd.password_file"),
    ("invalid auth token", EtcdDenied,
     "set etcd.user and etcd.password_file; if they are set, etcd's members do not accept each other's tokens"),
    ("revision of auth store", EtcdDenied, "users or roles of etcd keep changing during the call"),
)
"""Part of etcd's message, the error that it becomes, and what to do about it."""


class AttemptFailed(Exception):
    """One attempt on one member failed. Only for callers of ``Channels.attempt`` and ``Channels.stream``."""

    def __init__(self, code: grpc.StatusCode, details: str, failure: Failure) -> None:
        super().__init__(f"{details} [{code.name}]")
        self.code, self.details, self.failure = code, details, failure

    @classmethod
    def from_rpc_error(cls, error: grpc.RpcError) -> AttemptFailed:
        code, details = error.code(), error.details() or ""  # type: ignore[attr-defined]
        return cls(code, details, classify(code, details))

    @property
    def timed_out(self) -> bool:
        return self.code is grpc.StatusCode.DEADLINE_EXCEEDED


def classify(code: grpc.StatusCode, details: str) -> Failure:
    """Whether a failed attempt may be repeated elsewhere, and whether it may have taken effect."""
    text = details.lower()
    if "failed to connect" in text and any(part in text for part in _UNTRUSTED_DETAILS):
        return Failure.UNTRUSTED
    if any(part in text for part in _NOT_SENT_DETAILS):
        return Failure.NOT_SENT
    if any(part in text for part in _NOT_SIGNED_IN_DETAILS):
        return Failure.NOT_SIGNED_IN
    refused = code in _REFUSED_CODES or any(part in text for part in _REFUSED_DETAILS)
    return Failure.REFUSED if refused else Failure.UNKNOWN


def refusal(code: grpc.StatusCode, details: str) -> ElasticRLError:
    """The typed error of a request that etcd decided against."""
    text = details.lower()
    for part, kind, hint in _HINTS:
        if part in text:
            return kind(f"etcd refused: {details} [{code.name}]" if hint else details, hint=hint)
    return EtcdRefused(f"etcd refused: {details} [{code.name}]")


def untrusted(details: str) -> EtcdDenied:
    """The typed error of a cluster with none of whose members a TLS connection can be made."""
    return EtcdDenied(f"no secure connection to etcd: {details.removeprefix('failed to connect to all addresses; ')}",
                      hint=_CERTIFICATE_HINT)


def no_answer_hint(details: str, *, tls: bool) -> str:
    """What a person can do about members that do not answer. ``details``: the details of the last failed attempt."""
    if "failed to connect" in details.lower() and "socket closed" in details.lower():
        ours, theirs = (("we speak TLS (etcd.tls_ca is set)", "may not") if tls
                        else ("we speak no TLS", "may require it"))
        return f"the server closes the connection: {ours}, and etcd {theirs}; or it is starting or stopping"
    return "check that etcd runs and that a majority of its members is healthy"
