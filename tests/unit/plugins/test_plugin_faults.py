"""What a user's plug-in raises, returns or does ends no loop: each fault is one of its own kinds, with a clear text."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.algorithms.registry import ALGOS
from elastic_rl.config import Config
from elastic_rl.data.queue.step_groups import StepGroups
from elastic_rl.data.samples import FAILED, Group, Prompt, Sample, Segment
from elastic_rl.data.sources import make_source, prompt_fault, read_prompts
from elastic_rl.engine.client import Sampling
from elastic_rl.engine.generation import PromptRequest, fault_of
from elastic_rl.errors import ConfigError, EngineFailed, EtcdRefused, Fenced, PluginFailed, SourceFailed
from elastic_rl.etcd.records import JobStatus
from elastic_rl.models.arch import end_ids_of, vocabulary_of
from elastic_rl.pipeline.records.reporting import step_metrics
from elastic_rl.pipeline.records.run_log import JobStatusWriter
from elastic_rl.pipeline.sampling import filtering, reward_calls, user_calls
from elastic_rl.pipeline.sampling.filtering import Filters
from elastic_rl.pipeline.sampling.reward_calls import RewardFault
from elastic_rl.pipeline.sampling.rewarding import Rewarder
from elastic_rl.pipeline.waits import Waits
from elastic_rl.plugins.process import ProcessLost
from elastic_rl.plugins.user_code import describe, plain, resolve
from elastic_rl.rewards import filters, registry
from elastic_rl.rewards.base import Reward, RewardAway
from elastic_rl.roles.advantages import AdvantagesRole
from elastic_rl.roles.rollout import RolloutRole

SAMPLE = Sample((Segment((1, 2), (-0.5, -0.5), version=3),))


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def _request(ordinal: int, samples: int = 1) -> PromptRequest:
    return PromptRequest(ordinal, Prompt((1,), text=str(ordinal)), Sampling(4), samples)


# -- texts -------------------------------------------------------------------------------------------------------------


def test_text_of_an_error_is_encodable_short_and_always_there() -> None:
    assert describe(ValueError("no \udc80 text")) == "ValueError: no ? text"
    assert describe(ValueError()) == "ValueError"
    assert len(describe(ValueError("x" * 1_600_000))) < 2100
    assert describe(Unprintable()) == "Unprintable: (its text cannot be made: RuntimeError)"


def test_error_has_the_last_line_of_the_users_own_code(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import json\n\ndef f(text):\n    return json.loads(text)\n")
    scope: dict[str, Any] = {}
    exec(compile((tmp_path / "mine.py").read_text(), str(tmp_path / "mine.py"), "exec"), scope)
    with pytest.raises(ValueError) as raised:
        scope["f"]("{")
    assert describe(raised.value).endswith(f" ({tmp_path / 'mine.py'}:4)")


def test_module_that_exits_or_has_attributes_that_raise_is_a_wrong_setting(tmp_path: Path,
                                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "exiting_plugin.py").write_text("raise SystemExit(0)\n")
    (tmp_path / "raising_plugin.py").write_text("def __getattr__(name):\n    raise RuntimeError('lazy ' + name)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="SystemExit"):
        resolve("exiting_plugin:f", {}, setting="rollout.reward")
    with pytest.raises(ConfigError, match="lazy f"):
        resolve("raising_plugin:f", {}, setting="rollout.reward")


@pytest.mark.parametrize("refusal", [None, EtcdRefused("too large")])
def test_text_of_a_wait_never_ends_the_loop(refusal: Exception | None) -> None:
    written: list[bytes] = []

    class Writer:
        def write(self, op: Any) -> None:
            if refusal is not None:
                raise refusal
            written.append(op.data)

    status = JobStatusWriter(SimpleNamespace(get=lambda key: None),  # type: ignore[arg-type]
                             SimpleNamespace(job_status=lambda: "k"), Writer(), steps=1, seed=0)  # type: ignore[arg-type]
    for _ in range(2):
        status.activity("generate", "plugin", "bad \udc80 " + "x" * 100_000)
        status._clock = lambda: time.time() + 100
    assert bool(written) == (refusal is None)
    for raw in written:
        assert len(JobStatus.decode(raw).waiting_for) <= 4000


# -- rewards and filters -----------------------------------------------------------------------------------------------


class Attempts:
    """Waits that give a retry up after some failures, and note their texts."""

    def __init__(self, failures: int = 0) -> None:
        self.stopping, self.failures, self.texts = threading.Event(), failures, list[str]()
        self.waits = Waits(self._report, self.stopping)

    def _report(self, stage: str, kind: str, what: str) -> None:
        if kind:
            self.texts.append(f"{kind}: {what}")
            if len(self.texts) > self.failures:
                self.stopping.set()


def _rewarder(monkeypatch: pytest.MonkeyPatch, attempts: Attempts, reward: Any, timeout_s: float = 60.0,
              grace_s: float = 0.0) -> Rewarder:
    monkeypatch.setitem(registry.REWARDS, "mine", lambda options, context: reward)
    monkeypatch.setattr(user_calls, "_SLICE_S", 0.01)
    monkeypatch.setattr(reward_calls, "GRACE_S", grace_s)
    return Rewarder(_within(timeout_s, "--rollout.reward=mine"), attempts.waits, other=_nothing)


def _filters(monkeypatch: pytest.MonkeyPatch, drop: Any, timeout_s: float = 60.0, attempts: Attempts | None = None,
             other: Callable[[int], tuple[Prompt, Sample]] | None = None) -> Filters:
    monkeypatch.setitem(filters.FILTERS, "mine", drop)
    monkeypatch.setattr(user_calls, "_SLICE_S", 0.01)
    monkeypatch.setattr(filtering, "_RETRY_S", (0.001, 0.01))
    return Filters(_within(timeout_s, "--rollout.filters=[mine]", "--rollout.reward_attempts=2",
                           "--train.prompts_per_step=4", "--rollout.groups_per_request=1"),
                   (attempts or Attempts()).waits, other=other or _nothing)


def _within(timeout_s: float, *settings: str) -> Config:
    cfg = config.load(overrides=list(settings))
    return cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update={"reward_timeout_s": timeout_s})})


def _attempt(rewarder: Rewarder, request: PromptRequest) -> None:
    """Tries the group once. Raises PluginFailed with what is then waited for."""
    found = rewarder._reward.one((request, [SAMPLE]))
    if isinstance(found, RewardFault):
        raise found.error


def _nothing(number: int) -> tuple[Prompt, Sample]:
    raise SourceFailed("the source is away")


def _values(groups: Sequence[Group]) -> list[list[float]]:
    assert not any(group.failed for group in groups)
    return [group.rewards for group in groups]


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Ends what tests leave behind."""
    event = threading.Event()
    yield event
    event.set()


