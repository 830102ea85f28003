"""The stages generate and reward together: rewards are computed beside the requests, and show what they wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.data.samples import FILTER_FAILED, Group, Prompt, Sample, Segment
from elastic_rl.data.sources import make_source
from elastic_rl.engine.generation import Answers, PromptRequest
from elastic_rl.errors import Fenced
from elastic_rl.etcd.records import GenerationCap
from elastic_rl.pipeline.sampling import cap_watch
from elastic_rl.pipeline.sampling.sampler import Sampler
from elastic_rl.pipeline.waits import Waits
from elastic_rl.rewards import filters, registry
from elastic_rl.rewards.base import Reward

RewardFn = Callable[[Prompt, Sequence[Sample]], Any]


class Loop:
    """A sampler whose engines answer at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, reward: RewardFn, *settings: str) -> None:
        self.stopping, self.sent, self.shown = threading.Event(), list[int](), list[tuple[str, str]]()
        self.failed: list[tuple[str, list[int]]] = []
        self.asked: list[tuple[int, float]] = []
        monkeypatch.setitem(registry.REWARDS, "mine", lambda options, context: reward)
        monkeypatch.setattr("elastic_rl.pipeline.sampling.rewarding._RETRY_S", (0.001, 0.01))
        cfg = config.load(overrides=["--rollout.reward=mine", "--rollout.groups_per_request=1",
                                     "--rollout.reward_attempts=2", *settings])
        source = make_source(cfg)
        self.prompts = [source.train[i] for i in range(64)]
        self.waits = Waits(lambda stage, kind, what: self.shown.append((kind, what)), self.stopping)
        self.no_engine = ""
        self.caps: list[GenerationCap] = []
        self.answers = threading.Event()
        self.answers.set()
        self.sampler = Sampler(cfg, source, self._generate, self.waits, lambda: self.no_engine,
                               lambda part, ordinals, why: self.failed.append((part, list(ordinals))),
                               on_cap=self.caps.append)

    def _generate(self, requests: Sequence[PromptRequest], min_version: int, in_probation: bool) -> list[Answers]:
        self.sent += [request.ordinal for request in requests]
        self.asked += [(request.samples, request.sampling.temperature) for request in requests]
        if len(self.sent) > 1:
            self.answers.wait(60.0)
        return [[(place, [Sample((Segment((1,), (-0.5,), version=1),), metadata={"ordinal": r.ordinal})])
                 for place, r in enumerate(requests)]]

    def groups(self, count: int) -> list[tuple[Group, str]]:
        return self.sampler.training_groups(list(enumerate(self.prompts[:count])), 0)


@pytest.fixture
def make_loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Loop]]:
    made: list[Loop] = []

    def make(reward: RewardFn, *settings: str) -> Loop:
        made.append(Loop(monkeypatch, reward, *settings))
        return made[-1]

    yield make
    for loop in made:
        loop.sampler.close()


def test_groups_are_generated_while_a_reward_takes_its_time(make_loop: Callable[..., Loop]) -> None:
    """Engines must not stand still for it."""
    others = threading.Event()

    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        if samples[0].metadata["ordinal"] == 0 and not await asyncio.to_thread(others.wait, 60.0):
            raise ValueError("no other group was generated meanwhile")
        return [Reward(1.0)]

    loop = make_loop(reward)
    ordinals, found = iter(range(12)), list[int]()

    def more(wait_s: float) -> tuple[list[tuple[int, Prompt]], int] | None:
        if len(loop.sent) == 12:
            others.set()
        ordinal = next(ordinals, None)
        return None if ordinal is None and others.is_set() else (
            [] if ordinal is None else [(ordinal, loop.prompts[ordinal])], 0)

    for group, reason in loop.sampler.training_stream(more):
        assert group.rewards == [1.0] and not group.failed and not reason
        found.append(group.ordinal)
    assert sorted(found) == list(range(12)) and not loop.failed


def test_limit_that_keeps_prompts_from_coming_is_told_until_there_will_be_none(
        make_loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch) -> None:
    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        return [Reward(1.0)]

    monkeypatch.setattr(cap_watch, "MIN_S", 0.0)
    loop = make_loop(reward)

    def more(wait_s: float) -> tuple[list[tuple[int, Prompt]], int] | None:
        if not loop.sent:
            return [(0, loop.prompts[0])], 0
        return None if GenerationCap.STALENESS in loop.caps else ([], 0)

    generation_cap = iter([GenerationCap.NONE])
    assert len(list(loop.sampler.training_stream(more, lambda: next(generation_cap, GenerationCap.STALENESS)))) == 1
    assert loop.caps[0] is GenerationCap.NONE and loop.caps[-1] is GenerationCap.NONE


