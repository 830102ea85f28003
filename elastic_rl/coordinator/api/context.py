"""What the handlers of the admin API work with."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Path, Request

from elastic_rl.config import Config
from elastic_rl.coordinator.api.authentication import Authenticator, Caller
from elastic_rl.coordinator.api.change_stream import ChangeStream, StreamLimit
from elastic_rl.coordinator.api.forwarding import Forwarder
from elastic_rl.coordinator.api.sessions import SessionStore
from elastic_rl.coordinator.election.election import Election
from elastic_rl.coordinator.operations.service import OperationService
from elastic_rl.coordinator.problems import Kind, Problem, not_found
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.records import JobProblem


class ServedJobs(Mapping[str, "JobContext"]):
    """The jobs of the cluster that a replica has taken up, by name."""

    @abstractmethod
    def known(self) -> Collection[str]:
        """Every job that has a record, those included that the replica has not taken up."""

    @abstractmethod
    def problem(self, job: str) -> JobProblem | None:
        """What keeps this replica, as far as it knows itself, from deciding about a job. One that does not lead has no
        passes that could fail."""

    @abstractmethod
    def waits_for(self, job: str) -> str:
        """Why a job that has a record is not among them; empty for any other name."""


@dataclass(frozen=True)
class ReplicaContext:
    """The parts of one replica."""

    cfg: Config
    """Settings of the cluster."""
    etcd: EtcdClient
    """A client with a short retry budget: a client must not wait for an etcd that is away."""
    election: Election
    authenticator: Authenticator
    sessions: SessionStore
    stopping: threading.Event
    forwarder: Forwarder
    streams: StreamLimit
    jobs: ServedJobs

    @property
    def keys(self) -> ClusterKeys:
        return ClusterKeys(self.cfg.cluster_name)


@dataclass(frozen=True)
class JobContext:
    """The parts of one job."""

    replica: ReplicaContext
    cfg: Config
    """Settings of the job."""
    keys: Keys
    operations: OperationService
    changes: ChangeStream
    receivers: Sequence[str]
    """Names of the receivers of the job's alerts."""


async def _replica(request: Request) -> ReplicaContext:
    context: ReplicaContext = request.state.context
    return context


ReplicaCtx = Annotated[ReplicaContext, Depends(_replica)]


async def _job(replica: ReplicaCtx, job: Annotated[str, Path(description="Name of the job")]) -> JobContext:
    """Raises problems: 404 for a job that the cluster does not have, 503 for one that this replica has not taken up."""
    found = replica.jobs.get(job)
    if found is not None:
        return found
    if why := replica.jobs.waits_for(job):
        raise Problem(503, Kind.JOB_NOT_OPEN, "The replica has not taken up the job", why, headers={"Retry-After": "1"})
    raise not_found("job", job)


JobCtx = Annotated[JobContext, Depends(_job)]


def caller_of(request: Request) -> Caller:
    """Who sent the request. Only for routes that need a token or a session."""
    caller: Caller = request.state.caller
    return caller
