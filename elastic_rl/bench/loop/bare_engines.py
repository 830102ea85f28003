"""SGLang servers alone, at the work of the run's steps: the run's flags and requests, without router, Ray and roles."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import httpx
import torch

from elastic_rl.algorithms.registry import algorithm_of, options_of
from elastic_rl.bench.options import Unmeasurable
from elastic_rl.config import Config
from elastic_rl.data.batch import Batch, collate
from elastic_rl.data.order import groups, order_of
from elastic_rl.data.samples import Group, Prompt, Sample
from elastic_rl.data.sources import DataSource, make_source
from elastic_rl.engine.client import Sampling, parse_sample, sequences_of_request, share_requests
from elastic_rl.engine.server.sglang_server import SGLangServer
from elastic_rl.errors import EngineFailed
from elastic_rl.host.address import own_address
from elastic_rl.host.paths import JobPaths
from elastic_rl.pipeline.sampling.sampler import decoder, sampling_seed
from elastic_rl.rewards.base import Decode, Reward, RewardFn
from elastic_rl.rewards.registry import close_reward, make_reward
from elastic_rl.runtime.sequences import batches

WARM_ROUNDS = 2
"""First rounds that do not count."""
Request = list[tuple[int, Prompt]]
"""Prompts by their ordinal; each is sampled ``train.group_size`` times."""


@dataclass(frozen=True)
class EngineRounds:
    """What the engines did."""

    seconds: list[float]
    """Seconds of each round that counts, from the first request to the last byte of the last answer."""
    tokens: float
    """Tokens of a response, the mean of those rounds."""
    shares: list[list[Path]]
    """Shares of each round, also those that do not count: what it generated as the batch that the trainer gets, a file
    for each data-parallel rank."""


def measure_engines(cfg: Config, model: Path, folder: Path, rounds: int) -> EngineRounds:
    """Generates the prompts of the first steps of a run. ``folder``: for logs and batches. Raises Unmeasurable where
    what the run asks for does not follow from its prompts alone, and EngineFailed."""
    if cfg.rollout.generates_apart:
        raise Unmeasurable(f"{cfg.rollout.generated_by} decides itself what it asks the engines")
    if cfg.rollout.filters:
        raise Unmeasurable("rollout.filters decide how much a step generates")
    source = make_source(cfg)
    decode = decoder(source)
    reward = make_reward(cfg.rollout.reward, cfg.rollout.reward_options, decode=decode)
    seconds, tokens, shares = [], [], []
    with (contextlib.closing(_Rewards(reward, decode)) as rewards,
          started(cfg, model, folder) as (servers, _), _Client(servers, cfg, source) as client):
        for number in range(WARM_ROUNDS + rounds):
            step = requests_of_step(cfg, source, number)
            took, answers = client.send(step)
            groups = [group for request, bodies in zip(step, answers, strict=True)
                      for group in _groups(cfg, request, bodies, rewards)]
            shares.append(_write(cfg, groups, folder / f"batch-{number}"))
            if number >= WARM_ROUNDS:
                seconds.append(took)
                tokens.append(mean(len(s.response_ids) for g in groups for s in g.samples))
    return EngineRounds(seconds, mean(tokens), shares)


@contextmanager
def started(cfg: Config, model: Path, folder: Path) -> Iterator[tuple[list[SGLangServer], list[float]]]:
    """Starts as many servers as the run has, together, as the run's are; yields them and the seconds of each one's
    start until it answers. They end with the block. Raises EngineFailed."""
    servers = [SGLangServer(str(model), cfg=cfg.engine, device=cfg.device, log=folder / f"engine-{i}.log", seed=i + 1,
                            tag=JobPaths(folder).file_tag(f"engine-{i}"), host=own_address(),
                            deterministic=cfg.deterministic)
               for i in range(cfg.rollout.engines)]
    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(len(servers)))
        for server in servers:
            stack.callback(server.close)  # before the threads end, which wait for the servers
        yield servers, list(threads.map(_start, servers))


def _start(server: SGLangServer) -> float:
    began = time.monotonic()
    server.start()
    return time.monotonic() - began


# -- requests ---------------------------------------------------------------------------------------------------------
def requests_of_step(cfg: Config, source: DataSource, number: int) -> list[Request]:
    """The HTTP requests that the prompts of a step go out in, counted from 0. Pure."""
    count, train = cfg.train.prompts_per_step, source.train
    first = number * count
    prompts = [(ordinal, train[index]) for ordinal, index in
               enumerate(groups(order_of(source, cfg.seed), first, count), first)]
    sequences = sequences_of_request(source.max_response_tokens)
    return [[group for _, _, group in request] for call in batches(prompts, cfg.groups_per_request)
            for request in share_requests([(prompt.token_ids, cfg.train.group_size, (ordinal, prompt))
                                           for ordinal, prompt in call], sequences, apart=True)]


class _Client:
    """Sends requests straight to the servers, in turn, all of a step at once."""

    def __init__(self, servers: Sequence[SGLangServer], cfg: Config, source: DataSource) -> None:
        self._urls, self._cfg, self._source = [f"{server.url}/generate" for server in servers], cfg, source
        self._order = order_of(source, cfg.seed)
        self._http = httpx.Client(timeout=cfg.engine.request_timeout_s, limits=httpx.Limits(max_connections=None))
        self._threads = ThreadPoolExecutor(64, "requests")

    def send(self, step: Sequence[Request]) -> tuple[float, list[httpx.Response]]:
        """Seconds until the last byte, and the answers. Raises EngineFailed."""
        bodies = [self._body(request) for request in step]
        urls = [self._urls[i % len(self._urls)] for i in range(len(bodies))]
        began = time.monotonic()
        answers = list(self._threads.map(self._post, urls, bodies))
        return time.monotonic() - began, answers

    def _body(self, request: Request) -> dict[str, object]:
        _, data_pass = self._order.problem(request[0][0])
        sampling = Sampling(self._source.max_response_tokens, self._cfg.rollout.temperature,
                            tuple(self._source.stop_token_ids), sampling_seed(self._cfg.seed, data_pass))
        return {"input_ids": [list(prompt.token_ids) for _, prompt in request
                              for _ in range(self._cfg.train.group_size)],
                "return_logprob": True, "sampling_params": sampling.params()}

    def _post(self, url: str, body: dict[str, object]) -> httpx.Response:
        try:
            answer = self._http.post(url, json=body)
        except httpx.HTTPError as e:
            raise EngineFailed(f"a bare engine did not answer: {type(e).__name__}") from e
        if not answer.is_success:
            raise EngineFailed(f"a bare engine refused a request: {answer.status_code} {answer.text[:200]}")
        return answer

    def __enter__(self) -> _Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._http.close()


# -- from answers to a batch, which is not timed ----------------------------------------------------------------------
def _groups(cfg: Config, request: Request, answer: httpx.Response, rewards: _Rewards) -> list[Group]:
    samples = [parse_sample(one) for one in answer.json()]
    parts = batches(samples, cfg.train.group_size)
    return [Group(ordinal, prompt, rewards.rewarded(prompt, own))
            for (ordinal, prompt), own in zip(request, parts, strict=True)]


class _Rewards:
    def __init__(self, reward: RewardFn, decode: Decode | None) -> None:
        self._reward, self._decode = reward, decode

    def rewarded(self, prompt: Prompt, samples: Sequence[Sample]) -> tuple[Sample, ...]:
        if self._decode is not None:
            samples = [replace(s, text=self._decode(s.response_ids)) for s in samples]

        async def ask() -> Sequence[Reward]:
            return await self._reward(prompt, samples)

        return tuple(s.rewarded(r.value, r.parts) for s, r in zip(samples, asyncio.run(ask()), strict=True))

    def close(self) -> None:
        close_reward(self._reward)


def _write(cfg: Config, groups: Sequence[Group], target: Path) -> list[Path]:
    spec = algorithm_of(cfg)
    assert spec.advantages is not None  # checked by algorithm_of
    rewards = torch.tensor([g.rewards for g in groups])
    values = spec.advantages(rewards, options_of(spec, cfg.algorithm)).flatten().tolist()
    batch: Batch = collate([(g.prompt, s) for g in groups for s in g.samples], values)
    paths = [target.with_name(f"{target.name}-{i}.safetensors") for i in range(cfg.trainer.data_parallel)]
    shares = batch.shares(len(paths))
    for path, share in zip(paths, shares, strict=True):
        path.write_bytes(share.to_bytes())
    return paths
