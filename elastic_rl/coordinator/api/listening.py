"""Where a replica serves the admin API: its server, its listening socket and the URL that others reach it under."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from starlette.types import ASGIApp

from elastic_rl.config import CoordinatorConfig
from elastic_rl.coordinator.api import tls
from elastic_rl.errors import PreflightFailed
from elastic_rl.net import http_server
from elastic_rl.net.addresses import host_port, reachable_address, require_port_free
from elastic_rl.net.http_connections import Limits, limits_of_process
from elastic_rl.net.http_server import HttpServer, listening_socket

_KEEP_ALIVE_S = 30
_SHUTDOWN_S = 3
_BACKLOG = 256


def make_server(app: ASGIApp, cfg: CoordinatorConfig, limits: Limits | None = None) -> HttpServer:
    """``limits``: the limits of idle connections; default: as many as this process may have. Raises ConfigError when
    the certificate of the settings cannot be used."""
    context = tls.server_context(cfg)
    limits = limits or limits_of_process(cfg.max_requests + cfg.max_streams)
    return http_server.make_server(app, context, limits, request_timeout_s=cfg.request_timeout_s,
                                   keep_alive_s=_KEEP_ALIVE_S, shutdown_s=_SHUTDOWN_S)


def bind(host: str, port: int) -> socket.socket:
    """The listening socket. It is held from here on, so that no other process takes the port between the check and the
    use. Raises PreflightFailed when the port cannot be bound."""
    require_port_free(host, port, setting="coordinator.ports")
    try:
        return listening_socket(host, port, backlog=_BACKLOG, reuses_address=True)
    except OSError as e:
        raise PreflightFailed(f"port {port} on {host} cannot be bound (coordinator.ports): {e.strerror}",
                              hint="stop what listens there, or set another port") from e


def advertised(cfg: CoordinatorConfig, port: int, etcd_endpoints: Sequence[str]) -> str:
    """URL under which the other replicas and the clients reach this one."""
    host = cfg.advertise_host or reachable_address(cfg.host, etcd_endpoints)
    return f"{cfg.scheme}://{host_port(host, port)}"
