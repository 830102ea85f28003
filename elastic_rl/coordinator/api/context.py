"""What the handlers of the admin API work with."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from elastic_rl.config import Config
from elastic_rl.coordinator.api.auth import Token, TokenTable
from elastic_rl.coordinator.api.change_stream import ChangeStream
from elastic_rl.coordinator.api.forwarding import Forwarder
from elastic_rl.coordinator.election.election import Election
from elastic_rl.coordinator.operations.service import OperationService
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys


@dataclass(frozen=True)
class Context:
    """One replica's parts. ``store`` has a short retry budget: a client must not wait for an etcd that is away."""

    cfg: Config
    keys: Keys
    etcd: EtcdClient
    election: Election
    tokens: TokenTable
    stopping: threading.Event
    forwarder: Forwarder
    desk: OperationService
    feed: ChangeStream
    receivers: Sequence[str]
    """Names of those that are told of alerts."""


async def _of(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


Ctx = Annotated[Context, Depends(_of)]


def token_of(request: Request) -> Token | None:
    """The token that the gate let the request in with; None where none is needed."""
    found: Token | None = request.state.token
    return found


def asker(request: Request) -> str:
    """Name of the token, for events and records."""
    token = token_of(request)
    return token.name if token else "operator"
