"""The actor's client against the services of two replicas, over real HTTP and etcd, without the ranks behind them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import save

from elastic_rl import config
from elastic_rl.data.batch import Batch
from elastic_rl.dcs.security import Security
from elastic_rl.errors import ConfigError
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import Membership
from elastic_rl.trainer.service.board import Board
from elastic_rl.trainer.service.client import TrainerClient
from elastic_rl.trainer.service.server import TrainerService

LENGTHS = [9, 8, 7, 2, 3, 2, 2]


def batch() -> Batch:
    inside = torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]
    return Batch({"tokens": torch.arange(1, 1 + inside.numel()).view(inside.shape) * inside,
                  "lengths": torch.tensor(LENGTHS), "loss_mask": inside & (torch.arange(max(LENGTHS)) > 0)})


def give_back_tokens(boards: list[Board], shapes: list[tuple[int, ...]], stopping: threading.Event) -> None:
    """Carries out commands as the ranks do: each replica gives back, as log-probs, the tokens of its share.
    ``shapes`` gets the tokens and the width of each share."""
    while not stopping.is_set():
        command = boards[0].next()
        if command is None:
            boards[0].wake.wait(0.05)
            boards[0].wake.clear()
            continue
        for board in boards:
            share = Batch.from_bytes(board.share(command.batch) or b"")
            shapes.append((int(share["lengths"].sum()), share.width))
            board.put_output(command.id, save({"logprobs": share["tokens"].float(),
                                               "greedy": share["loss_mask"].contiguous()}))
        boards[0].done(command, {})


@contextlib.contextmanager
def ranks_of(boards: list[Board]) -> Iterator[list[tuple[int, ...]]]:
    """Commands are carried out inside, by ``give_back_tokens``, whose ``shapes`` this is."""
    stopping, shapes = threading.Event(), list[tuple[int, ...]]()
    ranks = threading.Thread(target=give_back_tokens, args=(boards, shapes, stopping))
    ranks.start()
    try:
        yield shapes
    finally:
        stopping.set()
        ranks.join()


def take_share(raw: bytes) -> bytes:
    Batch.from_bytes(raw)
    return raw


@contextlib.contextmanager
def client_of(boards: list[Board], etcd: EtcdClient, keys: Keys) -> Iterator[TrainerClient]:
    """A client of the services of these boards, one a replica."""
    with contextlib.ExitStack() as stack:
        services = [TrainerService(board, "127.0.0.1", Security("secret"), take_share).start()
                    for board in boards]
        for service in services:
            stack.callback(service.close)
        member = Membership(etcd, keys, "trainer", "rank-0", ttl_s=5, url=services[0].url, epoch=1).start()
        stack.callback(member.close)
        boards[0].set_status(ready=True, group=member.incarnation, epoch=1, step=0, phase="sft", policy_version=0,
                             state_version=0, restarts=0, cursor={}, consumed={}, pair="0/", branch=[0, 0],
                             reference_version=0, share_urls=[service.url for service in services])
        client = TrainerClient(etcd, keys, Security("secret"), epoch=1, term=1)
        stack.callback(client.close)
        yield client


def test_logprobs_of_all_replicas_come_back_in_the_order_of_the_batch(etcd: EtcdClient, keys: Keys) -> None:
    boards = [Board(1 << 20), Board(1 << 20)]
    with client_of(boards, etcd, keys) as client, ranks_of(boards) as shapes:
        found = client.forward_logprobs(batch())
    assert torch.equal(found["logprobs"], batch()["tokens"].float())
    assert torch.equal(found["greedy"], batch()["loss_mask"])
    assert shapes == [(16, 9), (17, 8)]


def test_share_beyond_the_limit_is_refused_with_the_setting_that_raises_it(etcd: EtcdClient, keys: Keys) -> None:
    with (client_of([Board(1 << 20), Board(300)], etcd, keys) as client,
          pytest.raises(ConfigError, match=r"the share of a batch has \d+ bytes; the limit is 300") as raised):
        client.forward_logprobs(batch())
    assert "trainer.max_share_bytes" in raised.value.hint
    assert config.parse({"trainer": {"max_share_bytes": 2 << 30}}).trainer.max_share_bytes == 2 << 30


class FailsOnce(Board):
    """Its service has a fault in the first share that it gets."""

    def __init__(self, max_share_bytes: int) -> None:
        super().__init__(max_share_bytes)
        self.puts = 0

    def put_share(self, batch_id: str, raw: bytes) -> None:
        self.puts += 1
        if self.puts == 1:
            raise RuntimeError("a fault of the service")
        super().put_share(batch_id, raw)


def test_only_the_share_that_did_not_arrive_is_sent_again(etcd: EtcdClient, keys: Keys) -> None:
    boards = [Board(1 << 20), FailsOnce(1 << 20), Board(1 << 20)]
    arrived = list[str]()
    for board in (boards[0], boards[2]):
        board.put_share = lambda batch_id, raw, put=board.put_share: (  # type: ignore[method-assign,misc]
            arrived.append(batch_id), put(batch_id, raw))
    with client_of(boards, etcd, keys) as client, ranks_of(boards):
        found = client.forward_logprobs(batch())
    assert torch.equal(found["logprobs"], batch()["tokens"].float())
    assert boards[1].puts == 2 and len(arrived) == 2 and len(set(arrived)) == 1