def _blocks(released: threading.Event) -> Callable[..., Any]:
    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        released.wait(60)
        return [Reward(1.0) for _ in samples]
    return reward


def _blocks_in_a_thread(released: threading.Event) -> Callable[..., Any]:
    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        await asyncio.to_thread(released.wait, 60)
        return [Reward(1.0) for _ in samples]
    return reward


def _swallows_its_cancellation(released: threading.Event) -> Callable[..., Any]:
    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        while not released.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                pass
        return [Reward(1.0) for _ in samples]
    return reward


@pytest.mark.parametrize("plugin", [_blocks, _blocks_in_a_thread, _swallows_its_cancellation])
def test_reward_that_does_not_end_is_given_up_and_said(monkeypatch: pytest.MonkeyPatch, released: threading.Event,
                                                       plugin: Callable[[threading.Event], Any]) -> None:
    attempts = Attempts(failures=1 << 20)
    rewarder = _rewarder(monkeypatch, attempts, plugin(released), timeout_s=0.1)
    with pytest.raises(PluginFailed, match="rollout.reward=mine took longer than 0.1 s"):
        _attempt(rewarder, _request(0))


def test_blocked_reward_does_not_keep_the_loop_from_ending(monkeypatch: pytest.MonkeyPatch, released: threading.Event
                                                           ) -> None:
    attempts = Attempts()
    rewarder = _rewarder(monkeypatch, attempts, _blocks(released))
    threading.Timer(0.1, attempts.stopping.set).start()
    with pytest.raises(Fenced):
        rewarder.groups([_request(0)], [[SAMPLE]])


