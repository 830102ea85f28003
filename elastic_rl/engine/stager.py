"""Brings a version into a scheduler's staged weights while the engine serves: the part before the pause.

Each scheduler process (one a tensor-parallel rank) has a thread that listens on an abstract Unix socket, whose name and
secret come with the environment from whoever started the server. On one connection it is asked to *begin*, to *add*
references to tensors (map, verify, load into the shadow), as often as more of the version is on this host, and to
*finish* (check that nothing is missing), which answers with the checksum of what is staged. The live weights are
untouched, so a failure here costs nothing. Messages are JSON; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import contextvars
import hmac
import json
import logging
import os
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Protocol, Self

from elastic_rl.dcs import protocol
from elastic_rl.dcs.codecs.digests import BLAKE3, digest_of
from elastic_rl.errors import ChunkCorrupt, ElasticRLError, NodeUnavailable, StagingFailed

log = logging.getLogger(__name__)

ENV = "ELASTIC_RL_STAGER"
_HELLO_S = 10.0
"""Longest wait of a stager for the first request on a connection."""
_IDLE_S = 120.0
"""And for the next one: as long as a tensor may take to arrive."""
_MAX_REQUEST = 256 << 20
"""Bytes; the reference of a version of 100,000 tensors has 12 million."""


class StagingTarget(Protocol):
    """What a stager does with a version; see ``loader.Loader``."""

    def begin(self) -> None: ...

    def add(self, reference: dict[str, Any]) -> None: ...

    def finish(self, ticket: str) -> str: ...


def new_secret() -> str:
    """Names the stagers of one server, and lets in who knows it."""
    return secrets.token_hex(16)


def _address(secret: str, rank: int) -> str:
    # all can see the name, so it does not tell the secret
    return f"\0elastic-rl-stager/{digest_of(secret.encode(), BLAKE3)[:16]}/{rank}"


class Stager(threading.Thread):
    """Serves a loader to whoever has the secret, one at a time. A daemon: it ends with its process."""

    def __init__(self, secret: str, rank: int, loader: StagingTarget) -> None:
        super().__init__(name="stager", daemon=True)
        self._secret = secret
        self._loader = loader
        self._listener = Listener(_address(secret, rank), family="AF_UNIX")
        # Who asks is in no context; models read theirs (parallel groups) from the thread that loads.
        self._context = contextvars.copy_context()

    def run(self) -> None:
        while True:
            with self._listener.accept() as asking:
                try:
                    self._serve(asking)
                except (OSError, EOFError, ValueError) as e:  # a stranger, or one that went
                    log.warning("stager: %s: %s", type(e).__name__, e)

    def _serve(self, asking: Connection) -> None:
        patience_s = _HELLO_S
        while asking.poll(patience_s):
            try:
                request = json.loads(asking.recv_bytes(_MAX_REQUEST))
            except EOFError:
                return  # it has what it wanted
            if not isinstance(request, dict) or not hmac.compare_digest(str(request.get("secret", "")), self._secret):
                return
            asking.send_bytes(json.dumps(self._answer(request)).encode())
            patience_s = _IDLE_S

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._context.run(self._do, request)
        except (ChunkCorrupt, NodeUnavailable) as e:
            return protocol.failure(e)
        except ElasticRLError as e:
            return protocol.failure(StagingFailed(e.message, hint=e.hint))
        except Exception as e:  # whatever a model's loader raises
            return protocol.failure(StagingFailed(f"{type(e).__name__}: {e}"))

    def _do(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "begin":
                self._loader.begin()
            case "add":
                self._loader.add(request["reference"])
            case "finish":
                return {"checksum": self._loader.finish(str(request["ticket"]))}
            case other:
                raise StagingFailed(f"this stager cannot {other!r}", hint="run one release of elastic-rl everywhere")
        return {}


def start(loader: StagingTarget, rank: int) -> None:
    """Starts the stager of this process, if whoever started the server wants one."""
    if secret := os.environ.get(ENV):
        Stager(secret, rank, loader).start()


class StagingClient:
    """The stagers of one server, asked together to stage one version. A context manager; for one thread.

    Every call raises ChunkCorrupt, NodeUnavailable and StagingFailed; the live weights are as they were.
    """

    def __init__(self, secret: str, ranks: int, *, timeout_s: float) -> None:
        """``timeout_s``: for each request. Where a rank has no stager, since its model cannot be staged, ``possible``
        is false."""
        self._secret, self._timeout_s = secret, timeout_s
        self._ranks: list[Connection] = []
        with contextlib.ExitStack() as stack:
            self._pool = stack.enter_context(ThreadPoolExecutor(ranks, thread_name_prefix="stage"))
            self.possible = self._connect(ranks, stack)
            if self.possible:
                self._all({"do": "begin"})
            self._open = stack.pop_all()

    def _connect(self, ranks: int, stack: contextlib.ExitStack) -> bool:
        try:
            for rank in range(ranks):
                self._ranks.append(stack.enter_context(Client(_address(self._secret, rank), family="AF_UNIX")))
        except ConnectionRefusedError:
            return False
        except OSError as e:
            raise StagingFailed(f"a scheduler cannot be asked to stage weights: {e}") from e
        return True

    def add(self, reference: dict[str, Any]) -> None:
        """Stages some tensors."""
        if self.possible:
            self._all({"do": "add", "reference": reference})

    def finish(self, ticket: str) -> list[str]:
        """Has what was added be known as ``ticket``; the checksums by rank."""
        return [str(answer["checksum"]) for answer in self._all({"do": "finish", "ticket": ticket})]

    def _all(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        body = json.dumps({**request, "secret": self._secret}).encode()
        answers = list(self._pool.map(lambda rank: self._ask(rank, body), self._ranks))
        for answer in answers:
            protocol.raise_failure(answer)
        return answers

    def _ask(self, stager: Connection, body: bytes) -> dict[str, Any]:
        try:
            stager.send_bytes(body)
            if not stager.poll(self._timeout_s):
                raise StagingFailed(f"a scheduler did not stage the weights within {self._timeout_s:g} s")
            answer: dict[str, Any] = json.loads(stager.recv_bytes())
            return answer
        except (OSError, EOFError) as e:
            raise StagingFailed(f"a scheduler went while it staged the weights: {type(e).__name__}") from e

    def close(self) -> None:
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
