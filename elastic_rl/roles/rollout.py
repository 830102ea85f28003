"""The rollout role: generates samples of prompt groups on the engine pool, through the router.

Every sample carries the policy versions that generated it. A group with a sample of an older version than the caller
accepts is generated again, a limited number of times: an engine may just have joined, or not have seen the new head. So
is one with a sample of a version that was never published: no engine of the job made it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from elastic_rl.config import ROLLOUT_POOL, Stream
from elastic_rl.data.queue.group_codec import decode_samples, encode_samples
from elastic_rl.data.samples import MAX_TOKEN_IDS, Sample
from elastic_rl.dcs.catalog import reads
from elastic_rl.engine import generation
from elastic_rl.engine.client import Caller, GenerateClient
from elastic_rl.engine.generation import Answers, Generated, GenerateFault, GenerateFn, PromptRequest
from elastic_rl.engine.own_generate import OwnGenerate, make_generate
from elastic_rl.errors import ElasticRLError, EngineFailed, EtcdUnavailable, PluginAway, PluginFailed, Unanswered
from elastic_rl.etcd import event_kinds, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Severity
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.job_secrets import engine_access
from elastic_rl.models.arch import end_ids_of, vocabulary_of
from elastic_rl.plugins.process import CallLost, ProcessLost
from elastic_rl.plugins.user_code import describe, text_of
from elastic_rl.roles.base import EngineRole
from elastic_rl.roles.host_needs import with_policy_model
from elastic_rl.runtime.backoff import backoff_s
from elastic_rl.telemetry import traces

log = logging.getLogger(__name__)

_RETRY_S = (0.05, 1.0)
"""First and longest pause before a group is generated again whose samples cannot be used."""
_REPORT_S = 30.0
"""An event of samples whose weights were not published at most so often; the alert of it lasts longer."""


@dataclass(frozen=True)
class GenerationRequest:
    """Prompt groups to sample. ``min_version``: the oldest policy version whose samples are accepted. ``in_probation``:
    they may end the process of the user's function, so they get another one than all other groups."""

    prompts: tuple[PromptRequest, ...]
    min_version: int
    in_probation: bool = False


Encoded = bytes | GenerateFault
"""What becomes of one group, its samples as bytes: as objects they take Ray several times as long."""
EncodedAnswers = list[tuple[int, Encoded]]


def encoded(found: Generated) -> Encoded:
    if isinstance(found, GenerateFault):
        return found
    try:
        return encode_samples(found)
    except PluginFailed as e:  # for metadata
        return GenerateFault(str(e))


def decoded(answers: EncodedAnswers) -> Answers:
    """A group that cannot be read, since a user's function has put something into its samples that they cannot have,
    such as a reward that is no number, has failed by itself: those beside it are good."""
    return [(place, _decoded(one)) for place, one in answers]


def _decoded(one: Encoded) -> Generated:
    if isinstance(one, GenerateFault):
        return one
    try:
        return decode_samples(one)
    except ValueError as e:
        return GenerateFault(f"the samples of the group cannot be read: {e}")


