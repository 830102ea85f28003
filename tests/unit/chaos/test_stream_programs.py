"""What programs beside a job write down of a call of the checkpoint service, and what the checkers make of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.waiting import wait_until

from chaos_tests.event_log import Event, EventLog, Kind, read
from chaos_tests.history import Operation
from chaos_tests.model.models import STREAM
from chaos_tests.model.number import READ, WRITE
from chaos_tests.traffic.dcs import content
from chaos_tests.traffic.stream_programs import CONNECT, OF_PROGRAMS, TORN, StreamPrograms
from chaos_tests.validate import histories, judge
from elastic_rl.errors import (
    ArenaFull,
    Conflict,
    ElasticRLError,
    EtcdUnavailable,
    Fenced,
    NodeUnavailable,
    OutcomeUnknown,
    VersionNotFound,
)
from elastic_rl.etcd.keys import Keys

UNSERVED, UNKNOWN = "unserved", "unknown"


class Service:
    """Answers with a version, or with an error."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def publish(self, stream: str, tensors: Any, *, meta: Any) -> Any:
        return self._answered()

    def pull(self, stream: str) -> Any:
        return self._answered()

    def _answered(self) -> Any:
        if isinstance(self.answer, ElasticRLError):
            raise self.answer
        return self.answer


def written(act: str, answer: Any, folder: Path) -> Any:
    """The result of a call that is written down, or that it has none."""
    log = EventLog(folder / "events.jsonl")
    log.write(Kind.RUN, form=1)
    programs = StreamPrograms(lambda: pytest.fail("no program runs"), log=log)
    service: Any = Service(answer)
    try:
        getattr(programs, act)(service, "program")
    except ElasticRLError:
        assert isinstance(answer, ElasticRLError)
    programs.close()
    log.close()
    [_, record] = read(folder / "events.jsonl")
    assert (record["client"], record["key"], record["model"]) == ("program", OF_PROGRAMS, STREAM)
    return UNSERVED if record["kind"] == Kind.UNANSWERED else record["result"] if record["ended_s"] else UNKNOWN


@pytest.mark.parametrize("error", [EtcdUnavailable, NodeUnavailable, ArenaFull, Conflict, Fenced])
@pytest.mark.parametrize("act", ["_publish", "_pull"])
def test_call_that_was_not_served_counts_as_a_try(act: str, error: type[ElasticRLError], tmp_path: Path) -> None:
    assert written(act, error("away"), tmp_path) == UNSERVED


def test_only_of_a_lost_commit_the_outcome_is_unknown(tmp_path: Path) -> None:
    assert written("_publish", OutcomeUnknown("away"), tmp_path) == UNKNOWN


def test_pull_says_what_it_got(tmp_path: Path) -> None:
    def pulled(tensors: dict[str, torch.Tensor]) -> Any:
        return SimpleNamespace(version=SimpleNamespace(meta={"seed": 3}, number=7), tensors=tensors)

    whole = dict(content(3))
    for n, (answer, told) in enumerate((
            (pulled(whole), [3, 7]), (pulled(whole | {"t5": whole["t5"] + 1}), [TORN, 7]),
            (pulled({"t0": whole["t0"]}), [TORN, 7]), (VersionNotFound("none"), [0, 0]))):
        (tmp_path / str(n)).mkdir()
        assert written("_pull", answer, tmp_path / str(n)) == told


def operation(n: int, call: str, result: tuple[int, int] | None, seed: int | None = None) -> Event:
    return {"kind": Kind.OPERATION, "at": float(n), **asdict(Operation(
        "program", OF_PROGRAMS, call, seed, float(n), n + 0.5 if result else None, result, STREAM))}


def committed(*versions: tuple[int, int]) -> list[Event]:
    """What the observer saw of the stream. ``versions``: number and seed."""
    return [{"kind": Kind.CHANGE, "at": 0.0, "revision": 1 + n, "put": True, "create": 1 + n,
             "key": Keys("j").version(OF_PROGRAMS, number), "value": json.dumps({
                 "stream": OF_PROGRAMS, "number": number, "state": "committed", "meta": {"seed": seed}})}
            for n, (number, seed) in enumerate(versions)]


def rules(events: Sequence[Event]) -> list[str]:
    return [violation.rule for violation in judge.broken(events, histories.CHECKERS)]


FIRST = operation(1, WRITE, (1, 4), seed=1)


def test_history_of_a_stream_is_right_where_each_pull_has_the_newest_version() -> None:
    seen = committed((4, 1), (6, 2))
    assert rules([*seen, operation(0, READ, (0, 0)), FIRST, operation(2, READ, (1, 4)),
                  operation(3, WRITE, None, seed=2), operation(4, READ, (2, 6))]) == []


@pytest.mark.parametrize(("wrong", "why"), [
    ([operation(0, READ, (TORN, 4)), FIRST], "torn, before anything was seen"),
    ([FIRST, operation(2, READ, (TORN, 4))], "torn"),
    ([FIRST, operation(2, READ, (0, 0))], "the head is gone"),
    ([FIRST, operation(2, WRITE, (2, 6), seed=2), operation(3, READ, (1, 4))], "stale"),
    ([FIRST, operation(2, WRITE, (2, 3), seed=2)], "a lower number"),
    ([FIRST, operation(2, WRITE, None, seed=2), operation(3, READ, (2, 9))], "a number that etcd never had"),
    ([FIRST, operation(2, WRITE, None, seed=3), operation(3, READ, (3, 5))], "a version that was never committed")])
def test_pull_that_is_wrong_breaks_the_rule_of_versions(wrong: list[Event], why: str) -> None:
    assert "I3" in rules([*committed((4, 1), (6, 2)), *wrong]), why


@pytest.mark.timeout(60)
def test_many_publishes_whose_outcome_is_unknown_are_decided() -> None:
    """The search knows from the observer which of them never happened."""
    seen = committed(*((n, n) for n in range(1, 300, 10)))
    history = [operation(n, WRITE, (n, n) if n % 10 == 1 else None, seed=n) for n in range(1, 300)]
    last = operation(400, READ, (1, 1))
    assert rules([*seen, *history]) == [] and "I3" in rules([*seen, *history, last])


def test_service_that_nothing_connects_to_is_tried_on_the_record(tmp_path: Path) -> None:
    def away() -> Any:
        raise EtcdUnavailable("no member answers")

    log = EventLog(tmp_path / "events.jsonl")
    log.write(Kind.RUN, form=1)
    programs = StreamPrograms(away, pause_s=0.01, log=log).start()
    wait_until(lambda: log.written[Kind.UNANSWERED] > 20, what="tries")
    programs.close()
    log.close()
    [_, *records] = read(tmp_path / "events.jsonl")
    assert {(record["kind"], record["client"], record["call"]) for record in records} == {
        (Kind.UNANSWERED, client, CONNECT) for client in ("publisher", "puller-0", "puller-1")}
