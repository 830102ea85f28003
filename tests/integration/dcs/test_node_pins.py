"""The pins that a node holds for its readers, on a real etcd."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from support.waiting import wait_until

from elastic_rl.dcs.catalog import pins
from elastic_rl.dcs.node import pins as node_pins
from elastic_rl.dcs.node.pins import NodePins
from elastic_rl.errors import VersionNotFound
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Version, VersionState

STREAM = "policy"


@pytest.fixture
def node(etcd: EtcdClient, keys: Keys) -> Iterator[NodePins]:
    for number in (1, 2, 3):
        etcd.put(keys.version(STREAM, number), Version(
            stream=STREAM, number=number, state=VersionState.COMMITTED, epoch=1).encode())
    with contextlib.closing(NodePins(etcd, keys, "n", 30)) as made:
        yield made


def test_pin_ends_those_before_in_its_transaction(etcd: EtcdClient, keys: Keys, node: NodePins,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_pins, "_DELETE_AFTER_S", 600.0)
    first, second = node.pin(STREAM, 1), node.pin(STREAM, 2)
    node.unpin(first)
    node.unpin(second)
    before = etcd.revision()
    node.pin(STREAM, 3)
    assert pins.pinned(etcd, keys, STREAM) == {3}
    assert etcd.revision() == before + 1


def test_pin_ends_without_a_further_one(etcd: EtcdClient, keys: Keys, node: NodePins) -> None:
    node.unpin(node.pin(STREAM, 1))
    wait_until(lambda: not pins.pinned(etcd, keys, STREAM), what="the end of the pin")


def test_refused_pin_ends_none_and_they_end_later(etcd: EtcdClient, keys: Keys, node: NodePins) -> None:
    held = node.pin(STREAM, 2)
    node.unpin(node.pin(STREAM, 1))
    with pytest.raises(VersionNotFound):
        node.pin(STREAM, 9)
    wait_until(lambda: pins.pinned(etcd, keys, STREAM) == {2}, what="the end of the pin")
    assert held.alive


def test_readers_that_are_refused_again_and_again_keep_no_pin_that_has_ended(
        etcd: EtcdClient, keys: Keys, node: NodePins) -> None:
    node.unpin(node.pin(STREAM, 1))

    def ended() -> bool:
        with pytest.raises(VersionNotFound):
            node.pin(STREAM, 9)
        return not pins.pinned(etcd, keys, STREAM)

    wait_until(ended, poll_s=0.05, what="the end of the pin")
