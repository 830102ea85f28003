"""The command line of an SGLang server, and what is asked of one whose device memory is shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_rl.config import DeviceConfig, EngineConfig
from elastic_rl.engine.server.device_memory import CUDA_GRAPH, KV_CACHE, WEIGHTS, DeviceMemory
from elastic_rl.engine.server.sglang_server import SGLangServer
from elastic_rl.errors import EngineFailed


@pytest.mark.parametrize("shares", [True, False])
def test_memory_saver_is_on_where_device_memory_is_shared_on_a_gpu(tmp_path: Path, shares: bool) -> None:
    server = SGLangServer("model", cfg=EngineConfig(), device=DeviceConfig(), log=tmp_path / "log", seed=1, tag="args",
                          shares_devices=shares)
    assert ("--enable-memory-saver" in server.arguments(cuda=True)) == shares
    assert "--enable-memory-saver" not in server.arguments(cuda=False), "there is nothing to save on a CPU"


def test_engine_that_is_given_gpus_uses_them_where_its_runner_sees_none(tmp_path: Path) -> None:
    def uses_cuda(device: str, gpus: str) -> bool:
        return SGLangServer("model", cfg=EngineConfig(), device=DeviceConfig(type=device),  # type: ignore[arg-type]
                            log=tmp_path / "log", seed=1, tag="args", gpus=gpus).uses_cuda()

    assert uses_cuda("auto", "2,3") and not uses_cuda("cpu", "2,3")


class Scheduler:
    """Of SGLang, as far as it keeps account of what is released: it fails for a tag that is not there to resume."""

    def __init__(self) -> None:
        self.released: set[str] = set()
        self.calls: list[str] = []

    def __call__(self, method: str, path: str, body: dict[str, Any] | None = None) -> object:
        assert method == "POST" and body is not None and body["tags"]
        self.calls.append(path)
        tags = set(body["tags"])
        if path == "/release_memory_occupation":
            if tags & self.released:
                raise EngineFailed("released twice")
            self.released |= tags
        else:
            if not tags <= self.released:
                raise EngineFailed("resumed twice")
            self.released -= tags
        return {}


def test_each_tag_is_released_and_resumed_in_turns_also_when_a_turn_ends_before_the_cache_is_resumed() -> None:
    scheduler = Scheduler()
    memory = DeviceMemory(scheduler)
    memory.release()
    assert scheduler.released == {WEIGHTS, KV_CACHE, CUDA_GRAPH} and memory.lacks_cache
    memory.resume_weights()
    assert scheduler.released == {KV_CACHE} and memory.lacks_cache
    memory.release()
    assert scheduler.released == {WEIGHTS, KV_CACHE, CUDA_GRAPH}
    memory.resume_weights()
    memory.resume_cache()
    assert scheduler.released == set() and not memory.lacks_cache
    calls = len(scheduler.calls)
    memory.resume_weights()
    memory.resume_cache()
    assert len(scheduler.calls) == calls, "there is nothing to ask for"
