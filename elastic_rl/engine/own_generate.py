"""A ``GenerateFn`` of the user's own code, in a process of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from elastic_rl.data.samples import Sample, Segment
from elastic_rl.engine.client import GenerateClient
from elastic_rl.engine.generation import GenerateFn, PromptRequest, fault_of
from elastic_rl.errors import ConfigError, EngineFailed, PluginFailed
from elastic_rl.plugin_process import PluginProcess
from elastic_rl.plugins import plain, resolve, text_of


class OwnGenerate:
    """The function that ``rollout.generate`` names as ``package.module:name``, with a client of the engines of its own.
    The process of the role does not import it."""

    def __init__(self, name: str, router_url: str, *, timeout_s: float, retries: int, vocabulary: int) -> None:
        """``timeout_s``, ``retries``: of the client. ``vocabulary``: number of the model's tokens. Raises
        ConfigError."""
        self._process = PluginProcess(f"rollout.generate={plain(name, 200)}", f"{__name__}:serve", name, router_url,
                                      timeout_s, retries, vocabulary)
        self._process.start_first()

    def start(self) -> None:
        """Replaces its process if need be; call it before calls. Raises PluginFailed."""
        self._process.start()

    async def __call__(self, request: PromptRequest, engines: GenerateClient) -> list[Sample]:
        """Samples that ``fault_of`` has found sound. ``engines`` is not used. Raises EngineFailed and PluginFailed."""
        answer = await self._process.call(request)
        if "engines" in answer:
            raise EngineFailed(answer["engines"])
        return [Sample(tuple(Segment(tuple(ids), tuple(logprobs), loss, version)
                             for ids, logprobs, loss, version in sample["segments"]),
                       finish_reason=sample["finish_reason"], metadata=sample["metadata"])
                for sample in answer["samples"]]

    def close(self) -> None:
        self._process.close()


def serve(name: str, router_url: str, timeout_s: float, retries: int, vocabulary: int
          ) -> Callable[[PromptRequest], Awaitable[dict[str, Any]]]:
    """In the process: the function that it runs. Raises ConfigError."""
    generate: GenerateFn = resolve(name, {}, setting="rollout.generate")
    if not callable(generate) or isinstance(generate, type):
        raise ConfigError(f"rollout.generate={name!r} is no async function (request, engines) -> samples",
                          hint="GenerateFn in elastic_rl/engine/generation.py says what it is")
    client = GenerateClient(router_url, timeout_s=timeout_s, retries=retries)

    async def call(request: PromptRequest) -> dict[str, Any]:
        try:
            samples = await generate(request, client)
        except EngineFailed as e:  # or a class of the user's derived from it
            return {"engines": text_of(e)}
        if fault := fault_of(samples, request, vocabulary):
            raise PluginFailed(f"it {fault}")
        return {"samples": [_to_json(sample) for sample in samples]}

    return call


def _to_json(sample: Sample) -> dict[str, Any]:
    return {"segments": [_segment(segment) for segment in sample.segments],
            "finish_reason": plain(sample.finish_reason, 100), "metadata": dict(sample.metadata)}


def _segment(segment: Segment) -> Sequence[Any]:
    return list(segment.token_ids), [float(p) for p in segment.logprobs], segment.loss, segment.version
