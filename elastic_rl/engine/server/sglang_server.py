"""One SGLang server: its processes, weights and health. Knows nothing of etcd or of the pool."""

from __future__ import annotations

import base64
import io
import json
import logging
import math
import os
import pickle
import secrets
import subprocess
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from elastic_rl.config import DeviceConfig, EngineConfig
from elastic_rl.engine.client import to_version
from elastic_rl.engine.server.arguments import tensor_parallel
from elastic_rl.engine.server.device_memory import DeviceMemory
from elastic_rl.engine.server.health import Effort
from elastic_rl.engine.server.probe import Load, ServerProbe, parse_load
from elastic_rl.engine.sglang import stager
from elastic_rl.engine.sglang.loader import LIMIT_ENV, LOADER, REQUEST
from elastic_rl.errors import DeadlineExceeded, EngineFailed
from elastic_rl.host.address import own_address
from elastic_rl.host.leftovers import remove_files
from elastic_rl.host.process_activity import ActivityMeter, of_tree
from elastic_rl.host.processes import python, spawn, stop
from elastic_rl.net import http_client
from elastic_rl.net.addresses import free_port, host_port
from elastic_rl.net.engine_key import KEY_FILE_ENV, OTHER_KEY, EngineAccess, read_key
from elastic_rl.net.listeners import check_connections
from elastic_rl.net.tls import TlsFolder
from elastic_rl.runtime.file_tags import TAG_ENV
from elastic_rl.runtime.process import runs
from elastic_rl.runtime.waiting import ProgressLimit, wait_until

log = logging.getLogger(__name__)

_START_STEPS = {"cpu_s": 0.5, "starved_s": 0.5, "read_bytes": 1 << 16}
"""What counts as progress of a start: a tree of processes that all wait still wakes up now and then."""
_START_LOOK_S = 1.0
_ANSWER_TIMEOUT_S = 5.0
_KILLED_S = 60.0
"""A killed process is gone at once, but for one that waits for a device or for a CPU."""
OTHER_KEY_HINT = (f"{OTHER_KEY}; an external one is to be started with `{KEY_FILE_ENV}=…/cluster/engine.key python -m "
                  "elastic_rl.engine.sglang.launch …`")
"""What an operator does about a server that refuses the job's key."""


@dataclass(frozen=True)
class StagedUpdate:
    """A version that ``EngineServer.apply`` can bring into the engine. ``checksums``: those of the weights, by rank;
    empty when they could not be staged and are loaded in the pause."""

    request: dict[str, Any]
    checksums: list[str]


class StagingSession:
    """Brings one version into an engine's staged weights, part by part, while the live weights serve.

    Every call raises ChunkCorrupt, NodeUnavailable and StagingFailed.
    """

    def __init__(self, stagers: stager.StagingClient) -> None:
        self._stagers = stagers

    def add(self, reference: dict[str, Any]) -> None:
        """Stages some tensors of the version, as ``Puller.pull`` passes them."""
        self._stagers.add(reference)

    def finish(self, reference: dict[str, Any]) -> StagedUpdate:
        """Seals the version after all its tensors were added; ``reference`` names all of them."""
        if not self._stagers.available:
            return StagedUpdate({"reference": reference}, [])
        ticket = secrets.token_hex(8)
        return StagedUpdate({"ticket": ticket}, self._stagers.finish(ticket))


