"""Brings a version into a scheduler's staged weights while the engine serves: the part before the pause.

Each scheduler process (one a tensor-parallel rank) has a thread that listens on an abstract Unix socket, whose name and
secret come with the environment from whoever started the server. It is asked to *stage* a version: map, verify, load
into the shadow, check. The answer says whether, and the checksum of what was staged. The live weights are untouched, so
a failure here costs nothing. Messages are JSON; nothing is unpickled.
"""

from __future__ import annotations

import contextvars
import hmac
import json
import logging
import os
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from elastic_rl.dcs import protocol
from elastic_rl.dcs.digests import BLAKE3, digest_of
from elastic_rl.errors import ChunkCorrupt, ElasticRLError, NodeUnavailable, StagingFailed

log = logging.getLogger(__name__)

ENV = "ELASTIC_RL_STAGER"
_REQUEST_S = 10.0
"""Longest wait of a stager for a request on a connection that was made."""
_MAX_REQUEST = 256 << 20
"""Bytes; the reference of a version of 100,000 tensors has 12 million."""

Stage = Callable[[dict[str, Any]], str]
"""Stages what a reference describes; the checksum of it."""


def new_secret() -> str:
    """Names the stagers of one server, and lets in who knows it."""
    return secrets.token_hex(16)


def _address(secret: str, rank: int) -> str:
    # all can see the name, so it does not tell the secret
    return f"\0elastic-rl-stager/{digest_of(secret.encode(), BLAKE3)[:16]}/{rank}"


class Stager(threading.Thread):
    """Serves ``stage`` to whoever has the secret; one at a time. A daemon: it ends with its process."""

    def __init__(self, secret: str, rank: int, stage: Stage) -> None:
        super().__init__(name="stager", daemon=True)
        self._secret = secret
        self._stage = stage
        self._listener = Listener(_address(secret, rank), family="AF_UNIX")
        # Who asks is in no context; models read theirs (parallel groups) from the thread that loads.
        self._context = contextvars.copy_context()

    def run(self) -> None:
        while True:
            with self._listener.accept() as asking:
                try:
                    self._answer(asking)
                except (OSError, EOFError, ValueError) as e:  # a stranger, or one that went
                    log.warning("stager: %s: %s", type(e).__name__, e)

    def _answer(self, asking: Connection) -> None:
        if not asking.poll(_REQUEST_S):
            return
        request = json.loads(asking.recv_bytes(_MAX_REQUEST))
        if not isinstance(request, dict) or not hmac.compare_digest(str(request.pop("secret", "")), self._secret):
            return
        try:
            answer = {"checksum": self._context.run(self._stage, request)}
        except (ChunkCorrupt, NodeUnavailable) as e:
            answer = protocol.failure(e)
        except ElasticRLError as e:
            answer = protocol.failure(StagingFailed(e.message, hint=e.hint))
        except Exception as e:  # whatever a model's loader raises
            answer = protocol.failure(StagingFailed(f"{type(e).__name__}: {e}"))
        asking.send_bytes(json.dumps(answer).encode())


def start(stage: Stage, rank: int) -> None:
    """Starts the stager of this process, if whoever started the server wants one."""
    if secret := os.environ.get(ENV):
        Stager(secret, rank, stage).start()


def ask(secret: str, ranks: int, request: dict[str, Any], *, timeout_s: float) -> list[str] | None:
    """Stages at all ranks; their checksums, by rank. None when a rank has no stager: its model cannot be staged.

    Raises ChunkCorrupt, NodeUnavailable and StagingFailed; the live weights are as they were.
    """
    body = json.dumps({**request, "secret": secret}).encode()
    with ThreadPoolExecutor(ranks, thread_name_prefix="stage") as pool:
        answers = list(pool.map(lambda rank: _ask(_address(secret, rank), body, timeout_s), range(ranks)))
    for answer in answers:
        protocol.raise_failure(answer or {})
    return None if None in answers else [answer["checksum"] for answer in answers if answer]


def _ask(address: str, body: bytes, timeout_s: float) -> dict[str, Any] | None:
    try:
        with Client(address, family="AF_UNIX") as stager:
            stager.send_bytes(body)
            if not stager.poll(timeout_s):
                raise StagingFailed(f"a scheduler did not stage the weights within {timeout_s:g} s")
            answer: dict[str, Any] = json.loads(stager.recv_bytes())
            return answer
    except ConnectionRefusedError:
        return None
    except (OSError, EOFError) as e:
        raise StagingFailed(f"a scheduler went while it staged the weights: {type(e).__name__}") from e