def test_task_that_ignores_its_end_costs_no_reward(monkeypatch: pytest.MonkeyPatch, released: threading.Event) -> None:
    attempts, hang, kept = Attempts(), _swallows_its_cancellation(released), list[Any]()

    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        kept.append(asyncio.create_task(hang(prompt, samples)))
        await asyncio.sleep(0)
        return [Reward(1.0) for _ in samples]

    rewarder = _rewarder(monkeypatch, attempts, reward)
    for _ in range(user_calls._MAX_THREADS):
        assert _values(rewarder.groups([_request(0)], [[SAMPLE]])) == [[1.0]]
    with pytest.raises(PluginFailed, match="all 16 threads run calls that were abandoned"):
        _attempt(rewarder, _request(0))
    released.set()

    def works() -> bool:
        with contextlib.suppress(PluginFailed):
            _attempt(rewarder, _request(0))
            return True
        return False

    wait_until(works, what="the end of an earlier call")


def test_blocking_rewards_far_below_the_limit_each_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        time.sleep(0.05)
        return [Reward(float(prompt.text)) for _ in samples]

    attempts = Attempts(failures=1 << 20)
    rewarder = _rewarder(monkeypatch, attempts, reward, timeout_s=0.5, grace_s=30.0)
    found = rewarder.groups([_request(i) for i in range(16)], [[SAMPLE]] * 16)
    assert _values(found) == [[i] for i in range(16)]
    assert not any("took longer" in text for text in attempts.texts)


def test_group_whose_reward_fails_is_tried_again_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        asked.append(prompt.text)
        if prompt.text == "1" and asked.count("1") == 1:
            raise RuntimeError("the judge is away")
        return [Reward(float(prompt.text)) for _ in samples]

    attempts = Attempts(failures=1)
    found = _rewarder(monkeypatch, attempts, reward).groups([_request(i) for i in range(4)], [[SAMPLE]] * 4)
    assert _values(found) == [[0], [1], [2], [3]]
    assert asked.count("1") == 2 and len(asked) <= 6, "one other may show that the reward works"
    [text] = attempts.texts
    assert re.fullmatch("plugin: rollout.reward=mine failed for group 1: RuntimeError: the judge is away "
                        r"\(\S+py:\d+\), for the response '' \(correct it; `elastic-rl restart roles/actor --job=\S+`"
                        " then imports it again\\)", text)


def test_error_of_a_reward_shows_the_shortest_responses_and_cuts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        return [Reward(float(sample.text.split()[0])) for sample in samples]

    answered = [replace(SAMPLE, text=text) for text in ("7", "9" * 500, "\x1b[2J", "", "", "12 34")]
    found = _rewarder(monkeypatch, Attempts(failures=1 << 20), reward)._reward.one((_request(0), answered))
    assert isinstance(found, RewardFault)
    assert found.error.message.endswith("for the responses '', '7', '\\x1b[2J' and 2 others")
    found = _rewarder(monkeypatch, Attempts(), reward)._reward.one((_request(0), [replace(SAMPLE, text="a" * 500)]))
    assert isinstance(found, RewardFault) and found.error.message.endswith(f"for the response '{'a' * 79}…'")


@pytest.mark.parametrize(("away", "shown"), [(RewardAway("the judge is away"), "reward: reward: the judge is away"),
                                             (ProcessLost("the judge is away"), "plugin: the judge is away")])
