"""The stager of a scheduler serves clients over its socket, and only those that have the secret."""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Callable
from multiprocessing.connection import Client
from typing import Any

import pytest

from elastic_rl.engine.sglang import stager
from elastic_rl.errors import ChunkCorrupt, StagingFailed


class Loader:
    """Records its calls; ``on_add`` may fail or take its time."""

    def __init__(self, name: str = "sum", on_add: Callable[[], object] = lambda: None) -> None:
        self.name, self.on_add = name, on_add
        self.done: list[Any] = []

    def begin(self) -> None:
        self.done = ["begin"]

    def add(self, reference: dict[str, Any]) -> None:
        self.on_add()
        self.done.append(reference)

    def finish(self, ticket: str) -> str:
        self.done.append(ticket)
        return self.name


def start(secret: str, rank: int, loader: Loader) -> Loader:
    stager.Stager(secret, rank, loader).start()
    return loader


def stage(secret: str, *references: dict[str, Any], ranks: int = 1, timeout_s: float = 5) -> list[str]:
    with stager.StagingClient(secret, ranks, timeout_s=timeout_s) as client:
        for reference in references:
            client.add(reference)
        return client.finish("ticket")


def test_client_stages_parts_on_all_ranks_with_checksums_in_order() -> None:
    secret = stager.new_secret()
    loaders = [start(secret, rank, Loader(f"sum-{rank}")) for rank in range(3)]
    for _ in range(2):
        assert stage(secret, {"x": 1}, {"y": 2}, ranks=3) == ["sum-0", "sum-1", "sum-2"]
        assert all(loader.done == ["begin", {"x": 1}, {"y": 2}, "ticket"] for loader in loaders)


def test_client_is_unavailable_when_a_rank_has_no_stager() -> None:
    secret = stager.new_secret()
    with stager.StagingClient(secret, 1, timeout_s=5) as client:
        assert not client.available
        client.add({})
    loader = start(secret, 0, Loader())
    with stager.StagingClient(secret, 2, timeout_s=5) as client:
        assert not client.available
        client.add({})
    assert not loader.done and stage(secret, {}) == ["sum"]


@pytest.mark.parametrize(("raised", "reported"), [
    (ChunkCorrupt("bad"), ChunkCorrupt), (StagingFailed("no"), StagingFailed), (ValueError("shape"), StagingFailed)])
def test_stager_reports_errors_and_stages_the_next_version(raised: Exception, reported: type[Exception]) -> None:
    secret, fail = stager.new_secret(), [True]

    def on_add() -> None:
        if fail.pop() if fail else False:
            raise raised

    loader = start(secret, 0, Loader(on_add=on_add))
    with pytest.raises(reported, match=str(raised)):
        stage(secret, {"x": 1})
    assert loader.done == ["begin"]
    assert stage(secret, {"x": 2}) == ["sum"]


def test_client_reports_that_it_cannot_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(stager, "Client", fail)
    with pytest.raises(StagingFailed, match="too many open files"):
        stager.StagingClient(stager.new_secret(), 1, timeout_s=5)


def test_client_reports_a_timeout() -> None:
    secret, go = stager.new_secret(), threading.Event()
    start(secret, 0, Loader(on_add=lambda: go.wait(60)))
    with pytest.raises(StagingFailed, match="within"):
        stage(secret, {}, timeout_s=0.1)
    go.set()


def test_stager_serves_the_next_client_after_one_that_left_early() -> None:
    secret = stager.new_secret()
    loader = start(secret, 0, Loader())
    with stager.StagingClient(secret, 1, timeout_s=5) as client:
        client.add({"x": 1})
    assert loader.done == ["begin", {"x": 1}]
    assert stage(secret, {"x": 2}) == ["sum"]


def test_stager_refuses_clients_of_other_users_before_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    secret, user = stager.new_secret(), os.geteuid()
    loader = start(secret, 0, Loader())
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: user + 1)  # then this process is another user's
        with Client(stager._address(secret, 0), family="AF_UNIX") as stranger:
            assert stranger.poll(5), "it is disconnected though it has sent nothing"
            with pytest.raises((EOFError, ConnectionResetError)):
                stranger.recv_bytes()
    assert not loader.done
    assert stage(secret, {}) == ["sum"]


def test_client_that_stops_within_a_request_does_not_stop_the_stager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stager, "_FIRST_REQUEST_S", 0.2)
    secret = stager.new_secret()
    start(secret, 0, Loader())
    with Client(stager._address(secret, 0), family="AF_UNIX") as halting:
        os.write(halting.fileno(), struct.pack("!i", 1000) + b"{")
        assert halting.poll(5), "it is disconnected"
        assert stage(secret, {}) == ["sum"]


def test_stager_refuses_clients_without_the_secret() -> None:
    secret = stager.new_secret()
    loader = start(secret, 0, Loader())
    address = stager._address(secret, 0)
    assert secret not in address
    for body in (b"{}", b"no json", b"[]", json.dumps({"secret": "0" * 32, "do": "begin"}).encode()):
        with Client(address, family="AF_UNIX") as stranger:
            stranger.send_bytes(body)
            with pytest.raises(EOFError):
                stranger.recv_bytes()
    assert not loader.done
    with Client(address, family="AF_UNIX") as friend:
        friend.send_bytes(json.dumps({"secret": secret, "do": "unknown"}).encode())
        assert "unknown" in friend.recv_bytes().decode()
    assert stage(secret, {}) == ["sum"]
