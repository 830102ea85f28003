"""The leader's part of following: has engines that lack what the run needs leave the router, and replaced."""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import Protocol

from elastic_rl.config import Config, Stream
from elastic_rl.coordinator.membership.registry import BY_LEADER
from elastic_rl.coordinator.snapshot import ClusterSnapshot
from elastic_rl.coordinator.stragglers.rule import Following, FollowLimits
from elastic_rl.coordinator.write_set import WriteSet
from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Engine, Event, Severity, Straggler
from elastic_rl.etcd.transaction import GuardedWrite

log = logging.getLogger(__name__)


class ReplacementRecorder(Protocol):
    """Has the failure policy replace an engine; called again until it is gone. Raises Fenced and EtcdUnavailable."""

    def __call__(self, engine: Engine, why: str, snapshot: ClusterSnapshot) -> None: ...


class StragglerController:
    """The controller is level-triggered, but for what ``Following`` remembers."""

    def __init__(self, keys: Keys, cfg: Config, record_straggler: ReplacementRecorder, guarded: GuardedWrite) -> None:
        self._keys, self._record, self._guarded = keys, record_straggler, guarded
        self._limits = FollowLimits.of(cfg)
        self._following: dict[str, Following] = {}
        """What is remembered of each pool, by its name."""

    def begin_term(self) -> None:
        """Forgets what it knows of an earlier leadership."""
        self._following = {}

    def update(self, snapshot: ClusterSnapshot) -> None:
        """Writes what follows from a snapshot. A record that has changed since is left to the next pass. Raises Fenced
        and EtcdUnavailable."""
        if snapshot.run_ended or snapshot.status is None:
            return
        pools = defaultdict[str, list[Engine]](list)
        for engine in snapshot.engines.values():
            if engine.epoch == snapshot.epoch and snapshot.follows(engine) == Stream.POLICY:
                pools[engine.pool].append(engine)
        before, self._following = self._following, {}
        for pool, engines in pools.items():
            self._following[pool], verdicts = before.get(pool, Following()).look(
                engines, snapshot.status.needs_version, snapshot.leader_time, self._limits)
            for engine_id, straggler in verdicts.changed.items():
                self._write(snapshot, snapshot.engines[engine_id], straggler)
            for engine_id, why in verdicts.replace.items():
                self._record(snapshot.engines[engine_id], why, snapshot)

    def _write(self, snapshot: ClusterSnapshot, engine: Engine, straggler: Straggler | None) -> None:
        writes, key = WriteSet(), self._keys.engine(engine.id)
        writes.put(key, snapshot.revision(key), engine.replace(straggler=straggler))
        if (event := _event(engine, straggler)) is not None:
            writes.add(events.put_op(self._keys, event))
        if self._guarded(writes.compares, writes.ops) and event is not None:
            log.warning("%s", event.message)


def _event(engine: Engine, straggler: Straggler | None) -> Event | None:
    """The event of an engine that is given up for the first time, or follows again: one that comes back for a while in
    each step is one fault."""
    if straggler is None:
        return events.build(event_kinds.ENGINE_FOLLOWS, engine.id, f"engine {engine.id} follows the others again: it "
                            f"got version {engine.version} in time", by=BY_LEADER, version=engine.version)
    if engine.straggler is not None:
        return None
    return events.build(
        event_kinds.ENGINE_BEHIND, engine.id, f"engine {engine.id} has version {engine.version}, and the run needs "
        f"version {straggler.needs}, which most others serve: it gets no requests until it has caught up",
        severity=Severity.WARNING, by=BY_LEADER, version=engine.version, needs=straggler.needs)
