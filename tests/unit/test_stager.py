"""The stager of a scheduler: asked over its socket by who has the secret, and by nobody else."""

from __future__ import annotations

import json
import threading
from multiprocessing.connection import Client

import pytest

from elastic_rl.engine import stager
from elastic_rl.errors import ChunkCorrupt, StagingFailed


def start(secret: str, rank: int, stage) -> None:
    stager.Stager(secret, rank, stage).start()


def test_all_ranks_stage_and_answer_in_their_order():
    secret, seen = stager.new_secret(), []
    for rank in range(3):
        start(secret, rank, lambda request, rank=rank: seen.append(request) or f"sum-{rank}")
    assert stager.ask(secret, 3, {"ticket": "t", "reference": {"x": 1}}, timeout_s=5) == ["sum-0", "sum-1", "sum-2"]
    assert seen == 3 * [{"ticket": "t", "reference": {"x": 1}}]


def test_a_rank_without_a_stager_means_that_nothing_can_be_staged():
    secret = stager.new_secret()
    assert stager.ask(secret, 1, {}, timeout_s=5) is None
    start(secret, 0, lambda request: "sum")
    assert stager.ask(secret, 2, {}, timeout_s=5) is None


@pytest.mark.parametrize(("raised", "told"), [
    (ChunkCorrupt("bad"), ChunkCorrupt), (StagingFailed("no"), StagingFailed), (ValueError("shape"), StagingFailed)])
def test_what_goes_wrong_is_told_and_the_next_request_is_served(raised, told):
    secret, fail = stager.new_secret(), [True]

    def stage(request) -> str:
        if fail.pop() if fail else False:
            raise raised
        return "sum"

    start(secret, 0, stage)
    with pytest.raises(told, match=str(raised)):
        stager.ask(secret, 1, {}, timeout_s=5)
    assert stager.ask(secret, 1, {}, timeout_s=5) == ["sum"]


def test_one_that_takes_too_long_is_told_after_the_time():
    secret, go = stager.new_secret(), threading.Event()
    start(secret, 0, lambda request: str(go.wait(10)))
    with pytest.raises(StagingFailed, match="within"):
        stager.ask(secret, 1, {}, timeout_s=0.1)
    go.set()


def test_a_stranger_stages_nothing():
    secret, staged = stager.new_secret(), []
    start(secret, 0, lambda request: staged.append(request) or "sum")
    address = stager._address(secret, 0)
    assert secret not in address
    for body in (b"{}", b"no json", json.dumps({"secret": "0" * 32, "ticket": "x"}).encode()):
        with Client(address, family="AF_UNIX") as stranger:
            stranger.send_bytes(body)
            with pytest.raises(EOFError):
                stranger.recv_bytes()
    assert not staged
    assert stager.ask(secret, 1, {}, timeout_s=5) == ["sum"]