def test_group_is_tried_for_as_long_as_its_rewards_service_is_away(monkeypatch: pytest.MonkeyPatch, away: Exception,
                                                                   shown: str) -> None:
    asked: list[str] = []

    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        asked.append(prompt.text)
        if prompt.text == "1" and asked.count("1") < 6:
            raise away
        return [Reward(float(prompt.text)) for _ in samples]

    attempts = Attempts(failures=1 << 20)
    found = _rewarder(monkeypatch, attempts, reward).groups([_request(i) for i in range(4)], [[SAMPLE]] * 4)
    assert _values(found) == [[0], [1], [2], [3]], "none is dropped, though others were rewarded meanwhile"
    assert sorted(asked) == ["0", *["1"] * 6, "2", "3"]
    assert set(attempts.texts) == {shown}


@pytest.mark.parametrize("raised", [SystemExit(0), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(),
                                    Fenced("not yours to say"), Unprintable(), TimeoutError("my own")])
def test_whatever_a_reward_or_filter_raises_is_a_fault_of_the_plugin(monkeypatch: pytest.MonkeyPatch,
                                                                     raised: BaseException) -> None:
    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        raise raised

    def drop(group: Group) -> str:
        raise raised

    with pytest.raises(PluginFailed, match=type(raised).__name__):
        _attempt(_rewarder(monkeypatch, Attempts(), reward), _request(0))
    with pytest.raises(PluginFailed, match=type(raised).__name__):
        _filters(monkeypatch, drop).attempt(_group(0))


class Endless(dict[str, float]):
    def items(self) -> Any:
        return ((f"p{i}", 0.0) for i in iter(int, 1))


@pytest.mark.parametrize("given", [
    [], None, [1.0], [Reward(float("nan"))], [Reward(10**400)], [Reward("1")],  # type: ignore[arg-type]
    [Reward(0.0, {f"p{i}": 0.0 for i in range(65)})], [Reward(0.0, {"p" * 65: 0.0})], [Reward(0.0, {"\udc80": 0.0})],
    [Reward(0.0, {"p\nstep 9": 0.0})], [Reward(0.0, {"\x1b[2J": 0.0})], [Reward(0.0, {"": 0.0})],
    [Reward(0.0, Endless())], [Reward(0.0, {"p": float("inf")})], [Reward(0.0, {1: 0.0})]])  # type: ignore[dict-item]
def test_unsound_rewards_are_a_fault_of_the_plugin(monkeypatch: pytest.MonkeyPatch, given: Any) -> None:
    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> Any:
        return given

    with pytest.raises(PluginFailed, match="rollout.reward=mine"):
        _attempt(_rewarder(monkeypatch, Attempts(), reward), _request(0))


