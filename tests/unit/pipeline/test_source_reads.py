"""Reads of a data source that block, raise, or go on while the loop is to end."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from elastic_rl import config
from elastic_rl.data.order import PromptOrder
from elastic_rl.data.samples import Prompt, Sample, Segment
from elastic_rl.data.sources import make_source
from elastic_rl.errors import ConfigError, Fenced, SourceFailed
from elastic_rl.pipeline.sampling import source_reads
from elastic_rl.pipeline.sampling.prompt_reader import PromptReader
from elastic_rl.pipeline.sampling.sampler import Sampler
from elastic_rl.pipeline.sampling.source_reads import SourceReads
from elastic_rl.pipeline.waits import Waits
from elastic_rl.rewards.registry import REWARDS


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_reads, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(source_reads, "_SLICE_S", 0.01)


def test_blocked_read_is_shown_by_name_until_it_returns() -> None:
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


@pytest.mark.parametrize("raised", [SystemExit(3), OSError("the disk is away"), Fenced("not yours to say")])
def test_what_a_read_raises_is_a_fault_of_the_source(raised: BaseException) -> None:
    def read() -> int:
        raise raised

    with pytest.raises(SourceFailed, match=f"data.source=mine failed to be made: {type(raised).__name__}"):
        SourceReads("mine", Waits(lambda *_: None, threading.Event())).read("be made", read)


def test_wrong_setting_that_a_read_finds_is_raised() -> None:
    def read() -> int:
        raise ConfigError("no such file")

    with pytest.raises(ConfigError, match="no such file"):
        SourceReads("mine", Waits(lambda *_: None, threading.Event())).read("be made", read)


def test_read_that_blocks_does_not_keep_the_loop_from_ending() -> None:
    returns, stopping = threading.Event(), threading.Event()
    reads = SourceReads("mine", Waits(lambda *_: stopping.set(), stopping))
    try:
        with pytest.raises(Fenced):
            reads.read("be made", returns.wait)
    finally:
        returns.set()


def test_source_is_read_by_one_thread_while_a_reward_is_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A held-out prompt, which shows whether the reward works, is read as all others are."""
    monkeypatch.setattr("elastic_rl.pipeline.waits._RETRY_S", (0.001, 0.002))
    monkeypatch.setattr("elastic_rl.pipeline.sampling.sampler._POLL_S", 0.01)
    monkeypatch.setitem(REWARDS, "mine", lambda options, context: _refuses)
    inside, most, stopping, returns = list[int](), list[int](), threading.Event(), threading.Event()

    class HeldOut(list[Prompt]):
        def __getitem__(self, index: Any) -> Any:
            inside.append(threading.get_ident())
            most.append(len(inside))
            returns.wait()
            inside.pop()
            return super().__getitem__(index)

    def report(stage: str, kind: str, what: str) -> None:
        if "give another prompt" in what:
            shown.append(what)
            if len(shown) > 50:
                stopping.set()

    shown: list[str] = []
    cfg = config.load(overrides=["--rollout.reward=mine", "--rollout.reward_timeout_s=0.1"])
    source = make_source(cfg)
    held_out = HeldOut(source.eval)
    sampler = Sampler(cfg, replace(source, eval=held_out), _generate, Waits(report, stopping))
    try:
        with pytest.raises(Fenced):
            sampler.training_groups([(0, source.train[0])], 0)
    finally:
        returns.set()
        sampler.close()
    assert set(most) == {1} and len(shown) > 50


async def _refuses(prompt: Prompt, samples: Any) -> Any:
    raise ValueError("no")


def _generate(prompts: Any, min_version: int, in_probation: bool) -> Any:
    return [[(place, [Sample((Segment((1,), (-0.5,), version=1),))] * p.samples) for place, p in enumerate(prompts)]]


class _Away(PromptOrder):
    """A source's own order that fails at first whenever it is made or asked."""

    def __init__(self, failures: list[int]) -> None:
        self._failures = failures
        self._fail()
        super().__init__(50, 0)

    def _fail(self) -> None:
        self._failures[0] -= 1
        if self._failures[0] % 3:
            raise OSError("the curriculum is away")

    def problem(self, ordinal: int) -> tuple[int, int]:
        self._fail()
        return super().problem(ordinal)


def test_order_of_a_source_that_is_away_is_waited_for_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_rl.pipeline.waits._RETRY_S", (0.001, 0.002))
    shown, failures = list[str](), [60]

    def report(stage: str, kind: str, what: str) -> None:
        if "the curriculum is away" in what:
            shown.append(f"{kind}: {what}")

    cfg = config.load(overrides=["--sft.max_steps=0"])
    source = replace(make_source(cfg), order=lambda seed: _Away(failures))
    waits = Waits(report, threading.Event())
    reads = SourceReads("mine", waits)
    reader = waits.retry("source", lambda: PromptReader(cfg, source, waits, reads))
    sampler = Sampler(cfg, source, _generate, waits)
    of_reader = len(shown)
    prompts = reader.training([0])
    for _ in range(2):
        assert [g.ordinal for g, _ in sampler.training_groups(prompts, 0)] == [0]
    sampler.close()
    assert of_reader >= 2 and len(shown) > of_reader + 2 and {text.partition(":")[0] for text in shown} == {"source"}
