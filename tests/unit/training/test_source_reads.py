"""Reads of a data source that block, raise, or go on while the loop is to end."""

from __future__ import annotations

import threading

import pytest

from elastic_rl.errors import Fenced
from elastic_rl.pipeline import source_reads
from elastic_rl.pipeline.source_reads import SourceReads
from elastic_rl.pipeline.waits import Waits


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_reads, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(source_reads, "_SLICE_S", 0.01)


def test_read_that_blocks_is_shown_by_name_and_goes_on_when_it_returns() -> None:
    returns, shown, before = threading.Event(), list[tuple[str, str]](), threading.active_count()

    def report(stage: str, kind: str, what: str) -> None:
        shown.append((kind, what))
        if len(shown) > 20:
            assert threading.active_count() == before + 1, "one thread, however long it takes"
            returns.set()

    def read() -> int:
        returns.wait()
        return 7

    assert SourceReads("my.module:source", Waits(report, threading.Event())).read("give 3 prompts", read) == 7
    assert {kind for kind, _ in shown} == {"source"}
    assert "data.source=my.module:source to give 3 prompts" in shown[0][1] and "restart roles/actor" in shown[0][1]


def test_what_a_read_raises_is_raised() -> None:
    def read() -> int:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        SourceReads("mine", Waits(lambda *_: None, threading.Event())).read("be made", read)


def test_read_that_blocks_does_not_keep_the_loop_from_ending() -> None:
    returns, stopping = threading.Event(), threading.Event()
    reads = SourceReads("mine", Waits(lambda *_: stopping.set(), stopping))
    try:
        with pytest.raises(Fenced):
            reads.read("be made", returns.wait)
    finally:
        returns.set()
