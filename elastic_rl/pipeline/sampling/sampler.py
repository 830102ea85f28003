"""The stages generate and reward: from prompt groups to rewarded samples, streamed in requests of some groups each."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from elastic_rl.config import Config, EvalConfig, RolloutConfig
from elastic_rl.data.order import order_of
from elastic_rl.data.samples import Group, Prompt, Sample, Segment, demonstration
from elastic_rl.data.sources import CheckedSource, DataSource, read_order, read_prompts
from elastic_rl.engine.client import Sampling
from elastic_rl.engine.generation import PromptRequest
from elastic_rl.etcd.records import GenerationCap
from elastic_rl.pipeline.sampling.cap_watch import CapWatch
from elastic_rl.pipeline.sampling.filtering import Filters
from elastic_rl.pipeline.sampling.group_requests import Generate, GroupRequests
from elastic_rl.pipeline.sampling.reward_stream import Judged, RewardStream
from elastic_rl.pipeline.sampling.rewarding import Rewarder
from elastic_rl.pipeline.sampling.side_calls import SideCalls
from elastic_rl.pipeline.sampling.source_reads import SourceReads
from elastic_rl.pipeline.waits import Waits
from elastic_rl.rewards.base import Decode, Judge

_POLL_S, _FEED_S = 0.5, 0.05
"""How long is waited at once for a request to end, or for prompts: while nothing else is to be done, and while there
may be further prompts."""

T = TypeVar("T")
OnFailed = Callable[[str, Sequence[int], str], None]
"""Called with what failed (``reward``, ``generate``, ``filters``), the groups that are dropped for it, and why. Raises
nothing but Fenced."""
OnCap = Callable[[GenerationCap], None]
"""Is told again and again which limit has kept the engines from being asked for more samples for a while. Raises
nothing but Fenced."""


def sampling_seed(seed: int, data_pass: int) -> int:
    """What engines derive the seeds of samples from; 31 bits."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{data_pass}".encode()).digest()[:4], "little") & 0x7FFFFFFF


More = Callable[[float], tuple[Sequence[T], int] | None]
"""Gives further prompts, with the oldest version that is accepted of their samples: none when it has none within so
many seconds; None when there will be none."""


