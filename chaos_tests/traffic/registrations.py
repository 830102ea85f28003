"""A client of the admin API that runs an SGLang server of its own, registers it with the pool of a job, and takes it
out again, as the manual of external engines says."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from chaos_tests.event_log import EventLog
from chaos_tests.model.operation import FINAL
from chaos_tests.traffic.cluster_changes import ApiTarget
from chaos_tests.traffic.job_clients import JobClients
from chaos_tests.traffic.pool_changes import POOL
from elastic_rl.config import Config
from elastic_rl.errors import EngineFailed
from elastic_rl.host.address import own_address
from elastic_rl.host.job_secrets import engine_key_file, engine_tls
from elastic_rl.host.paths import JobPaths
from elastic_rl.runtime.waiting import wait_until

if TYPE_CHECKING:
    from elastic_rl.engine.server.sglang_server import SGLangServer

_SERVES_S = 10.0
"""The server is in the pool for so long."""
_LEAVES_S = 180.0
"""At the end it has left the pool after so long."""
_MIN_ATTEMPTS = 3
"""Of so many registrations one succeeds, whatever faults there are."""


def own_server(cfg: Config) -> SGLangServer:
    """A server that fits the engines of a job on this host. It ends with this process."""
    from elastic_rl.engine.server.sglang_server import SGLangServer  # torch: the list of scenarios needs none
    paths = JobPaths.of(cfg)
    return SGLangServer(str(cfg.model.path or paths.model), cfg=cfg.engine, device=cfg.device, has_weights=False,
                        log=paths.log("chaos-server"), seed=cfg.seed, tag=paths.file_tag("chaos-server"),
                        host=own_address(), key_file=engine_key_file(cfg), tls=engine_tls(cfg))


class Registrations(JobClients):
    """One client, since a server can be registered once at a time. Each request goes to any replica."""

    def __init__(self, target: ApiTarget, seed: int, make_server: Callable[[], SGLangServer], *, pause_s: float = 10.0,
                 log: EventLog | None = None) -> None:
        super().__init__(target, seed, pause_s=pause_s, log=log)
        self._make_server = make_server
        self._server: SGLangServer | None = None
        self._begun = ""
        """Key of the request whose registration may not have ended."""
        self._attempts = 0

    def workers(self) -> Sequence[Callable[[], None]]:
        return [self._serve]

    def _serve(self) -> None:
        server = self._server = self._make_server()
        try:
            server.start(wait_while=lambda: not self.stopping)
        except EngineFailed:
            if self.stopping:
                return
            raise
        choose = random.Random(f"{self._seed} {type(self).__name__}")
        while not self.pause(self._pause_s * 2 * choose.random()):
            if not server.alive():
                raise EngineFailed("the server that the clients register has ended by itself",
                                   hint="see chaos-server.log among the logs of the job")
            if self.act(choose.choice([*self.calls.target.urls]), choose):
                self.count()

    @property
    def _url(self) -> str:
        """The URL of the server; "" before it was started."""
        return self._server.url if self._server is not None else ""

    @property
    def _request(self) -> dict[str, object]:
        return {"url": self._url, "pool": POOL}

    def act(self, replica: str, choose: random.Random) -> bool:
        """What an earlier time has left registered, as where no replica answered, is taken out first."""
        if self._engine() == "":
            self._begun, self._attempts = self._begun or self.new_key(choose), self._attempts + 1
            _, state = self.carry_out(replica, choose, "engines", self._request, key=self._begun)
            if state not in FINAL:
                return False
            self._begun = ""
            self.pause(_SERVES_S)
        if not (engine := self._engine()):
            return False
        return self.carry_out(replica, choose, f"engines/{engine}", None, method="DELETE")[1] == "succeeded"

    def _engine(self) -> str | None:
        """Id of the engine that the server is, "" where it is none; None where no replica says it."""
        found = (self.calls.engine_at(replica, self._url) for replica in self.calls.target.urls)
        return next((engine for engine in found if engine is not None), None)

    def close(self) -> None:
        """Ends the server once it has left the pool: else its end would be a fault. Raises DeadlineExceeded where it
        does not leave, and EngineFailed where it never was in the pool."""
        self.stop()
        try:
            if self._server is not None and self._server.alive():
                wait_until(self._has_left, timeout_s=_LEAVES_S, poll_s=1.0, what="the server to leave the pool")
        finally:
            if self._server is not None:
                self._server.close()
            super().close()
        if self._attempts >= _MIN_ATTEMPTS and not self.accepted():
            raise EngineFailed(f"the clients' server has joined the pool in none of {self._attempts} registrations")

    def _has_left(self) -> bool:
        for replica in self.calls.target.urls:
            engine = self.calls.engine_at(replica, self._url)
            if engine is None:
                continue
            if engine:
                self._begun = ""
                self.calls.create(replica, f"engines/{engine}", None, f"last-{engine}", "last", method="DELETE")
            elif self._begun:  # the outcome of a request is unknown: the same one names its operation
                begun = self.calls.create(replica, "engines", self._request, self._begun, "last")
                if begun and self.calls.state(replica, begun, self._begun, "last") in FINAL:
                    self._begun = ""
            else:
                return True
        return False
