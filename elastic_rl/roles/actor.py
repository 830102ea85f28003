"""The actor role: the run's single controller. Its replica runs the training loop in a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import threading

from ray import serve

from elastic_rl.errors import ElasticRLError, Fenced
from elastic_rl.etcd import fencing
from elastic_rl.etcd.cluster_records import JobRecord, is_stopped
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.etcd.membership import members
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.pipeline.pipeline import Pipeline
from elastic_rl.roles.base import Role
from elastic_rl.roles.registry import ROLES
from elastic_rl.roles.role_clients import RoleClients

log = logging.getLogger(__name__)

_STOP_READ_S = 0.5
"""Whether the job was stopped is read so often."""
_CALLED = ("rollout", "advantages", "genrm", "teacher")


class ActorRole(Role):
    """Starts the loop as soon as the replica is up: a new replica resumes from committed state by itself, and fences
    off the loop of its predecessor."""

    name = "actor"

    def __init__(self, ctx: RunContext) -> None:
        super().__init__(ctx)
        cfg = ctx.config
        self._stopping, self._stop_asked = threading.Event(), threading.Event()
        clients = RoleClients({name: serve.get_app_handle(name) for name in _CALLED if ROLES[name].is_wanted(cfg)},
                              cfg, lambda role: bool(members(self.etcd, ctx.keys, role)), lambda: self.pipeline.term)
        self.pipeline = Pipeline(ctx, self.etcd, self.member, clients, self._stopping, self._stop_asked)
        self._ended = ""
        self._thread = threading.Thread(target=self._run, name="training-loop", daemon=True)
        self._thread.start()
        threading.Thread(target=self._follow_job, name="follow-job", daemon=True).start()

    def _follow_job(self) -> None:
        """Has the loop end once the operator has stopped this submission of the job. An outage of etcd is no stop, and
        neither is a record that this release cannot read."""
        key = ClusterKeys(self.ctx.config.cluster_name).job(self.ctx.job)
        while not self._stopping.wait(_STOP_READ_S):
            with contextlib.suppress(ElasticRLError):
                record = readable_one(found := self.etcd.get(key), JobRecord)
                if (record is not None or found is None) and is_stopped(record, self.ctx.submission):
                    self._stop_asked.set()
                    return

    def _run(self) -> None:
        try:
            self.pipeline.run()
        except Fenced as e:
            log.warning("the training loop ends: %s", e)
            self._ended = str(e)
        except Exception as e:  # a fault of ours or of a plug-in: a new replica begins from committed state
            log.exception("the training loop ended")
            self._ended = f"{type(e).__name__}: {e}"

    def check_health(self) -> None:
        """Called by Ray Serve. Raises when the loop has ended before the run, so that the replica is replaced; not when
        the whole epoch is over, which ends this replica anyway."""
        if self._thread.is_alive() or self.pipeline.finished:
            return
        try:
            if fencing.current_epoch(self.etcd, self.ctx.keys) != self.ctx.epoch:
                return
        except ElasticRLError:
            return  # etcd is away: the next check decides
        raise RuntimeError(f"the training loop ended: {self._ended or 'see the log'}")

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=5.0)
        super().close()
