"""Real SGLang engines for the bench, and the model they serve: shaped like Qwen3, random, made for the occasion."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx
import torch
from safetensors.torch import load_file

from elastic_rl import config
from elastic_rl.bench.dcs import loaders
from elastic_rl.bench.dcs.testbed import Cluster
from elastic_rl.bench.options import Unmeasurable
from elastic_rl.bench.workers import last_line
from elastic_rl.config import Config
from elastic_rl.data.tiny_model import make_model_dir
from elastic_rl.engine.server.sglang_server import SGLangServer
from elastic_rl.engine.sglang.loader import LOADER
from elastic_rl.errors import EngineFailed
from elastic_rl.host.address import own_address
from elastic_rl.host.paths import JobPaths

T = TypeVar("T")
_HIDDEN, _FFN, _HEADS, _KV_HEADS, _HEAD_DIM = 1024, 3072, 16, 8, 128
_LAYER_BYTES = 2 * (2 * _HIDDEN * _HEADS * _HEAD_DIM + 2 * _HIDDEN * _KV_HEADS * _HEAD_DIM + 3 * _HIDDEN * _FFN)
_START_S, _CALL_S = 300.0, 120.0


def configure(folder: Path, nbytes: int) -> Config:
    """A bf16 model of about so many bytes: layers of Qwen3-0.6B."""
    return config.parse({
        "job": "bench", "run_dir": str(folder / "runs"), "device": {"type": "auto", "dtype": "bfloat16"},
        "model": {"hidden_size": _HIDDEN, "intermediate_size": _FFN, "num_heads": _HEADS, "num_kv_heads": _KV_HEADS,
                  "head_dim": _HEAD_DIM, "num_layers": max(round(nbytes / _LAYER_BYTES), 1), "max_positions": 4096},
        "engine": {"start_timeout_s": _START_S, "apply_timeout_s": _CALL_S, "max_total_tokens": 2048,
                   "max_running_requests": 8}})


class Model:
    """The folder that engines start from, and its tensors in one buffer; ``renew`` makes another version of them."""

    def __init__(self, folder: Path, cfg: Config) -> None:
        self.folder = make_model_dir(folder / "model", cfg)
        loaded = load_file(self.folder / "model.safetensors")
        self.nbytes = sum(t.nbytes for t in loaded.values())
        self.flat = torch.empty(self.nbytes // 2, dtype=torch.bfloat16)
        self.tensors: list[tuple[str, torch.Tensor]] = []
        at = 0
        for name, tensor in loaded.items():
            view = self.flat[at:at + tensor.numel()].view(tensor.shape)
            self.tensors.append((name, view.copy_(tensor)))
            at += tensor.numel()
        self._round = 0

    def renew(self) -> None:
        """Flips some of the low bits of every element: other bytes everywhere, and still sound weights."""
        self._round = self._round % 7 + 1
        self.flat.view(torch.int16).bitwise_xor_(self._round)


class BenchEngine(SGLangServer):
    """An engine that notes when it was paused, and takes the bench's loaders too."""

    pauses: list[float]
    """Seconds of each pause, from asking for it to the answer that it is over."""

    def __init__(self, index: int, model: Model, cfg: Config, folder: Path, more_loaders: Sequence[str]) -> None:
        self.folder, self.log = model.folder, folder / f"engine-{index}.log"
        self._loaders = (loaders.BARE, *more_loaders)
        super().__init__(str(model.folder), cfg=cfg.engine, device=cfg.device, log=self.log, seed=index,
                         tag=JobPaths(folder).file_tag(f"engine-{index}"), host=own_address())
        self.pauses = []
        self._asked = 0.0

    def arguments(self, cuda: bool) -> list[str]:
        args = super().arguments(cuda)
        at = args.index(LOADER)
        return [*args[:at + 1], *self._loaders, *args[at + 1:]]

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None, *,
              timeout_s: float | None = None) -> dict[str, Any]:
        if path == "/pause_generation":
            self._asked = time.monotonic()
        answer = super()._call(method, path, body, timeout_s=timeout_s)
        if path == "/continue_generation":
            self.pauses.append(time.monotonic() - self._asked)
        return answer

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """One of SGLang's own endpoints. Raises EngineFailed."""
        reply = httpx.post(self.url + path, json=body, timeout=_CALL_S)
        answer: dict[str, Any] = reply.json() if reply.content[:1] == b"{" else {}
        if not reply.is_success or answer.get("success") is False:
            raise EngineFailed(f"{path}: {reply.status_code} {reply.text[:300]}")
        return answer

    def session(self, update: Callable[[], object]) -> None:
        """``update`` between the calls that SGLang wants around it."""
        self.post("/begin_weight_update")
        update()
        self.post("/end_weight_update")

    def checksums(self) -> str:
        """Checksum of every parameter, as it now is in the engine."""
        answer = self.post("/weights_checker", action="checksum")
        return json.dumps({k: v for k, v in answer.items() if k not in ("message", "success")}, sort_keys=True)


def start(cluster: Cluster, model: Model, cfg: Config, count: int, more_loaders: Sequence[str] = ()
          ) -> list[BenchEngine]:
    """Engines that end with the cluster; started together, since most of a start is waiting for one core.
    ``more_loaders``: weight loaders that they take beside the bench's own."""
    engines = [BenchEngine(i, model, cfg, cluster.testbed.folder, more_loaders) for i in range(count)]
    for engine in engines:
        cluster.adopt(engine)
    try:
        everywhere(engines, lambda engine: engine.start())
    except EngineFailed as e:
        raise Unmeasurable(f"{e.message}; {'; '.join(last_line(engine.log) for engine in engines)}") from e
    return engines


def everywhere(engines: Sequence[BenchEngine], do: Callable[[BenchEngine], T]) -> list[T]:
    """Calls all engines at once; raises what one of them raised."""
    with ThreadPoolExecutor(len(engines)) as pool:
        return list(pool.map(do, engines))
