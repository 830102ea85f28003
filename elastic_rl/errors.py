"""The error tree: one root, and each kind says whether trying the same thing again can help."""

from __future__ import annotations


class ElasticRLError(Exception):
    """Root of every error this project raises on purpose.

    ``retryable`` says whether the same call may succeed later with nothing changed by a person.
    ``hint`` is one sentence for the operator: what to do now. It is shown under the message.
    """

    retryable: bool = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ConfigError(ElasticRLError):
    """The configuration is wrong; nothing was started."""


class EtcdUnavailable(ElasticRLError):
    """etcd does not serve the call now, mostly since no member answered within the retry budget. A write did not
    happen (but see OutcomeUnknown). Whoever works without new decisions meanwhile goes on working."""

    retryable = True


class OutcomeUnknown(EtcdUnavailable):
    """A write was sent and its answer lost, and no member answered since: it may have been applied, or may still be."""


class EtcdDenied(EtcdUnavailable):
    """etcd does not let this client in, or not do this: certificate, user, password or role. Raised at once; nothing
    helps but a person."""

    retryable = False


class EtcdFull(EtcdUnavailable):
    """etcd's database is at its quota (or corrupt) and takes no writes until a person mends it; it may still read."""

    retryable = False


class EtcdRefused(ElasticRLError):
    """etcd refused the request itself: too large or malformed."""


class LeaseLost(ElasticRLError):
    """The lease that a key was to live under is gone; get a new one and register again."""

    retryable = True


class Compacted(ElasticRLError):
    """The wanted revisions are no longer kept; list the range again and go on from the list's revision."""

    retryable = True


class Fenced(ElasticRLError):
    """The caller's leadership or epoch is over; it must stop, and never retry under the old token."""


class Conflict(ElasticRLError):
    """A guarded write found another value than the one it was made from."""

    retryable = True


class DeadlineExceeded(ElasticRLError):
    """A bounded wait ended before what it waited for happened."""

    retryable = True


class ArenaFull(ElasticRLError):
    """The shared-memory arena has no room for the chunk; versions already stored are untouched."""

    retryable = True


class DiskFull(ElasticRLError):
    """A node's disk folder or the durable store has no room; versions already stored are untouched."""

    retryable = True


class AccessDenied(ElasticRLError):
    """A wrong or missing token, or a peer without the right certificate."""


class ChunkCorrupt(ElasticRLError):
    """A chunk's bytes do not match its digest."""

    retryable = True


class ChunkMissing(ElasticRLError):
    """A chunk of a version is on no node that answers."""

    retryable = True


class NodeUnavailable(ElasticRLError):
    """No node of the checkpoint service could be reached, or it died during the call."""

    retryable = True


class VersionNotFound(ElasticRLError):
    """The stream has no such committed version."""


class CatalogMismatch(ElasticRLError):
    """The catalog in etcd is not the one that the nodes' chunks belong to, or is an older state of it. Nothing is
    published or dropped until a person has said what to do."""


class RecordUnreadable(ElasticRLError):
    """A record in etcd cannot be decoded; the message names its key."""


class IllegalTransition(ElasticRLError):
    """A state machine was asked for a transition that does not exist."""


class EngineFailed(ElasticRLError):
    """An inference engine died, hung, or refused an operation; it will be replaced."""

    retryable = True


class StagingFailed(ElasticRLError):
    """A version could not be brought into an engine's staged weights; the engine serves on with what it has."""

    retryable = True


class TrainerFailed(ElasticRLError):
    """The trainer group lost a rank or did not answer; it re-forms from the last trainer_state."""

    retryable = True


class PreflightFailed(ElasticRLError):
    """The machine lacks something that is needed (a port, shared memory, a program, a package)."""
