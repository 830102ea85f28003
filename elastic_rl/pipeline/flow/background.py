"""``train.schedule: fully_async``: groups are generated beside the steps.

The loop's thread makes steps (teacher, reference, advantage, train, publish) and evaluates; the producer's thread
generates, rewards and filters. Between the two are the flow, which decides, and the queue, which holds the data.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence

from elastic_rl.config import Config
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.data.samples import Prompt
from elastic_rl.errors import Fenced, GroupsLost
from elastic_rl.etcd.records import Engine, GenerationCap
from elastic_rl.pipeline.flow.group_flow import FlowLimits, Grant
from elastic_rl.pipeline.flow.group_queue import QueueLoss
from elastic_rl.pipeline.flow.queues import make_queue
from elastic_rl.pipeline.flow.shared_flow import OnPart, SharedFlow, Taken
from elastic_rl.pipeline.pool_sync import PoolSync, VersionWait
from elastic_rl.pipeline.records.step_timer import StepTimer
from elastic_rl.pipeline.rollout_pool import serves
from elastic_rl.pipeline.rollouts import Rollouts
from elastic_rl.pipeline.sampling.sampler import OnCap
from elastic_rl.pipeline.waits import WaitRelay, Waits
from elastic_rl.plugins.user_code import describe
from elastic_rl.telemetry import traces

log = logging.getLogger(__name__)

_END_S = 5.0
"""How long the end of the loop waits for the producer, which is a daemon."""
_POLL_S = 0.1
"""How often the loop's thread checks, while it waits for groups, what the producer waits for."""
_LOOK_S = 0.05
"""Pause between two looks at engines that are waited for, while nothing is generated."""


class BackgroundGeneration:
    """Starts the producer at once, and ends it with ``close``."""

    def __init__(self, cfg: Config, limits: FlowLimits, rollouts: Rollouts, lease: Callable[[IntervalSet], None],
                 on_cap: OnCap, publish_again: Callable[[int], None], queue_lost: Callable[[QueueLoss], None],
                 host: str) -> None:
        """``rollouts``: of the loop's thread. ``lease``: see ``Producer``. ``on_cap``: of the producer's thread, see
        ``Sampler``. ``publish_again``: called by ``take`` with a version that engines cannot get; ``queue_lost``: by
        ``take`` too. ``host``: see ``make_queue``."""
        self._waits, self._publish_again, self._queue_lost = rollouts.waits, publish_again, queue_lost
        self._wanted_again = 0
        """A version that engines cannot get: the loop's thread publishes it, since it has the trainer."""
        self.flow = SharedFlow(limits, make_queue(cfg, limits.capacity, host))
        self._ending = threading.Event()
        self._producer = Producer(self.flow, lambda waits: rollouts.of_thread(waits, self._want_again, on_cap), lease,
                                  self._ending)
        self._producer.start()

    @property
    def engines(self) -> Sequence[Engine]:
        return self._producer.engines

    def take(self, step: int, timer: StepTimer, on_part: OnPart) -> Taken:
        """Raises RuntimeError too, once the producer has ended."""
        self._waits.stage("generate")
        with traces.span("take", step=step), timer.stage("groups"):
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


class Producer:
    """The thread that generates what the flow grants, until ``stopping`` is set: source → generate → reward → filters.
    """

    def __init__(self, flow: SharedFlow, make: Callable[[Waits], Rollouts], lease: Callable[[IntervalSet], None],
                 stopping: threading.Event) -> None:
        """``make``: makes, in the thread, what it generates with; raises Fenced. ``lease``: writes down that this actor
        works on these groups; raises Fenced and EtcdUnavailable."""
        self._flow, self._make, self._lease = flow, make, lease
        self._relay = WaitRelay()
        self.waits = Waits(self._relay, stopping)
        self.engines: Sequence[Engine] = ()
        """The engines that a version was last waited for from, as they were then. Any thread may read it."""
        self._error: BaseException | None = None
        self._grant: Grant | None = None
        self._sync: VersionWait | None = None
        self._synced = 0
        """The newest version that every engine with requests was found to serve: they do not go back."""
        self._thread = threading.Thread(target=self._run, name="producer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    # -- called by the loop's thread --------------------------------------------------------------------------------
    @property
    def waiting(self) -> tuple[str, str]:
        """Kind and text of what it waits for; "" while it works."""
        return self._relay.waiting

    def require_alive(self) -> None:
        """Raises Fenced when it has ended since this actor is over, and RuntimeError, which no wait takes for an
        outage, when anything else has ended it."""
        if isinstance(error := self._error, Fenced):
            raise error
        if error is not None:
            raise RuntimeError(f"the producer ended: {describe(error)}") from error

    # -- in the thread ----------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            with contextlib.closing(self._make(self.waits)) as rollouts:
                self._produce(rollouts)
        except Fenced as e:
            self._error = e
        except BaseException as e:  # a fault of ours or of a plug-in: the loop ends with it, and a new replica begins
            log.exception("the producer ended")
            self._error = e
        finally:
            self._end_sync()

    def _produce(self, rollouts: Rollouts) -> None:
        self.waits.stage("generate")
        for group, reason in rollouts.sampler.training_stream(lambda wait_s: self._more(rollouts, wait_s),
                                                                  self._generation_cap):
            self._flow.finished(group, reason, self.waits)

    def _generation_cap(self) -> GenerationCap:
        """The limit that leaves no further groups to be generated; none while it is engines that lack a version."""
        return self._flow.generation_cap if self._grant is None else GenerationCap.NONE

    def _more(self, rollouts: Rollouts, wait_s: float) -> tuple[Sequence[tuple[int, Prompt]], int]:
        if self._grant is None:
            self._grant = self._flow.lease(wait_s)
            if self._grant is None:
                return (), 0
            self.waits.retry("etcd", lambda: self._lease(self._flow.open))
        if not self._in_sync(rollouts.pool, self._grant.min_version):
            # Others are being generated, or are to be harvested: so the wait is no pause of theirs.
            if wait_s > 0:
                self.waits.pause(_LOOK_S)
            return (), 0
        grant, self._grant = self._grant, None
        return rollouts.prompts.training(grant.ordinals), grant.min_version

    def _in_sync(self, pool: PoolSync, version: int) -> bool:
        """Whether every engine that takes requests serves the version or a newer one: else samples would be made in
        vain."""
        if version <= self._synced:
            return True
        if self._sync is None:
            self._sync = pool.begin(version, serves)
        in_sync, self.engines = self._sync.poll(), pool.engines
        if in_sync:
            self._synced = version
            self._end_sync()
        return in_sync

    def _end_sync(self) -> None:
        if self._sync is not None:
            self._sync.close()
            self._sync = None