class EngineServer(ABC):
    """An SGLang server as its engine sees it: one that the engine starts, or an external one."""

    _pause_of_drain = "abort"
    """SGLang's pause for ``engine.pause_mode=drain``, once requests have been given their time."""

    def __init__(self, cfg: EngineConfig, *, secret: str, log_hint: str, access: EngineAccess = EngineAccess(),
                 hooks: Sequence[Callable[[httpx.Request], None]] = ()) -> None:
        """``secret``: the secret of the stagers of its schedulers; ``log_hint``: where the cause of a failure is found;
        ``access``: to it; ``hooks``: called with each request, of which one checks who listens where that is to be
        this user."""
        self._cfg, self._secret, self._log_hint = cfg, secret, log_hint
        self._http = http_client.client(timeout=cfg.apply_timeout_s, users=None, event_hooks={"request": hooks},
                                        **access.options)
        self._probe = ServerProbe(lambda: self.url, timeout_s=probe_timeout_s(cfg), access=access, hooks=hooks)
        self._meter = ActivityMeter(())
        self._condemned = ""
        self.memory = DeviceMemory(self._call)

    @property
    @abstractmethod
    def url(self) -> str: ...

    @property
    @abstractmethod
    def pid(self) -> int:
        """Pid of the main process; 0 for an external server, and before the start."""

    @property
    def pids(self) -> list[int]:
        """Pids of the main process and its children; empty for an external server, and until the server answered."""
        return []

    @property
    @abstractmethod
    def layout(self) -> str:
        """What determines the layout of the weights in memory: engines of one layout and version hold equal bytes."""

    @property
    @abstractmethod
    def tensor_parallel(self) -> int:
        """Schedulers that share the weights."""

    @abstractmethod
    def start(self, wait_while: Callable[[], bool] = lambda: True) -> None:
        """Returns when the server answers. Raises EngineFailed, also when ``wait_while`` turns false."""

    @abstractmethod
    def alive(self) -> bool:
        """Whether the server runs and still has the weights that were applied to it."""

    @property
    def failure(self) -> str:
        """Why ``alive`` is false."""
        return self._condemned or "a process of the SGLang server ended"

    # -- health: called in the monitor's thread -------------------------------------------------------------------
    @property
    def probe_interval_s(self) -> float:
        """Seconds between two calls of ``probe``."""
        return self._cfg.probe_interval_s

    def probe(self) -> bool | None:
        """Whether the server shows a sign of life; None when it was not asked. Bounded; raises nothing. Not while its
        weights change."""
        return self._probe.sign_of_life()

    def effort(self) -> Effort:
        """What the busiest of its processes did since the last call."""
        since = self._meter.since()
        # One that sleeps on a disk works, as far as can be seen: it is limited like one that uses a CPU. One that is
        # ready to run now has waited for a CPU in the time in which it did not run.
        return Effort(math.inf if since.on_disk else since.cpu_s, math.inf if since.ready else since.starved_s)

    def condemn(self, reason: str) -> None:
        """Makes ``alive`` false, and kills the processes of a server that is not external: calls that wait for it fail
        at once, and the router sees it go."""
        self._condemned = reason

    @property
    def load(self) -> Load | None:
        """Load as of the last probe."""
        return self._probe.load

    @abstractmethod
    def stop(self) -> bool:
        """Ends the server, unless it is external. False when a killed process of it still runs, and may have device
        memory."""

    def model_version(self) -> int:
        """Version that the engine puts on its answers; 0 before the first update. Raises EngineFailed."""
        return to_version(self._call("GET", "/model_info").get("weight_version"))

    def checksum(self) -> str:
        """Checksum of the weights that it serves, in its own layout. Takes as long as reading them. Raises
        EngineFailed."""
        answer = self._call("POST", "/weights_checker", {"action": "checksum"}, timeout_s=self._cfg.start_timeout_s)
        return str(answer.get("per_engine_checksum") or "")

    def in_flight(self) -> int:
        """Requests that run or wait in the engine. Raises EngineFailed."""
        return parse_load(self._call("GET", "/v1/loads")).in_flight

    def abort_requests(self) -> None:
        """Ends every request that runs or waits in the engine. Raises EngineFailed."""
        self._call("POST", "/abort_request", {"rid": "", "abort_all": True})

    # -- weights --------------------------------------------------------------------------------------------------
    @contextmanager
    def stage(self) -> Iterator[StagingSession]:
        """Stages a version beside the weights that serve. The live weights do not change."""
        with stager.StagingClient(self._secret, self.tensor_parallel, timeout_s=self._cfg.apply_timeout_s) as stagers:
            yield StagingSession(stagers)

    def apply(self, update: StagedUpdate, version: int) -> None:
        """Replaces the weights, verified in the loader, and sets ``version``.

        With ``engine.pause_mode=retract`` requests in flight return to the queue: the tokens that they have stay with
        the old version, their KV cache is computed again under the new one, and the answer says where the version
        changed. With ``abort`` they are answered with the tokens that they have, and so are those that are left, or
        have come late, with ``drain``: one that went on would be of two versions. Raises EngineFailed;
        the weights may then be torn, and the engine must not serve again.
        """
        mode = self._cfg.pause_mode
        self._call("POST", "/pause_generation", {"mode": self._pause_of_drain if mode == "drain" else mode})
        self._call("POST", "/begin_weight_update", {})
        # One call, so the version that SGLang records after each call is recorded after the last byte; it also drops
        # the prefix cache, which holds KV of the old weights (and cannot be dropped under requests that use it).
        self._call("POST", "/update_weights_from_tensor", {
            "serialized_named_tensors": [pack(update.request)] * self.tensor_parallel, "load_format": LOADER,
            "weight_version": str(version), "flush_cache": mode != "in_place"})
        self._call("POST", "/end_weight_update", {})
        self._call("POST", "/continue_generation", {})
        # Checked after the pause, to keep it short; until then the record says `applying`.
        seen = self.model_version()
        if seen != version or not self.alive():
            raise EngineFailed(f"the engine reports version {seen} after version {version} was applied")

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None, *,
              timeout_s: float | None = None) -> dict[str, Any]:
        limit = self._http.timeout if timeout_s is None else timeout_s
        try:
            reply = self._http.request(method, self.url + path, json=body, timeout=limit)
        except httpx.HTTPError as e:
            raise EngineFailed(f"engine {self.url} failed at {path}: {type(e).__name__}",
                               hint=self._log_hint) from e
        if not reply.is_success:
            raise EngineFailed(f"engine {self.url} refused {path}: {reply.status_code} {reply.text[:300]}",
                               hint=OTHER_KEY_HINT if reply.status_code == httpx.codes.UNAUTHORIZED else "")
        try:
            answer = reply.json()
        except json.JSONDecodeError:
            answer = {}
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineFailed(f"engine {self.url} failed {path}: {answer.get('message', '')}")
        return answer if isinstance(answer, dict) else {"items": answer}

    def close(self) -> None:
        """Stops the server, unless it is external, and closes the connections to it."""
        self.stop()
        self._http.close()


