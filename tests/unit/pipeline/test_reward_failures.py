"""The stage reward, of which some groups fail, in every way that a reward can."""

from __future__ import annotations

import asyncio
import datetime
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl import config
from elastic_rl.data.samples import EPISODE, Group, Prompt, Sample, Segment
from elastic_rl.engine.client import Sampling
from elastic_rl.engine.generation import PromptRequest
from elastic_rl.errors import Fenced
from elastic_rl.pipeline.sampling import reward_calls, rewarding, user_calls
from elastic_rl.pipeline.sampling.group_requests import Answer
from elastic_rl.pipeline.sampling.rewarding import Rewarder
from elastic_rl.pipeline.waits import Waits
from elastic_rl.rewards import registry
from elastic_rl.rewards.base import Reward, RewardAway

SAMPLE = Sample((Segment((1, 2), (-0.5, -0.5), version=3),))


class Loop:
    """A rewarder whose waits end the test after some, and what it reported."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, reward: Any, *settings: str, waits: int = 1000) -> None:
        stopping, self.texts = threading.Event(), list[str]()

        def report(stage: str, kind: str, what: str) -> None:
            if kind:
                self.texts.append(what)
                if len(self.texts) > waits:
                    stopping.set()

        monkeypatch.setitem(registry.REWARDS, "mine", lambda options, context: reward)
        monkeypatch.setattr(user_calls, "_SLICE_S", 0.01)
        monkeypatch.setattr(rewarding, "_RETRY_S", (0.001, 0.01))
        monkeypatch.setattr(rewarding, "_LOOK_S", 0.01)
        cfg = config.load(overrides=["--rollout.reward=mine", *settings])
        self.metadata: dict[int, dict[str, Any]] = {}
        self.rewarder = Rewarder(cfg, Waits(report, stopping), other=lambda number: (Prompt((1,), str(number)), SAMPLE),
                                 decode=lambda ids: " ".join(map(str, ids)))

    def request(self, ordinal: int) -> PromptRequest:
        return PromptRequest(ordinal, Prompt((1,), str(ordinal), metadata=self.metadata.get(ordinal, {})),
                             Sampling(4), 1)

    def groups(self, *ordinals: int) -> list[Group]:
        return self.rewarder.groups([self.request(i) for i in ordinals], [[SAMPLE] for _ in ordinals])


async def _fails_for_odd_groups(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
    if int(prompt.text) % 2:
        raise ValueError("odd")
    return [Reward(1.0) for _ in samples]


def test_group_whose_reward_fails_is_returned_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, _fails_for_odd_groups)
    found = loop.groups(0, 1, 2, 4)
    assert [(g.ordinal, bool(g.failed), g.rewards) for g in found] == [
        (0, False, [1.0]), (1, True, [0.0]), (2, False, [1.0]), (4, False, [1.0])]
    assert "ValueError: odd" in found[1].failed


def test_lone_group_is_dropped_when_the_reward_works_for_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, _fails_for_odd_groups)
    loop.groups(0)
    assert [bool(g.failed) for g in loop.groups(7)] == [True]


def test_first_group_is_dropped_if_a_held_out_prompt_is_rewarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a restart of the actor; of the other prompts some make the reward fail too."""
    assert [bool(g.failed) for g in Loop(monkeypatch, _fails_for_odd_groups).groups(7)] == [True]


def test_first_group_is_waited_for_when_the_reward_works_for_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    away = [40]

    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        away[0] -= 1
        if away[0] > 0:
            raise ConnectionError("the service is away")
        return [Reward(1.0) for _ in samples]

    assert [bool(g.failed) for g in Loop(monkeypatch, reward).groups(7)] == [False]


def test_reward_that_fails_for_every_group_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    away = [12]

    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        if away[0] > 0:
            away[0] -= 1
            raise ConnectionError("the service is away")
        return [Reward(1.0) for _ in samples]

    loop = Loop(monkeypatch, reward)
    assert not any(g.failed for g in loop.groups(0, 1))
    assert any("the service is away" in text for text in loop.texts)
    away[0] = 12
    assert not any(g.failed for g in loop.groups(2, 3))


