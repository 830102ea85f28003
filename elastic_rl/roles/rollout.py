"""The rollout role: generates samples of prompt groups on the engine pool, through the router.

Every sample carries the policy version that generated it. A group with a sample of an older version than the caller
accepts is generated again, a limited number of times: an engine may just have joined, or not have seen the new head.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from elastic_rl.engine.client import GenerateClient, Sample
from elastic_rl.errors import EngineFailed
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.roles.base import Role
from elastic_rl.roles.first_sample_trace import FirstSampleTrace


@dataclass(frozen=True)
class GenerationRequest:
    """Prompts to sample. ``min_version``: the oldest policy version whose samples are accepted."""

    prompts: list[list[int]]
    samples_per_prompt: int
    temperature: float
    max_new_tokens: int
    stop_token_ids: list[int]
    min_version: int


class RolloutRole(Role):
    name = "rollout"

    def __init__(self, ctx: RunContext) -> None:
        super().__init__(ctx)
        self.client = GenerateClient(ctx.router_url, timeout_s=ctx.config.engine.request_timeout_s,
                                     retries=ctx.config.rollout.max_attempts)
        self._completed = self._in_flight = 0  # prompt groups
        self._first_sample = FirstSampleTrace(self.etcd, ctx.keys)

    async def generate(self, request: GenerationRequest) -> list[list[Sample]]:
        """One list of samples per prompt, in the prompts' order. Raises EngineFailed when the retries are used up."""
        count = len(request.prompts)
        self._in_flight += count
        self._report()
        try:
            groups = list(await asyncio.gather(*(self._group(p, request) for p in request.prompts)))
            self._completed += count
            return groups
        finally:
            self._in_flight -= count
            self._report()

    def _report(self) -> None:
        # Neither phase counts as hung: engines that do not answer are no fault of this role, and each wait is bounded.
        phase = "waiting for the engines" if self._in_flight else "idle"
        self.member.progress(self._completed, phase, in_flight=self._in_flight)

    async def _group(self, prompt: list[int], request: GenerationRequest) -> list[Sample]:
        for attempt in range(self.ctx.config.rollout.max_attempts):
            requested_at = time.time()
            samples = await self.client.generate(
                prompt, n=request.samples_per_prompt, temperature=request.temperature,
                max_new_tokens=request.max_new_tokens, stop_token_ids=request.stop_token_ids)
            if version := self._first_sample.first_of(samples):
                await asyncio.to_thread(self._first_sample.record, version, requested_at, time.time())
            if all(s.version >= request.min_version for s in samples):
                return samples
            await asyncio.sleep(min(0.05 * 2**attempt, 1.0))  # the engine is about to be updated or removed
        raise EngineFailed(f"no engine generated samples of policy version {request.min_version} or newer",
                           hint="`elastic-rl engines` shows which version each engine serves")
