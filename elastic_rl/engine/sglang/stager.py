"""Stages a version in a scheduler while the engine serves: the part of an update before the pause.

Each scheduler process (one per tensor-parallel rank) has a thread that listens on an abstract Unix socket; the name and
the secret come from the environment of the process that started the server. Requests on one connection: *begin*, then
*add* with references to tensors (map, verify, load into the shadow) as parts of the version arrive on this host, then
*finish* (check that nothing is missing), which returns the checksum of the staged weights. The live weights do not
change, so a failure here costs nothing. Messages are JSON; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import contextvars
import hmac
import json
import logging
import os
import secrets
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Protocol, Self

from elastic_rl.dcs import protocol
from elastic_rl.dcs.codecs.digests import BLAKE3, digest_of
from elastic_rl.errors import ChunkCorrupt, ElasticRLError, NodeUnavailable, StagingFailed

log = logging.getLogger(__name__)

ENV = "ELASTIC_RL_STAGER"
_FIRST_REQUEST_S = 10.0
"""Timeout of a stager for the first request on a connection, and for each part of a message."""
_ACCEPT_RETRY_S = 0.5
_NEXT_REQUEST_S = 120.0
"""Timeout for each further request: as long as a tensor may take to arrive."""
_MAX_REQUEST = 256 << 20
"""Bytes; the reference of a version of 100,000 tensors has 12 million."""


class StagingTarget(Protocol):
    """Where a stager puts a version; see ``loader.Loader``."""

    def begin(self) -> None: ...

    def add(self, reference: dict[str, Any]) -> None: ...

    def finish(self, ticket: str) -> str: ...


def new_secret() -> str:
    """A new secret for the stagers of one server: it names their sockets and authenticates their clients."""
    return secrets.token_hex(16)


def _address(secret: str, rank: int) -> str:
    # Every process sees the names of abstract sockets, so the name must not contain the secret.
    return f"\0elastic-rl-stager/{digest_of(secret.encode(), BLAKE3)[:16]}/{rank}"


class Stager(threading.Thread):
    """Serves a loader to clients of its own user that have the secret, one connection at a time. A daemon thread."""

    def __init__(self, secret: str, rank: int, loader: StagingTarget) -> None:
        super().__init__(name="stager", daemon=True)
        self._secret = secret
        self._loader = loader
        self._listener = Listener(_address(secret, rank), family="AF_UNIX")
        # Models read context variables (parallel groups) of the thread that loads them.
        self._context = contextvars.copy_context()

    def run(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError as e:  # no descriptors
                log.error("stager: a connection cannot be accepted: %s", e)
                time.sleep(_ACCEPT_RETRY_S)
                continue
            with connection:
                try:
                    self._serve(connection)
                except (OSError, EOFError, ValueError) as e:  # not a client of ours, or one that disconnected
                    log.warning("stager: %s: %s", type(e).__name__, e)

    def _serve(self, connection: Connection) -> None:
        timeout_s = _FIRST_REQUEST_S
        with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            # An abstract socket has no permissions: every user of the host can connect.
            _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if user != os.geteuid():
                raise PermissionError(f"a connection of user {user} is refused")
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # of each read and write within a message
                sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", *divmod(int(timeout_s * 1e6), 10**6)))
        while connection.poll(timeout_s):
            try:
                request = json.loads(connection.recv_bytes(_MAX_REQUEST))
            except EOFError:
                return  # the client is done
            if not isinstance(request, dict) or not hmac.compare_digest(str(request.get("secret", "")), self._secret):
                return
            connection.send_bytes(json.dumps(self._answer(request)).encode())
            timeout_s = _NEXT_REQUEST_S

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._context.run(self._handle, request)
        except (ChunkCorrupt, NodeUnavailable) as e:
            return protocol.failure(e)
        except ElasticRLError as e:
            return protocol.failure(StagingFailed(e.message, hint=e.hint))
        except Exception as e:  # a model's loader may raise anything
            return protocol.failure(StagingFailed(f"{type(e).__name__}: {e}"))

    def _handle(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "begin":
                self._loader.begin()
            case "add":
                self._loader.add(request["reference"])
            case "finish":
                return {"checksum": self._loader.finish(str(request["ticket"]))}
            case other:
                raise StagingFailed(f"unknown stager request {other!r}",
                                    hint="run one release of elastic-rl everywhere")
        return {}


def start(loader: StagingTarget, rank: int) -> None:
    """Starts the stager of this process if its environment has a secret for it."""
    if secret := os.environ.get(ENV):
        Stager(secret, rank, loader).start()


class StagingClient:
    """Client of all stagers of one server, for one version. A context manager; for one thread.

    Every call raises ChunkCorrupt, NodeUnavailable and StagingFailed; the live weights do not change.
    """

    def __init__(self, secret: str, ranks: int, *, timeout_s: float) -> None:
        """``timeout_s``: for each request. ``available`` is false when a rank has no stager, since its model cannot be
        staged."""
        self._secret, self._timeout_s = secret, timeout_s
        self._ranks: list[Connection] = []
        with contextlib.ExitStack() as stack:
            self._pool = stack.enter_context(ThreadPoolExecutor(ranks, thread_name_prefix="stage"))
            self.available = self._connect(ranks, stack)
            if self.available:
                self._all({"do": "begin"})
            self._open = stack.pop_all()

    def _connect(self, ranks: int, stack: contextlib.ExitStack) -> bool:
        try:
            for rank in range(ranks):
                self._ranks.append(stack.enter_context(Client(_address(self._secret, rank), family="AF_UNIX")))
        except ConnectionRefusedError:
            return False
        except OSError as e:
            raise StagingFailed(f"cannot connect to the stager of a scheduler: {e}") from e
        return True

    def add(self, reference: dict[str, Any]) -> None:
        """Stages some tensors on every rank."""
        if self.available:
            self._all({"do": "add", "reference": reference})

    def finish(self, ticket: str) -> list[str]:
        """Names the staged version ``ticket``; returns the checksums by rank."""
        return [str(answer["checksum"]) for answer in self._all({"do": "finish", "ticket": ticket})]

    def _all(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        body = json.dumps({**request, "secret": self._secret}).encode()
        answers = list(self._pool.map(lambda rank: self._request(rank, body), self._ranks))
        for answer in answers:
            protocol.raise_failure(answer)
        return answers

    def _request(self, stager: Connection, body: bytes) -> dict[str, Any]:
        try:
            stager.send_bytes(body)
            if not stager.poll(self._timeout_s):
                raise StagingFailed(f"a scheduler did not stage the weights within {self._timeout_s:g} s")
            answer: dict[str, Any] = json.loads(stager.recv_bytes())
            return answer
        except (OSError, EOFError) as e:
            raise StagingFailed(f"a scheduler disconnected while it staged the weights: {type(e).__name__}") from e

    def close(self) -> None:
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