class RolloutRole(EngineRole):
    name = "rollout"

    def __init__(self, ctx: RunContext) -> None:
        super().__init__(ctx)
        self.ctx = ctx = with_policy_model(
            self.ctx, self.name, self.etcd, lambda: self.member.progress(0, "waiting for the model"))
        cfg = ctx.config
        self._vocabulary = vocabulary_of(ctx.model_dir) or MAX_TOKEN_IDS
        self.generate_fn = make_generate(cfg, ctx.router_urls[ROLLOUT_POOL], self._vocabulary, ctx.model_dir)
        self.client = GenerateClient(ctx.router_urls[ROLLOUT_POOL], timeout_s=cfg.engine.request_timeout_s,
                                     retries=cfg.rollout.max_attempts, vocabulary=self._vocabulary,
                                     end_ids=end_ids_of(ctx.model_dir), access=engine_access(cfg))
        self._first_sample = FirstSampleTrace(self.etcd, ctx.keys)
        self._published = PublishedVersions(self.etcd, ctx.keys, ctx.epoch)

    async def generate(self, request: GenerationRequest, term: int) -> AsyncIterator[EncodedAnswers]:
        """Yields the samples of each prompt as it has them, or why there are none: the user's function failed, or no
        engine answered. ``term``: the term of the actor. Raises Fenced when it is over."""
        caller = Caller()
        async for answers in self.requests.stream(term, partial(self._generated, request, caller),
                                                  lambda: caller.is_waiting):
            yield answers

    async def _generated(self, request: GenerationRequest, caller: Caller,
                         give: Callable[[tuple[int, Encoded]], None]) -> None:
        async def answer(place: int, prompt: PromptRequest) -> None:
            with self.working():
                try:
                    found = await self._bounded(prompt, request.min_version, request.in_probation)
                except EngineFailed as e:
                    found = GenerateFault(f"the engines to generate: {e}", away="engines",
                                          unanswered=isinstance(e, Unanswered))
                give((place, encoded(found)))

        # Each to its end, whatever one raises: what still ran would go on, beside the repeated request, and call tools.
        with caller.asks():
            ended = await asyncio.gather(*(answer(*one) for one in enumerate(request.prompts)), return_exceptions=True)
        for error in ended:
            if error is not None:
                raise error

    def close(self) -> None:
        if isinstance(self.generate_fn, OwnGenerate):
            self.generate_fn.close()
        super().close()

    async def _bounded(self, prompt: PromptRequest, min_version: int, in_probation: bool = False) -> Generated:
        """One group: a function of the user's own has a limit for all that it does, and a fault of it is no error."""
        if not isinstance(self.generate_fn, OwnGenerate):
            try:
                return await self._group(prompt, min_version, self.generate_fn)
            except PluginFailed as e:
                return GenerateFault(str(e))
        generate_fn = self.generate_fn.for_probation if in_probation else self.generate_fn
        with generate_fn.in_use():
            return await self._bounded_own(prompt, min_version, generate_fn)

    async def _bounded_own(self, prompt: PromptRequest, min_version: int, generate_fn: OwnGenerate) -> Generated:
        setting, limit_s = self.ctx.config.rollout.generated_by, self.ctx.config.rollout.generate_timeout_s
        try:
            for _ in range(self.ctx.config.rollout.max_attempts):
                try:
                    await generate_fn.started()
                except PluginFailed as e:  # which says nothing about the group
                    return GenerateFault(str(e), away="plugin")
                with contextlib.suppress(ProcessLost):  # replaced for another group: that is no time of this one
                    async with generate_fn.within(limit_s):
                        return await self._group(prompt, min_version, generate_fn)
            return GenerateFault(f"{setting} cannot be called for group {prompt.ordinal}: its process "
                                 "ended again and again", shared=True)
        except TimeoutError:
            return GenerateFault(f"{setting} took longer than {limit_s:g} s for group "
                                 f"{prompt.ordinal} (raise rollout.generate_timeout_s, or make the function faster)")
        except CallLost as e:
            return GenerateFault(f"{setting} failed for group {prompt.ordinal}: {e}", shared=True)
        except PluginAway as e:
            return GenerateFault(str(e), away="plugin")
        except PluginFailed as e:
            return GenerateFault(str(e))

    async def _group(self, prompt: PromptRequest, min_version: int, generate_fn: GenerateFn) -> list[Sample]:
        prompt = replace(prompt, min_version=min_version)
        for attempt in range(1, self.ctx.config.rollout.max_attempts + 1):
            requested_at = time.time()
            samples = await self._generate(prompt, generate_fn)
            if await self._are_foreign(samples, last=attempt == self.ctx.config.rollout.max_attempts):
                await asyncio.sleep(backoff_s(attempt, *_RETRY_S))  # the driver takes a foreign worker out again
                continue
            if version := self._first_sample.first_of(samples):
                await asyncio.to_thread(self._first_sample.record, version, requested_at, time.time())
            if generation.oldest_version(samples) >= min_version and not self._is_mixed(samples):
                return list(samples)
            await asyncio.sleep(backoff_s(attempt, *_RETRY_S))  # the engine is about to be updated or removed
        raise EngineFailed(f"no engine generated samples of policy version {min_version} or newer",
                           hint="`elastic-rl engines` shows which version each engine serves")

    async def _are_foreign(self, samples: Sequence[Sample], *, last: bool) -> bool:
        """Whether a sample is of a version that was never published. ``last``: raises EngineFailed then, or
        PluginFailed where a function of the user's own says the version. Raises EngineFailed if it cannot be known."""
        try:
            version = await self._published.beyond(samples)
        except EtcdUnavailable as e:
            raise EngineFailed(f"it is not known which policy versions are published: {e}") from e
        if version and last:
            rollout = self.ctx.config.rollout
            if isinstance(self.generate_fn, OwnGenerate) and not rollout.plays_episodes:
                raise PluginFailed(f"{rollout.generated_by} gave a sample of policy version {version}, and none so new "
                                   "was published", hint="each segment has the version of the call that made it")
            raise EngineFailed(f"samples are of policy version {version}, and none so new was published",
                               hint="the router of the pool reached a server that is no engine of this job; see "
                               "`elastic-rl events`")
        return version > 0

    def _is_mixed(self, samples: Sequence[Sample]) -> bool:
        """Whether a deterministic job cannot use the samples: where the weights changed within one, which may be under
        a new number only, its KV cache was computed again in one pass, with other last bits."""
        return self.ctx.config.deterministic and any(len(s.versions) > 1 for s in samples)

    async def _generate(self, prompt: PromptRequest, generate_fn: GenerateFn) -> Sequence[Sample]:
        setting = self.ctx.config.rollout.generated_by
        try:
            samples = await generate_fn(prompt, self.client)
            fault = generation.fault_of(samples, prompt, self._vocabulary)
        except (CallLost, ProcessLost, PluginAway):
            raise
        except EngineFailed as e:  # or a class of the user's derived from it, which the caller may not be able to read
            raise (Unanswered if isinstance(e, Unanswered) else EngineFailed)(text_of(e)) from e
        except BaseException as e:  # whatever a user's function raises: also SystemExit
            task = asyncio.current_task()
            if isinstance(e, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the request is cancelled
            why = text_of(e) if isinstance(e, PluginFailed) else describe(e)
            raise PluginFailed(f"{setting} failed for group {prompt.ordinal}: {why}") from e
        if fault:
            raise PluginFailed(f"{setting} {fault} for group {prompt.ordinal}")
        return samples


class PublishedVersions:
    """Versions of the policy up to the head of their stream, which never goes back: what generated samples of any
    others is no engine of the job. For one event loop."""

    def __init__(self, etcd: EtcdClient, keys: Keys, epoch: int) -> None:
        self._etcd, self._keys, self._epoch = etcd, keys, epoch
        self._newest = 0
        """The newest one that etcd was seen to have."""
        self._reading = asyncio.Lock()
        self._reported_at = float("-inf")

    async def beyond(self, samples: Iterable[Sample]) -> int:
        """The newest version of the samples if none so new was published; else 0. Engines may serve a version from the
        moment on at which it is committed, so etcd is asked about each that was not known yet. Raises EtcdUnavailable.
        """
        version = max((segment.version for sample in samples for segment in sample.segments), default=0)
        if version <= self._newest:
            return 0
        async with self._reading:
            if version > self._newest:
                self._newest = max(self._newest, await asyncio.to_thread(self._head))
        if version <= self._newest:
            return 0
        if (now := time.monotonic()) - self._reported_at >= _REPORT_S:
            self._reported_at = now
            await asyncio.to_thread(self._report, version, self._newest)
        return version

    def _head(self) -> int:
        found = reads.head(self._etcd, self._keys, Stream.POLICY)
        return found.number if found is not None else 0

    def _report(self, version: int, newest: int) -> None:
        text = f"samples of policy version {version} are refused: the newest one that was published is {newest}"
        log.warning("%s", text)
        try:
            fencing.emit(self._etcd, self._keys, self._epoch, event_kinds.SAMPLES_UNPUBLISHED, "rollout", text,
                         severity=Severity.WARNING, version=version)
        except ElasticRLError as e:  # the samples are refused all the same
            log.warning("that cannot be reported: %s", e)


class FirstSampleTrace:
    """Completes the trace of a version with the first sample that its weights generated for this process; each of
    several processes that request samples records its own."""

    def __init__(self, etcd: EtcdClient, keys: Keys) -> None:
        self._etcd, self._keys = etcd, keys
        self._newest = 0

    def first_of(self, samples: Iterable[Sample]) -> int:
        """The version of which these samples are the first; 0 when there is none, or tracing is off."""
        if not traces.enabled():
            return 0
        newest = max((v for s in samples for v in s.versions), default=0)
        if newest <= self._newest:
            return 0
        self._newest = newest
        return newest

    def record(self, version: int, requested_at: float, answered_at: float) -> None:
        """Adds the span ``rollout.first_token`` to the version's trace: from the request to the sample (unix seconds).
        Reads etcd; without etcd the span is dropped."""
        try:
            found = reads.get_version(self._etcd, self._keys, Stream.POLICY, version)
        except EtcdUnavailable as e:
            log.warning("dropping the span rollout.first_token of version %d: %s", version, e)
            return
        if found is not None:
            traces.record("rollout.first_token", requested_at, answered_at, version=version,
                          parent=traces.extract(found.meta.get("trace")))
