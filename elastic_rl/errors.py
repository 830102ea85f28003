"""The error tree: one root. Whether an error is waited for depends on what was called, so the loops that wait name the
kinds (``runtime.patience``): a run waits for what only a person can end, too."""

from __future__ import annotations

from collections.abc import Sequence


class ElasticRLError(Exception):
    """Root of every error this project raises on purpose.

    ``hint``: what the operator should do now. It is shown after the message.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ConfigError(ElasticRLError):
    """The configuration is invalid; nothing was started."""


class EtcdUnavailable(ElasticRLError):
    """etcd does not serve the call now, mostly because no member answered within the retry budget. A write was not
    applied (but see OutcomeUnknown). Work that needs no new decision continues meanwhile."""


class OutcomeUnknown(EtcdUnavailable):
    """A write was sent, its answer was lost and no member has answered since: it may have been applied, or may still
    be."""


class EtcdDenied(EtcdUnavailable):
    """etcd refuses this client or this call: certificate, user, password or role. Raised without retries, since only a
    change by a person helps."""


class EtcdFull(EtcdUnavailable):
    """etcd's database is at its quota, or corrupt, and accepts no writes until that is fixed; reads may still work."""


class HostUnavailable(ElasticRLError):
    """A host of the cluster is away, or its agent does not answer. It says nothing about what runs there."""


class EtcdRefused(ElasticRLError):
    """etcd refused the request itself: too large or malformed."""


class LeaseLost(ElasticRLError):
    """The lease that a key depends on has ended; get a new one and register again."""


class Compacted(ElasticRLError):
    """The requested revisions were compacted; list the range again and continue from the revision of the list."""


class Fenced(ElasticRLError):
    """The caller's term or epoch is over; it must stop and never retry with the old token."""


class Conflict(ElasticRLError):
    """A guarded write found that the value it is based on has changed."""


class DeadlineExceeded(ElasticRLError):
    """A wait reached its timeout before its condition held."""


class ArenaFull(ElasticRLError):
    """The shared-memory arena has no room for the chunk; stored versions are unaffected."""


class DiskFull(ElasticRLError):
    """A node's disk folder or the durable store has no room; stored versions are unaffected."""


class AccessDenied(ElasticRLError):
    """A wrong or missing token, or a peer without a valid certificate."""


class ChunkCorrupt(ElasticRLError):
    """A chunk's bytes do not match its digest."""


class ChunkMissing(ElasticRLError):
    """No node that answers has a chunk of the version."""


class NodeUnavailable(ElasticRLError):
    """No node of the checkpoint service could be reached, or it died during the call."""


class VersionNotFound(ElasticRLError):
    """The stream has no such committed version."""


class TensorMismatch(ElasticRLError):
    """The tensors that a version is to be pulled into, or published after, are not those of the version; nothing was
    changed."""


class CatalogMismatch(ElasticRLError):
    """The catalog in etcd is not the one that the nodes' chunks belong to, or is an older state of it. Nothing is
    published or dropped until a person has said what to do."""


class RecordUnreadable(ElasticRLError):
    """A record in etcd cannot be decoded; the message names its key."""


class IllegalTransition(ElasticRLError):
    """A state machine has no such transition."""


class EngineFailed(ElasticRLError):
    """An inference engine died, hung or refused an operation; it is replaced."""


class Unanswered(EngineFailed):
    """No engine gave what a request asks for, in all attempts. Engines may be away, or the request may be what they
    cannot do: what becomes of other requests meanwhile shows which."""


class RequestRefused(Unanswered):
    """An engine refused a request for what it says; any other engine would too. No engine is at fault."""


class RoleUnavailable(ElasticRLError):
    """No replica of a role answered in time; Ray Serve replaces replicas that are gone."""


class QueueUnavailable(ElasticRLError):
    """The queue between generation and training does not take or give groups now."""


class GroupsLost(Conflict):
    """The queue has groups no more that were chosen for a step: they are generated again."""

    def __init__(self, message: str, ordinals: Sequence[int] = (), *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.ordinals = tuple(ordinals)


class StaleSamples(Conflict):
    """The trainer refuses a step with samples of some versions of the policy: their groups are not trained on."""

    def __init__(self, message: str, versions: Sequence[int] = (), *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.versions = tuple(versions)


class SourceFailed(ElasticRLError):
    """The data source raised; what it reads may be away."""


class PluginFailed(ElasticRLError):
    """A function that the user's settings name raised, or returned something else than it must."""


class StepsHeld(PluginFailed):
    """A trainer group makes no step any more, since one has failed after an update of it, again and again: a person is
    to correct what failed. It says nothing about the samples that it was given."""


class StepRefused(ElasticRLError):
    """A trainer group cannot compute with the samples that it was given: their gradient is not finite, or a pass needs
    more memory than a rank has. All its ranks have refused them together, or have ended since one could not go on."""

    def __init__(self, message: str, *, hint: str = "", went_back: bool = False) -> None:
        """``went_back``: an update of the step had been made by then, or the ranks have ended, so that the group is
        back at an earlier state, or is to go back to one. Else nothing of its state has changed."""
        super().__init__(message, hint=hint)
        self.went_back = went_back


class GroupsFailed(ElasticRLError):
    """A step was not made, since a trainer group cannot compute with some groups of it. They are to be dropped; without
    any, the step is to be tried again as it is."""

    def __init__(self, message: str, ordinals: Sequence[int], *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.ordinals = tuple(ordinals)


class PluginAway(PluginFailed):
    """What the user's code asks does not answer. It says nothing about what it was called for, which is tried again for
    as long as that lasts."""

    def __init__(self, message: str, *, hint: str = "", replace: bool = False) -> None:
        """``replace``: whether another process of the user's code may help."""
        super().__init__(message, hint=hint)
        self.replace = replace


class RouterUnavailable(EngineFailed):
    """The router does not answer, or refuses a change of its worker list. No engine is at fault."""


class PortTaken(EngineFailed):
    """A process of another user listens where a service of this user should. It was sent nothing."""


class StagingFailed(ElasticRLError):
    """A version could not be loaded into an engine's staged weights; the engine keeps serving its current ones."""


class OutputFailed(ElasticRLError):
    """What a job makes cannot be written into its folder, or is gone from there."""


class TrainerFailed(ElasticRLError):
    """A trainer group lost a rank or did not answer; it re-forms from its newest state."""
    group = "trainer"
    """Name of the group."""


class GroupReformed(TrainerFailed):
    """A trainer group has lost its ranks, and formed again with others, before its caller knew of it."""


class PreflightFailed(ElasticRLError):
    """The machine lacks something that a run needs: a port, shared memory, a program, a package."""


class ComputePlaneLost(ElasticRLError):
    """Ray cannot be used any more. The driver ends what is left on it, and the next one begins with another Ray."""


class SharedDevicesLost(ComputePlaneLost):
    """A host that trainer and engines share is lost or to be emptied, or its GPUs are others': the next epoch looks for
    hosts again. That is no fault of the driver."""

    EXIT_CODE = 5
    """The exit code of a driver that ends for it."""


class RayNodeLost(ElasticRLError):
    """The node of Ray that the driver is connected to has ended. The driver ends, and the next one takes over."""
