"""A ``GenerateFn`` of the user's own code, or an environment, in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any

from elastic_rl.data.samples import Prompt, Sample, Segment
from elastic_rl.engine.client import GenerateClient, Sampling
from elastic_rl.engine.generation import GENERATE_FNS, GenerateFn, PromptRequest, fault_of, version_fault
from elastic_rl.engine.scoring import ScoreRequest, TokenScores
from elastic_rl.errors import ConfigError, EngineFailed, PluginAway, PluginFailed, Unanswered
from elastic_rl.net.engine_key import EngineAccess
from elastic_rl.plugins.process import PluginProcess
from elastic_rl.plugins.user_code import call_fault, encodable, plain, resolve, text_of
from elastic_rl.runtime.json_values import as_json

if TYPE_CHECKING:  # the process of the user's code imports this module too, and starts sooner without the settings
    from elastic_rl.config import Config

_UNUSED_S = 60.0
"""The process of groups in probation ends when it was not used for so long: more than they pause between attempts."""


@dataclass(frozen=True)
class EnvironmentJob:
    """What episodes are played with (``elastic_rl/environments``)."""

    name: str
    options: Mapping[str, Any]
    model_dir: str
    turns: int
    """Most turns of the policy in a sample."""
    turn_tokens: int
    seconds: float
    """Seconds that the environment may take in one episode; what the engines take does not count."""
    template_options: Mapping[str, Any]
    template_date: date | None = None
    """The setting ``data.template_date``."""

    @classmethod
    def of(cls, cfg: Config, model_dir: str) -> EnvironmentJob:
        rollout = cfg.rollout
        return cls(rollout.environment, rollout.environment_options, model_dir, rollout.max_turns,
                   rollout.max_turn_tokens, rollout.generate_timeout_s,
                   cfg.data.options.get("chat_template_options") or {}, cfg.data.template_date)


@dataclass(frozen=True)
class ClientOptions:
    """What a client of the engines is made with, in another process than this."""

    router_url: str
    timeout_s: float
    retries: int
    vocabulary: int
    """Number of the model's tokens."""
    access: EngineAccess = EngineAccess()
    """What the client needs to be let into the router."""
    end_ids: tuple[int, ...] = ()
    """Token ids at which engines end a response whatever the request says."""

    def make(self) -> GenerateClient:
        return GenerateClient(self.router_url, timeout_s=self.timeout_s, retries=self.retries,
                              vocabulary=self.vocabulary, end_ids=self.end_ids, access=self.access)


Asked = PromptRequest | Prompt | None
"""What the process is asked: the samples of a prompt; whether a prompt can be sampled; or whether its loop runs."""