def test_rewards_become_plain_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def reward(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        return [Reward(True, {"n": 3})]

    [group] = _rewarder(monkeypatch, Attempts(), reward).groups([_request(0)], [[SAMPLE]])
    assert type(group.samples[0].reward) is float and type(group.samples[0].reward_parts["n"]) is float


def test_parts_of_a_step_are_bounded_over_all_samples() -> None:
    samples = tuple(SAMPLE.rewarded(1.0, {f"part {i}": 1.0}) for i in range(1000))
    metrics = step_metrics(1, StepGroups.from_groups([Group(0, Prompt((1,)), samples)]), policy_version=3, dropped={})
    assert len(metrics.reward_parts) == 64


def test_filter_that_blocks_or_returns_no_text_is_at_fault(monkeypatch: pytest.MonkeyPatch,
                                                           released: threading.Event) -> None:
    def blocks(group: Group) -> str:
        released.wait(60)
        return ""

    with pytest.raises(PluginFailed, match="the filter mine for group 0 took longer than 0.1 s"):
        _filters(monkeypatch, blocks, timeout_s=0.1).attempt(_group(0))
    with pytest.raises(PluginFailed, match="not NoneType"):
        _filters(monkeypatch, lambda g: None).attempt(_group(0))
    assert _filters(monkeypatch, lambda g: "\udc80" * 200).drop_reason(_group(0)) == plain("?" * 200, 100)


def _group(ordinal: int) -> Group:
    return Group(ordinal, Prompt((1,)), (SAMPLE,))


def _fails_for_odd_groups(group: Group) -> str:
    if group.ordinal % 2 and group.ordinal > 0:
        raise ValueError("odd")
    return ""


def _held_out(number: int) -> tuple[Prompt, Sample]:
    return Prompt((number,)), SAMPLE


def test_group_is_dropped_if_the_filter_fails_for_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _filters(monkeypatch, _fails_for_odd_groups, attempts=Attempts(1 << 20))
    assert [found.drop_reason(_group(i)) for i in range(3)] == ["", filtering.FILTER_FAILED, ""]


def test_group_is_dropped_when_its_filter_works_for_a_held_out_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _filters(monkeypatch, _fails_for_odd_groups, attempts=Attempts(1 << 20), other=_held_out)
    assert found.drop_reason(_group(1)) == filtering.FILTER_FAILED


def test_filter_that_fails_for_every_group_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [20]

    def drop(group: Group) -> str:
        left[0] -= 1
        if left[0] > 0:
            raise ConnectionError("the service is away")
        return "too easy"

    attempts = Attempts(1 << 20)
    assert _filters(monkeypatch, drop, attempts=attempts, other=_held_out).drop_reason(_group(1)) == "too easy"
    assert "the service is away" in attempts.texts[0]


@pytest.mark.parametrize("reason", [*sorted(FAILED), " Reward failed\n"])
def test_filter_may_not_give_a_reason_that_stands_for_a_failure(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    answers = iter([reason, "too easy"])
    attempts = Attempts()
    found = _filters(monkeypatch, lambda group: next(answers), attempts=attempts, other=_held_out)
    with pytest.raises(Fenced):
        found.drop_reason(_group(1))
    assert reason.strip() in attempts.texts[0] and "return another text for the filter's reason" in attempts.texts[0]


def test_filter_that_fails_for_too_many_groups_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = Attempts(100)
    found = _filters(monkeypatch, _fails_for_odd_groups, attempts=attempts)
    assert not found.drop_reason(_group(0))
    assert {found.drop_reason(_group(i)) for i in (1, 3)} == {filtering.FILTER_FAILED}
    with pytest.raises(Fenced):
        found.drop_reason(_group(5))
    assert "rollout.max_failed_groups" in attempts.texts[-1]


# -- generation --------------------------------------------------------------------------------------------------------


def _segment(**fields: Any) -> Sample:
    segment = Segment((1, 2), (-0.5, -0.5), version=3)
    for name, value in fields.items():
        object.__setattr__(segment, name, value)
    return Sample((segment,))


@pytest.mark.parametrize("sample", [
    Sample(({},)), Sample(None), Sample(()), replace(SAMPLE, finish_reason=None),  # type: ignore[arg-type]
    _segment(token_ids=(1, 2.0)), _segment(token_ids=(1, True)), _segment(token_ids=(1, 2**40)),
    _segment(token_ids=(1, 50)), _segment(token_ids=None), _segment(logprobs=(-0.5, "x")),
    _segment(logprobs=(-0.5, 1e39)), _segment(logprobs=(-0.5, float("nan"))), _segment(logprobs=(-0.5,)),
    _segment(version="3"), _segment(version=-1), _segment(version=2**63), _segment(loss=None), _segment(loss=False),
    replace(SAMPLE, segments=SAMPLE.segments * 3)])
def test_sample_of_wrong_types_is_a_fault(sample: Sample) -> None:
    assert fault_of([sample], _request(0), 50)
    assert not fault_of([SAMPLE], _request(0), 50)


def _rollout(generate: Any, model_dir: str = "") -> RolloutRole:
    role = RolloutRole.__new__(RolloutRole)
    role.ctx = SimpleNamespace(config=Config(), model_dir=model_dir)  # type: ignore[assignment]
    role.generate_fn, role.client, role._vocabulary = generate, None, 50  # type: ignore[assignment]
    return role


class RaisingSample(Sample):
    @property
    def segments(self) -> Any:  # type: ignore[override]
        raise Unprintable


@pytest.mark.parametrize("raised", [SystemExit(0), KeyboardInterrupt(), asyncio.CancelledError(), Unprintable(), None])
def test_whatever_a_generate_function_raises_is_a_fault_of_the_plugin(raised: BaseException | None) -> None:
    async def generate(request: PromptRequest, engines: Any) -> list[Sample]:
        if raised is None:
            return [RaisingSample.__new__(RaisingSample)]
        raise raised

    with pytest.raises(PluginFailed, match="rollout.generate=single_turn failed for group 7"):
        asyncio.run(_rollout(generate)._generate(_request(7), generate))


def test_cancelled_requests_and_failed_engines_are_no_fault_of_the_plugin() -> None:
    async def hangs(request: PromptRequest, engines: Any) -> list[Sample]:
        await asyncio.sleep(60)
        return []

    async def fails(request: PromptRequest, engines: Any) -> list[Sample]:
        raise EngineFailed("x" * 100_000)

    async def cancelled() -> None:
        task = asyncio.create_task(_rollout(hangs)._generate(_request(7), hangs))
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    with pytest.raises(EngineFailed) as failed:
        asyncio.run(_rollout(fails)._generate(_request(7), fails))
    assert len(str(failed.value)) <= 2000


# -- sources -----------------------------------------------------------------------------------------------------------


PROMPT = Prompt((1, 2), "1+1=", (3, 4))


class Source:
    def __init__(self, **changed: Any) -> None:
        self.train: Any = [PROMPT] * 3
        self.eval: Any = [PROMPT]
        self.stop_token_ids: Any = [0]
        self.max_prompt_tokens: Any = 4
        self.max_response_tokens: Any = 4
        vars(self).update(changed)


def _make(monkeypatch: pytest.MonkeyPatch, factory: Any, *settings: str) -> Any:
    from elastic_rl.data import sources

    monkeypatch.setitem(sources.SOURCES, "mine", factory)
    return make_source(config.load(overrides=["--data.source=mine", *settings]))


@pytest.mark.parametrize("changed", [
    {"train": [{}]}, {"eval": [{}]}, {"train": {}}, {"train": {1: PROMPT}}, {"train": None}, {"stop_token_ids": 1},
    {"stop_token_ids": "1"}, {"max_prompt_tokens": "4"}, {"max_response_tokens": 4.0}, {"max_response_tokens": 0},
    {"train": [Prompt(())]}, {"train": [Prompt([1])]}, {"train": [Prompt((1,), answer_ids=())]}])
def test_source_of_wrong_types_is_a_wrong_setting(monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="mine"):
        _make(monkeypatch, lambda *a, **k: Source(**changed))


@pytest.mark.parametrize("raised", [SystemExit(0), GeneratorExit(), Unprintable(), ValueError("\udc80" * 10**6)])
def test_whatever_a_factory_raises_is_a_wrong_setting(monkeypatch: pytest.MonkeyPatch, raised: BaseException) -> None:
    def factory(*args: Any, **kwargs: Any) -> Any:
        raise raised

    with pytest.raises(ConfigError, match=type(raised).__name__) as error:
        _make(monkeypatch, factory)
    assert len(str(error.value).encode()) < 3000


def test_factory_cannot_change_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    from elastic_rl.data import sources

    def factory(options: dict[str, Any], **kwargs: Any) -> Source:
        options.pop("nested")["deep"].clear()
        return Source()

    monkeypatch.setitem(sources.SOURCES, "mine", factory)
    cfg = config.load(overrides=["--data.source=mine", "--data.options={nested: {deep: [1]}}"])
    make_source(cfg)
    assert cfg.data.options == {"nested": {"deep": [1]}}


def test_number_of_prompts_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Away(list[Prompt]):
        away = False

        def __len__(self) -> int:
            if self.away:
                raise OSError("the file is away")
            return super().__len__()

    source = _make(monkeypatch, lambda *a, **k: Source(train=Away([PROMPT] * 3)))
    monkeypatch.setattr(Away, "away", True)
    assert len(source.train) == 3 and source.train[2] == PROMPT and list(source.train) == [PROMPT] * 3


def test_prompt_of_wrong_types_is_reported_with_source_and_index() -> None:
    class Exits(list[Prompt]):
        def __getitem__(self, index: Any) -> Any:
            raise SystemExit(0)

    without = Prompt((1,))
    assert not prompt_fault(without) and prompt_fault(without, answers=True)
    for prompts, answers in (([PROMPT, {}], False), ([PROMPT, without], True), ([PROMPT, Prompt(("a",))], False),
                             ([PROMPT, Prompt((2**31,))], False), ([PROMPT, Prompt((-1,))], False), ([PROMPT], False),
                             ([PROMPT, Prompt((1,), b"1")], False), ([PROMPT, Prompt((1,), metadata=[1])], False),
                             ([PROMPT, Prompt((1,), answer_ids=(1.0,))], True)):  # type: ignore[arg-type]
        with pytest.raises(SourceFailed, match="data.source=mine .* prompt 1"):
            read_prompts(prompts, [0, 1], named="mine", answers=answers)  # type: ignore[arg-type]
    with pytest.raises(SourceFailed, match="prompt 0: SystemExit"):
        read_prompts(Exits(), [0], named="mine", answers=False)
    foreign = [PROMPT, Prompt((1, 16)), Prompt((1,), answer_ids=(17,))]
    for i in (1, 2):
        with pytest.raises(SourceFailed, match=f"prompt {i} with the id {15 + i} in .*has 16 tokens"):
            read_prompts(foreign, [0, i], named="mine", answers=False, vocabulary=16)


# -- advantages --------------------------------------------------------------------------------------------------------


def _raises(rewards: torch.Tensor, settings: Any) -> torch.Tensor:
    raise SystemExit(0)


@pytest.mark.parametrize("advantages", [
    _raises, lambda r, s: None, lambda r, s: r[0], lambda r, s: r / 0, lambda r, s: r.sum(), lambda r, s: r.T,
    lambda r, s: r.resize_(1, 1)])
def test_wrong_advantages_are_a_fault_of_the_plugin(monkeypatch: pytest.MonkeyPatch, advantages: Any) -> None:
    monkeypatch.setitem(ALGOS, "mine", replace(ALGOS["grpo"], advantages=advantages))
    role = AdvantagesRole.__new__(AdvantagesRole)
    role.ctx = SimpleNamespace(config=config.load(overrides=["--algorithm.name=mine"]))  # type: ignore[assignment]
    with pytest.raises(PluginFailed, match="algorithm.name=mine"):
        asyncio.run(role.compute([[0.0, 1.0, 2.0], [1.0, 2.0, 3.0]]))


def test_vocabulary_is_that_of_the_model_where_its_folder_says_it(tmp_path: Path) -> None:
    for said, size in ({}, None), ({"vocab_size": 17}, 17), ({"text_config": {"vocab_size": 18}}, 18):
        (tmp_path / "config.json").write_text(json.dumps(said))
        assert vocabulary_of(tmp_path) == size
    assert vocabulary_of(tmp_path / "nowhere") is None


def test_end_tokens_of_a_model_are_those_of_both_its_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    assert end_ids_of(tmp_path) == (5,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 5, "x"]}')
    assert (end_ids_of(tmp_path), end_ids_of(tmp_path / "nowhere")) == ((5, 7), ())