class SGLangServer(EngineServer):
    """A server with its scheduler and detokenizer processes, all of which end with this process.

    ``model_dir``: HF folder. ``seed`` seeds the sampler: engines of a pool need
    different ones, or they would produce the same samples. ``log``: file for stdout and stderr. ``tag``: put into the
    names of the server's files in /dev/shm and the temp folder; ``stop`` removes the files of this tag.
    """

    def __init__(self, model_dir: str, *, cfg: EngineConfig, device: DeviceConfig, log: Path, seed: int, tag: str,
                 host: str, deterministic: bool = False, folder_version: int = 0,
                 shares_devices: bool = False, gpus: str = "", key_file: Path | None = None,
                 tls: TlsFolder | None = None, has_weights: bool = True, reads_text: bool = False) -> None:
        """``deterministic``: what a sample gets depends on nothing but the weights, its prompt and its seed.
        ``folder_version``: the version of the folder's weights; 0 where they belong to no version. ``has_weights``:
        whether the folder has weights; else the server begins with arbitrary ones. ``shares_devices``: its device
        memory is to be released and resumed (``memory``). ``gpus``: the ones it uses, as ``CUDA_VISIBLE_DEVICES`` has
        them; empty: those that this process sees. ``key_file``: the file of the key that it asks for (``engine_key``).
        ``reads_text``: requests may have texts that end a response.
        ``tls``: the certificate that it serves with; None: without TLS. Raises ConfigError for files that cannot be
        read."""
        super().__init__(cfg, secret=stager.new_secret(), log_hint=f"see its log: {log}", hooks=[check_connections],
                         access=EngineAccess(read_key(key_file) if key_file is not None else "",
                                             str(tls.ca) if tls is not None else ""))
        self._tls, self._has_weights, self._reads_text = tls, has_weights, reads_text
        self._key_file = key_file
        self._model_dir, self._device, self._log, self._seed = model_dir, device, log, seed
        self._host, self._tag, self._deterministic = host, tag, deterministic
        self._folder_version, self._shares_devices, self._gpus = folder_version, shares_devices, gpus
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._processes: list[psutil.Process] = []
        self._ending = threading.Lock()
        self._has_ended = True
        """False once a process of the server outlived its SIGKILL."""

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://{host_port(self._host, self._port)}"

    @property
    def pid(self) -> int:
        """Pid of the main process; 0 before the start."""
        return self._process.pid if self._process else 0

    @property
    def pids(self) -> list[int]:
        return [p.pid for p in self._processes]

    def start(self, wait_while: Callable[[], bool] = lambda: True) -> None:
        """Returns when the server answers. Raises EngineFailed, also when ``wait_while`` turns false, and PortTaken."""
        self._port = free_port(self._host)
        cuda = self.uses_cuda()
        env = {"HF_HUB_OFFLINE": "1", TAG_ENV: self._tag, stager.ENV: self._secret,
               LIMIT_ENV: str(self._cfg.staging_limit_bytes)}
        if not cuda:
            # Two threads per engine make 2 cores slower, not faster, and the allocator's arenas cost memory.
            env |= {"OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": "1", "MALLOC_ARENA_MAX": "2",
                    **_cores_of_ranks(self.tensor_parallel)}
        if self._gpus:
            env["CUDA_VISIBLE_DEVICES"] = self._gpus
        if self._key_file is not None:
            env[KEY_FILE_ENV] = str(self._key_file)
        env["SGLANG_HEALTH_CHECK_TIMEOUT"] = str(math.ceil(probe_timeout_s(self._cfg)))
        self._process = spawn(python("elastic_rl.engine.sglang.launch", *self.arguments(cuda)), log=self._log, env=env)
        limit = ProgressLimit(self._cfg.start_timeout_s, steps=_START_STEPS)
        look_at = 0.0

        def goes_on() -> bool:
            nonlocal look_at
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + _START_LOOK_S
                limit.update(self._start_evidence())
            return self._main_alive() and wait_while() and not limit.expired

        try:
            wait_until(self._answers, timeout_s=self._cfg.start_ceiling_s, what=f"the SGLang server (log: {self._log})",
                       poll_s=0.1, alive=goes_on)
        except DeadlineExceeded as e:
            self.stop()
            if limit.expired:
                raise EngineFailed(f"the start of the SGLang server made no progress for {limit.stalled_s:.0f} s",
                                   hint=self._log_hint) from e
            raise EngineFailed(e.message, hint=e.hint) from e
        except EngineFailed:
            self.stop()
            raise
        main = psutil.Process(self._process.pid)
        self._processes = [main, *main.children(recursive=True)]
        self._meter = ActivityMeter(self.pids)

    def _start_evidence(self) -> dict[str, float]:
        activity = of_tree(self.pid)
        try:
            log_bytes = self._log.stat().st_size
        except OSError:
            log_bytes = 0
        return {"cpu_s": activity.cpu_s, "starved_s": activity.starved_s, "read_bytes": activity.read_bytes,
                "log_bytes": log_bytes}

    def uses_cuda(self) -> bool:
        # Ray hides the GPUs from an actor that it gave none, as to the runner of an engine that shares some.
        return self._device.uses_cuda(lambda: bool(self._gpus) or torch.cuda.is_available())

    def arguments(self, cuda: bool) -> list[str]:
        """Command line of sglang.launch_server."""
        # On a CPU the last bits of a product depend on the number of its rows, so nothing is batched.
        alone = self._deterministic and not cuda
        args = ["--model-path", self._model_dir, "--host", self._host, "--port", str(self._port),
                "--dtype", self._device.dtype, "--random-seed", str(self._seed),
                "--max-total-tokens", str(self._cfg.max_total_tokens),
                "--max-running-requests", str(self._cfg.max_running_requests),
                "--custom-weight-loader", LOADER, "--log-level", "warning",
                # The store by which its schedulers find each other takes commands from whoever reaches it.
                *(() if self._host == own_address() else ("--dist-init-addr", host_port(own_address(), free_port()))),
                *(() if self._has_weights else ("--load-format", "dummy")),
                *(("--ssl-certfile", str(self._tls.cert), "--ssl-keyfile", str(self._tls.key)) if self._tls else ()),
                *(("--weight-version", str(self._folder_version)) if self._folder_version else ()),
                *(() if self._reads_text else ("--skip-tokenizer-init",)),   # token ids in, token ids out
                # It tells its load after so many steps, by default 15. Until then an engine with requests seems to have
                # none, and would end, or update, under them.
                "--load-snapshot-publish-interval", "1",
                "--skip-server-warmup", "--sleep-on-idle"]  # without the latter an idle scheduler spins a core
        if not cuda:
            args += ["--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule",
                     "--disable-cuda-graph", "--disable-radix-cache"]  # the tree costs more than short prompts' prefill
        elif self._shares_devices:
            args.append("--enable-memory-saver")
        seeded = self._cfg.seeded_sampling
        if self._deterministic or seeded == "on" or (seeded == "auto" and not cuda):
            args.append("--enable-deterministic-inference")
        # The last one of an option counts.
        return [*args, *self._cfg.extra_args, *(("--max-running-requests", "1") if alone else ())]

    @property
    def layout(self) -> str:
        extra = zlib.crc32(json.dumps(self._cfg.extra_args).encode())
        return f"{self._device.dtype}/tp{self.tensor_parallel}/{extra:08x}"

    # -- health ---------------------------------------------------------------------------------------------------
    def alive(self) -> bool:
        """Whether the main process and every child that it had when it first answered still run."""
        return not self._condemned and self._main_alive() and all(runs(p) for p in self._processes[1:])

    def condemn(self, reason: str) -> None:
        super().condemn(reason)
        with self._ending:
            for process in self._processes:  # SIGTERM would hang
                if runs(process):
                    process.kill()

    def _main_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _answers(self) -> bool:
        try:
            return self._http.get(f"{self.url}/model_info", timeout=_ANSWER_TIMEOUT_S).is_success
        except httpx.HTTPError:
            return False

    @property
    def tensor_parallel(self) -> int:
        return tensor_parallel(self._cfg.extra_args)

    # -- end ------------------------------------------------------------------------------------------------------
    def stop(self, *, grace_s: float = 0.0) -> bool:
        """Ends every process of the server and removes its files; without grace at once, since SGLang's own shutdown
        can take a minute."""
        with self._ending:
            if self._process is None:
                return self._has_ended
            for process in self._processes[1:] if not grace_s else ():
                if runs(process):
                    process.kill()
            stop(self._process.pid, grace_s=grace_s)
            try:
                self._process.wait(_KILLED_S)
            except subprocess.TimeoutExpired:  # it ends when the kernel lets it; what follows must not wait for it
                self._has_ended = False
                log.warning("the server of %s (pid %d) has not ended %d s after SIGKILL", self._tag, self._process.pid,
                            _KILLED_S)
            for process in self._processes[1:]:  # those that had left the tree when the main process ended
                if runs(process):
                    process.kill()
            self._process = None
        remove_files(self._tag)
        return self._has_ended


