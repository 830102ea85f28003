"""The body of an engine's Ray actor. The driver decorates it; here it is a plain class, and nothing imports Ray."""

from __future__ import annotations

from typing import Any

from elastic_rl.engine.runner import EngineRunner
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.runtime import freeze_heap
from elastic_rl.telemetry import logs, traces


class EngineActor:
    """Needs a concurrency of 2 or more: ``run`` blocks for the engine's whole life."""

    def __init__(self, ctx: RunContext, engine_id: str, pool: str = "rollout", attach_to: str = "") -> None:
        logs.setup(f"engine-{engine_id}", ctx.config.telemetry.log_level)
        traces.setup(ctx.config.telemetry.otlp_endpoint, "elastic-rl.engine")
        self._runner = EngineRunner(ctx, engine_id, pool=pool, attach_to=attach_to)
        freeze_heap()

    def run(self) -> None:
        """Returns when the engine was drained, stopped or found dead."""
        self._runner.run()

    def ping(self) -> dict[str, Any]:
        """State, version and server pid of the engine."""
        return self._runner.ping()

    def drain(self) -> None:
        """Asks the engine to leave the pool; ``run`` returns when it did."""
        self._runner.drain()

    def stop(self) -> None:
        """Asks the engine to end at once."""
        self._runner.stop()
