"""Bugs that are planted into the product's versions, drivers and engines; see ``planted``. What takes seconds to import
is imported where its bug is planted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

from chaos_tests.sim.patch import Patch
from elastic_rl.dcs.catalog import leader_writes, pins, reads, writer
from elastic_rl.dcs.catalog.writer import StreamWriter
from elastic_rl.dcs.fetch import chunk_reader
from elastic_rl.engine.departure import Departure, LeaveStep
from elastic_rl.engine.lifecycle import EngineLifecycle
from elastic_rl.errors import VersionNotFound
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import EngineState, Version
from elastic_rl.etcd.transaction import Compare, KeyValue, Op


# -- versions ----------------------------------------------------------------------------------------------------------
def committed_before_sealed(patch: Patch) -> None:
    from elastic_rl.dcs.publish import publisher
    patch.setattr(publisher._Replication, "store_part", lambda self, *part: {})


def committed_after_its_lease(patch: Patch) -> None:
    conditions = StreamWriter._commit_conditions
    patch.setattr(StreamWriter, "_commit_conditions", lambda self, pending: [
        compare for compare in conditions(self, pending) if compare.key != self._commit_keys(pending)[1]])


def older_version_becomes_the_head(patch: Patch) -> None:
    require = StreamWriter._require_committable

    def whatever_the_head_is(self: StreamWriter, *of: Any) -> None:
        head, self._head = self._head, (0, 0)
        try:
            require(self, *of)
        finally:
            self._head = head

    patch.setattr(StreamWriter, "_require_committable", whatever_the_head_is)


def committed_on_lost_nodes(patch: Patch) -> None:
    patch.setattr(writer, "registration_guards", lambda *asked: ([], 0))


def number_taken_again(patch: Patch) -> None:
    def saw_next(self: StreamWriter, kv: KeyValue | None) -> bool:
        now = (max(0, int(kv.value) - 1), kv.mod_revision) if kv else (0, 0)
        changed, self._next = now != self._next, now
        return changed

    patch.setattr(StreamWriter, "_saw_next", saw_next)


def pinned_versions_are_released(patch: Patch) -> None:
    release = leader_writes.release

    def whatever_is_pinned(etcd: EtcdClient, *more: Any) -> bool:
        with mock.patch.object(leader_writes.Compare, "none_created_since", lambda prefix, revision: Compare.create(
                prefix, ">", -1)):
            return release(etcd, *more)

    patch.setattr(leader_writes, "release", whatever_is_pinned)


def pins_are_not_read(patch: Patch) -> None:
    """Neither before a release nor in it."""
    pinned_versions_are_released(patch)
    from elastic_rl.dcs.catalog import garbage_collector
    patch.setattr(garbage_collector, "pinned", lambda *asked: set())


def pin_of_any_state(patch: Patch) -> None:
    def pin(etcd: EtcdClient, keys: Keys, stream: str, number: int | None, holder: str, lease: int,
            ended: Sequence[str] = ()) -> Version:
        found = reads.head(etcd, keys, stream) if number is None else reads.get_version(etcd, keys, stream, number)
        if found is None:
            raise VersionNotFound(f"there is no version {number}")
        etcd.txn((), [Op.put(keys.pin(stream, found.number, holder), b"{}", lease)])
        return found

    patch.setattr(pins, "pin", pin)


def checksum_unchecked(patch: Patch) -> None:
    patch.setattr(chunk_reader, "matches", lambda data, digest: True)


def absent_manifest_stops_the_drops(patch: Patch) -> None:
    from elastic_rl.dcs.storage.chunk_table import ChunkTable
    drop = ChunkTable.drop

    def nothing_while_one_is_absent(self: ChunkTable, live: set[str], mark: int) -> tuple[int, int]:
        return drop(self, live, mark) if all(map(self.has, live)) else (0, 0)

    patch.setattr(ChunkTable, "drop", nothing_while_one_is_absent)


def no_epoch_guard(patch: Patch) -> None:
    patch.setattr(fencing, "epoch_guard", lambda keys, number: Compare.version(keys.epoch(), ">", -1))


def formation_ignored(patch: Patch) -> None:
    patch.setattr(FencedWriter, "of_formation", classmethod(
        lambda cls, etcd, keys, epoch, group, number: cls.of_epoch(etcd, keys, epoch)))


# -- drivers and engines -----------------------------------------------------------------------------------------------
def stale_driver_writes(patch: Patch) -> None:
    patch.setattr(FencedWriter, "of_driver", classmethod(
        lambda cls, etcd, keys, epoch, generation: cls.of_epoch(etcd, keys, epoch)))


def assignment_is_no_token(patch: Patch) -> None:
    patch.setattr(fencing, "assigned", lambda keys, job, generation: [])


def take_over_raises_the_epoch(patch: Patch) -> None:
    from elastic_rl.driver import __main__ as driver_main
    begin = driver_main._begin

    def without_adoption(*of: Any) -> tuple[int, int, bool]:
        with mock.patch.object(driver_main, "ray_epoch", lambda paths: 0):
            return begin(*of)

    patch.setattr(driver_main, "_begin", without_adoption)


def engines_of_any_epoch_are_adopted(patch: Patch) -> None:
    from elastic_rl.driver.placement import Placer, driver_writer
    patch.setattr(Placer, "of", classmethod(
        lambda cls, ctx, etcd: cls(driver_writer(ctx, etcd), f"{ctx.job}/", ctx.generation)))


def routable_before_verified(patch: Patch) -> None:
    patch.setattr(EngineLifecycle, "routed", lambda self: replace(self, state=EngineState.READY))


def drain_that_does_not_wait(patch: Patch) -> None:
    patch.setattr(Departure, "step", lambda self, now, in_flight, *, can_hand_over: LeaveStep.DONE)
