"""The stages generate and reward: from prompt groups to rewarded samples, streamed in requests of some groups each."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from elastic_rl.config import Config
from elastic_rl.data.order import order_of
from elastic_rl.data.samples import Group, Prompt, Sample, Segment, demonstration
from elastic_rl.data.sources import DataSource, read_order, read_prompts
from elastic_rl.engine.client import Sampling
from elastic_rl.engine.generation import Generated, GenerateFault, PromptRequest
from elastic_rl.errors import ElasticRLError, Fenced, PluginFailed, RoleUnavailable, SourceFailed
from elastic_rl.pipeline.reward_failures import RewardFailures
from elastic_rl.pipeline.rewarding import Rewarder
from elastic_rl.pipeline.source_reads import SourceReads
from elastic_rl.pipeline.waits import Waits
from elastic_rl.retry import RetryBackoff
from elastic_rl.rewards.base import Decode
from elastic_rl.runtime import batches

log = logging.getLogger(__name__)

_REQUESTS = 64
"""Requests in flight at once."""
_POLL_S = 0.5
_RETRY_S = (0.2, 4.0)
"""First and longest pause before a request that failed is sent again."""

_PROOF = -1
"""Number of the request that shows whether the user's function works."""
_TOO_MANY = ("more of the last groups failed than rollout.max_failed_rewards allows, so none is dropped: correct "
             "rollout.generate")

Generate = Callable[[Sequence[PromptRequest], int], Sequence[Generated]]
"""One attempt: from prompt groups and the oldest version that is accepted to the samples of each, or why there are
none."""
OnFailed = Callable[[str, Sequence[int], str], None]
"""Called with what failed (``reward``, ``generate``), the groups that are dropped for it, and why. Raises nothing but
Fenced."""


