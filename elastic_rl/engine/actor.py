"""The body of an engine's Ray actor: a plain class without Ray, which the driver makes an actor."""

from __future__ import annotations

import os
import signal

from elastic_rl.engine.colocated_runner import ColocatedRunner
from elastic_rl.engine.runner import EngineRunner
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.here import context_here
from elastic_rl.host.paths import JobPaths
from elastic_rl.runtime.process import freeze_heap
from elastic_rl.telemetry import logs, traces
from elastic_rl.telemetry.log_files import redirect_output


class EngineActor:
    """Needs a concurrency of 2 or more: ``run`` blocks until the engine has ended."""

    def __init__(self, ctx: RunContext, engine_id: str, pool: str, external_url: str = "", gpus: str = "") -> None:
        """``gpus``: those that it shares with the trainer, as ``CUDA_VISIBLE_DEVICES`` has them. Raises ConfigError."""
        ctx = context_here(ctx)
        redirect_output(JobPaths.of(ctx.config).log(f"runner-{engine_id}"))  # SGLang's own one is engine-….log
        logs.setup(f"engine-{engine_id}", ctx.config.telemetry.log_level)
        traces.setup(ctx.config.telemetry.otlp_endpoint, "elastic-rl.engine")
        # An external server shares no device with the trainer: its memory is someone else's.
        shares = ctx.pool(pool).colocated and not external_url
        self._runner = (ColocatedRunner(ctx, engine_id, pool, gpus) if shares
                        else EngineRunner(ctx, engine_id, pool, external_url=external_url))
        freeze_heap()

    def run(self) -> None:
        """Returns when the engine was drained, stopped or found dead."""
        self._runner.run()

    def drain(self) -> None:
        """Makes the engine leave the pool; ``run`` returns when it has left."""
        self._runner.drain()

    def hurry(self) -> None:
        """Has an engine that leaves give its requests back now: its host ends in a moment."""
        self._runner.hurry()

    def kill_hung(self) -> None:
        """Writes the stacks of this process and its server, and kills this one, with which the server dies: an engine
        that hangs can do nothing else."""
        try:
            self._runner.write_stacks("it hangs, or stays behind the others", [os.getpid()], report=True)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)

    def stop(self) -> None:
        """Makes the engine end at once."""
        self._runner.stop()
