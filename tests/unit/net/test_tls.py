"""Renewal of TLS files under a running server, with real sockets and certificates."""

from __future__ import annotations

import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.certificates import Authority, Identity

from elastic_rl.net.tls import ReloadingContext


class Files:
    """The files that a server is configured with; ``install`` replaces them as a renewal does."""

    def __init__(self, folder: Path) -> None:
        self.cert, self.key, self.ca = (folder / f"live-{n}.pem" for n in ("cert", "key", "ca"))

    def install(self, identity: Identity, authority: Authority) -> None:
        for source, target in ((identity.cert, self.cert), (identity.key, self.key), (authority.cert, self.ca)):
            partial = target.with_suffix(".partial")
            shutil.copy(source, partial)
            partial.rename(target)

    def server_context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(self.ca))
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self.cert, self.key)
        return context

    def reloading(self, **more: object) -> ReloadingContext:
        return ReloadingContext(self.server_context, (self.cert, self.key, self.ca), **more)  # type: ignore[arg-type]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture
def old(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "old")


@pytest.fixture
def new(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "new")


def client_context(identity: Identity, authority: Authority) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.cert))
    context.load_cert_chain(identity.cert, identity.key)
    return context


Connect = Callable[[ssl.SSLContext], str]


@pytest.fixture
def serve() -> Iterator[Callable[[ssl.SSLContext], Connect]]:
    """Starts a server that keeps the context it is given. Returns a call that connects and gives the common name of
    the server's certificate; it raises what the handshake raises."""
    listeners: list[socket.socket] = []

    def start(context: ssl.SSLContext) -> Connect:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def accept() -> None:
            while True:
                try:
                    raw = listener.accept()[0]
                except OSError:
                    return
                try:
                    with context.wrap_socket(raw, server_side=True) as connection:
                        connection.sendall(b"ok")
                except OSError:
                    raw.close()

        threading.Thread(target=accept, daemon=True).start()

        def connect(client: ssl.SSLContext) -> str:
            with socket.create_connection(listener.getsockname(), timeout=10) as raw, client.wrap_socket(
                    raw, server_hostname="server") as connection:
                assert connection.recv(2) == b"ok"
                subject = dict(pair for part in connection.getpeercert()["subject"] for pair in part)
                issuer = dict(pair for part in connection.getpeercert()["issuer"] for pair in part)
                assert subject["commonName"] == "server"
                return issuer["commonName"]

        return connect

    yield start
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def test_server_uses_renewed_certificate_and_authority_without_restart(
        files: Files, old: Authority, new: Authority, serve: Callable[[ssl.SSLContext], Connect]) -> None:
    files.install(old.issue("server"), old)
    connect = serve(files.reloading(recheck_s=0.0).for_server())
    of_old, of_new = client_context(old.issue("client"), old), client_context(new.issue("client"), new)
    assert connect(of_old) == "old"
    with pytest.raises(ssl.SSLCertVerificationError):
        connect(of_new)
    files.install(new.issue("server"), new)
    assert connect(of_new) == "new"
    with pytest.raises(ssl.SSLError):  # the client of the old authority no longer believes the server
        connect(of_old)
    old_client_of_new_server = client_context(old.issue("client"), new)
    with pytest.raises((ssl.SSLError, OSError)):  # nor does the server accept a client of the old authority
        connect(old_client_of_new_server)


def test_files_that_do_not_fit_together_leave_the_previous_context_in_use(
        files: Files, old: Authority, new: Authority, caplog: pytest.LogCaptureFixture) -> None:
    files.install(old.issue("server"), old)
    reloading = files.reloading(recheck_s=0.0)
    first, renewed = reloading.current(), new.issue("server")
    shutil.copy(renewed.cert, files.cert)  # the key still belongs to the old certificate
    assert reloading.current() is first and reloading.current() is first
    assert sum("cannot be reloaded" in r.message for r in caplog.records) == 1
    files.key.unlink()
    assert reloading.current() is first
    files.install(renewed, new)
    assert reloading.current() is not first


def test_files_are_checked_no_more_often_than_recheck_s(files: Files, old: Authority) -> None:
    files.install(old.issue("server"), old)
    now = [0.0]
    reloading = files.reloading(recheck_s=10.0, clock=lambda: now[0])
    first = reloading.current()
    files.install(old.issue("server"), old)
    now[0] = 9.0
    assert reloading.current() is first
    now[0] = 10.0
    second = reloading.current()
    assert second is not first
    now[0] = 99.0
    assert reloading.current() is second, "unchanged files are not read again"


def test_first_load_of_missing_files_raises(files: Files) -> None:
    with pytest.raises(OSError):
        files.reloading()
