"""The genrm role: judges responses with the engines of a pool of its own, the judge's model. Any replica may answer."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from elastic_rl.data.samples import MAX_TOKEN_IDS
from elastic_rl.engine.client import GenerateClient, Sampling
from elastic_rl.errors import ElasticRLError, PluginFailed, RequestRefused
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.job_secrets import engine_access
from elastic_rl.models.arch import end_ids_of, vocabulary_of
from elastic_rl.plugins.user_code import describe
from elastic_rl.rewards.judge_prompts import JudgePrompts
from elastic_rl.rewards.judging import Judgement, JudgeRequest, judgements
from elastic_rl.roles.base import EngineRole

_CACHED_CHARACTERS = 32 << 20
"""Characters of the judge's answers that are kept: a group that is rewarded again costs no second judgement."""


class GenRmRole(EngineRole):
    name = "genrm"

    def __init__(self, ctx: RunContext) -> None:
        super().__init__(ctx)
        self._pools: dict[str, _Pool] = {}
        self._answers = _Answers(_CACHED_CHARACTERS)

    async def judge(self, request: JudgeRequest, term: int) -> list[Judgement]:
        """What each response is worth. ``term``: the term of the actor. Raises EngineFailed while no engine answers,
        Fenced when the term is over, and PluginFailed for a judge that cannot be asked."""
        return await self.requests.run(term, self._judged(request))

    async def _judged(self, request: JudgeRequest) -> list[Judgement]:
        try:
            with self.working():
                pool = self._pool(request.options.pool)
                asked, prompts = await asyncio.to_thread(pool.prompts.of, request)
                known = [self._known(request, pool, prompt) for prompt in prompts]
                if not any(one is None for one in known):
                    await self._probe(pool)
                answers = await asyncio.gather(*(
                    self._ask(pool, request, *one) for one in zip(prompts, known, strict=True)))
                return await asyncio.to_thread(judgements, request, asked, answers)
        except RequestRefused as e:
            raise PluginFailed(f"the engines of pool {request.options.pool} refuse a question: {e.message}",
                               hint="check the judge's model, and engine.extra_args of its pool") from e
        except ElasticRLError:
            raise
        except Exception as e:  # no judge that is away, so that the group is not tried without end
            raise PluginFailed(f"the judge failed: {describe(e)}") from e

    def _pool(self, name: str) -> _Pool:
        if name not in self._pools:
            try:
                self._pools[name] = _Pool(self.ctx, name)
            except KeyError as e:
                raise PluginFailed(f"the job has no pool {name!r}", hint=f"set pools.{name}.model") from e
        return self._pools[name]

    async def _probe(self, pool: _Pool) -> None:
        """Raises EngineFailed while the judge does not answer. What is answered from memory alone would show nothing of
        that, and whoever asks may want to know just whether the judge works."""
        await pool.client.generate(pool.tokenizer.eos_ids[:1], Sampling(1, 0.0), 1)

    def _known(self, request: JudgeRequest, pool: _Pool, prompt: Sequence[int]) -> list[str] | None:
        """The judge's answers to one prompt as far as they need no asking; none to one that is too long."""
        if len(prompt) > pool.prompts.longest(request.options):
            return []
        return self._answers.get(self._key(request, pool, prompt))

    def _key(self, request: JudgeRequest, pool: _Pool, prompt: Sequence[int]) -> bytes:
        options = request.options
        asked = (options.pool, self._sampling(request, pool), options.votes, options.read_cut_answers, tuple(prompt))
        return hashlib.blake2b(repr(asked).encode()).digest()

    def _sampling(self, request: JudgeRequest, pool: _Pool) -> Sampling:
        options = request.options
        return Sampling.of(options, max_new_tokens=options.max_tokens, temperature=options.temperature,
                           stop_token_ids=pool.tokenizer.eos_ids, seed=request.seed,
                           resume=not self.ctx.config.deterministic)

    async def _ask(self, pool: _Pool, request: JudgeRequest, prompt: Sequence[int], known: list[str] | None
                   ) -> list[str]:
        """The judge's answers to one prompt. ``known``: those that need no asking."""
        if known is not None:
            return known
        samples = await pool.client.generate(prompt, self._sampling(request, pool), request.options.votes)
        answers = [pool.tokenizer.decode(sample.response_ids)
                   if request.options.read_cut_answers or sample.finish_reason == "stop" else "" for sample in samples]
        self._answers.put(self._key(request, pool, prompt), answers)
        return answers


class _Pool:
    """A judge: its prompts, and a client of its engines."""

    def __init__(self, ctx: RunContext, name: str) -> None:
        """Raises KeyError for a pool that the job does not have."""
        settings = ctx.pool(name)
        self.prompts = JudgePrompts(settings)
        self.tokenizer = self.prompts.tokenizer
        self.client = GenerateClient(ctx.router_urls[name], timeout_s=settings.engine.request_timeout_s,
                                     retries=ctx.config.rollout.max_attempts,
                                     vocabulary=vocabulary_of(settings.model_dir) or MAX_TOKEN_IDS,
                                     end_ids=end_ids_of(settings.model_dir), access=engine_access(ctx.config))


class _Answers:
    """Answers by key, up to a number of characters; the latest are kept."""

    def __init__(self, most: int) -> None:
        self._most, self._size = most, 0
        self._kept: OrderedDict[bytes, list[str]] = OrderedDict()

    def get(self, key: bytes) -> list[str] | None:
        if (found := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
        return found

    def put(self, key: bytes, answers: list[str]) -> None:
        if key in self._kept:
            return
        self._kept[key] = answers
        self._size += _size(answers)
        while self._size > self._most:
            self._size -= _size(self._kept.popitem(last=False)[1])


def _size(answers: Sequence[str]) -> int:
    return 100 + sum(map(len, answers))
