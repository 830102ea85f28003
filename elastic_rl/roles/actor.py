"""The actor role: the run's single controller. Its replica runs the training loop in a thread of its own."""

from __future__ import annotations

import logging
import threading

from ray import serve

from elastic_rl.errors import ElasticRLError, Fenced
from elastic_rl.etcd import fencing
from elastic_rl.etcd.records import Severity
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.roles.base import Role
from elastic_rl.roles.loop import TrainingLoop
from elastic_rl.roles.role_clients import RoleClients
from elastic_rl.trainer.client import TrainerClient

log = logging.getLogger(__name__)


class ActorRole(Role):
    """Starts the loop as soon as the replica is up: a new replica resumes from committed state by itself."""

    name = "actor"

    def __init__(self, ctx: RunContext) -> None:
        super().__init__(ctx)
        cfg = ctx.config
        trainer = TrainerClient(self.etcd, ctx.keys, step_timeout_s=cfg.trainer.step_timeout_s,
                                start_timeout_s=cfg.trainer.start_timeout_s)
        clients = RoleClients(rollout=serve.get_app_handle("rollout"), advantages=serve.get_app_handle("advantages"),
                              timeout_s=cfg.engine.request_timeout_s * (cfg.rollout.max_attempts + 1))
        self.loop = TrainingLoop(ctx, self.etcd, self.member, trainer, clients)
        self._failure: ElasticRLError | None = None
        self._thread = threading.Thread(target=self._run, name="training-loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.loop.run()
        except Fenced as e:
            log.warning("the training loop ends: %s", e)
            self._failure = e
        except ElasticRLError as e:
            log.exception("the run failed")
            self._failure = e
            self.loop.status.write("failed", message=str(e))
            fencing.emit(self.etcd, self.ctx.keys, self.ctx.epoch, "run.failed", self.ctx.job, str(e),
                         severity=Severity.ERROR)

    def check_health(self) -> None:
        """Called by Ray Serve. Raises when the loop's thread has ended without a result, so that the replica is
        replaced."""
        if not self._thread.is_alive() and self._failure is None and not self.loop.finished:
            raise RuntimeError("the training loop ended without a result")

