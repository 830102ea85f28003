"""The actor's loop in threads: as many replicas as a test starts, of which a later one fences those before it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.membership import Membership
from elastic_rl.etcd.records import Engine, EngineState, JobStatus
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.pipeline.pipeline import Pipeline
from support.waiting import wait_until

WAIT_S = 120.0
"""For what takes seconds, on a machine that may be busy."""


@dataclass
class ActorRun:
    """One replica. ``errors``: what has ended it."""

    pipeline: Pipeline
    stopping: threading.Event
    errors: list[Exception] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.pipeline.run()
        except Exception as e:
            self.errors.append(e)

    def stop(self, timeout_s: float) -> None:
        self.stopping.set()
        self.thread.join(timeout_s)


class ThreadedJob:
    """A job with an engine on record and without Ray. ``roles``: what stands for the other roles."""

    def __init__(self, etcd: EtcdClient, ctx: RunContext, roles: Any) -> None:
        self.etcd, self.keys, self.ctx, self.roles = etcd, ctx.keys, ctx, roles
        self.member = Membership(etcd, ctx.keys, "actor", "actor-1", ttl_s=10, epoch=ctx.epoch).start()
        self.runs: list[ActorRun] = []
        self.stop_asked = threading.Event()
        """Whether the operator stops the run."""
        engine = Engine(id="rollout-e", pool="rollout", state=EngineState.READY, epoch=ctx.epoch, version=1 << 30)
        etcd.put(ctx.keys.engine(engine.id), engine.encode())

    def start_actor(self) -> list[Exception]:
        """One more replica of the actor; returns where the error appears that ends it."""
        stopping = threading.Event()
        run = ActorRun(Pipeline(self.ctx, self.etcd, self.member, self.roles, stopping, self.stop_asked), stopping)
        self.runs.append(run)
        return run.errors

    def status(self) -> JobStatus:
        found = self.etcd.get(self.keys.job_status())
        return JobStatus.decode(found.value) if found else JobStatus(phase="")

    def wait_for(self, step: int, *, phase: str = "") -> None:
        """``phase``: in which the step counts; empty: in any."""
        wait_until(lambda: phase in ("", self.status().phase) and self.status().step >= step,
                   what=f"step {step}")

    def wait_waiting(self, kind: str) -> str:
        """What the run says it waits for, once it waits for this."""
        wait_until(lambda: self.status().waiting_kind == kind, what=f"a wait for {kind}")
        return self.status().waiting_for

    def finish(self) -> None:
        """Waits for the end of the job, which must be no error's."""
        wait_until(lambda: self.status().phase == "finished" or any(run.errors for run in self.runs[-1:]),
                   what="the end of the job")
        assert not self.runs[-1].errors, self.runs[-1].errors
        self.runs[-1].thread.join(WAIT_S)

    def close(self) -> None:
        for run in self.runs:
            run.stop(WAIT_S)
        self.member.close()
