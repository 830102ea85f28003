"""What clients of the admin API write down of a call: only what certainly had no effect is left out of a history."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from chaos_tests.event_log import EventLog, Kind, read
from chaos_tests.history import Recorder
from chaos_tests.traffic import pool_changes
from chaos_tests.traffic.cluster_changes import ApiTarget, ClusterCalls

LEFT_OUT, TRY, UNKNOWN, KNOWN = "left out", "a try", "unknown", "known"
CALLS: dict[str, Callable[[ClusterCalls], Any]] = {
    "patch": lambda calls: calls.pool.patch("https://r/v1/jobs/j", 2),
    "want": lambda calls: calls.want("r", "a", 1, "c"),
    "create": lambda calls: calls.create("r", "restarts", {}, "k", "c"),
    "silence": lambda calls: calls.silence("r", "x", 1.0, "k", "c"),
    "end silence": lambda calls: calls.end_silence("r", "s", "k", "c"),
    "read": lambda calls: calls.pool.read("https://r/v1/jobs/j"),
    "wanted": lambda calls: calls.wanted("r", "a", "c"),
    "state": lambda calls: calls.state("r", "o", "k", "c"),
    "silenced": lambda calls: calls.silenced("r", "s", "k", "c"),
}
READS = ("read", "wanted", "state", "silenced")


def written(name: str, answer: int | Exception, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is written down of a call. ``answer``: a status, or how the connection failed."""
    def request(*_: Any, **__: Any) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(answer, json={"id": "i", "state": "running"})

    monkeypatch.setattr(pool_changes.http_client, "request", request)
    log = EventLog(folder / "events.jsonl")
    log.write(Kind.RUN, form=1)
    recorder = Recorder(log=log)
    CALLS[name](ClusterCalls(ApiTarget({"r": "https://r"}, "j", {}, False), recorder))
    recorder.close()
    log.close()
    [_, *records] = read(folder / "events.jsonl")
    if not records:
        return LEFT_OUT
    [record] = records
    assert recorder.operations() == [], "the log has them: a long run has many"
    return TRY if record["kind"] == Kind.UNANSWERED else UNKNOWN if record["ended_s"] is None else KNOWN


@pytest.mark.parametrize(("answer", "of_write", "of_read"), [
    (httpx.ConnectError("refused"), TRY, TRY), (httpx.ConnectTimeout("away"), TRY, TRY),
    (httpx.ReadTimeout("silent"), UNKNOWN, TRY), (httpx.RemoteProtocolError("it died"), UNKNOWN, TRY),
    (504, UNKNOWN, TRY), (503, TRY, TRY), (500, UNKNOWN, TRY), (502, UNKNOWN, TRY), (409, LEFT_OUT, TRY),
    (401, TRY, TRY), (422, TRY, TRY), (429, TRY, TRY)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_call_without_an_answer_is_a_try_or_unknown(name: str, answer: int | Exception, of_write: str, of_read: str,
                                                   tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(name, answer, tmp_path, monkeypatch) == (of_read if name in READS else of_write)


@pytest.mark.parametrize(("name", "status"), [("create", 202), ("silence", 201), ("end silence", 200),
                                              ("end silence", 204), ("state", 200), ("state", 404)])
def test_answer_is_known(name: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(name, status, tmp_path, monkeypatch) == KNOWN