class Sampler:
    """Generates and rewards groups. Used by one thread."""

    def __init__(self, cfg: Config, source: CheckedSource, generate: Generate, waits: Waits,
                 no_engine: Callable[[], str] = lambda: "",
                 on_failed: OnFailed = lambda part, ordinals, why: None, judge: Judge | None = None,
                 reads: SourceReads | None = None, running: Callable[[], int] = lambda: 0,
                 on_cap: OnCap = lambda cap: None) -> None:
        """``no_engine``: says which engines are missing while none serves; else "". ``judge``: for rewards that ask a
        model. ``reads``: where another thread asks the same source. ``running``: sequences that the engines of the pool
        decode at once, as far as it is known; else 0. ``on_cap``: is told what ``CapWatch`` says. Waits for the
        source's order. Raises ConfigError for a setting that names nothing."""
        self._cfg, self._source, self._waits, self._on_failed = cfg, source, waits, on_failed
        self._reads = reads or SourceReads(cfg.data.source, waits)
        self._order = waits.retry("source", lambda: self._reads.read("be ordered", lambda: order_of(
            source, cfg.seed))) if cfg.uses_training_prompts else None
        self._on_cap = on_cap
        self.reward_s = 0.0
        """Seconds in which only rewards were waited for, since it was last set to 0; part of the time of ``groups``."""
        self._requests = GroupRequests(cfg, generate, waits, other=self._other_request, no_engine=no_engine,
                                       on_failed=partial(on_failed, "generate"), running=running)
        # Beside the requests: rewards may take as long as the samples, and engines would stand still for them.
        self._side = SideCalls("reward", waits)
        self._side_reads = self._reads.of_thread(self._side.waits)
        with contextlib.ExitStack() as closing:
            closing.callback(self._requests.close)
            closing.callback(self._side.close)
            self._filters = self._side.call(lambda: Filters(cfg, self._side.waits, other=self._other), Filters.close)
            closing.callback(self._filters.close)
            self._rewarder = self._side.call(lambda: Rewarder(
                cfg, self._side.waits, other=self._other, decode=decoder(source), judge=judge), Rewarder.close)
            closing.callback(self._rewarder.close)
            closing.callback(self._side.close)  # first of all, so that nothing is under way
            self._closing = closing.pop_all()

    def close(self) -> None:
        self._closing.close()

    def training_groups(self, prompts: Sequence[tuple[int, Prompt]], min_version: int,
                        on_done: Callable[[int], None] = lambda ordinal: None) -> list[tuple[Group, str]]:
        """A group for each (ordinal, prompt), and the reason of the first filter that drops it, or "". One whose reward
        failed says so itself, and no filter sees it. ``on_done``: is told of each as soon as it has its rewards."""
        groups = self._groups(self._prompt_requests(prompts), min_version, on_done)
        judged = self._side.call(lambda: [(group, self._filters.drop_reason(group)) for group in groups])
        self._report("filters", self._filters.take_failed())
        return judged

    def training_stream(self, more: More[tuple[int, Prompt]],
                        generation_cap: Callable[[], GenerationCap] = lambda: GenerationCap.NONE
                        ) -> Iterator[tuple[Group, str]]:
        """Yields what ``training_groups`` returns, of the prompts that ``more`` gives again and again, each group as it
        finishes. Ends with them. ``generation_cap``: the limit for which ``more`` gives none."""
        def requests(wait_s: float) -> tuple[Sequence[PromptRequest], int] | None:
            given = more(wait_s)
            return None if given is None else (self._prompt_requests(given[0]), given[1])

        return self._stream(requests, self._filters.drop_reason, generation_cap)

    def _prompt_requests(self, prompts: Sequence[tuple[int, Prompt]]) -> list[PromptRequest]:
        if not prompts:
            return []
        # A prompt returns once in each of its passes over the data, so pass and prompt stand for the group.
        return [PromptRequest(
            ordinal, prompt, self._sampling(self._cfg.rollout, sampling_seed(self._cfg.seed, data_pass)),
            self._cfg.train.group_size)
            for (ordinal, prompt), data_pass in zip(prompts, self._passes([o for o, _ in prompts]), strict=True)]

    def evaluation_groups(self, prompts: Sequence[tuple[int, Prompt]], min_version: int) -> list[Group]:
        """A group of samples for each (ordinal, prompt), rewarded, as the section ``eval`` has it; one whose reward
        failed has the reward 0. No filter drops one."""
        how = self._cfg.eval
        sampling = self._sampling(how, sampling_seed(self._cfg.seed, 0))
        return self._groups([PromptRequest(i, prompt, sampling, how.samples) for i, prompt in prompts], min_version)

    def _passes(self, ordinals: Sequence[int]) -> list[int]:
        """The pass over the data of each ordinal, by the source's order, which is waited for."""
        order = self._order
        assert order is not None  # the mode has training prompts
        return [data_pass for _, data_pass in self._waits.retry("source", lambda: self._reads.read(
            "give an order", lambda: read_order(order, ordinals, len(self._source.train),
                                                named=self._cfg.data.source)))]

    def _held_out(self, number: int, reads: SourceReads) -> Prompt:
        """One of the held-out prompts. Raises SourceFailed."""
        prompts = self._source.eval
        [prompt] = reads.read("give another prompt", lambda: read_prompts(
            prompts, [number % len(prompts)], named=self._cfg.data.source, answers=False,
            vocabulary=self._source.vocabulary))
        return prompt

    def _other(self, number: int) -> tuple[Prompt, Sample]:
        """A held-out prompt with its answer or, where it has none, with an empty response. The thread of the
        rewards calls it. Raises SourceFailed."""
        prompt = self._held_out(number, self._side_reads)
        return prompt, demonstration(prompt) if prompt.answer_ids else Sample(
            (Segment(tuple(self._source.stop_token_ids[:1]) or prompt.token_ids[:1]),))

    def _other_request(self, number: int) -> PromptRequest:
        """A request for a held-out prompt. Raises SourceFailed."""
        return PromptRequest(-1, self._held_out(number, self._reads), self._sampling(
            self._cfg.rollout, sampling_seed(self._cfg.seed, 0)), 1)

    def _sampling(self, how: RolloutConfig | EvalConfig, seed: int) -> Sampling:
        return Sampling.of(how, max_new_tokens=self._source.max_response_tokens, temperature=how.temperature,
                           stop_token_ids=self._source.stop_token_ids, seed=seed, resume=not self._cfg.deterministic)

    def _groups(self, requests: Sequence[PromptRequest], min_version: int,
                on_done: Callable[[int], None] = lambda ordinal: None) -> list[Group]:
        """Every group, in order."""
        given = iter([(requests, min_version)])
        done = dict[int, Group]()
        for group, _ in self._stream(lambda wait_s: next(given, None), lambda group: ""):
            done[group.ordinal] = group
            on_done(group.ordinal)
        return [done[request.ordinal] for request in requests]

    def _stream(self, more: More[PromptRequest], judged: Callable[[Group], str],
                generation_cap: Callable[[], GenerationCap] = lambda: GenerationCap.NONE) -> Iterator[Judged]:
        """The groups that ``more`` gives, each as it is rewarded, with what ``judged`` says of it in the thread of the
        rewards. One that could not be generated or rewarded says so itself."""
        requests = self._requests
        requests.begin()
        rewards = RewardStream(self._side, self._rewarder, judged)
        ended, caps = False, CapWatch()
        while True:
            self._waits.pause(0.0)
            if not ended:
                given = more(0.0 if requests.pending or rewards.pending else _POLL_S)
                ended = given is None
                if given is not None:
                    requests.add(*given)
            if ended and not requests.pending and not rewards.pending:
                self._on_cap(GenerationCap.NONE)
                return
            began, only_rewards = time.perf_counter(), not requests.pending
            found, failed = requests.poll(_POLL_S if ended else _FEED_S, rewards.news, quiet=self._side.show())
            self._on_cap(caps.seen(time.monotonic(), requests.generation_cap or generation_cap()))
            self.reward_s += time.perf_counter() - began if only_rewards else 0.0
            yield from ((group, "") for group in failed)
            rewards.add(found)
            done = rewards.take()
            self._report("reward", {group.ordinal: group.failed for group, _ in done if group.failed})
            self._report("filters", self._filters.take_failed())
            yield from done

    def _report(self, part: str, faults: Mapping[int, str]) -> None:
        """``faults``: the groups that are dropped since this failed for them, and why."""
        if faults:
            self._on_failed(part, sorted(faults), faults[max(faults)])


def decoder(source: DataSource) -> Decode | None:
    """A function from token ids to text without special tokens, by the source's tokenizer; None where it has none."""
    tokenizer = getattr(source, "tokenizer", None)
    return None if tokenizer is None else lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True))

