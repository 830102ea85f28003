"""The flow and the queue between those who generate groups and the loop, which trains them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from elastic_rl.data.branch import Branch
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.data.ledger import Consumption
from elastic_rl.data.queue.step_groups import StepGroups
from elastic_rl.data.queue.summary import GroupSummary
from elastic_rl.data.samples import Group
from elastic_rl.errors import GroupsFailed, IllegalTransition
from elastic_rl.etcd.records import GenerationCap
from elastic_rl.pipeline.flow.accumulated import Accumulated
from elastic_rl.pipeline.flow.group_flow import (
    ChosenPart,
    ChosenStep,
    FlowCounts,
    FlowLimits,
    Grant,
    GroupFlow,
)
from elastic_rl.pipeline.flow.group_queue import GroupQueue, QueueLoss
from elastic_rl.pipeline.waits import Waits


@dataclass(frozen=True)
class Taken:
    """The groups of a step, and what is known of how they came."""

    groups: StepGroups
    chosen: ChosenStep
    metrics: dict[str, float]
    """Metrics by the names of ``training_metrics``."""
    accumulated: Accumulated
    """What ``on_part`` returned for the last part."""


OnPart = Callable[[StepGroups, Accumulated], Accumulated]
"""Computes with a part of a step: from its groups and what the parts before it have added, nothing for the first one,
to what all of them have added."""


class SharedFlow:
    """The flow of groups, thread-safe: groups may be generated in another thread than the loop's. The lock is never
    held while the queue is called, which may take its time."""

    def __init__(self, limits: FlowLimits, queue: GroupQueue) -> None:
        self._flow, self._queue = GroupFlow(limits), queue
        self._changed = threading.Condition()
        self._reported = FlowCounts()
        self._no_room_s = 0.0
        self._finished: set[int] = set()
        self._dropping = 0
        """Threads that drop data of groups which the flow has given up: nothing is leased meanwhile. Else there would
        be more data than the queue has room for, and a group that is generated again could be dropped."""

    # -- the schedule -----------------------------------------------------------------------------------------------
    def resume(self, step: int, version: int, consumed: IntervalSet, branch: Branch) -> None:
        self._give_up(lambda: self._flow.resume(step, version, consumed, branch))

    def trained(self, consumption: Consumption, version: int) -> None:
        self._give_up(lambda: self._flow.trained(consumption, version))
        with self._changed:
            self._finished -= {*consumption.groups}

    def failed(self, ordinals: Collection[int]) -> None:
        self._give_up(lambda: self._flow.failed(ordinals))

    def _give_up(self, decide: Callable[[], Collection[int]]) -> None:
        """Has the flow give up groups, and the queue their data."""
        with self._changed:
            gone = decide()
            self._dropping += 1
        try:
            if gone:
                self._queue.drop(gone)
        finally:
            with self._changed:
                self._dropping -= 1
                self._changed.notify_all()

    # -- the producer -----------------------------------------------------------------------------------------------
    def lease(self, wait_s: float) -> Grant | None:
        """Groups to be generated; None when there was no room for any in this time."""
        began = time.monotonic()
        with self._changed:
            grant = self._lease()
            if grant is None and wait_s > 0:
                self._changed.wait(wait_s)
                grant = self._lease()
                self._no_room_s += time.monotonic() - began
            return grant

    def _lease(self) -> Grant | None:
        return None if self._dropping else self._flow.lease()

    @property
    def generation_cap(self) -> GenerationCap:
        """The limit that leaves no room for groups of further steps (``GroupFlow.generation_cap``)."""
        with self._changed:
            return self._flow.generation_cap

    def give_back(self, grant: Grant) -> None:
        """Groups of this grant that have not finished are not being generated any more."""
        with self._changed:
            self._flow.give_back(grant.ordinals)

    @property
    def finished_groups(self) -> int:
        """How many groups have finished that no step of this term has consumed. One that is generated again, whatever
        the reason, is the same one: it says nothing of how far the run is."""
        with self._changed:
            return len(self._finished)

    @property
    def open(self) -> IntervalSet:
        """Groups that were begun and that no update has recorded."""
        with self._changed:
            return self._flow.open

    def rewarded(self, ordinal: int) -> None:
        """A group has its rewards, and is handed on later: it counts as finished."""
        with self._changed:
            self._finished.add(ordinal)

    def finished(self, group: Group, reason: str, waits: Waits) -> None:
        """Takes a group in. ``reason``: of the filter that drops it, or that one failed. Waits while the queue does not
        take it. Raises Fenced, and IllegalTransition for a group beyond the queue's capacity: waiting would give it no
        room."""
        self.rewarded(group.ordinal)
        with self._changed:
            kept = self._flow.finished(group.ordinal, group.versions, group.failure or reason)
            self._changed.notify_all()
        if not kept:
            return
        waits.retry("queue", lambda: self._queue.put(group), end_on=(IllegalTransition,))
        self._give_up(lambda: () if self._flow.arrived(group.ordinal) else (group.ordinal,))

    # -- the trainer ------------------------------------------------------------------------------------------------
    def take(self, waits: Waits, more: Callable[[], None], on_loss: Callable[[QueueLoss], None],
             on_part: OnPart, *, poll_s: float = 0.0) -> Taken:
        """The groups of the next step, as soon as there are enough. ``more`` is called while there are not: it
        generates some or, each ``poll_s``, says what the thread that does so waits for. ``on_loss`` is called with
        what the queue has lost, once that is to be generated again; ``on_part`` with each part as soon as its groups
        are there; groups for which that raises GroupsFailed are dropped. A step that is chosen again begins with a
        first part again. Raises Fenced and what these raise."""
        with self._changed:
            self._flow.choose_again()  # this call may follow one that failed
        groups, accumulated = dict[int, GroupSummary](), Accumulated()
        while True:
            self._take_loss(on_loss)
            if (part := self._next_part(poll_s)) is None:
                waits.pause(0.0)
                more()
                continue
            found = self._queue.get(part.ordinals)
            if missing := [ordinal for ordinal in part.ordinals if ordinal not in found]:
                self.lost(missing, on_loss)
                continue
            if part.first:
                groups, accumulated = {}, Accumulated()
            groups |= found
            try:
                accumulated = on_part(self._step_groups(found, part.ordinals), accumulated)
            except GroupsFailed as e:
                self.failed(e.ordinals)
                continue
            if (chosen := part.step) is not None:
                return Taken(self._step_groups(groups, chosen.ordinals), chosen, self._metrics(chosen), accumulated)

    def _step_groups(self, groups: Mapping[int, GroupSummary], ordinals: Sequence[int]) -> StepGroups:
        chosen = tuple(groups[ordinal] for ordinal in ordinals)
        return StepGroups(chosen, self._queue.reader(chosen))

    def lost(self, chosen: Collection[int], on_loss: Callable[[QueueLoss], None]) -> None:
        """The queue has no data any more of some of the groups that were chosen: the step is chosen again. ``on_loss``:
        see ``take``. What else the queue has lost with them is taken now: later it would seem to be what was generated
        again since."""
        loss = self._queue.take_loss()
        self._give_up(lambda: [*self._flow.not_loaded(chosen), *(self._flow.lost(loss.groups) if loss else ())])
        if loss is not None:
            on_loss(loss)

    def refused(self, versions: Collection[int]) -> None:
        """The trainer refuses samples of these versions: the step is chosen again, without their groups."""
        self._give_up(lambda: self._flow.refused(versions))

    def _next_part(self, wait_s: float) -> ChosenPart | None:
        """The next part; None when there is none within this time."""
        with self._changed:
            if not self._flow.has_stale:
                if (part := self._flow.choose()) is None and wait_s > 0:
                    self._changed.wait(wait_s)
                return part
        self._give_up(self._flow.take_stale)
        return None

    def _take_loss(self, on_loss: Callable[[QueueLoss], None]) -> None:
        if (loss := self._queue.take_loss()) is not None:
            with self._changed:
                self._flow.lost(loss.groups)
                self._changed.notify_all()
            on_loss(loss)

    def _metrics(self, chosen: ChosenStep) -> dict[str, float]:
        with self._changed:
            depth, counts = self._flow.depth, self._flow.counts
            stale, lost = counts.stale - self._reported.stale, counts.lost - self._reported.lost
            self._reported = FlowCounts(counts.stale, counts.lost)
        return {"staleness_min": chosen.staleness.least, "staleness_mean": chosen.staleness.mean,
                "staleness_max": chosen.staleness.most, "groups_queued": depth.queued, "groups_leased": depth.leased,
                "groups_stale": stale, "groups_lost": lost}

    def take_no_room_s(self) -> float:
        """Seconds since the last call in which the producer had nothing to do, since the staleness allowed no more."""
        with self._changed:
            taken, self._no_room_s = self._no_room_s, 0.0
            return taken

    def close(self) -> None:
        self._queue.close()
