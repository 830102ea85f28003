"""The reward ``genrm``: a model judges the responses. Its engines are a pool of their own, which the role ``genrm``
asks."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from elastic_rl.config.options import read_options
from elastic_rl.data.rows import value_at
from elastic_rl.data.samples import Prompt, Sample
from elastic_rl.data.values import text_value
from elastic_rl.errors import ConfigError, EngineFailed, PluginFailed, RoleUnavailable, SourceFailed
from elastic_rl.rewards.base import Reward, RewardAway, RewardContext, gold_answers
from elastic_rl.rewards.judge_prompts import JudgePrompts
from elastic_rl.rewards.judging import NO_VERDICT, JudgeOptions, JudgeRequest

_OWN_S = 10.0
"""What a call takes besides the judge's role."""
_CONCURRENCY = 256
"""Groups that are judged at once; ``rollout.reward_concurrency`` is the usual limit."""


class GenRm:
    """Asks the role. What that needs may be away, which is no fault of a response: RewardAway."""

    def __init__(self, options: Mapping[str, Any], context: RewardContext) -> None:
        """Raises ConfigError."""
        self._options = read_options(JudgeOptions, options, of="the reward 'genrm'", setting=context.setting)
        pool = context.pools.get(self._options.pool)
        if pool is None or pool.stream is not None:
            names = sorted(name for name, one in context.pools.items() if one.stream is None)
            known = f"there is {', '.join(names)}" if names else "there is none"
            raise ConfigError(f"{context.setting}.pool={self._options.pool!r} is no pool of the job: {known}",
                              hint="name a pool of its own: pools.NAME.model is the folder of the judge's model")
        self._prompts, self._judge = JudgePrompts(pool), context.judge
        self._decode, self._seed = context.decode, context.seed
        self._call_s = pool.call_timeout_s(context.attempts) + _OWN_S
        self._threads = ThreadPoolExecutor(_CONCURRENCY, "genrm")

    def least_timeout_s(self, samples: int) -> float:
        return self._call_s

    async def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        lone = self._has_nothing_to_compare(prompt, samples)
        # Without a question the judge is asked whether it is there: a reward that shows nothing of that is no proof
        # that rewards work.
        request = JudgeRequest(self._options, "", "", ()) if lone else self._request(prompt, samples)
        if self._judge is None:
            if not lone:
                await asyncio.to_thread(self._require_room, request)
            raise RewardAway("the judge's engines run with the job only")
        call = functools.partial(self._judge, request)
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except (EngineFailed, RoleUnavailable) as e:
            raise RewardAway(f"the judge is away: {e.message}", hint=e.hint) from e
        return [Reward(0.0, {NO_VERDICT: 1.0})] if lone else [
            Reward(one.value, {NO_VERDICT: one.no_verdict}) for one in found]

    def _request(self, prompt: Prompt, samples: Sequence[Sample]) -> JudgeRequest:
        """Raises PluginFailed for a prompt that lacks what the judge is to see."""
        right = gold_answers(prompt, self._decode) if self._options.uses_answer(len(samples)) else ("",)
        # As a response that another is compared with it is one of them.
        answer = right[0] if self._options.mode == "pairwise" and len(samples) == 1 else " or ".join(right)
        return JudgeRequest(self._options, prompt.question or prompt.text or self._text(prompt), answer,
                            tuple(sample.text for sample in samples), self._seed, self._metadata(prompt))

    def _has_nothing_to_compare(self, prompt: Prompt, samples: Sequence[Sample]) -> bool:
        """Whether this is the only response, as in an evaluation, of a prompt without an answer."""
        return (self._options.mode == "pairwise" and len(samples) == 1 and prompt.metadata.get("answer") is None
                and (prompt.answer_ids is None or self._decode is None))

    def check(self, prompt: Prompt) -> None:
        """Raises PluginFailed for a prompt about whose responses the judge could not be asked."""
        samples = [Sample((), text="1")] * 2
        self._require_room(self._request(prompt, samples))

    def _require_room(self, request: JudgeRequest) -> None:
        """Raises PluginFailed for questions that the judge cannot be asked."""
        shortest, longest = min(map(len, self._prompts.of(request)[1])), self._prompts.longest(request.options)
        if shortest > longest:
            raise PluginFailed(f"a question for the judge has {shortest} tokens, and it takes up to {longest}",
                               hint="raise max_prompt_tokens, or shorten the judge's prompt; its model's positions and "
                               "engine.max_total_tokens of its pool bound it too")

    def _metadata(self, prompt: Prompt) -> dict[str, str]:
        where = "the prompt's metadata"
        try:
            return {field: text_value(value_at(prompt.metadata, field, where), f"{where}: {field!r}")
                    for field in self._options.metadata_fields}
        except SourceFailed as e:
            raise PluginFailed(f"the judge cannot be asked: {e.message}", hint="name the column in "
                               "data.options.metadata_keys, or correct the judge's prompt") from e

    def _text(self, prompt: Prompt) -> str:
        return self._decode(prompt.token_ids) if self._decode is not None else ""

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
