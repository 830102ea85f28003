"""The actor's loop in threads: as many replicas as a test starts, of which a later one fences those before it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from elastic_rl.pipeline.stages import Pipeline


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
