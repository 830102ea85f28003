"""``train.schedule: fully_async``: groups are generated beside the steps.

The loop's thread makes steps (teacher, reference, advantage, train, publish) and evaluates; the producer's thread
generates, rewards and filters. Between the two are the flow, which decides, and the queue, which holds the data.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from elastic_rl.config import Config
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.errors import GroupsLost
from elastic_rl.etcd.records import Engine
from elastic_rl.pipeline.flow.group_flow import FlowLimits
from elastic_rl.pipeline.flow.group_queue import QueueLoss
from elastic_rl.pipeline.flow.producer import Producer
from elastic_rl.pipeline.flow.queues import make_queue
from elastic_rl.pipeline.flow.shared_flow import OnPart, SharedFlow, Taken
from elastic_rl.pipeline.records.step_timer import StepTimer
from elastic_rl.pipeline.rollouts import Rollouts
from elastic_rl.telemetry import traces

_END_S = 5.0
"""How long the end of the loop waits for the producer, which is a daemon."""
_POLL_S = 0.1
"""How often the loop's thread checks, while it waits for groups, what the producer waits for."""


class BackgroundGeneration:
    """Starts the producer at once, and ends it with ``close``."""

    def __init__(self, cfg: Config, limits: FlowLimits, rollouts: Rollouts, lease: Callable[[IntervalSet], None],
                 publish_again: Callable[[int], None], queue_lost: Callable[[QueueLoss], None], host: str) -> None:
        """``rollouts``: of the loop's thread. ``lease``: see ``Producer``. ``publish_again``: called by ``take`` with a
        version that engines cannot get; ``queue_lost``: by ``take`` too. ``host``: see ``make_queue``."""
        self._waits, self._publish_again, self._queue_lost = rollouts.waits, publish_again, queue_lost
        self._wanted_again = 0
        """A version that engines cannot get: the loop's thread publishes it, since it has the trainer."""
        self.flow = SharedFlow(limits, make_queue(cfg, limits.capacity, host))
        self._ending = threading.Event()
        self._producer = Producer(self.flow, lambda waits: rollouts.of_thread(waits, self._want_again), lease,
                                  self._ending)
        self._producer.start()

    @property
    def engines(self) -> Sequence[Engine]:
        return self._producer.engines

    def take(self, step: int, timer: StepTimer, on_part: OnPart) -> Taken:
        """Raises RuntimeError too, once the producer has ended."""
        self._waits.stage("generate")
        with traces.span("take", step=step), timer.phase("groups"):
            taken = self.flow.take(self._waits, self._look, self._queue_lost, on_part, poll_s=_POLL_S)
        self._producer.require_alive()
        return taken

    def _look(self) -> None:
        self._producer.require_alive()
        wanted, self._wanted_again = self._wanted_again, 0
        if wanted:
            self._publish_again(wanted)
        kind, what = self._producer.waiting
        if kind:
            self._waits.waits(kind, what)
        else:
            self._waits.works()

    def _want_again(self, version: int) -> None:
        """The producer's thread calls this."""
        self._wanted_again = version

    def lost(self, error: GroupsLost) -> None:
        self.flow.lost(error.ordinals, self._queue_lost)

    def take_idle_s(self, timer: StepTimer) -> dict[str, float]:
        idle = self._waits.take_idle_s()
        idle.pop("generate", None)  # while it waits for groups it says what those who make them wait for
        return {**idle, "groups": timer.seconds().get("groups", 0.0)}

    def take_metrics(self) -> dict[str, float]:
        """The seconds in which the producer waited for a part of the system, and in which it had nothing to do since
        the staleness allowed no more groups. They have no part in a step's own time."""
        return {"producer_wait_s": sum(self._producer.waits.take_idle_s().values()),
                "producer_no_room_s": self.flow.take_no_room_s()}

    def close(self) -> None:
        self._ending.set()
        self._producer.join(_END_S)
        self.flow.close()
