"""The logs and stacks of this host for other hosts of its cluster: a read-only HTTP service of the host agent.

    GET /v1/parts?job=                                the parts with a log: {"parts": [LogPart], "folders": …}
    GET /v1/parts/{part}?job=&lines=                  the last lines of a part: a block of them
    GET /v1/parts/{part}?job=&after=POSITION&wait_s=  what comes after a block, within ``wait_s`` seconds
    GET /v1/stacks?job=                               the stacks of the job's processes: {"processes": [ProcessStacks]}

A block is at most ``BLOCK_BYTES`` of the log as it is; its end is in the header ``POSITION``, for the next request. So
the server keeps nothing between two requests, and a reader that is away for an hour goes on where it was. Stacks are
taken for one request at a time.

Every request needs the cluster's token for logs; errors are JSON, ``{"error": …}``. The server has a thread of its own,
which reads files in two further ones: a disk that hangs, or a slow reader, is nothing that the agent waits for.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import ssl
import threading
from collections.abc import Awaitable, Callable
from typing import Self, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from elastic_rl.errors import ConfigError, ElasticRLError, PreflightFailed
from elastic_rl.host import stacks
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.log_folders import LogFolders
from elastic_rl.host.stacks import ProcessStacks
from elastic_rl.net.addresses import free_port, host_port
from elastic_rl.net.cluster_secret import ClusterSecret
from elastic_rl.net.http_connections import Limits
from elastic_rl.net.http_server import listening_socket, make_server
from elastic_rl.net.tls import ReloadingContext, TlsFolder
from elastic_rl.runtime.abandonable import AbandonableCalls, CallRefused, CallTookTooLong
from elastic_rl.telemetry.log_files import LogPosition

log = logging.getLogger(__name__)

T = TypeVar("T")

POSITION = "x-log-position"
"""Header of an answer: the position after its block."""
BLOCK_BYTES = 256 << 10
"""Most bytes of a log in an answer."""
MAX_WAIT_S = 10.0
"""Longest time that a request waits for what is written next."""
MAX_LINES = 10 ** 9
_REQUESTS = 32
"""Requests with the token at one time, those that wait included; a further one is answered 503. So at most 8 MiB of
logs are in memory."""
_READERS, _READ_S = 2, 10.0
"""Threads that read files, and the longest time for what one request reads."""
STACKS_S = stacks.ALL_S + 2 * stacks.PROCESS_S
"""Longest time for the stacks of a job."""
_POLL_S = 0.5
_IDLE_CONNECTIONS = 64
"""Connections without a request that has the token, of which the oldest is closed for a further one."""
_REQUEST_TIMEOUT_S = 10.0
_KEEP_ALIVE_S = 30
_SHUTDOWN_S = 1
_BACKLOG = 64
_CLOSE_S = 2.0


class _Logs:
    """The requests, of which each opens what it reads, and closes it. For the thread of an event loop."""

    def __init__(self, folders: Callable[[str], LogFolders], stacks_of: Callable[[str], list[ProcessStacks]],
                 token: str) -> None:
        """``folders``: those of the cluster and a job. ``stacks_of``: those of a job. Raises ConfigError."""
        self._folders, self._stacks_of, self._token = folders, stacks_of, token
        self._requests = 0
        self._readers = AbandonableCalls("log-reader", _READERS)
        self._stack_reader = AbandonableCalls("stack-reader", 1)
        self._takes_stacks = False

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/parts", self._answers(self._list), methods=["GET"]),
                                 Route("/v1/parts/{part}", self._answers(self._block), methods=["GET"]),
                                 Route("/v1/stacks", self._answers(self._stacks), methods=["GET"])])

    def close(self) -> None:
        self._readers.close(0.0)
        self._stack_reader.close(0.0)

    def _answers(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            web_page = {"origin", "sec-fetch-site"} & set(request.headers)
            if web_page or not hmac.compare_digest(given.encode(errors="replace"), self._token.encode()):
                return _error(403, "the request has no valid token of this cluster, or comes from a web page")
            request.scope["state"]["connection"].busy()
            if self._requests >= _REQUESTS:
                return _error(503, f"{_REQUESTS} other requests read logs of this host")
            self._requests += 1
            try:
                return await handler(request)
            except FileNotFoundError:
                return _error(404, "this host has no such log")
            except ConfigError as e:
                return _error(400, str(e))
            except (CallRefused, CallTookTooLong) as e:
                return _error(503, f"the disk with the logs does not answer: {e}")
            except (ElasticRLError, OSError) as e:
                return _error(500, f"the logs cannot be read: {e}")
            finally:
                self._requests -= 1

        return answer

    async def _list(self, request: Request) -> Response:
        def read() -> dict[str, object]:
            folders = self._folders(request.query_params.get("job", ""))
            return {"parts": [part.model_dump() for part in folders.parts()], "folders": folders.described}

        return JSONResponse(await self._in_reader(read))

    async def _block(self, request: Request) -> Response:
        part, query = request.path_params["part"], request.query_params
        wait_s = _number(query.get("wait_s", "0"), "wait_s", MAX_WAIT_S)
        lines = int(_number(query.get("lines", "0"), "lines", MAX_LINES))
        try:
            after = LogPosition.parse(query["after"]) if "after" in query else None
        except ValueError as e:
            raise ConfigError(str(e)) from e
        folders = await self._in_reader(lambda: self._folders(query.get("job", "")))

        def read(at: LogPosition | None) -> tuple[bytes, LogPosition]:
            return folders.read_from(part, at or folders.before_last_lines(part, lines), BLOCK_BYTES)

        end = asyncio.get_running_loop().time() + wait_s
        while True:
            block, after = await self._in_reader(lambda at=after: read(at))  # type: ignore[misc]
            left_s = end - asyncio.get_running_loop().time()
            if block or left_s <= 0:
                return Response(block, media_type="application/octet-stream", headers={POSITION: str(after)})
            await asyncio.sleep(min(_POLL_S, left_s))

    async def _stacks(self, request: Request) -> Response:
        job, busy = request.query_params.get("job", ""), "another request takes stacks of this host: repeat this later"
        if self._takes_stacks:
            return _error(503, busy)
        self._takes_stacks = True
        try:
            found = await self._stack_reader.begin(lambda: self._stacks_of(job)).result_within(STACKS_S)
        except CallRefused:
            return _error(503, busy)
        except CallTookTooLong:
            return _error(503, f"the stacks were not read within {STACKS_S:g} s")
        except PreflightFailed as e:
            return _error(500, f"{e.message}: {e.hint}")
        finally:
            self._takes_stacks = False
        return JSONResponse({"processes": [process.model_dump() for process in found]})

    async def _in_reader(self, call: Callable[[], T]) -> T:
        return await self._readers.begin(call).result_within(_READ_S)


def _number(text: str, what: str, most: float) -> float:
    """Raises ConfigError for what is no number from 0 to ``most``."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= most:
        raise ConfigError(f"{what} must be a number from 0 to {most:g}")
    return value


