"""Who may call a node: tokens, TLS, and callers that do not say who they are. Real node processes."""

from __future__ import annotations

import os
import shutil
import ssl
from pathlib import Path

import pytest
from support.certificates import Authority
from support.dcs_security import security_with
from support.dcs_wire import CHUNK, MIB, Dcs
from support.waiting import wait_until

from elastic_rl.dcs import protocol
from elastic_rl.errors import (
    AccessDenied,
    NodeUnavailable,
)


def test_requests_without_the_right_token_are_refused(dcs: Dcs) -> None:
    secret = dcs.folder / "token"
    secret.write_text("correct horse\n")
    node = dcs.start(token_file=secret)
    for header in ({"op": "hello", "token": "correct hors"}, {"op": "hello"}, {"op": "stat", "token": "correct horse"},
                   {"op": "put"}):
        wire = dcs.wire(node, hello=False)
        with pytest.raises(AccessDenied):
            wire.call(job=dcs.keys.job, **header)
        with pytest.raises((protocol.Closed, OSError)):
            wire.call(op="stat")
    wire = dcs.wire(node, hello=False)
    assert wire.call(op="hello", job=dcs.keys.job, token="correct horse")["id"] == "a"
    assert wire.call(op="stat")["chunks"] == 0
    assert "correct" not in dcs.log()


def test_payload_before_authentication_is_refused(dcs: Dcs) -> None:
    wire = dcs.wire(dcs.start(), hello=False)
    with pytest.raises((protocol.Closed, OSError)):
        wire.send(b"x" * 1000, op="put")  # which the node may refuse before all of it is sent
        wire.answer()


def test_silent_caller_is_disconnected(dcs: Dcs) -> None:
    wire = dcs.wire(dcs.start(io_timeout_s=1), hello=False)
    assert wire.sock.recv(1) == b""


def test_node_of_another_job_is_reported(dcs: Dcs) -> None:
    wire = dcs.wire(dcs.start(), hello=False)
    with pytest.raises(NodeUnavailable, match="of job"):
        wire.call(op="hello", job="another")


def test_tls_requires_a_certificate(dcs: Dcs) -> None:
    ours, theirs = Authority(dcs.folder, "ours"), Authority(dcs.folder, "theirs")
    host, client, stranger = ours.issue("node"), ours.issue("client"), theirs.issue("client")
    tls = {"tls_cert": host.cert, "tls_key": host.key, "tls_ca": ours.cert}
    node = dcs.start(io_timeout_s=4, arena_bytes=32 * MIB, **tls)

    def context(cert: Path, key: Path, ca: Path) -> ssl.SSLContext:
        out = security_with(tls_cert=cert, tls_key=key, tls_ca=ca).client_context
        assert out is not None
        return out

    wire = dcs.wire(node, context=context(client.cert, client.key, ours.cert))
    data = os.urandom(20 * MIB)
    assert wire.get(wire.call(data, op="put")["digest"])[1] == data
    assert isinstance(wire.sock, ssl.SSLSocket) and wire.sock.version() in ("TLSv1.2", "TLSv1.3")

    with pytest.raises(ssl.SSLCertVerificationError):
        dcs.wire(node, context=context(client.cert, client.key, theirs.cert))
    anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anonymous.check_hostname, anonymous.verify_mode = False, ssl.CERT_NONE
    for unknown in (context(stranger.cert, stranger.key, ours.cert), anonymous):
        with pytest.raises((OSError, protocol.Closed)):
            dcs.wire(node, context=unknown)
    with pytest.raises(AccessDenied, match="TLS"):
        dcs.wire(node)
    silent = dcs.wire(node, hello=False)
    assert silent.sock.recv(1) == b"", "a handshake that never comes is waited for forever"
    assert wire.call(op="stat")["chunks"] == 1


def test_nodes_with_tls_and_a_token_fetch_from_each_other(dcs: Dcs) -> None:
    ours, secret = Authority(dcs.folder, "ours"), dcs.folder / "token"
    secret.write_text("correct horse")

    def settings(name: str) -> dict[str, Path]:
        pem = ours.issue(name)
        return {"tls_cert": pem.cert, "tls_key": pem.key, "tls_ca": ours.cert, "token_file": secret}

    source, node = dcs.start("a", **settings("a")), dcs.start("b", **settings("b"))
    security = security_with(**settings("client"))
    digest = ""
    for there in (source, node):
        wire = dcs.wire(there, hello=False, context=security.client_context)
        wire.call(op="hello", job=dcs.keys.job, token=security.token)
        if not digest:
            digest = wire.call(b"x" * CHUNK, op="put")["digest"]
    assert wire.fetch([digest])[digest][1] == CHUNK
    assert wire.get(digest)[1] == b"x" * CHUNK


def test_node_does_not_start_without_its_token_file(dcs: Dcs) -> None:
    assert dcs.launch("a", token_file=dcs.folder / "none").wait(20) == 2
    assert "dcs.token_file" in dcs.log()


def test_node_on_a_public_address_without_a_token_does_not_start(dcs: Dcs) -> None:
    assert dcs.launch("a", host="0.0.0.0", advertise_host="127.0.0.1").wait(20) == 2
    assert "ConfigError" in dcs.log() and "dcs.token_file" in dcs.log()
    secret = dcs.folder / "token"
    secret.write_text("correct horse")
    dcs.start("b", host="0.0.0.0", advertise_host="127.0.0.1", token_file=secret)


def test_renewed_certificate_is_used_without_a_restart(dcs: Dcs) -> None:
    first, second = Authority(dcs.folder, "first"), Authority(dcs.folder, "second")
    pem, renewed, client = first.issue("node"), second.issue("node"), second.issue("client")
    node = dcs.start(tls_cert=pem.cert, tls_key=pem.key, tls_ca=first.cert)
    context = security_with(tls_cert=client.cert, tls_key=client.key, tls_ca=second.cert).client_context
    with pytest.raises(ssl.SSLCertVerificationError):
        dcs.wire(node, context=context)
    for old, new in ((pem.cert, renewed.cert), (pem.key, renewed.key), (first.cert, second.cert)):
        shutil.copy(new, old)

    def accepted() -> bool:
        try:
            return dcs.wire(node, context=context).call(op="stat")["chunks"] == 0
        except (OSError, protocol.Closed):
            return False

    wait_until(accepted, what="the new certificate", poll_s=1.0)