def sampling_seed(seed: int, data_pass: int) -> int:
    """What engines derive the seeds of samples from; 31 bits."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{data_pass}".encode()).digest()[:4], "little") & 0x7FFFFFFF


class Sampler:
    """Generates and rewards groups. Used by one thread."""

    def __init__(self, cfg: Config, source: DataSource, generate: Generate, waits: Waits,
                 no_engine: Callable[[], str] = lambda: "",
                 on_failed: OnFailed = lambda part, ordinals, why: None) -> None:
        """``no_engine``: says which engines are missing while none serves; else "". Waits for the source's order.
        Raises ConfigError for a setting that names nothing."""
        self._cfg, self._source, self._generate, self._waits = cfg, source, generate, waits
        self._reads = SourceReads(cfg.data.source, waits)
        self._order = waits.retry("source", lambda: self._reads.read("be ordered", lambda: order_of(
            source, cfg.seed))) if cfg.uses_training_prompts else None
        self._no_engine = no_engine
        self._on_failed = on_failed
        self._rewarder = Rewarder(cfg, waits, other=self._other, decode=decoder(source),
                                  on_failed=lambda ordinals, why: on_failed("reward", ordinals, why))
        self._failures = RewardFailures(
            attempts=cfg.rollout.reward_attempts, max_share=cfg.rollout.max_failed_rewards,
            window=max(cfg.train.prompts_per_step, cfg.rollout.groups_per_request))
        self._generated = 0
        """Groups that were generated, so that it is known whether others were while one failed."""
        self._proof: PromptRequest | None = None
        """A group that was generated: as long as it can be again, the user's function works."""
        self._others = 0
        self._threads = ThreadPoolExecutor(_REQUESTS, "generate")
        self.reward_s = 0.0
        """Seconds spent on rewards since it was last set to 0; part of the time of ``groups``."""

    def close(self) -> None:
        self._rewarder.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def training_groups(self, prompts: Sequence[tuple[int, Prompt]], min_version: int) -> list[tuple[Group, str]]:
        """A group for each (ordinal, prompt), and the reason of the first filter that drops it, or "". One whose reward
        failed says so itself, and no filter sees it."""
        # A prompt returns once in each of its passes over the data, so pass and prompt stand for the group.
        groups = self._groups([PromptRequest(
            ordinal, prompt, self._sampling(self._cfg.rollout.temperature, sampling_seed(self._cfg.seed, data_pass)),
            self._cfg.train.group_size)
            for (ordinal, prompt), data_pass in zip(prompts, self._passes([o for o, _ in prompts]), strict=True)],
            min_version)
        return [(group, "" if group.failed else self._rewarder.dropped_because(group)) for group in groups]

    def evaluation_groups(self, prompts: Sequence[tuple[int, Prompt]], min_version: int, *, samples: int = 1,
                          temperature: float = 0.0) -> list[Group]:
        """A group of samples for each (ordinal, prompt), rewarded; one whose reward failed has the reward 0. No filter
        drops one."""
        sampling = self._sampling(temperature, sampling_seed(self._cfg.seed, 0) if temperature else None)
        return self._groups([PromptRequest(i, prompt, sampling, samples) for i, prompt in prompts], min_version)

    def _passes(self, ordinals: Sequence[int]) -> list[int]:
        """Over the data, by the source's order, which is waited for."""
        order = self._order
        assert order is not None  # the mode has training prompts
        return [data_pass for _, data_pass in self._waits.retry("source", lambda: self._reads.read(
            "give an order", lambda: read_order(order, ordinals, len(self._source.train),
                                                named=self._cfg.data.source)))]

    def _held_out(self, number: int) -> Prompt:
        """One of the held-out prompts. Raises SourceFailed."""
        prompts = self._source.eval
        [prompt] = self._reads.read("give another prompt", lambda: read_prompts(
            prompts, [number % len(prompts)], named=self._cfg.data.source, answers=False))
        return prompt

    def _other(self, number: int) -> tuple[Prompt, Sample]:
        """A held-out prompt with its answer or, where it has none, with an empty response. Raises SourceFailed."""
        prompt = self._held_out(number)
        return prompt, demonstration(prompt) if prompt.answer_ids else Sample(
            (Segment(tuple(self._source.stop_token_ids[:1]) or prompt.token_ids[:1]),))

    def _known_good(self) -> PromptRequest | None:
        """A group that was generated or, before there is one, another prompt: of the first groups of an actor some may
        fail whenever they are tried. None where the source gives none now."""
        if self._proof is None:
            self._others += 1  # another one each time: the function may fail for this one too
            with contextlib.suppress(SourceFailed):
                return PromptRequest(-1, self._held_out(self._others), self._sampling(
                    self._cfg.rollout.temperature, sampling_seed(self._cfg.seed, 0)), 1)
        return self._proof

    def _sampling(self, temperature: float, seed: int | None) -> Sampling:
        return Sampling(self._source.max_response_tokens, temperature, tuple(self._source.stop_token_ids), seed)

    def _groups(self, requests: Sequence[PromptRequest], min_version: int) -> list[Group]:
        """Every group, in order. A request that fails is sent again, after a pause that grows, without end; a group for
        which the user's function fails is sent again alone, and is returned as failed in the end. That takes attempts
        between which another group was generated: what the function depends on may be away for all of them."""
        parts = [list(part) for part in batches(requests, self._cfg.rollout.groups_per_request)]
        retries = [RetryBackoff(*_RETRY_S) for _ in parts]
        unsent = dict.fromkeys(range(len(parts)))  # in order
        suspects: dict[int, None] = {}
        """Parts of one group that may have ended the process of others: they are sent while nothing else runs."""
        running: dict[Future[Sequence[Generated]], int] = {}
        generated: dict[int, int] = {}
        """How many groups were generated when a part failed last, or was sent first."""
        done: dict[int, Group] = {}
        self._failures.begin()
        alone = -1
        """Number of the part that was last sent while nothing else ran."""
        while len(done) < len(requests):
            self._waits.pause(0.0)
            now = time.monotonic()
            queue, room = (unsent, _REQUESTS - len(running)) if unsent or running else (suspects, 1)
            for number in [n for n in queue if retries[n].is_due(now)][:room]:
                del queue[number]
                alone = number if queue is suspects else -1
                generated.setdefault(number, self._generated)
                running[self._threads.submit(self._generate, parts[number], min_version)] = number
            if not running:
                self._waits.pause(min(retries[n].left_s(now) for n in queue))
                continue
            ended, _ = wait(running, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            if not ended and (missing := self._no_engine()):
                self._waits.waits("engines", missing)  # the requests themselves may wait in the router
            for future in ended:
                number = running.pop(future)
                try:
                    given = future.result()
                except Fenced:
                    raise
                except ElasticRLError as e:
                    if number != _PROOF:
                        retries[number].failed(time.monotonic())
                        unsent[number] = None
                    self._waits.waits(*_waited_for(e))
                    continue
                if number == _PROOF:
                    self._generated += not isinstance(given[0], GenerateFault)
                    continue
                answered = list(zip(parts[number], given, strict=True))
                done |= self._rewarded([(r, found) for r, found in answered if not isinstance(found, GenerateFault)])
                for request, fault in answered:
                    if not isinstance(fault, GenerateFault):
                        continue
                    if self._is_dropped(request.ordinal, fault, self._generated > generated[number],
                                        number == alone):
                        done[request.ordinal] = Group(request.ordinal, request.prompt, (), fault.why)
                        continue
                    again = number
                    if len(answered) > 1:
                        again = len(parts)
                        parts.append([request])
                        retries.append(RetryBackoff(*_RETRY_S))
                    retries[again].failed(time.monotonic())
                    generated[again] = self._generated
                    (suspects if fault.shared else unsent)[again] = None
                    if _PROOF not in running.values() and (proof := self._known_good()) is not None:
                        running[self._threads.submit(self._generate, [proof], min_version)] = _PROOF
                    too_many = f" ({_TOO_MANY})" if self._failures.is_exhausted([request.ordinal]) else ""
                    self._waits.waits("plugin", fault.why + too_many)
        return [done[request.ordinal] for request in requests]

    def _is_dropped(self, ordinal: int, fault: GenerateFault, works: bool, alone: bool) -> bool:
        """Whether the group has failed for good. ``works``: another was generated since it failed before."""
        if not self._failures.failed([ordinal], reward_works=works and (alone or not fault.shared)):
            return False
        log.warning("group %d is dropped since it cannot be generated: %s", ordinal, fault.why)
        self._on_failed("generate", [ordinal], fault.why)
        return True

    # -- rewards ------------------------------------------------------------------------------------------------------
    def _rewarded(self, answered: Sequence[tuple[PromptRequest, list[Sample]]]) -> dict[int, Group]:
        """The groups of one request by ordinal, whose rewards are computed at once."""
        if not answered:
            return {}
        self._waits.works()
        self._generated, self._proof = self._generated + len(answered), answered[-1][0]
        self._failures.rewarded(len(answered))
        began = time.perf_counter()
        groups = self._rewarder.groups([request for request, _ in answered], [samples for _, samples in answered])
        self.reward_s += time.perf_counter() - began
        return {group.ordinal: group for group in groups}


def decoder(source: DataSource) -> Decode | None:
    """From token ids to text without special tokens, by the source's tokenizer; None where it has none."""
    tokenizer = getattr(source, "tokenizer", None)
    return None if tokenizer is None else lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True))


def _waited_for(error: ElasticRLError) -> tuple[str, str]:
    """Kind and text of the wait for another attempt to generate."""
    if isinstance(error, PluginFailed):
        return "plugin", str(error)
    if isinstance(error, RoleUnavailable):
        return "rollout", str(error)
    return "engines", f"the engines to generate: {error}"
