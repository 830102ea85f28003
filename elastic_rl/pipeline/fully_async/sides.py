"""``train.schedule: fully_async``: the parts of it that the loop has beside those of a synchronous run.

The loop's thread makes steps (teacher, reference, advantage, train, publish) and evaluates; the producer's thread
generates, rewards and filters. Between the two are the flow, which decides, and the queue, which holds the data.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from elastic_rl.config import Config
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.data.queue.step_groups import StepGroups
from elastic_rl.data.sources import CheckedSource
from elastic_rl.errors import GroupsLost
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.event_kinds import EventKind
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Engine, Severity
from elastic_rl.pipeline.fully_async.group_queue import QueueLoss
from elastic_rl.pipeline.fully_async.producer import Parts, Producer
from elastic_rl.pipeline.fully_async.queues import make_queue
from elastic_rl.pipeline.fully_async.shared_flow import SharedFlow, Taken
from elastic_rl.pipeline.pool_sync import PoolSync
from elastic_rl.pipeline.records.run_events import RunEvents
from elastic_rl.pipeline.sampling.generating import Generate
from elastic_rl.pipeline.sampling.prompt_reader import PromptReader
from elastic_rl.pipeline.sampling.samples import Sampler
from elastic_rl.pipeline.sampling.source_reads import SourceReads
from elastic_rl.pipeline.schedule import Plan
from elastic_rl.pipeline.waits import Waits
from elastic_rl.rewards.base import Judge

_END_S = 5.0
"""How long the end of the loop waits for the producer, which is a daemon."""


class FullyAsync:
    """Of one term of the actor. ``take`` is the loop's; the rest runs by itself."""

    def __init__(self, cfg: Config, plan: Plan, etcd: EtcdClient, keys: Keys, writer: FencedWriter,
                 source: CheckedSource, generate: Generate, judge: Judge, lease: Callable[[IntervalSet], None],
                 source_turn: threading.Lock, publish_again: Callable[[int], None],
                 queue_lost: Callable[[QueueLoss], None], host: str) -> None:
        """``source_turn``: of the threads that ask the source. ``publish_again``: called by ``take`` with a version
        that engines cannot get; ``queue_lost``: by ``take`` too. ``host``: see ``make_queue``."""
        self._cfg, self._etcd, self._keys, self._writer = cfg, etcd, keys, writer
        self._source, self._source_turn, self._generate, self._judge = source, source_turn, generate, judge
        self._publish_again, self._queue_lost = publish_again, queue_lost
        self._wanted_again = 0
        """A version that engines cannot get: the loop's thread publishes it, since it has the trainer."""
        limits = plan.flow_limits(cfg.train.max_groups_in_flight)
        self.flow = SharedFlow(limits, make_queue(cfg, (limits.max_staleness + 1) * limits.groups_per_step, host))
        self._pool: PoolSync | None = None
        self._ending = threading.Event()
        self._producer = Producer(self.flow, self._make, lease, self._ending)
        self._producer.start()

    def take(self, waits: Waits, on_part: Callable[[StepGroups, bool], None]) -> Taken:
        """The groups of the next step; ``on_part``: see ``SharedFlow.take``. Raises Fenced, what ``on_part`` raises,
        and RuntimeError once the producer has ended."""
        def look() -> None:
            self._producer.require_alive()
            wanted, self._wanted_again = self._wanted_again, 0
            if wanted:
                self._publish_again(wanted)
            kind, what = self._producer.waiting
            if kind:
                waits.waits(kind, what)
            else:
                waits.works()

        taken = self.flow.take(waits, look, self._queue_lost, on_part)
        self._producer.require_alive()
        return taken

    def lost(self, error: GroupsLost) -> None:
        """Groups that ``take`` gave are gone from the queue: they are generated again."""
        self.flow.lost(error.ordinals, self._queue_lost)

    @property
    def engines(self) -> list[Engine]:
        """As of the producer's last wait for a version."""
        return [] if self._pool is None else self._pool.engines

    def take_idle_s(self) -> dict[str, float]:
        """Seconds since the last call in which the producer waited for a part of the system, and in which it had
        nothing to do since the staleness allowed no more groups, by the names of ``training_metrics``. It has no part
        in a step's own time."""
        return {"producer_wait_s": sum(self._producer.waits.take_idle_s().values()),
                "producer_no_room_s": self.flow.take_no_room_s()}

    def close(self) -> None:
        self._ending.set()
        self._producer.join(_END_S)
        self.flow.close()

    # -- in the producer's thread -----------------------------------------------------------------------------------
    def _make(self, waits: Waits) -> Parts:
        cfg, source = self._cfg, self._source
        pool = self._pool = PoolSync(self._etcd, self._keys, waits, self._want_again,
                                     first_pull_s=cfg.engine.fetch_timeout_s)

        def emit(kind: EventKind, subject: str, message: str, *, severity: Severity = Severity.INFO,
                 **data: Any) -> None:
            waits.retry("etcd", lambda: self._writer.emit(kind, subject, message, severity=severity, **data))

        events = RunEvents(self._etcd, self._keys, emit)
        reads = SourceReads(cfg.data.source, waits, self._source_turn)
        prompts = waits.retry("source", lambda: PromptReader(cfg, source, waits, reads))
        sampler = waits.retry("plugin", lambda: Sampler(
            cfg, source, self._generate, waits, pool.no_engine, events.groups_failed, self._judge, reads))
        return Parts(sampler, prompts, pool)

    def _want_again(self, version: int) -> None:
        self._wanted_again = version