def test_reward_that_fails_for_too_many_groups_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, _fails_for_odd_groups, "--rollout.max_failed_groups=0.1", "--rollout.reward_attempts=1",
                "--rollout.groups_per_request=16", "--train.prompts_per_step=16", waits=20)
    with pytest.raises(Fenced):
        loop.groups(0, 1, 2, 3, 5)
    assert "rollout.max_failed_groups" in loop.texts[-1]


def test_group_too_large_for_the_queue_fails_without_holding_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        return [Reward(1.0) for _ in samples]

    settings = ("--train.schedule=fully_async", "--train.queue=transfer_queue", "--rollout.reward_attempts=2")
    loop = Loop(monkeypatch, reward, *settings, waits=1 << 20)
    loop.metadata = {5: {"made_at": datetime.date(2026, 1, 1)}, 6: {"made_at": "2026-01-01"}}
    found = loop.groups(4, 5, 6)
    assert [g.ordinal for g in found if g.failed] == [5] and "metadata" in found[1].failed
    embedded = Loop(monkeypatch, reward, "--train.schedule=fully_async")
    embedded.metadata = loop.metadata
    assert not any(g.failed for g in embedded.groups(4, 5, 6))


def test_group_that_blocks_the_thread_costs_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        if prompt.text == "0":
            released.wait(30)
        return [Reward(1.0) for _ in samples]

    monkeypatch.setattr(reward_calls, "GRACE_S", 2.0)
    loop = Loop(monkeypatch, reward, "--rollout.reward_attempts=2", "--rollout.reward_timeout_s=0.1",
                "--rollout.reward_concurrency=2", waits=1 << 20)
    found = loop.groups(0, 1, 2, 3)
    released.set()
    assert [bool(g.failed) for g in found] == [True, False, False, False]


def test_groups_beside_one_that_blocks_the_thread_are_not_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for something when the thread freezes, so all of them are under way as it is given up."""
    released = threading.Event()

    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        await asyncio.sleep(0.001)
        if prompt.text == "5":
            released.wait(30)
        await asyncio.sleep(0.001)
        return [Reward(1.0) for _ in samples]

    monkeypatch.setattr(reward_calls, "GRACE_S", 2.0)
    loop = Loop(monkeypatch, reward, "--rollout.reward_attempts=2", "--rollout.reward_timeout_s=0.5", waits=1 << 20)
    found = loop.groups(*range(8))
    released.set()
    assert [g.ordinal for g in found if g.failed] == [5]


class Arrivals:
    """Groups that are generated one after the other while others are rewarded."""

    def __init__(self, loop: Loop, *waves: Sequence[int]) -> None:
        self._loop, self._waves, self.given = loop, list(waves), list[Group]()

    def more(self) -> list[Answer]:
        return [(self._loop.request(i), [SAMPLE]) for i in (self._waves.pop(0) if self._waves else ())]

    def run(self) -> list[int]:
        """Ordinals in the order in which their groups were given."""
        while self._waves:  # a stream ends when there is none for a moment
            self._loop.rewarder.stream(self.more(), self.more, self.given.append)
        return [group.ordinal for group in self.given]


def test_slow_reward_holds_up_no_group_beside_or_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    arrivals: Arrivals

    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        while prompt.text == "0" and len(arrivals.given) < 4:
            await asyncio.sleep(0.001)
        return [Reward(1.0) for _ in samples]

    loop = Loop(monkeypatch, reward, "--rollout.reward_timeout_s=60")
    arrivals = Arrivals(loop, [0, 1], [2], [], [3, 4])
    order = arrivals.run()
    assert sorted(order) == [0, 1, 2, 3, 4] and order[-1] == 0


def test_reward_that_fails_holds_up_no_group_that_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do those beside it, which may take as long as they are allowed to."""
    arrivals: Arrivals

    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        if prompt.text == "0":
            raise ValueError("not this one")
        while prompt.text == "1" and not any(group.ordinal == 2 for group in arrivals.given):
            await asyncio.sleep(0.001)
        return [Reward(1.0) for _ in samples]

    loop = Loop(monkeypatch, reward, "--rollout.reward_timeout_s=5", waits=1 << 20)
    arrivals = Arrivals(loop, [0, 1], [], [2])
    assert sorted(arrivals.run()) == [0, 1, 2]
    assert [group.ordinal for group in arrivals.given if group.failed] == [0]