class OwnGenerate:
    """The function that ``rollout.generate`` names as ``package.module:name``, or an environment, with a client of the
    engines of its own. The process of the role does not import it. All but ``start`` and ``close`` is used from one
    event loop."""

    for_probation: OwnGenerate
    """The same in a second process, which is there only while it is used: for groups that may end it."""

    def __init__(self, name: str | EnvironmentJob, client: ClientOptions, *, is_second: bool = False) -> None:
        """``is_second``: no process is started yet. Raises ConfigError."""
        self._bounds_itself = isinstance(name, EnvironmentJob)
        what, maker = ((f"rollout.environment={plain(name.name, 200)}", "elastic_rl.environments.serving:serve")
                       if isinstance(name, EnvironmentJob) else
                       (f"rollout.generate={plain(name, 200)}", f"{__name__}:serve"))
        self._process = PluginProcess(what, maker, name, client)
        self._starting = ThreadPoolExecutor(1, "generate-start")
        """A thread of its own: while one process is started, which may take minutes, the other one's calls go on."""
        self._users = 0
        self._stopping: asyncio.TimerHandle | None = None
        self._is_second = is_second
        if not is_second:
            self._process.start_first()
            self.for_probation = OwnGenerate(name, client, is_second=True)

    def start(self) -> None:
        """Replaces its process if need be; call it before calls. Raises PluginFailed."""
        self._process.start()

    async def started(self) -> None:
        """Calls ``start`` in a thread."""
        await asyncio.get_running_loop().run_in_executor(self._starting, self.start)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Around calls and the start before them. The second process ends when it has not been used for a while: it
        takes as much memory as the first one."""
        if self._stopping is not None:
            self._stopping.cancel()
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self._is_second and not self._users:
                loop = asyncio.get_running_loop()
                self._stopping = loop.call_later(_UNUSED_S, loop.run_in_executor, None, self._process.stop)

    @contextlib.asynccontextmanager
    async def within(self, limit_s: float) -> AsyncIterator[None]:
        """Bounds a call. Of a function of the user's own that is all its time. An environment bounds its own, without
        that of the engines, which may be slow or away; from here it is bounded how long its process does not answer at
        all. Raises TimeoutError."""
        async with asyncio.timeout(limit_s) as bound:
            watching = asyncio.create_task(self._watch(bound, limit_s)) if self._bounds_itself else None
            try:
                yield
            finally:
                if watching is not None:
                    watching.cancel()

    async def _watch(self, bound: asyncio.Timeout, limit_s: float) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(PluginFailed):  # the call itself ends with it
            while True:
                asked = asyncio.create_task(self._process.call(None))
                asked.add_done_callback(lambda done: done.cancelled() or done.exception())  # somebody has seen it
                await asyncio.shield(asked)  # a call that is cancelled would cost the process
                if bound.expired():
                    return
                bound.reschedule(loop.time() + limit_s)
                await asyncio.sleep(limit_s / 4)

    async def __call__(self, request: PromptRequest, engines: GenerateClient) -> list[Sample]:
        """Samples that ``fault_of`` has found sound. ``engines`` is not used. Raises EngineFailed, PluginAway and
        PluginFailed."""
        answer = await self._process.call(request)
        if "engines" in answer:
            raise (Unanswered if answer["unanswered"] else EngineFailed)(answer["engines"])
        if "away" in answer:
            if answer["replace"]:
                self._process.replace()
            raise PluginAway(answer["away"])
        return [Sample(tuple(Segment(tuple(ids), tuple(logprobs), loss, version)
                             for ids, logprobs, loss, version in sample["segments"]),
                       finish_reason=sample["finish_reason"], metadata=sample["metadata"], text=sample["text"])
                for sample in answer["samples"]]

    async def check(self, prompt: Prompt) -> None:
        """Raises PluginFailed for a prompt of which no samples can be made, as far as that is known before."""
        await self._process.call(prompt)

    def close(self) -> None:
        if not self._is_second:
            self.for_probation.close()
        self._starting.shutdown(wait=False, cancel_futures=True)
        self._process.close()


def make_generate(cfg: Config, router_url: str, vocabulary: int, model_dir: str) -> GenerateFn:
    """What ``rollout.generate`` or ``rollout.environment`` names. ``router_url``: "" where no engine is to be asked.
    Raises ConfigError."""
    rollout = cfg.rollout
    if not rollout.generates_apart:
        return resolve(rollout.generate, GENERATE_FNS, setting="rollout.generate")
    from elastic_rl.host.job_secrets import engine_access  # imports pydantic, which the function's process is spared
    from elastic_rl.models.arch import end_ids_of
    return OwnGenerate(EnvironmentJob.of(cfg, model_dir) if rollout.plays_episodes else rollout.generate,
                       ClientOptions(router_url, cfg.engine.request_timeout_s, rollout.max_attempts, vocabulary,
                                     engine_access(cfg) if router_url else EngineAccess(),
                                     end_ids_of(model_dir) if router_url else ()))


def serve(name: str, client: ClientOptions) -> Callable[[Asked], Awaitable[dict[str, Any]]]:
    """The function that the process runs, made there. Raises ConfigError."""
    generate: GenerateFn = resolve(name, {}, setting="rollout.generate")
    if fault := call_fault(generate, 2, asynchronous=True):
        raise ConfigError(f"rollout.generate={name!r} is {fault}, and must be an async function (request, engines) -> "
                          "samples", hint="GenerateFn in elastic_rl/engine/generation.py says what it is")
    return answering(generate, client)


def answering(generate: GenerateFn, options: ClientOptions) -> Callable[[Asked], Awaitable[dict[str, Any]]]:
    """A way to generate, with a client of its own, as a function whose result is JSON."""
    client = options.make()

    async def call(asked: Asked) -> dict[str, Any]:
        if not isinstance(asked, PromptRequest):
            if asked is not None and callable(check := getattr(generate, "check", None)):
                await check(asked)
            return {}
        engines = _EnginesOfCall(client)
        try:
            samples = await generate(asked, engines)
        except EngineFailed as e:  # or a class of the user's derived from it
            return {"engines": text_of(e), "unanswered": isinstance(e, Unanswered)}
        except PluginAway as e:
            return {"away": text_of(e), "replace": bool(e.replace)}
        if fault := (fault_of(samples, asked, options.vocabulary)
                     or version_fault(samples, asked.min_version, engines.versions)):
            raise PluginFailed(f"it {fault}")
        return {"samples": [_to_json(sample) for sample in samples]}

    return call


class _EnginesOfCall(GenerateClient):
    """A client as one call of a ``GenerateFn`` uses it, which remembers with which versions engines answered."""

    def __init__(self, client: GenerateClient) -> None:
        self._client = client
        self.versions = set[int]()
        """The versions of all segments that are trained on."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, n: int, route: str = "") -> list[Sample]:
        samples = await self._client.generate(token_ids, sampling, n, route)
        self.versions.update(segment.version for sample in samples for segment in sample.segments if segment.loss)
        return samples

    async def score(self, sequences: Sequence[ScoreRequest], top: int = 0) -> list[TokenScores | None]:
        return await self._client.score(sequences, top)

    async def close(self) -> None:
        await self._client.close()


def _to_json(sample: Sample) -> dict[str, Any]:
    return {"segments": [_segment(segment) for segment in sample.segments],
            "finish_reason": plain(sample.finish_reason, 100), "metadata": _metadata(sample),
            "text": encodable(sample.text)}  # whole: the answer is at its end


def _metadata(sample: Sample) -> Any:
    try:
        return as_json(sample.metadata)
    except ValueError as e:
        raise PluginFailed(f"it returned a sample with metadata that are not passed on: {e}",
                           hint="put numbers, texts, and lists and mappings of them into metadata") from e


def _segment(segment: Segment) -> Sequence[Any]:
    return list(segment.token_ids), [float(p) for p in segment.logprobs], segment.loss, segment.version
