"""Connections to TransferQueue, without its actors: how long a call takes, and when a client is made."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.waiting import wait_until

from elastic_rl.data.queue import row_client
from elastic_rl.errors import QueueUnavailable
from elastic_rl.pipeline.flow.transfer_queue import _Actors


class Client:
    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> list[Client]:
    """Those that connections have made."""
    made: list[Client] = []

    def client(name: str, address: Mapping[str, Any]) -> Client:
        made.append(Client())
        return made[-1]

    monkeypatch.setattr(row_client, "RowClient", client)
    return made


def test_call_that_takes_too_long_names_the_setting(clients: list[Client]) -> None:
    connection = row_client.Connection("test", {}, 60.0)
    assert connection.run(lambda client: 1) == 1
    connection._call_s = 0.2
    with pytest.raises(TimeoutError, match="queue_call_timeout_s"):
        connection.run(lambda client: client.closed.wait(60))
    assert clients[0].closed.wait(60), "which ends the call"


def test_client_is_made_again_some_time_after_a_failed_call(
        clients: list[Client], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_client, "_RETRY_S", (3600.0, 3600.0))
    connection = row_client.Connection("test", {}, 60.0)

    def fails(client: object) -> None:
        raise OSError("broken")

    for _ in range(2):
        connection.run(lambda client: None)
    with pytest.raises(OSError, match="broken"):
        connection.run(fails)
    for _ in range(3):
        with pytest.raises(QueueUnavailable, match="tried again in"):
            connection.run(lambda client: None)
    assert len(clients) == 1 and clients[0].closed.is_set()
    connection._retry.try_now()
    connection.run(lambda client: None)
    connection.close()
    assert len(clients) == 2 and clients[1].closed.is_set()
    with pytest.raises(QueueUnavailable, match="closed"):
        connection.run(lambda client: None)


def test_queue_that_cannot_be_reached_gets_no_client_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_client, "_RETRY_S", (3600.0, 3600.0))
    tries: list[str] = []

    def unreachable(name: str, address: Mapping[str, Any]) -> None:
        tries.append(name)
        raise OSError("unreachable")

    monkeypatch.setattr(row_client, "RowClient", unreachable)
    connection = row_client.Connection("test", {}, 60.0)
    with pytest.raises(OSError, match="unreachable"):
        connection.run(lambda client: None)
    with pytest.raises(QueueUnavailable, match="tried again in"):
        connection.run(lambda client: None)
    assert len(tries) == 1


def test_client_that_is_made_too_late_is_closed(clients: list[Client], monkeypatch: pytest.MonkeyPatch) -> None:
    make, answer = row_client.RowClient, threading.Event()

    def slow(name: str, address: Mapping[str, Any]) -> Any:
        answer.wait(60)
        return make(name, address)

    monkeypatch.setattr(row_client, "RowClient", slow)
    connection = row_client.Connection("test", {}, 0.2)
    with pytest.raises(TimeoutError):
        connection.run(lambda client: None)
    answer.set()
    wait_until(lambda: bool(clients) and clients[0].closed.is_set(), what="the end of what came too late")


def test_two_that_connect_at_once_get_one_client(clients: list[Client], monkeypatch: pytest.MonkeyPatch) -> None:
    make, both = row_client.RowClient, threading.Barrier(2)

    def slow(name: str, address: Mapping[str, Any]) -> Any:
        both.wait(60)
        return make(name, address)

    monkeypatch.setattr(row_client, "RowClient", slow)
    connection = row_client.Connection("test", {}, 60.0)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: connection.run(lambda client: client), range(2))
    assert first is second and [client.closed.is_set() for client in clients].count(True) == 1
    assert connection.run(lambda client: client) is first


def test_calls_that_never_end_leave_threads_for_others_in_bounded_number(
        clients: list[Client], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_MAX_THREADS", 2), ("_MAX_REPLACED", 1), ("_REPLACE_S", 0.0)):
        monkeypatch.setattr(row_client, name, value)
    end = threading.Event()
    connection = row_client.Connection("test", {}, 60.0)

    def hang() -> None:
        for _ in range(2):
            connection._retry.try_now()
            connection.run(lambda client: None)  # makes the client
            connection._call_s = 0.1
            with pytest.raises(TimeoutError):
                connection.run(lambda client: end.wait(60))
            connection._call_s = 60.0

    for _ in range(2):
        hang()
    connection._retry.try_now()
    with pytest.raises(QueueUnavailable, match="all 2 threads"):
        connection.run(lambda client: 1)
    end.set()

    def answers() -> bool:
        connection._retry.try_now()
        try:
            return connection.run(lambda client: True)
        except QueueUnavailable:
            return False

    wait_until(answers, what="the first thread that is free again")
    connection.close()


def test_call_of_a_dead_actor_is_given_up_long_before_its_limit(
        clients: list[Client], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_client, "LOOK_EVERY_S", 0.01)
    actors = _Actors.__new__(_Actors)
    actors._connection = row_client.Connection("test", {}, 3600.0)
    lives = iter(["", ""])
    assert actors.run(lambda client: 1) == 1
    monkeypatch.setattr(actors, "dead", lambda: next(lives, "its controller is gone"))
    with pytest.raises(QueueUnavailable, match="controller is gone"):
        actors.run(lambda client: client.closed.wait(60))
    assert next(lives, None) is None, "as long as they live, it waits"
