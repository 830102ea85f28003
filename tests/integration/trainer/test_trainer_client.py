"""The actor's client against the services of two replicas, over real HTTP and etcd, without the ranks behind them."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save
from support.batches import from_rows
from support.simulated_job import share_on

from elastic_rl import config
from elastic_rl.data.batch import Batch
from elastic_rl.data.queue.queued_batch import QueuedBatch
from elastic_rl.data.queue.step_groups import SampleRef
from elastic_rl.data.queue.summary import SampleSummary
from elastic_rl.data.samples import Prompt, Sample, Segment
from elastic_rl.dcs.security import Security
from elastic_rl.errors import ConfigError, GroupReformed, GroupsLost
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import Membership
from elastic_rl.trainer.service import client as client_module
from elastic_rl.trainer.service.board import Board
from elastic_rl.trainer.service.client import TrainerClient
from elastic_rl.trainer.service.commands import ForwardLogprobs, Update
from elastic_rl.trainer.service.server import TrainerService

LENGTHS = [9, 8, 7, 2, 3, 2, 2]


def batch() -> Batch:
    shape = len(LENGTHS), max(LENGTHS)
    return from_rows(torch.arange(1, 1 + math.prod(shape)).view(shape), torch.tensor(LENGTHS),
                     (torch.arange(shape[1]) > 0).expand(shape))


def trained(of: Batch) -> torch.Tensor:
    """Its loss tokens."""
    return of["tokens"][of["loss_mask"]].float()


def give_back_tokens(boards: list[Board], shapes: list[tuple[int, ...]], stopping: threading.Event) -> None:
    """Carries out commands as the ranks do: each replica gives back, as log-probs, the loss tokens of its share.
    ``shapes`` gets the number of tokens and of pieces of each share."""
    while not stopping.is_set():
        command = boards[0].next()
        if command is None:
            boards[0].wake.wait(0.05)
            boards[0].wake.clear()
            continue
        for board in boards:
            share = share_on(board, command)
            shapes.append((int(share["lengths"].sum()), len(board.share(command.batch) or ())))
            board.put_output(command.id, save({"logprobs": trained(share), "greedy": trained(share) > 20}))
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
def client_of(boards: list[Board], etcd: EtcdClient, keys: Keys, *, square: float = 0.0,
              share_piece_bytes: int = 1 << 20) -> Iterator[TrainerClient]:
    """A client of the services of these boards, one a replica. ``square``: as ``SequenceCost`` has it."""
    with contextlib.ExitStack() as stack:
        services = [TrainerService(board, "127.0.0.1", Security("secret"), take_share).start()
                    for board in boards]
        for service in services:
            stack.callback(service.close)
        member = Membership(etcd, keys, "trainer", "rank-0", ttl_s=5, url=services[0].url, epoch=1).start()
        stack.callback(member.close)
        boards[0].set_status(ready=True, group=member.incarnation, epoch=1, step=0, phase="sft", policy_version=0,
                             state_version=0, restarts=0, cursor={}, consumed={}, pair="0/", branch=[0, 0],
                             reference_version=0, share_urls=[service.url for service in services], minibatches=1,
                             cost={"linear": 1.0, "square": square})
        client = TrainerClient(etcd, keys, Security("secret"), epoch=1, term=1, share_piece_bytes=share_piece_bytes)
        stack.callback(client.close)
        yield client


def test_logprobs_of_all_replicas_come_back_in_the_order_of_the_batch(etcd: EtcdClient, keys: Keys) -> None:
    boards = [Board(1 << 20), Board(1 << 20)]
    with client_of(boards, etcd, keys) as client, ranks_of(boards) as shapes:
        found = client.forward_logprobs(batch())
    assert torch.equal(found["logprobs"], trained(batch()))
    assert torch.equal(found["greedy"], trained(batch()) > 20)
    assert shapes == [(18, 1), (15, 1)], "as many positions in both, one fewer than tokens in each sample"


def test_share_is_sent_in_pieces_that_a_rank_takes(etcd: EtcdClient, keys: Keys) -> None:
    boards = [Board(600), Board(600)]
    with client_of(boards, etcd, keys, share_piece_bytes=120) as client, ranks_of(boards) as shapes:
        found = client.forward_logprobs(batch())
    assert torch.equal(found["logprobs"], trained(batch()))
    assert [tokens for tokens, _ in shapes] == [18, 15] and all(pieces > 1 for _, pieces in shapes)


def test_shares_are_balanced_by_the_work_of_the_groups_model(etcd: EtcdClient, keys: Keys) -> None:
    """The squares of the two longest samples are each more than those of all others together."""
    boards = [Board(1 << 20), Board(1 << 20), Board(1 << 20)]
    with client_of(boards, etcd, keys, square=100.0) as client, ranks_of(boards) as shapes:
        client.forward_logprobs(batch())
    assert [tokens for tokens, _ in shapes] == [9, 8, 16]


def test_actor_that_takes_over_waits_for_the_step_that_is_being_made(etcd: EtcdClient, keys: Keys) -> None:
    """Else it would have the groups of the step generated again, and then find the step made."""
    boards = [Board(1 << 20)]
    with client_of(boards, etcd, keys) as client:
        status = boards[0].status()
        made = Update(id="1-1-a", epoch=1, term=1, group=status["group"], batch="b", phase="rl", step=5)
        boards[0].set_status(phase="rl", step=4)
        boards[0].submit(made)
        boards[0].submit(ForwardLogprobs(id="1-1-b", epoch=1, term=1, group=status["group"], batch="b"))
        assert boards[0].next() == made and boards[0].claims.empty()
        texts, waited = list[str](), threading.Event()

        def on_wait(text: str) -> None:
            texts.append(text)
            if "to end the update of rl step 5" in text:
                waited.set()

        with contextlib.closing(TrainerClient(etcd, keys, Security("secret"), epoch=1, term=2, on_wait=on_wait)
                                ) as successor, ThreadPoolExecutor() as threads:
            found = threads.submit(successor.wait_ready)
            assert waited.wait(30) and not found.done()
            assert boards[0].claims.get_nowait() == (1, 2), "no further step is made for the actor before"
            boards[0].set_status(step=5)
            boards[0].done(made, {})
            assert boards[0].next() is not None, "what makes no step is not waited for"
            assert found.result(30).step == 5
        assert client.wait_ready().step == 5


def test_shares_of_a_batch_that_no_command_will_use_are_discarded(etcd: EtcdClient, keys: Keys) -> None:
    boards = [Board(1 << 20), Board(1 << 20)]
    with client_of(boards, etcd, keys) as client:
        uploaded = client.upload(batch())
        assert all(board.share(uploaded.batch) for board in boards)
        client.discard(uploaded)
        assert not any(board.share(uploaded.batch) for board in boards)


def test_sample_beyond_the_limit_is_refused_with_the_setting_that_raises_it(etcd: EtcdClient, keys: Keys) -> None:
    with (client_of([Board(1 << 20), Board(100)], etcd, keys) as client,
          pytest.raises(ConfigError, match=r"the piece of a share has \d+ bytes; the limit is 100") as raised):
        client.forward_logprobs(batch())
    assert "trainer.share_piece_bytes" in raised.value.hint
    assert config.parse({"trainer": {"share_piece_bytes": 2 << 30}}).trainer.share_piece_bytes == 2 << 30


class FailsOnce(Board):
    """Its service has a fault in the first share that it gets."""

    def __init__(self, share_piece_bytes: int) -> None:
        super().__init__(share_piece_bytes)
        self.puts = 0

    def put_share(self, batch_id: str, raw: bytes, piece: int = 0, pieces: int = 1) -> None:
        self.puts += 1
        if self.puts == 1:
            raise RuntimeError("a fault of the service")
        super().put_share(batch_id, raw, piece, pieces)


def test_only_the_share_that_did_not_arrive_is_sent_again(etcd: EtcdClient, keys: Keys) -> None:
    boards = [Board(1 << 20), FailsOnce(1 << 20), Board(1 << 20)]
    arrived = list[str]()
    for board in (boards[0], boards[2]):
        board.put_share = lambda batch_id, *piece, put=board.put_share: (  # type: ignore[method-assign,misc]
            arrived.append(batch_id), put(batch_id, *piece))
    with client_of(boards, etcd, keys) as client, ranks_of(boards):
        found = client.forward_logprobs(batch())
    assert torch.equal(found["logprobs"], trained(batch()))
    assert boards[1].puts == 2 and len(arrived) == 2 and len(set(arrived)) == 1


class Between(httpx.BaseTransport):
    """Gives answers of its own to the first requests of some kinds, and passes on the others."""

    def __init__(self, status: int, answers: dict[tuple[str, str], list[bytes]]) -> None:
        """``answers``: bodies by method and the beginning of the path."""
        self._status, self.answers, self._real = status, answers, httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        for (method, path), bodies in self.answers.items():
            if request.method == method and request.url.path.startswith(path) and bodies:
                return httpx.Response(self._status, content=bodies.pop())
        return self._real.handle_request(request)

    def put_before(self, client: TrainerClient) -> None:
        client._http = httpx.Client(transport=self, headers=client._http.headers)


def test_group_that_forms_again_is_seen_before_shares_are_sent_again(
        etcd: EtcdClient, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_UPLOAD_RETRY_S", (3600.0, 3600.0))
    with client_of([Board(1 << 20)], etcd, keys) as client, ThreadPoolExecutor(1) as thread:
        client.wait_ready()
        waits = threading.Event()
        client._on_wait = lambda text: waits.set()
        client._shares = ("http://127.0.0.1:9",)  # the rank has died
        uploading = thread.submit(client.forward_logprobs, batch())
        assert waits.wait(60)
        with (Membership(etcd, keys, "trainer", "rank-0", ttl_s=5, url="http://127.0.0.1:9", epoch=1).start(),
              pytest.raises(GroupReformed)):
            uploading.result(60)


def test_answer_that_is_garbage_is_asked_for_again(etcd: EtcdClient, keys: Keys) -> None:
    no_json = [b"", b"<html>", b"\xff", b'{"result": {"lo', b"[]", b"3", b"[" * 200_000]
    between = Between(200, {
        ("GET", "/v1/status"): [*no_json, b"{}", b'{"ready": true}'],
        ("PUT", "/v1/batches/"): [b"<html>"],
        ("POST", "/v1/commands"): [b"<html>"],
        ("GET", "/v1/commands/"): [*no_json, b"{}", b'{"result": 3}', b'{"result": null}', b'{"error": {}}'],
        ("GET", "/v1/outputs/"): [b"<html>", save({"logprobs": torch.ones(4)})[:-1]]})
    boards = [Board(1 << 20), Board(1 << 20)]
    with client_of(boards, etcd, keys) as client, ranks_of(boards):
        between.put_before(client)
        found = client.forward_logprobs(batch())
    assert not any(between.answers.values())
    assert torch.equal(found["logprobs"], trained(batch()))


class Elsewhere:
    """Samples of a queue that nobody reads in these tests."""

    address: dict[str, Any] = {"at": "test"}

    def read(self, refs: Sequence[SampleRef]) -> list[tuple[Prompt, Sample]]:
        raise NotImplementedError

    def require(self, refs: Sequence[SampleRef]) -> None:
        """Nobody has told it."""


@pytest.mark.parametrize(("told", "lost"), [
    (b'{"error": "gone", "groups": [4, 99]}', (4,)), (b'{"error": "gone"}', (2, 4)), (b'{"groups": "4"}', (2, 4)),
    (b'{"groups": []}', (2, 4)), (b'{"groups": [{}, null, 99]}', (2, 4)), (b"<html>", (2, 4)), (b"", (2, 4))])
def test_loss_of_unknown_groups_is_one_of_all_groups_of_the_batch(
        etcd: EtcdClient, keys: Keys, told: bytes, lost: tuple[int, ...]) -> None:
    sample = SampleSummary.from_sample(Prompt((1,)), Sample((Segment((2,), (-0.5,), version=1),)))
    queued = QueuedBatch.of([(4, 0), (4, 1), (2, 0)], [sample] * 3, Elsewhere(), [0.0] * 3)
    with client_of([Board(1 << 20)], etcd, keys) as client:
        Between(410, {("PUT", "/v1/batches/"): [told]}).put_before(client)
        with pytest.raises(GroupsLost) as raised:
            client.upload(queued)
    assert raised.value.ordinals == lost
