"""The command line of an SGLang server, and what is asked of one whose device memory is shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_rl import config
from elastic_rl.config import DeviceConfig, EngineConfig
from elastic_rl.config.engine import OWN_OPTIONS
from elastic_rl.engine.server.device_memory import CUDA_GRAPH, KV_CACHE, WEIGHTS, DeviceMemory
from elastic_rl.engine.server.sglang_server import SGLangServer
from elastic_rl.errors import ConfigError, EngineFailed
from elastic_rl.host.local_host import LocalHost
from elastic_rl.host.paths import ClusterPaths
from elastic_rl.net.addresses import LOOPBACK
from elastic_rl.net.cluster_secret import ClusterSecret
from elastic_rl.net.tls import TlsFolder


@pytest.mark.parametrize("shares", [True, False])
def test_memory_saver_is_on_where_device_memory_is_shared_on_a_gpu(tmp_path: Path, shares: bool) -> None:
    server = SGLangServer("model", host=LOOPBACK, cfg=EngineConfig(), device=DeviceConfig(), log=tmp_path / "log",
                          seed=1, tag="args", shares_devices=shares)
    assert ("--enable-memory-saver" in server.arguments(cuda=True)) == shares
    assert "--enable-memory-saver" not in server.arguments(cuda=False), "there is nothing to save on a CPU"


def test_server_tells_its_load_of_each_step_and_nobody_else_says_how_often(tmp_path: Path) -> None:
    """An engine without requests, by its load, ends, or changes its weights."""
    server = SGLangServer("model", host=LOOPBACK, cfg=EngineConfig(), device=DeviceConfig(), log=tmp_path / "log",
                          seed=1, tag="args")
    arguments = server.arguments(cuda=True)
    assert arguments[arguments.index("--load-snapshot-publish-interval") + 1] == "1"
    with pytest.raises(ConfigError, match="load-snapshot-publish-interval is set by the engine itself"):
        config.parse({"engine": {"extra_args": ["--load-snapshot-publish-interval=40"]}})


def test_only_http_with_tls_is_open_to_others_of_an_engine_that_they_reach(tmp_path: Path) -> None:
    def arguments(host: str, tls: TlsFolder | None) -> list[str]:
        return SGLangServer("model", host=host, cfg=EngineConfig(), device=DeviceConfig(), log=tmp_path / "log", seed=1,
                            tag="args", tls=tls, has_weights=tls is None).arguments(cuda=False)

    paths = ClusterPaths(tmp_path)
    LocalHost(name="a").certify(paths, "lab", ClusterSecret.generate())
    here, far = arguments(LOOPBACK, None), arguments("10.0.0.7", paths.tls)
    assert far[far.index("--ssl-certfile") + 1] == str(paths.tls.cert)
    assert far[far.index("--ssl-keyfile") + 1] == str(paths.tls.key)
    assert far[far.index("--dist-init-addr") + 1].startswith(f"{LOOPBACK}:")
    assert far[far.index("--load-format") + 1] == "dummy"
    assert not {"--ssl-certfile", "--dist-init-addr", "--load-format"} & set(here)


def test_tokenizer_is_loaded_where_requests_have_texts(tmp_path: Path) -> None:
    def skips(reads_text: bool) -> bool:
        return "--skip-tokenizer-init" in SGLangServer(
            "model", host=LOOPBACK, cfg=EngineConfig(), device=DeviceConfig(), log=tmp_path / "log", seed=1, tag="args",
            reads_text=reads_text).arguments(cuda=False)

    assert skips(False) and not skips(True)


def test_engine_that_is_given_gpus_uses_them_where_its_runner_sees_none(tmp_path: Path) -> None:
    def uses_cuda(device: str, gpus: str) -> bool:
        return SGLangServer("model", host=LOOPBACK, cfg=EngineConfig(), device=DeviceConfig(type=device),  # type: ignore[arg-type]
                            log=tmp_path / "log", seed=1, tag="args", gpus=gpus).uses_cuda()

    assert uses_cuda("auto", "2,3") and not uses_cuda("cpu", "2,3")


class Scheduler:
    """SGLang's scheduler, as far as it keeps account of what is released: it fails for a tag that is not there to
    resume."""

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


def test_every_tag_is_resumed_even_if_a_phase_ends_early() -> None:
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


_OPEN = {"--log-level", "--sleep-on-idle", "--attention-backend", "--disable-overlap-schedule", "--disable-cuda-graph",
         "--disable-radix-cache", "--enable-memory-saver", "--enable-deterministic-inference"}
"""Options of the engine's own that a user may replace: nothing else goes by them."""


@pytest.mark.parametrize("cuda", [True, False])
def test_check_of_extra_args_knows_the_engines_own_options(tmp_path: Path, cuda: bool) -> None:
    server = SGLangServer("model", host=LOOPBACK, cfg=EngineConfig(), device=DeviceConfig(), log=tmp_path / "log",
                          seed=1, tag="args", shares_devices=True, folder_version=3)
    found = {word for word in server.arguments(cuda=cuda) if word.startswith("--")}
    assert found - _OPEN <= OWN_OPTIONS.keys() and "--weight-version" in found


@pytest.mark.parametrize(("words", "text"), [
    (["--host=0.0.0.0"], "--host is set by the engine itself; leave it out"), (["--por", "1"], "--port is set"),
    (["--model", "/x"], "--model-path is set"), (["--weight-version=9"], "--weight-version is set"),
    (["--max-total-tokens", "9"], "set engine.max_total_tokens"), (["--dtype=float16"], "set device.dtype"),
    (["--tokenizer-worker-num", "2"], "leave --tokenizer-worker-num out: SGLang does not ask for a key"),
    (["--tokenizer-w=2"], "leave --tokenizer-worker-num out"), (["--grpc-port", "1"], "leave --grpc-port out"),
    (["--smg-grpc-mode"], "leave --smg-grpc-mode out"), (["--log-level", "info"], "the engine's key is among them"),
    (["--log-level=DEBUG"], "--log-level is warning or error"), (["--log-level"], "--log-level is warning or error")])
def test_extra_arguments_that_replace_the_engines_own_are_refused(words: list[str], text: str) -> None:
    for values in ({"engine": {"extra_args": words}},
                   {"pools": {"judge": {"model": "/judge", "engine": {"extra_args": words}}}}):
        with pytest.raises(ConfigError) as refused:
            config.parse(values)
        assert text in refused.value.message
    config.parse({"engine": {"extra_args": ["--tp", "2", "--mem-fraction-static=0.8", "--attention-backend", "fa3",
                                            "--log-level", "ERROR", "--log-level-http", "info"]}})