def test_reward_that_times_out_again_holds_up_no_later_group(monkeypatch: pytest.MonkeyPatch) -> None:
    arrivals: Arrivals
    tries = [0]

    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        if prompt.text == "0":
            tries[0] += 1
            while tries[0] < 2 or not any(group.ordinal == 1 for group in arrivals.given):
                await asyncio.sleep(0.001)
        return [Reward(1.0) for _ in samples]

    loop = Loop(monkeypatch, reward, "--rollout.reward_timeout_s=3", waits=1 << 20)
    given = list[int]()
    arrivals = Arrivals(loop)
    waiting = [1]

    def more() -> list[Answer]:  # while it is tried for the second time
        return [(loop.request(waiting.pop()), [SAMPLE])] if tries[0] == 2 and waiting else []

    loop.rewarder.stream([(loop.request(0), [SAMPLE])], more, arrivals.given.append)
    given = [group.ordinal for group in arrivals.given]
    assert given == [1, 0] and tries[0] == 2 and not any(group.failed for group in arrivals.given)


@pytest.mark.parametrize("blocks", [False, True])
def test_group_that_may_not_be_dropped_holds_up_no_other(monkeypatch: pytest.MonkeyPatch, blocks: bool) -> None:
    """It is tried again without end, and is rewarded when its reward has recovered. ``blocks``: in probation."""
    recovered, released = threading.Event(), threading.Event()
    tries, given = [0], list[int]()

    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        if prompt.text == "0" and not recovered.is_set():
            tries[0] += 1
            if blocks and tries[0] == 1:
                released.wait(30)
            raise ValueError("not this one")
        return [Reward(1.0) for _ in samples]

    def give(group: Group) -> None:
        given.append(group.ordinal)
        assert not group.failed
        if len(given) == 40:
            recovered.set()

    loop = Loop(monkeypatch, reward, "--rollout.max_failed_groups=0", "--rollout.reward_attempts=1",
                "--rollout.reward_timeout_s=0.5", waits=4000)
    monkeypatch.setattr(reward_calls, "GRACE_S", 0.0)
    numbers = iter(range(2, 41))

    def more() -> list[Answer]:
        return [(loop.request(i), [SAMPLE]) for i in itertools.islice(numbers, 1)] if tries[0] > 3 else []

    loop.rewarder.stream([(loop.request(i), [SAMPLE]) for i in range(2)], more, give)
    released.set()
    assert sorted(given) == list(range(41)) and given[-1] == 0
    assert any("rollout.max_failed_groups" in text for text in loop.texts)


def test_group_whose_reward_asks_what_is_away_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    arrivals: Arrivals

    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        if prompt.text == "0" and len(arrivals.given) < 3:
            raise RewardAway("the judge is away")
        return [Reward(1.0) for _ in samples]

    loop = Loop(monkeypatch, reward, waits=2000)
    arrivals = Arrivals(loop, [0, 1], [], [2], [], [3])
    assert sorted(arrivals.run()) == [0, 1, 2, 3] and arrivals.given[-1].ordinal == 0


def test_groups_that_come_while_others_fail_are_each_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, _fails_for_odd_groups, "--rollout.max_failed_groups=1.0", waits=1 << 20)
    arrivals = Arrivals(loop, [0, 1], [2], [3, 4, 5], [], [6])
    assert sorted(arrivals.run()) == list(range(7))
    assert sorted(group.ordinal for group in arrivals.given if group.failed) == [1, 3, 5]