@pytest.mark.parametrize(("settings", "asked"), [
    ((), (1, 0.0)), (("--eval.samples=3", "--eval.temperature=0.7"), (3, 0.7))])
def test_evaluation_samples_as_its_section_says(make_loop: Callable[..., Loop], settings: tuple[str, ...],
                                                asked: tuple[int, float]) -> None:
    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        return [Reward(1.0)] * len(samples)

    loop = make_loop(reward, *settings)
    loop.sampler.evaluation_groups([(0, loop.prompts[0]), (1, loop.prompts[1])], 0)
    assert loop.asked == [asked] * 2


def test_group_whose_reward_fails_is_returned_and_reported(make_loop: Callable[..., Loop]) -> None:
    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        if samples[0].metadata.get("ordinal") == 3:
            raise ValueError("odd")
        return [Reward(1.0) for _ in samples]

    loop = make_loop(reward)
    found = loop.groups(6)
    assert [group.ordinal for group, _ in found] == list(range(6))
    assert [group.ordinal for group, _ in found if "odd" in group.failed] == [3]
    assert loop.failed == [("reward", [3])]


def test_what_rewards_wait_for_is_shown_until_they_work(make_loop: Callable[..., Loop]) -> None:
    def is_shown() -> bool:
        return any(kind == "plugin" and "the service is away" in what for kind, what in loop.shown)

    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        if not is_shown():
            raise ConnectionError("the service is away")
        return [Reward(1.0) for _ in samples]

    loop = make_loop(reward)
    assert not any(group.failed for group, _ in loop.groups(2)) and not loop.failed
    assert is_shown()
    assert loop.shown[-1] == ("", "")


def test_wait_for_rewards_is_shown_while_engines_are_away_too(make_loop: Callable[..., Loop]) -> None:
    """Two waits that took turns would each be too young to be seen, and the run would look as if it worked."""
    def changes() -> list[str]:
        kinds = [kind for kind, _ in loop.shown]
        return [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]

    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        if not loop.answers.is_set():
            raise ConnectionError("the service is away")
        return [Reward(1.0) for _ in samples]

    loop = make_loop(reward)
    loop.answers.clear()
    loop.no_engine = "engines that serve: there is none"
    threading.Timer(4.0, loop.answers.set).start()
    assert not any(group.failed for group, _ in loop.groups(4)) and not loop.failed
    assert changes().count("plugin") == 1 and changes().count("engines") <= 1, changes()


def test_loop_that_is_to_end_leaves_no_reward_behind(make_loop: Callable[..., Loop]) -> None:
    began, before = threading.Event(), set(threading.enumerate())

    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        began.set()
        raise ConnectionError("the service is away")

    loop = make_loop(reward)
    threading.Thread(target=lambda: began.wait(60.0) and loop.stopping.set(), name="ender", daemon=True).start()
    with pytest.raises(Fenced):
        loop.groups(2)
    loop.sampler.close()
    wait_until(lambda: not {t for t in threading.enumerate() if t.name != "ender"} - before,
               what="the end of the threads")


def test_filters_see_the_groups_of_a_step_in_their_order(make_loop: Callable[..., Loop],
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def drop_reason(group: Group) -> str:
        seen.append(group.ordinal)
        return "odd" if group.ordinal % 2 else ""

    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        await asyncio.sleep(0.01 * (9 - samples[0].metadata.get("ordinal", 0)))  # the first one comes last
        return [Reward(1.0) for _ in samples]

    monkeypatch.setitem(filters.FILTERS, "mine", drop_reason)
    found = make_loop(reward, "--rollout.filters=[mine]").groups(5)
    assert seen == [0, 1, 2, 3, 4]
    assert [reason for _, reason in found] == ["", "odd", "", "odd", ""]


def test_group_for_which_a_filter_fails_is_dropped_and_reported(make_loop: Callable[..., Loop],
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    def drop_reason(group: Group) -> str:
        if group.ordinal == 3:
            raise ValueError("odd")
        return ""

    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        return [Reward(1.0) for _ in samples]

    monkeypatch.setattr("elastic_rl.pipeline.sampling.filtering._RETRY_S", (0.001, 0.01))
    monkeypatch.setitem(filters.FILTERS, "mine", drop_reason)
    loop = make_loop(reward, "--rollout.filters=[mine]")
    assert [reason for _, reason in loop.groups(5)] == ["", "", "", FILTER_FAILED, ""]
    assert loop.failed == [("filters", [3])]
