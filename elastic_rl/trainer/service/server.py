"""The HTTP service of a trainer group (FastAPI). Rank 0 takes commands; the first rank of each data-parallel replica
takes that replica's share of a batch, so that no rank receives more than its own.

    GET  /v1/status                     rank 0: progress, group, URLs of the ranks that take shares
    POST /v1/claim                      an actor has taken over: {"epoch", "term"}
    PUT  /v1/batches/{id}/share         a share, as safetensors; or what says where it is, which this rank then reads:
                                        503 while it cannot, 410 with the ``groups`` that are gone
    POST /v1/commands                   rank 0: a command (``Command.to_json``); 202
    GET  /v1/commands/{id}?wait_s=      rank 0: 200 with its outcome, 404 if it is not known; 202 while it is not done,
                                        with what the trainer waits for (``waits_for``)
    GET  /v1/outputs/{id}               what a command computed on this rank's share, as safetensors

Requests go to the ``Board``; one thread works on tensors. Every request needs the job's token. Errors are JSON:
``{"error": …, "hint": …}``.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from elastic_rl.data.batch import layout
from elastic_rl.dcs.security import Security
from elastic_rl.errors import ConfigError, Conflict, DeadlineExceeded, GroupsLost, PreflightFailed, QueueUnavailable
from elastic_rl.net.addresses import host_port
from elastic_rl.net.http_connections import Limits
from elastic_rl.net.http_server import listening_socket, make_server
from elastic_rl.runtime.waiting import wait_until
from elastic_rl.trainer.service.board import Board
from elastic_rl.trainer.service.commands import Command

_IDLE_CONNECTIONS = 256
"""Connections without a request of this job, of which the oldest is closed for a further one."""
_REQUEST_TIMEOUT_S = 10.0
"""Seconds within which the headers of a request must have arrived, and the body of one without a token."""
_KEEP_ALIVE_S = 60
_BACKLOG = 64
MAX_WAIT_S = 20.0
"""Longest time that one request waits for a result."""
_MAX_COMMAND_BYTES = 8 << 20
MAX_PIECES = 1 << 16
"""Pieces of a share."""
LARGER_PIECES = "it is a single long sample: start the job again with a larger trainer.share_piece_bytes"
_START_S = 30.0

TakeShare = Callable[[bytes], bytes]
"""Makes a share of its body. Raises ConfigError for bytes that are not a batch, since a rank must not fail
on them in a step; GroupsLost and QueueUnavailable for samples that cannot be read."""


def make_app(board: Board, security: Security, take_share: TakeShare) -> FastAPI:
    app = FastAPI(title="elastic-rl trainer", docs_url=None, redoc_url=None, openapi_url=None)

    @app.middleware("http")
    async def authenticate(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        # Without a token the service is bound to loopback (``require_for``), where web pages must not reach it.
        if not security.admits(token) or {"origin", "sec-fetch-site"} & set(request.headers):
            return _error(403, "the request has no valid token of this job, or comes from a web page")
        request.scope["state"]["connection"].busy()
        return await call_next(request)

    @app.exception_handler(ConfigError)
    async def invalid(_request: Request, error: ConfigError) -> Response:
        return _error(400, error.message, error.hint)

    @app.exception_handler(Conflict)
    async def conflict(_request: Request, error: Conflict) -> Response:
        return _error(409, error.message, error.hint)

    @app.exception_handler(GroupsLost)
    async def gone(_request: Request, error: GroupsLost) -> Response:
        return JSONResponse({"error": error.message, "groups": error.ordinals}, 410)

    @app.exception_handler(QueueUnavailable)
    async def unavailable(_request: Request, error: QueueUnavailable) -> Response:
        return _error(503, error.message, error.hint)

    @app.get("/v1/status")
    async def status() -> dict[str, Any]:
        return board.status()

    @app.post("/v1/claim", status_code=202)
    async def claim(request: Request) -> dict[str, Any]:
        raw = _json(await _body(request, _MAX_COMMAND_BYTES))
        try:
            board.claims.put_nowait((int(raw["epoch"]), int(raw["term"])))
        except (KeyError, ValueError, TypeError, OverflowError) as e:
            raise ConfigError(f"a claim has an epoch and a term: {e}") from e
        except Exception as e:
            raise Conflict("too many claims wait") from e
        board.wake.set()
        return {}

    @app.put("/v1/batches/{batch_id}/share", status_code=201)
    async def put_share(batch_id: str, request: Request, piece: Annotated[int, Query(ge=0, lt=MAX_PIECES)] = 0,
                        pieces: Annotated[int, Query(ge=1, le=MAX_PIECES)] = 1) -> dict[str, Any]:
        if len(batch_id) > 200:
            raise ConfigError("a batch's name has at most 200 characters")
        if piece >= pieces:
            raise ConfigError(f"there is no piece {piece} of {pieces}")
        raw = await _body(request, board.share_piece_bytes, "piece of a share", LARGER_PIECES)
        board.put_share(batch_id, await run_in_threadpool(take_share, raw), piece, pieces)
        whole = board.share(batch_id) or []
        if any(layout(other) != layout(whole[0]) for other in whole[1:]):  # no rank may fail on that in a step
            board.discard_share(batch_id)
            raise ConfigError("the pieces of a share have different tensors")
        return {}

    @app.delete("/v1/batches/{batch_id}/share", status_code=204)
    async def discard_share(batch_id: str) -> None:
        board.discard_share(batch_id)

    @app.post("/v1/commands", status_code=202)
    async def submit(request: Request) -> dict[str, Any]:
        command = Command.decode(await _body(request, _MAX_COMMAND_BYTES))
        board.submit(command)
        return {"id": command.id}

    @app.get("/v1/commands/{command_id}")
    async def result(command_id: str, wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S, allow_inf_nan=False)] = 0.0
                     ) -> Response:
        try:
            outcome = await run_in_threadpool(board.result, command_id, wait_s)
        except KeyError:
            return _error(404, f"no command {command_id[:200]!r}; send it again")
        return JSONResponse({"waits_for": board.waits_for}, 202) if outcome is None else JSONResponse(outcome)

    @app.get("/v1/outputs/{command_id}")
    async def output(command_id: str) -> Response:
        try:
            return Response(board.output(command_id), media_type="application/octet-stream")
        except KeyError:
            return _error(404, f"no output of {command_id[:200]!r}")

    return app


def _error(code: int, message: str, hint: str = "") -> JSONResponse:
    return JSONResponse({"error": message, **({"hint": hint} if hint else {})}, code)


def _json(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"the body is not JSON: {e}") from e
    if not isinstance(value, dict):
        raise ConfigError("the body must be a JSON object")
    return value


async def _body(request: Request, limit: int, what: str = "body", hint: str = "") -> bytes:
    """The whole body. Raises ConfigError, with the hint, for one that is too large."""
    given = request.headers.get("content-length", "")
    if given.isdecimal() and int(given) > limit:
        raise ConfigError(f"the {what} has {given} bytes; the limit is {limit}", hint=hint)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise ConfigError(f"the {what} has more than {limit} bytes, the limit", hint=hint)
        parts.append(part)
    return b"".join(parts)


class TrainerService:
    """Serves a board on ``host``, at a free port, in a thread until ``close``."""

    def __init__(self, board: Board, host: str, security: Security, take_share: TakeShare) -> None:
        """Raises ConfigError when it would serve everybody who can reach the address."""
        security.require_for(host)
        self._socket = listening_socket(host, 0, backlog=_BACKLOG)
        scheme = "https" if security.server is not None else "http"
        self.url = f"{scheme}://{host_port(host, self._socket.getsockname()[1])}"
        context = security.server
        # Connections without a request of this job are closed soon, and cannot keep the actor's out.
        self._server = make_server(
            make_app(board, security, take_share), context.for_server() if context is not None else None,
            Limits(idle=_IDLE_CONNECTIONS, idle_per_address=_IDLE_CONNECTIONS), request_timeout_s=_REQUEST_TIMEOUT_S,
            keep_alive_s=_KEEP_ALIVE_S)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]},
                                        name="trainer-service", daemon=True)

    def start(self) -> TrainerService:
        """Returns when it accepts requests. Raises PreflightFailed."""
        self._thread.start()
        try:
            wait_until(lambda: self._server.started, timeout_s=_START_S, what="the trainer's HTTP service", poll_s=0.01,
                       alive=self._thread.is_alive)
        except DeadlineExceeded as e:
            raise PreflightFailed("the trainer's HTTP service did not start", hint="see the trainer's log") from e
        return self

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=5.0)
        self._socket.close()
