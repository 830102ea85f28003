"""A client of the admin API that runs an SGLang server of its own, registers it with the pool of a job, and takes it
out again, as the manual of external engines says."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from chaos_tests.event_log import EventLog
from chaos_tests.traffic.cluster_changes import Target
from chaos_tests.traffic.job_clients import JobClients
from chaos_tests.traffic.pool_changes import POOL
from elastic_rl.config import Config
from elastic_rl.engine.server.sglang_server import SGLangServer
from elastic_rl.errors import EngineFailed
from elastic_rl.host.address import own_address
from elastic_rl.host.job_secrets import engine_key_file, engine_tls
from elastic_rl.host.paths import JobPaths
from elastic_rl.runtime.waiting import wait_until

_SERVES_S = 10.0
"""The server is in the pool for so long."""
_LEAVES_S = 300.0
"""At the end it has left the pool after so long."""


def own_server(cfg: Config) -> SGLangServer:
    """A server that fits the engines of a job on this host. It ends with this process."""
    paths = JobPaths.of(cfg)
    return SGLangServer(str(cfg.model.path or paths.model), cfg=cfg.engine, device=cfg.device, has_weights=False,
                        log=paths.log("chaos-server"), seed=cfg.seed, tag=paths.file_tag("chaos-server"),
                        host=own_address(), key_file=engine_key_file(cfg), tls=engine_tls(cfg))


class Registrations(JobClients):
    """One client, since a server can be registered once at a time. Each request goes to any replica."""

    def __init__(self, target: Target, seed: int, make_server: Callable[[], SGLangServer], *, pause_s: float = 10.0,
                 log: EventLog | None = None) -> None:
        super().__init__(target, seed, pause_s=pause_s, log=log)
        self._make_server = make_server
        self._server: SGLangServer | None = None

    def workers(self) -> Sequence[Callable[[], None]]:
        return [self._serve]

    def _serve(self) -> None:
        self._server = self._make_server()
        try:
            self._server.start(wait_while=lambda: not self.stopping)
        except EngineFailed:
            if self.stopping:
                return
            raise
        choose = random.Random(f"{self._seed} {type(self).__name__}")
        while not self.pause(self._pause_s * 2 * choose.random()):
            if self.act(choose.choice([*self.calls.target.urls]), choose):
                self.count()

    @property
    def url(self) -> str:
        """"" before the server was started."""
        return self._server.url if self._server is not None else ""

    def act(self, replica: str, choose: random.Random) -> bool:
        begun, state = self.carry_out(replica, choose, "engines", {"url": self.url, "pool": POOL})
        if not begun or state not in ("succeeded", ""):
            return False
        self.pause(_SERVES_S)
        engine = self.calls.engine_at(replica, self.url)
        return bool(engine) and bool(self.carry_out(replica, choose, f"engines/{engine}", None, method="DELETE")[0])

    def close(self) -> None:
        """Ends the server once it has left the pool: else its end would be a fault."""
        self.stop()
        try:
            if self._server is not None:
                wait_until(self._has_left, timeout_s=_LEAVES_S, poll_s=1.0, what="the server to leave the pool")
        finally:
            if self._server is not None:
                self._server.close()
            super().close()

    def _has_left(self) -> bool:
        for replica in self.calls.target.urls:
            engine = self.calls.engine_at(replica, self.url)
            if engine == "":
                return True
            if engine:
                self.calls.create(replica, f"engines/{engine}", None, f"last-{engine}", "last", method="DELETE")
        return False
