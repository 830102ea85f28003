"""The trainer's HTTP service: what it takes, what it refuses, and that nothing in it grows."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import pytest
import torch
from support.endless_bodies import closes_endless_chunks

from elastic_rl.data.batch import Batch
from elastic_rl.dcs.security import Security
from elastic_rl.errors import (
    ConfigError,
    Conflict,
    ElasticRLError,
    Fenced,
    PluginFailed,
    StepRefused,
    StepsHeld,
    TrainerFailed,
)
from elastic_rl.trainer.progress import Progress
from elastic_rl.trainer.service.board import Board
from elastic_rl.trainer.service.client import _error_of
from elastic_rl.trainer.service.commands import ForwardLogprobs, Save, Update, WriterGate
from elastic_rl.trainer.service.server import TrainerService

TOKEN = {"Authorization": "Bearer secret"}
SHARE = Batch({"tokens": torch.ones(3, dtype=torch.int32), "lengths": torch.tensor([3]),
               "loss_mask": torch.tensor([False, True, True])}).to_bytes()


def take_share(raw: bytes) -> bytes:
    Batch.from_bytes(raw)
    return raw


@pytest.fixture
def board() -> Board:
    board = Board(share_piece_bytes=1 << 16)
    board.set_status(ready=True)
    return board


@pytest.fixture
def url(board: Board) -> Iterator[str]:
    service = TrainerService(board, "127.0.0.1", Security("secret"), take_share).start()
    yield service.url
    service.close()


def command(number: int = 1) -> Update:
    return Update(id=f"c{number}", epoch=1, term=1, group="g", batch="b", step=number)


def submit(url: str, sent: Update) -> int:
    return httpx.post(f"{url}/v1/commands", content=sent.encode(), headers=TOKEN).status_code


def test_command_is_queued_once_and_its_outcome_is_given_to_who_asks(board: Board, url: str) -> None:
    assert [submit(url, command()), submit(url, command())] == [202, 202]
    assert httpx.get(f"{url}/v1/commands/c1?wait_s=0.05", headers=TOKEN).status_code == 202
    taken = board.next()
    assert taken == command() and board.next() is None
    board.done(taken, {"loss": 0.5})
    answer = httpx.get(f"{url}/v1/commands/c1?wait_s=5", headers=TOKEN)
    assert (answer.status_code, answer.json()) == (200, {"result": {"loss": 0.5}})
    assert submit(url, command()) == 202 and board.next() is None, "it was executed already"


@pytest.mark.parametrize("path", ["/v1/status", "/nothing"])
def test_endless_body_without_a_token_closes_its_connection(board: Board, url: str, path: str) -> None:
    at = httpx.URL(url)
    assert closes_endless_chunks((at.host, at.port or 0), path)
    assert httpx.get(f"{url}/v1/status", headers=TOKEN).status_code == 200
    share = iter([SHARE[n:n + 1] for n in range(len(SHARE))])
    assert httpx.put(f"{url}/v1/batches/b/share", content=share, headers=TOKEN).status_code == 201


def test_refusal_reaches_the_actor_with_its_kind(board: Board, url: str) -> None:
    submit(url, command())
    board.refused(board.next() or command(), Conflict("step 1 does not follow", hint="resume"))
    outcome = httpx.get(f"{url}/v1/commands/c1", headers=TOKEN).json()
    assert outcome == {"error": "conflict", "message": "step 1 does not follow", "hint": "resume"}


@pytest.mark.parametrize("error", [
    ConfigError("a"), Conflict("b"), PluginFailed("c"), Fenced("d"), TrainerFailed("e"), StepsHeld("f", hint="restart"),
    StepRefused("g", hint="h"), StepRefused("i", went_back=True)])
def test_refusal_is_raised_by_the_client_as_what_it_was(board: Board, error: ElasticRLError) -> None:
    board.submit(command())
    board.refused(board.next() or command(), error)
    raised = _error_of(board.result("c1", 0.0) or {})
    assert type(raised) is type(error) and vars(raised) == vars(error)


def test_unknown_command_is_not_found_so_that_it_is_sent_again(url: str) -> None:
    assert httpx.get(f"{url}/v1/commands/c9?wait_s=5", headers=TOKEN).status_code == 404


def test_commands_that_wait_are_bounded_and_so_is_what_is_remembered(board: Board, url: str) -> None:
    codes = [submit(url, command(n)) for n in range(1, 8)]
    assert codes == [202] * 4 + [409] * 3
    for n in range(200):
        board.done(command(n), {})
        board.put_share(f"b{n}", b"x")
        board.put_output(f"c{n}", b"x")
    assert len(board._results) < 50 and len(board._shares) < 10 and len(board._outputs) < 10


@pytest.mark.parametrize("refused", [True, False])
def test_step_is_executing_from_when_it_is_taken_until_it_has_an_outcome(board: Board, *, refused: bool) -> None:
    board.submit(command())
    assert board.status()["executing"] == ""
    taken = board.next() or command(2)
    assert board.status()["executing"] == "update of rl step 1"
    board.done(command(3), {})
    assert board.status()["executing"] == "update of rl step 1", "the outcome is of another one"
    if refused:
        board.refused(taken, Conflict("step 1 does not follow"))
    else:
        board.done(taken, {})
    assert board.status()["executing"] == ""


def test_trainer_that_is_not_ready_takes_no_command(board: Board) -> None:
    board.set_status(ready=False)
    with pytest.raises(Conflict, match="starting"):
        board.submit(command())


def test_share_is_checked_when_it_arrives(board: Board, url: str) -> None:
    put = lambda raw: httpx.put(f"{url}/v1/batches/b/share", content=raw, headers=TOKEN)  # noqa: E731
    assert put(SHARE).status_code == 201 and board.share("b") == [SHARE]
    assert put(b"not a batch").status_code == 400 and put(b"x" * (1 << 17)).status_code == 400
    assert board.share("b") == [SHARE]


def test_share_in_pieces_is_there_when_all_of_them_are(board: Board, url: str) -> None:
    def put(raw: bytes, piece: int, pieces: int) -> int:
        return httpx.put(f"{url}/v1/batches/b/share", params={"piece": piece, "pieces": pieces}, content=raw,
                         headers=TOKEN).status_code

    other = Batch.from_bytes(SHARE).with_tensors(lengths=torch.tensor([3])).to_bytes()
    assert put(SHARE, 1, 3) == 201 and board.share("b") is None
    assert put(SHARE, 0, 3) == 201 and put(SHARE, 1, 3) == 201 and board.share("b") is None, "one came twice"
    assert put(other, 2, 3) == 201 and board.share("b") == [SHARE, SHARE, other]
    assert put(SHARE, 0, 2) == 201 and board.share("b") is None, "it is another cut of the share"
    assert put(SHARE, 2, 2) == 400 and put(SHARE, 0, 0) == 422 and put(SHARE, -1, 2) == 422
    assert put(SHARE, 1, 2) == 201
    assert board.take_share("b") == [SHARE, SHARE] and board.share("b") is board.take_share("b") is None


@pytest.mark.parametrize("change", [
    {"advantages": torch.zeros(1)}, {"teacher_top_ids": torch.zeros(2, 4, dtype=torch.int32)}])
def test_pieces_that_cannot_be_one_batch_are_refused_when_the_last_comes(
        board: Board, url: str, change: dict[str, torch.Tensor]) -> None:
    first = Batch.from_bytes(SHARE).with_tensors(teacher_top_ids=torch.zeros(2, 3, dtype=torch.int32))
    answers = [httpx.put(f"{url}/v1/batches/b/share", params={"piece": piece, "pieces": 2}, content=raw, headers=TOKEN)
               for piece, raw in enumerate([first.to_bytes(), first.with_tensors(**change).to_bytes()])]
    assert [answer.status_code for answer in answers] == [201, 400]
    assert "different tensors" in answers[1].json()["error"] and board.share("b") is None


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"{}", b'{"id": 3}', b"\xff", b'"text"',
                                  command().encode().replace(b'"rl"', b'"dream"'),
                                  command().encode().replace(b'"update"', b'"explode"'),
                                  command().encode().replace(b'"c1"', b'"' + b"c" * 300 + b'"'),
                                  command().encode().replace(b'"c1"', b'"c\\ud800"'),
                                  command().encode().replace(b'"c1"', b'"c\\u00e9"'),
                                  command().encode().replace(b'"c1"', b'"c\\n"'),
                                  command().encode().replace(b'"c1"', b'""'),
                                  command().encode().replace(b'"trained":[]', b'"trained":[[3,1]]')])
def test_what_is_no_command_is_refused(board: Board, url: str, body: bytes) -> None:
    answer = httpx.post(f"{url}/v1/commands", content=body, headers=TOKEN)
    assert answer.status_code == 400 and answer.json()["error"]
    assert board.next() is None


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret2"},
                                     TOKEN | {"Origin": "http://evil.example"}, TOKEN | {"Sec-Fetch-Site": "none"}])
@pytest.mark.parametrize(("method", "path"), [("GET", "status"), ("POST", "commands"), ("POST", "claim"),
                                              ("PUT", "batches/b/share"), ("GET", "outputs/x"), ("GET", "nothing")])
def test_request_without_the_token_or_of_a_web_page_is_refused(board: Board, url: str, headers: dict[str, str],
                                                               method: str, path: str) -> None:
    answer = httpx.request(method, f"{url}/v1/{path}", content=command().encode() if method != "GET" else None,
                           headers=headers)
    assert answer.status_code == 403 and board.next() is None and board.claims.empty()


def test_service_without_a_token_binds_no_address_that_others_reach(board: Board) -> None:
    with pytest.raises(ConfigError, match="token"):
        TrainerService(board, "192.0.2.7", Security(), take_share)


def test_share_that_is_cut_off_is_not_kept(board: Board, url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(b"PUT /v1/batches/b/share HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
                     b"Content-Length: 10000\r\n\r\n" + SHARE)
        sock.shutdown(socket.SHUT_WR)
        sock.recv(4096)
    assert board.share("b") is None


def test_connections_without_a_request_keep_nobody_out(board: Board, url: str) -> None:
    where = httpx.URL(url)
    held = [socket.create_connection((where.host, where.port), timeout=5) for _ in range(300)]
    try:
        for sock in held[::2]:
            sock.sendall(b"GET /v1/status HTTP/1.1\r\n")  # and no more
        assert httpx.get(f"{url}/v1/status", headers=TOKEN).status_code == 200
        assert submit(url, command()) == 202
    finally:
        for sock in held:
            sock.close()


def test_who_waits_for_a_result_learns_what_the_trainer_waits_for(board: Board, url: str) -> None:
    submit(url, command())
    board.waits_for = "the trainer to publish step 3: the catalog is suspended"
    answer = httpx.get(f"{url}/v1/commands/c1?wait_s=0.01", headers=TOKEN)
    assert (answer.status_code, answer.json()) == (202, {"waits_for": board.waits_for})


def test_gate_that_holds_steps_makes_none_until_another_actor_takes_over() -> None:
    gate, held = WriterGate(1, "g"), StepsHeld("the loss failed")
    step = command()
    assert gate.admit(step, Progress(phase="rl")) is None
    gate.hold(held)
    for further in (step, command(7)):  # also one that would not fit any more
        with pytest.raises(StepsHeld, match="the loss failed"):
            gate.admit(further, Progress(phase="rl"))
    assert gate.admit(Save(id="c-3", epoch=1, term=1, group="g", step=0), Progress(phase="rl")) is None
    assert gate.admit(ForwardLogprobs(id="c-4", epoch=1, term=1, group="g", batch="b"), Progress(phase="rl")) is None
    assert gate.admit(step.model_copy(update={"id": "c-5", "term": 2}), Progress(phase="rl")) is None
