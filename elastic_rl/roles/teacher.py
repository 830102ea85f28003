"""The teacher role: scores the policy's samples with the engines of a pool of its own, the teacher's model. Any replica
may answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from elastic_rl.data.samples import MAX_TOKEN_IDS
from elastic_rl.engine.client import GenerateClient
from elastic_rl.engine.scoring import ScoreRequest, TokenScores
from elastic_rl.errors import RequestRefused
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.job_secrets import engine_access
from elastic_rl.models.arch import vocabulary_of
from elastic_rl.roles.base import EngineRole

log = logging.getLogger(__name__)


class TeacherRole(EngineRole):
    name = "teacher"

    def __init__(self, ctx: RunContext) -> None:
        super().__init__(ctx)
        ctx = self.ctx
        name = ctx.config.algorithm.teacher
        assert name is not None
        pool = ctx.pool(name)
        self._client = GenerateClient(ctx.router_urls[name], timeout_s=pool.engine.request_timeout_s,
                                      retries=ctx.config.rollout.max_attempts,
                                      vocabulary=vocabulary_of(pool.model_dir) or MAX_TOKEN_IDS,
                                      access=engine_access(ctx.config))

    async def score(self, requests: Sequence[ScoreRequest], top: int, term: int) -> list[TokenScores | None]:
        """What the teacher makes of each sequence; None of one that its engines refuse, or that has other tokens than
        the teacher's. ``term``: the term of the actor. Raises EngineFailed while no engine answers, and Fenced when the
        term is over."""
        return await self.requests.run(term, self._scored(requests, top))

    async def _scored(self, requests: Sequence[ScoreRequest], top: int) -> list[TokenScores | None]:
        with self.working(len(requests)):
            try:
                return await self._client.score(requests, top)
            except RequestRefused:
                return await asyncio.gather(*(self._score(one, top) for one in requests))

    async def _score(self, request: ScoreRequest, top: int) -> TokenScores | None:
        try:
            [found] = await self._client.score([request], top)
            return found
        except RequestRefused as e:
            log.warning("the teacher's engines refuse a sequence of %d tokens: %s", len(request.token_ids), e)
            return None
