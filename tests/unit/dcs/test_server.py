"""A node's server in this process: whom it serves, and what callers that have not authenticated can do to it."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.certificates import Authority
from support.dcs_security import security_with
from support.waiting import wait_until

from elastic_rl.config import DcsConfig
from elastic_rl.dcs import protocol
from elastic_rl.dcs.fetch.fetcher import Fetcher
from elastic_rl.dcs.node.admission import ConnectionLimits
from elastic_rl.dcs.node.open_versions import OpenVersions
from elastic_rl.dcs.node.pins import NodePins
from elastic_rl.dcs.node.server import NodeServer
from elastic_rl.dcs.node.version_index import VersionIndex
from elastic_rl.dcs.security import Security
from elastic_rl.dcs.storage.chunk_table import ChunkTable
from elastic_rl.errors import AccessDenied, ConfigError
from elastic_rl.etcd.keys import Keys

TOKEN = "secret"
_START_OF_A_CLIENT_HELLO = bytes.fromhex("160301020001")


class Node:
    """A server without etcd and without peers."""

    def __init__(self, io_timeout_s: float, security: Security | None = None) -> None:
        self.table = ChunkTable(memoryview(bytearray(1 << 20)))
        fetcher = Fetcher(self.table, None, "n")  # type: ignore[arg-type]
        versions = OpenVersions(self.table, fetcher, NodePins(None, Keys("job"), "n", 5))  # type: ignore[arg-type]
        self.listener = socket.create_server(("0.0.0.0", 0), backlog=512)
        self.server = NodeServer(self.table, fetcher, versions, VersionIndex(None, grace_s=0),
                             {"job": "job", "id": "n"}, self.listener, DcsConfig(io_timeout_s=io_timeout_s),
                             security or Security(TOKEN))
        self.server.start()
        self.sockets: list[socket.socket] = []

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        sock = socket.create_connection(self.listener.getsockname(), timeout=20, source_address=(source, 0))
        self.sockets.append(sock)
        return sock

    def authenticated(self) -> socket.socket:
        sock = self.connect()
        call(sock, op="hello", job="job", token=TOKEN)
        return sock

    def in_handshake(self) -> int:
        """Connections whose TLS handshake has begun: the TLS socket has taken over their descriptor."""
        sessions = list(self.server._sessions.values())
        return sum(isinstance(s.sock, ssl.SSLSocket) or s.sock.fileno() < 0 for s in sessions)

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()
        self.server.stop()


def call(sock: socket.socket, **header: object) -> dict[str, Any]:
    protocol.send(sock, header)
    answer, _ = protocol.receive(sock)
    protocol.raise_failure(answer)
    return answer


@pytest.fixture
def node() -> Iterator[Node]:
    out = Node(io_timeout_s=60)
    yield out
    out.close()


@contextlib.contextmanager
def descriptors_up_to(number: int) -> Iterator[None]:
    """All descriptors below ``number`` are in use."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(limits[0], number + 200), limits[1]), limits[1]))
    opened = [os.open("/dev/null", os.O_RDONLY)]
    try:
        while opened[-1] < number:
            opened.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_connection_with_a_descriptor_above_1023_keeps_its_regions(node: Node) -> None:
    with descriptors_up_to(1100):
        sock = node.authenticated()
        assert sock.fileno() > 1023
        call(sock, op="alloc", nbytes=100)
        assert call(sock, op="stat")["pending"] == 1
        assert call(node.authenticated(), op="stat")["pending"] == 1


def test_silent_callers_do_not_keep_out_one_that_authenticates(node: Node) -> None:
    silent = [node.connect(f"127.0.0.{2 + i % 20}") for i in range(600)]
    sock = node.authenticated()
    assert call(sock, op="stat")["connections"] <= 129
    assert silent[0].recv(1) == b"", "the oldest one was closed"


def test_silent_callers_of_its_host_do_not_keep_out_an_authenticated_one(node: Node) -> None:
    for _ in range(100):
        node.connect()
    assert call(node.authenticated(), op="stat")["connections"] <= 33


@pytest.fixture(scope="module")
def tls_security(tmp_path_factory: pytest.TempPathFactory) -> Security:
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority(folder, "authority")
    identity = authority.issue("node")
    return security_with(tls_cert=identity.cert, tls_key=identity.key, tls_ca=authority.cert)


def test_caller_in_an_unfinished_tls_handshake_is_evicted_for_the_next_one(tls_security: Security) -> None:
    node = Node(60, tls_security)
    try:
        silent = [node.connect() for _ in range(ConnectionLimits.unauthenticated_per_host)]
        for sock in silent:
            sock.sendall(_START_OF_A_CLIENT_HELLO)
        wait_until(lambda: node.in_handshake() == len(silent), what="the handshakes")
        assert tls_security.client_context is not None
        with tls_security.client_context.wrap_socket(node.connect()) as sock:
            assert call(sock, op="hello", job="job")["id"] == "n"
        with contextlib.suppress(ConnectionResetError):
            assert silent[0].recv(1) == b"", "the oldest one was closed"
    finally:
        node.close()


def test_slow_hello_is_disconnected_at_the_deadline() -> None:
    node = Node(io_timeout_s=1)
    try:
        sock, ended = node.connect(), threading.Event()

        def drip() -> None:
            with contextlib.suppress(OSError):
                for byte in protocol.MAGIC + struct.pack(">IQ", 1000, 0) + b"{" + b" " * 900:
                    sock.sendall(bytes([byte]))  # each within the timeout of a single read
                    if ended.wait(0.2):
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
        ended.set()
        thread.join(60)
    finally:
        node.close()


@pytest.mark.parametrize(("header", "payload"), [(b"{}", 4 << 30), (b"{}", 1), (b" " * (64 << 10) + b"{}", 0)])
def test_message_before_authentication_is_refused_before_it_is_received(node: Node, header: bytes, payload: int
                                                                          ) -> None:
    sock = node.connect()
    sock.sendall(protocol.MAGIC + struct.pack(">IQ", len(header), payload))
    with contextlib.suppress(ConnectionResetError):
        assert sock.recv(1) == b"", "it waits for the rest"


def test_wrong_token_is_refused_and_disconnected(node: Node) -> None:
    sock = node.connect()
    with pytest.raises(AccessDenied):
        call(sock, op="hello", job="job", token="secre")
    with contextlib.suppress(ConnectionResetError):
        assert sock.recv(1) == b""


@pytest.mark.parametrize("op", ["has", "fetch"])
def test_request_with_too_many_digests_is_refused(node: Node, op: str) -> None:
    sock = node.authenticated()
    with pytest.raises(ConfigError, match="50001 chunks; 50000 are allowed"):
        call(sock, op=op, digests=["0" * 32] * 50_001, prefer=[], hold=False)
    assert len(call(sock, op="has", digests=["0" * 32] * 50_000)["missing"]) == 50_000