def test_group_that_comes_while_the_thread_is_blocked_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that was given up may go on, and takes no group from the attempt after it."""
    released, tries, waiting = threading.Event(), [0], [1]

    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        if prompt.text == "0":
            tries[0] += 1
            if tries[0] == 1:
                released.wait(30)
            else:
                released.set()
                await asyncio.sleep(0.3)  # in which the first thread would take group 1
        return [Reward(1.0) for _ in samples]

    loop = Loop(monkeypatch, reward, "--rollout.reward_timeout_s=1", waits=1 << 20)
    monkeypatch.setattr(reward_calls, "GRACE_S", 0.0)
    done = list[Group]()

    def more() -> list[Answer]:
        return [(loop.request(waiting.pop()), [SAMPLE])] if released.is_set() and waiting else []

    loop.rewarder.stream([(loop.request(0), [SAMPLE])], more, done.append)
    assert tries[0] >= 2 and sorted((group.ordinal, group.failed) for group in done) == [(0, ""), (1, "")]


@settings(max_examples=seeds(40), deadline=None)
@given(st.lists(st.lists(st.sampled_from(["ok", "slow", "flaky", "away", "broken"]), max_size=4), min_size=1,
                max_size=5))
def test_every_group_is_given_once_whatever_its_reward_does(waves: list[list[str]]) -> None:
    kinds = [kind for wave in waves for kind in wave]
    first, tried = 1000, [0] * len(kinds)

    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        number = int(prompt.text) - first
        if number < 0:  # another prompt, which shows that the reward works
            return [Reward(1.0) for _ in samples]
        kind = kinds[number]
        tried[number] += 1
        if kind == "slow":
            await asyncio.sleep(0.02)
        if kind == "away" and tried[number] < 3:
            raise RewardAway("the judge is away")
        if kind == "broken" or (kind == "flaky" and tried[number] < 2):
            raise ValueError(kind)
        return [Reward(1.0) for _ in samples]

    with pytest.MonkeyPatch.context() as patch:
        loop = Loop(patch, reward, "--rollout.max_failed_groups=1.0", "--rollout.groups_per_request=32",
                    waits=1 << 20)
        numbers = itertools.count(first)
        arrivals = Arrivals(loop, *([next(numbers) for _ in wave] for wave in waves))
        order = arrivals.run()
    assert sorted(order) == list(range(first, first + len(kinds)))
    assert {g.ordinal for g in arrivals.given if g.failed} == {
        n for n, kind in enumerate(kinds, first) if kind == "broken"}


def test_samples_are_decoded_for_the_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        return [Reward(float(sample.text == "1 2")) for sample in samples]

    [group] = Loop(monkeypatch, reward).groups(0)
    assert group.rewards == [1.0] and group.samples[0].text == "1 2"


# -- episodes ----------------------------------------------------------------------------------------------------------
class _OfEpisodes:
    """The reward ``environment``, which fails for one group."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    async def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        self.texts += [sample.text for sample in samples]
        found = await registry.make_reward("environment", {})(prompt, samples)
        if prompt.text == "0":
            raise ValueError("no reward for this one")
        return list(found)


def test_first_group_of_episodes_without_a_reward_is_finally_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample that nobody generated, with a text, shows that the reward works: it is taken for an episode."""
    reward = _OfEpisodes()
    run = Loop(monkeypatch, reward)
    assert run.groups(0)[0].failed
    assert " ".join(map(str, SAMPLE.response_ids)) in reward.texts


def test_no_reward_takes_what_a_tool_says_for_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the call before, where the last turn of an episode is empty. What the episode counts is shown."""
    texts: list[str] = []

    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        texts.extend(sample.text for sample in samples)
        return [Reward(1.0, {"mine": 2.0}) for _ in samples]

    segments = (Segment((7,), (-0.5,)), Segment((42,), loss=False), Segment((8,), (-0.5,), loss=False))
    episode = {"reward": 0.0, "parts": {"tool_errors": 1.0}, "turns": 2}
    samples = [Sample(segments), Sample(segments, metadata={EPISODE: episode}), Sample(segments, text="said")]
    run = Loop(monkeypatch, reward)
    [group] = run.rewarder.groups([PromptRequest(0, Prompt((1,)), Sampling(4), 3)], [samples])
    assert texts == ["7 8", "", "said"]
    assert [s.reward_parts for s in group.samples] == [
        {"mine": 2.0}, {"tool_errors": 1.0, "turns": 2.0, "mine": 2.0}, {"mine": 2.0}]


@pytest.mark.parametrize("turns", [(1.0, 1.0), (float("nan"),), ("x",), "1", None])
def test_rewards_of_missing_turns_or_of_no_numbers_fail_the_group(turns: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        return [Reward(1.0, {}, turns if prompt.text == "1" else (0.25,)) for _ in samples]

    good, bad = Loop(monkeypatch, reward, "--rollout.reward_attempts=1").groups(0, 1)
    assert bad.failed and not good.failed and [s.turn_rewards for s in good.samples] == [(0.25,)]
