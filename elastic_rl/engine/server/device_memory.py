"""Gives the device memory of an SGLang server up, and takes it again.

SGLang keeps the memory of a tag apart with ``--enable-memory-saver``: released, its addresses stay and the pages are
freed; resumed, there are pages of any content. On a CPU nothing is freed: the calls do the same without an effect. It
wants each tag released and resumed in turns, and no request in flight at a release.
"""

from __future__ import annotations

from typing import Any, Protocol

WEIGHTS, KV_CACHE, CUDA_GRAPH = "weights", "kv_cache", "cuda_graph"


class Call(Protocol):
    def __call__(self, method: str, path: str, body: dict[str, Any] | None = None) -> object:
        """Calls the server. Raises EngineFailed."""


class DeviceMemory:
    """The device memory of one server. Used by one thread. Every method raises EngineFailed; the server is then to be
    ended."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._released: frozenset[str] = frozenset()

    @property
    def lacks_cache(self) -> bool:
        """Whether the KV cache is released, so that no request can be served."""
        return KV_CACHE in self._released

    def release(self) -> None:
        """Gives up what it has. The weights are gone then."""
        self._released |= self._change("/release_memory_occupation", {KV_CACHE, WEIGHTS, CUDA_GRAPH} - self._released)

    def resume_weights(self) -> None:
        """Takes the memory of the weights and of captured graphs, which read them at the same addresses. The weights
        are of any content. The KV cache is resumed after the weights were loaded: loading takes memory too."""
        self._released -= self._change("/resume_memory_occupation", {WEIGHTS, CUDA_GRAPH} & self._released)

    def resume_cache(self) -> None:
        """Takes the memory of the KV cache, which is empty then."""
        self._released -= self._change("/resume_memory_occupation", {KV_CACHE} & self._released)

    def _change(self, path: str, tags: set[str] | frozenset[str]) -> frozenset[str]:
        if tags:
            self._call("POST", path, {"tags": sorted(tags)})
        return frozenset(tags)
