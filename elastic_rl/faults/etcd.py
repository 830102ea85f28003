"""Faults of etcd, and of what is written there, beyond its stop and its death (``outages``)."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil

from elastic_rl.errors import EtcdUnavailable
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.records import Engine, EngineState, Event
from elastic_rl.faults.context import INJECT_TIMEOUT_S, FaultContext, InjectionEnded, stopped
from elastic_rl.faults.finding import ETCD, await_service
from elastic_rl.faults.kinds import RecoversWithSteps
from elastic_rl.runtime.waiting import wait_until

_PROBES = "chaos/"
"""Below the prefix of a job: keys that no part of the product knows."""
_WRITERS, _WRITE_EVERY_S = 8, 0.02
"""Clients whose writes are to be under way when etcd is stopped, and the pause of each between two of them."""
_LEASE_S = 60
"""Longest time for which a record that a fault has written is there, also when the injector is killed."""


class EtcdPulsed(RecoversWithSteps):
    """etcd is stopped and continued again and again. With short stops it is slow, as on a disk whose fsync takes that
    long. With stops longer than a call may take, writes are carried out whose answers come too late: who wrote has to
    find out whether it did (``WriteDeduplicator``), and nothing is done twice."""

    may_go_unnoticed = True

    def __init__(self, context: FaultContext, name: str, *, seconds: float, stopped_s: float, running_s: float,
                 loses_answers: bool) -> None:
        """``loses_answers``: whether the witness is an answer that did not come."""
        super().__init__(context)
        self.name, self.seconds, self.stopped_s, self.running_s = name, seconds, stopped_s, running_s
        self.loses_answers = loses_answers

    def inject(self) -> tuple[str, str]:
        pid, pulses, over = await_service(self.context, ETCD), 0, threading.Event()
        etcd = self.context.etcd
        lease = wait_until(lambda: etcd.grant(_LEASE_S), timeout_s=INJECT_TIMEOUT_S, what="a lease")
        with ThreadPoolExecutor(_WRITERS) as threads:
            writers = [threads.submit(self._lost, lease, n, over)
                       for n in range(_WRITERS if self.loses_answers else 0)]
            try:
                self.at, end = time.time(), time.monotonic() + self.seconds
                while time.monotonic() < end and not self.context.ended.is_set():
                    with stopped(self.context, psutil.Process(pid)):
                        self.context.ended.wait(self.stopped_s)
                    pulses += 1
                    self.context.ended.wait(self.running_s)
            finally:
                over.set()
            lost = sum(writer.result() for writer in writers)
        self.context.answered(lambda: etcd.revoke(lease))
        said = f"pid {pid} was stopped {pulses} times for {self.stopped_s:g} s, each {self.running_s:g} s apart"
        if not self.loses_answers:
            return ETCD, said
        return ETCD, f"{said}; {lost} writes of a witness were made and not answered" if lost else ""

    def _lost(self, lease: int, number: int, over: threading.Event) -> int:
        """Writes until it is over; how many of the writes that were not answered were made. Some are always under way
        when etcd is stopped."""
        etcd, key, lost = self.context.etcd, f"{self.context.keys.root}{_PROBES}answer-{number}", 0
        with EtcdClient([etcd.endpoint], call_timeout_s=self.stopped_s / 2, retry_budget_s=self.stopped_s / 2
                        ) as hasty:
            for value in (str(n).encode() for n in itertools.count()):
                try:
                    hasty.put(key, value, lease=lease)
                except EtcdUnavailable:
                    try:
                        found = self.context.answered(lambda: etcd.get(key))
                    except InjectionEnded:
                        return lost
                    lost += found is not None and found.value == value
                if over.wait(_WRITE_EVERY_S):
                    return lost
        return lost

    def detected(self) -> bool:
        return False  # it is slow, and no part is at fault

    def is_back(self) -> bool:
        return True


class CompactedPastWatcher(RecoversWithSteps):
    """etcd is restarted and compacted up to its newest revision while the leading coordinator is stopped: what its
    watches have missed is not there any more, so that it has to read everything again."""

    name, may_go_unnoticed = "etcd_compacted_past_watcher", True

    def __init__(self, context: FaultContext) -> None:
        super().__init__(context)
        self._revision = 0

    def inject(self) -> tuple[str, str]:
        leader = wait_until(self.context.leader, timeout_s=INJECT_TIMEOUT_S, what="a leading coordinator")
        etcd, key = self.context.etcd, f"{self.context.keys.root}{_PROBES}compacted"
        self.at, before = time.time(), etcd.revision()
        with stopped(self.context, psutil.Process(leader.pid)):
            witness = self.context.kill(await_service(self.context, ETCD))

            def written() -> int:
                try:
                    return etcd.put(key, b"{}", lease=etcd.grant(_LEASE_S))
                except EtcdUnavailable:
                    return 0

            self._revision = wait_until(written, timeout_s=INJECT_TIMEOUT_S, what="an etcd that is back")
            self.context.answered(lambda: etcd.compact(self._revision))
        return f"{ETCD}, watches of {leader.replica}", (
            f"{witness}; it was compacted up to revision {self._revision} while {leader.replica} was stopped at "
            f"{before} or before")

    def detected(self) -> bool:
        return False  # who has to read again does, and says so in its log only

    def is_back(self) -> bool:
        """A leader works: it has processed what was written since."""
        found = self.context.etcd.get(self.context.keys.event_cursor())
        return found is not None and found.mod_revision > self._revision


class ForeignRecords(RecoversWithSteps):
    """Records that this release has not written, as there are some during an upgrade. Of a later one: an engine in an
    unknown state with an unknown field, and an operation of an unknown kind. Of an earlier one: an event without the
    fields that came later, of a kind that is no more. And bytes that are no record at all. Nobody acts on them, and
    everything else goes on. They are leased, and gone after a while."""

    name, may_go_unnoticed = "foreign_records", True

    def __init__(self, context: FaultContext, seconds: float) -> None:
        super().__init__(context)
        self.seconds = seconds

    def inject(self) -> tuple[str, str]:
        etcd, keys, step = self.context.etcd, self.context.keys, self.context.step()
        self.at = time.time()
        engine = Engine(id="rollout-foreign", pool="rollout", state=EngineState.DEAD, epoch=1).encode()
        earlier = {name: value for name, value in json.loads(Event(
            id=f"{int(self.at * 1000):015d}-earlier", at=self.at, kind="trainer.hibernated", subject="trainer",
            message="by an earlier release").encode()).items() if Event.model_fields[name].is_required()}
        records = {
            keys.event(earlier["id"]): json.dumps(earlier).encode(),
            keys.engine("rollout-foreign"): json.dumps(
                {**json.loads(engine), "state": "hibernating", "dream": {"depth": 3}}).encode(),
            keys.operation("foreign"): json.dumps({"id": "foreign", "kind": "transmogrify", "state": "?"}).encode(),
            keys.member("rollout", "foreign"): b"\xff no record",
            keys.alert("foreign"): b"[]"}
        lease, answered = etcd.grant(_LEASE_S), self.context.answered
        try:
            with (self.context.striking("records of other releases were written"),
                  contextlib.suppress(EtcdUnavailable)):  # it is written again below
                etcd.put(keys.alert("foreign"), records[keys.alert("foreign")], lease=lease)
            for key, value in records.items():
                answered(lambda key=key, value=value: etcd.put(key, value, lease=lease))  # type: ignore[misc]
            self.context.ended.wait(self.seconds)
            left = sum(answered(lambda key=key: etcd.get(key)) is not None for key in records)  # type: ignore[misc]
        finally:
            etcd.revoke(lease)
        return "etcd", (f"{len(records)} records of other releases were there for {self.seconds:g} s, {left} of them "
                        f"to the end; the run made {answered(self.context.step) - step} steps meanwhile")

    def detected(self) -> bool:
        return False  # there is nothing to do about them

    def is_back(self) -> bool:
        """The leader's passes over the job work."""
        return self.context.etcd.get(self.context.keys.leader_problem()) is None
