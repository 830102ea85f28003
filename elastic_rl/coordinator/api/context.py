"""What the handlers of the admin API work with."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from elastic_rl.config import Config
from elastic_rl.coordinator.api.authentication import Authenticator, Caller
from elastic_rl.coordinator.api.change_stream import ChangeStream
from elastic_rl.coordinator.api.forwarding import Forwarder
from elastic_rl.coordinator.api.sessions import SessionStore
from elastic_rl.coordinator.election.election import Election
from elastic_rl.coordinator.operations.service import OperationService
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys


@dataclass(frozen=True)
class Context:
    """One replica's parts."""

    cfg: Config
    keys: Keys
    etcd: EtcdClient
    """A client with a short retry budget: a client must not wait for an etcd that is away."""
    election: Election
    authenticator: Authenticator
    sessions: SessionStore
    stopping: threading.Event
    forwarder: Forwarder
    operations: OperationService
    changes: ChangeStream
    receivers: Sequence[str]
    """Names of the receivers of alerts."""


async def _of(request: Request) -> Context:
    context: Context = request.state.context
    return context


Ctx = Annotated[Context, Depends(_of)]


def caller_of(request: Request) -> Caller:
    """Who sent the request. Only for routes that need a token or a session."""
    caller: Caller = request.state.caller
    return caller
