"""Bodies of the driver's Ray actors without an SGLang server or a trainer, for tests of the driver's own work."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from elastic_rl.errors import EtcdUnavailable
from elastic_rl.etcd.client import Op
from elastic_rl.etcd.fencing import write
from elastic_rl.etcd.membership import Membership
from elastic_rl.etcd.records import Engine, EngineState
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.here import context_here
from elastic_rl.host.paths import JobPaths
from support import http_servers

FAIL = "starts-fail"
"""A file of this name in the job's folder makes every start of an engine fail."""


class StubServer(BaseHTTPRequestHandler):
    """Answers what a router asks its workers."""

    def do_GET(self) -> None:
        body = b'{"model_path": "tiny", "weight_version": "1"}'
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class StubEngine:
    """An engine that is READY at once, and whose server generates nothing. Its layout is the GPUs that it is told to
    use."""

    def __init__(self, ctx: RunContext, engine_id: str, pool: str = "rollout", external_url: str = "", gpus: str = ""
                 ) -> None:
        self._ctx, self._id, self._pool, self._gpus = context_here(ctx), engine_id, pool, gpus
        self._external_url = external_url
        self._leave = threading.Event()

    def run(self) -> None:
        if (JobPaths.of(self._ctx.config).private / FAIL).exists():
            raise RuntimeError("no weights")
        host = self._ctx.host
        with self._ctx.connect() as etcd, http_servers.serving(ThreadingHTTPServer((host, 0), StubServer)) as server:
            key = self._ctx.keys.engine(self._id)
            with Membership(etcd, self._ctx.keys, "engine", self._id, ttl_s=30, epoch=self._ctx.epoch) as member:
                record = Engine(id=self._id, pool=self._pool, state=EngineState.READY, epoch=self._ctx.epoch,
                                incarnation=member.incarnation, pid=os.getpid(), version=1, layout=self._gpus,
                                host=host, url=self._external_url or f"http://{host}:{server.server_port}",
                                external=bool(self._external_url))
                written = False
                while not written:
                    try:
                        write(etcd, self._ctx.keys, self._ctx.epoch, Op.put(key, record.encode()))
                        written = True
                    except EtcdUnavailable:
                        continue
                member.start()
                self._leave.wait()
                write(etcd, self._ctx.keys, self._ctx.epoch, Op.delete(key))

    def drain(self) -> None:
        self._leave.set()

    def stop(self) -> None:
        self._leave.set()


class LingeringEngine(StubEngine):
    """One whose drain takes until its host ends. Its name is a file of the run's folder then."""

    def drain(self) -> None:
        pass

    def hurry(self) -> None:
        (Path(self._ctx.config.run_dir) / self._id).touch()
        self._leave.set()


class RefusedEngine(StubEngine):
    """One that leaves its record with the reason, as the engine of a server that cannot be used."""

    def run(self) -> None:
        with self._ctx.connect() as etcd:
            record = Engine(id=self._id, pool=self._pool, state=EngineState.DEAD, epoch=self._ctx.epoch,
                            reason="its server cannot be used")
            write(etcd, self._ctx.keys, self._ctx.epoch, Op.put(self._ctx.keys.engine(self._id), record.encode()))


class StubTrainer:
    """The ranks of a host that run until they are told to stop. They note their process in a file of the run's folder,
    and their GPUs in another."""

    def __init__(self, ctx: RunContext, ranks: int, hosts: int, model: str, gpus: str = "") -> None:
        self._notes = Path(ctx.config.run_dir) / "trainers"
        self._notes.with_name("gpus").write_text(gpus)
        self._stopped = threading.Event()

    def run(self) -> int:
        with self._notes.open("a") as notes:
            notes.write(f"{os.getpid()}\n")
        self._stopped.wait()
        return 0

    def stop(self) -> None:
        self._stopped.set()

    def is_stopping(self) -> bool:
        return self._stopped.is_set()


class HungTrainer(StubTrainer):
    """One that does not react."""

    def stop(self) -> None:
        pass


class KilledTrainer(StubTrainer):
    """One whose process is killed, and that leaves a folder, which it notes instead."""

    def __init__(self, ctx: RunContext, *share: Any) -> None:
        super().__init__(ctx, *share)
        self._tag = JobPaths.of(ctx.config).file_tag(ctx.group.name)

    def run(self) -> int:
        with self._notes.open("a") as notes:
            notes.write(f"{tempfile.mkdtemp(prefix=self._tag)}\n")
        os.kill(os.getpid(), signal.SIGKILL)
        return 0


class StubRole:
    """A role that does nothing."""

    def __init__(self, ctx: RunContext) -> None:
        pass