def probe_timeout_s(cfg: EngineConfig) -> float:
    """Limit for the generation of one token: several fit into the time after which a silent engine counts as frozen."""
    return max(1.5, min(10.0, cfg.frozen_after_s / 3))


def _cores_of_ranks(ranks: int) -> dict[str, str]:
    """SGLang needs a NUMA node for each rank on the CPU, unless the environment assigns cores to ranks."""
    name = "SGLANG_CPU_OMP_THREADS_BIND"
    if ranks == 1 or name in os.environ:
        return {}
    cores = sorted(os.sched_getaffinity(0))
    return {name: "|".join(",".join(map(str, cores[rank::ranks] or cores)) for rank in range(ranks))}


class _InBand:
    """Makes pickle write a uint8 tensor as its bytes. torch's default passes a shared-memory handle instead, which
    needs a helper process in the sender and ends the engine when the handle cannot be opened."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return torch.ByteTensor, (bytearray(self._raw),)


def pack(request: dict[str, Any]) -> str:
    """The request in the form that SGLang's endpoint takes: base64 of a pickle, which *its* restricted unpickler
    reads. This project only writes one, to a server of this host, and never reads a pickle."""
    buffer = io.BytesIO()
    pickle.dump([(REQUEST, _InBand(json.dumps(request).encode()))], buffer, protocol=4)
    return base64.b64encode(buffer.getvalue()).decode()