def _error(code: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, code)


class LogServer:
    """Serves logs and stacks at ``address``, at a free port, in a thread until ``close``."""

    def __init__(self, folders: Callable[[str], LogFolders], stacks_of: Callable[[str], list[ProcessStacks]],
                 address: str, token: str, tls: TlsFolder | None) -> None:
        """``tls``: the certificate to serve with, which is followed; None: without TLS. Raises OSError, and
        ConfigError for a certificate that cannot be used."""
        context = _context(tls) if tls is not None else None
        self._logs = _Logs(folders, stacks_of, token)
        self.port = free_port(address)
        self.url = f"{'https' if tls is not None else 'http'}://{host_port(address, self.port)}"
        self._socket = listening_socket(address, self.port, backlog=_BACKLOG)
        self._server = make_server(
            self._logs.app(), context.for_server() if context is not None else None,
            Limits(idle=_IDLE_CONNECTIONS, idle_per_address=_IDLE_CONNECTIONS), request_timeout_s=_REQUEST_TIMEOUT_S,
            keep_alive_s=_KEEP_ALIVE_S, shutdown_s=_SHUTDOWN_S)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, name="log-server",
                                        daemon=True)

    @classmethod
    def of_cluster(cls, cluster: Callable[[], Cluster]) -> Self:
        """The server of what a cluster and its jobs have on this host. ``cluster``: with its present settings. Raises
        ConfigError and OSError."""
        here = cluster()
        return cls(lambda job: LogFolders(cluster().cfg, job),
                   lambda job: stacks.read_all(stacks.of_job(cluster().cfg, job)), here.host.address,
                   ClusterSecret.read(here.paths.secret).logs(), here.host.tls(here.paths))

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> Self:
        """Returns at once; requests are answered soon after."""
        self._thread.start()
        log.info("the logs of this host are served at %s", self.url)
        return self

    def close(self) -> None:
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)
        self._socket.close()
        self._logs.close()


def _context(tls: TlsFolder) -> ReloadingContext:
    def build() -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(tls.cert, tls.key)
        return context

    try:
        return ReloadingContext(build, [tls.cert, tls.key])
    except OSError as e:  # ssl.SSLError is one
        raise ConfigError(f"the certificate {tls.cert} cannot be used: {e}",
                          hint="the host agent makes another one within seconds where it is gone") from e
