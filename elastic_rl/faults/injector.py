"""The injector of ``--faults``: injects faults into a running job, at steps or by time, and records the consequences.

It records of each fault when it *happened* (with a witness: the process is gone, the request was accepted), when it was
*detected* (by the control plane's own report) and when it was *healed*. What the run did meanwhile is read from its own
records.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from elastic_rl.errors import DeadlineExceeded, ElasticRLError, EtcdUnavailable
from elastic_rl.faults.context import (
    AWAY_PAUSES_S,
    INJECT_TIMEOUT_S,
    Fault,
    FaultContext,
    InjectionEnded,
    RuleBroken,
    VictimTaken,
)
from elastic_rl.faults.kinds import CoordinatorKilled, EngineKilled, PoolScaled, TrainerRankKilled
from elastic_rl.faults.undo import undo_all
from elastic_rl.report.build import read_records_since
from elastic_rl.runtime.patience import patiently

log = logging.getLogger(__name__)

_DETECT_TIMEOUT_S, _HEAL_TIMEOUT_S = 120.0, 900.0
T = TypeVar("T")

@dataclass(frozen=True)
class Elapsed:
    """A trigger by time: so many seconds after the injector has first seen a step of the run."""

    seconds: float


Trigger = int | Elapsed
"""When faults are injected: once this step was done, or once so much time has passed."""
FaultPlan = Callable[[FaultContext, int], Sequence[tuple[Trigger, Sequence[Fault]]]]
"""Returns (trigger, faults), in order, for the context and the run's number of steps. Faults of one entry happen at
once."""


class FaultRecords(Protocol):
    """Takes the record of each fault once it is over, or given up."""

    def write(self, kind: str, **fields: Any) -> None: ...


def standard_faults(context: FaultContext, steps: int) -> list[tuple[int, Sequence[Fault]]]:
    """The plan of the quick start: one fault at a time, spread over the first four fifths of the run."""
    return [(max(1, round(steps * at)), [fault]) for at, fault in (
        (0.10, EngineKilled(context)),
        (0.30, TrainerRankKilled(context)),
        (0.45, CoordinatorKilled(context)),
        (0.50, PoolScaled(context, "pool_scaled_out", +1)),
        (0.75, PoolScaled(context, "pool_scaled_in", -1)),
    )]


class FaultInjector(threading.Thread):
    """Plays the entries of a plan. Each waits for its trigger, and for the recovery from faults before it. An etcd that
    is away makes it wait, however long."""

    def __init__(self, context: FaultContext, records: FaultRecords, plan: Sequence[tuple[Trigger, Sequence[Fault]]],
                 *steps: Path, overlap: int = 1, rest_steps: int = 0, heal_timeout_s: float = _HEAL_TIMEOUT_S
                 ) -> None:
        """``steps``: the files with the records of the run's steps, one a host. ``overlap``: entries that may be under
        way at once, before the run has recovered from them. ``rest_steps``: steps that the run does once it has
        recovered from an entry, before the next one. ``heal_timeout_s``: a fault from which the run has not recovered
        by then is given up."""
        super().__init__(name="fault-injector", daemon=True)
        self.context, self.records, self.plan, self.steps = context, records, plan, steps
        self.stopping = threading.Event()
        self.over = list[dict[str, Any]]()
        """The records of the faults that are over, or given up."""
        self.under_way = dict[Fault, float]()
        """When each of the others has begun, unix s."""
        self._heal_timeout_s = heal_timeout_s
        self._rooms, self._lock = threading.Semaphore(overlap), threading.Lock()
        self._rest_steps, self._recovered_at = rest_steps, -rest_steps
        self._began_s: float | None = None

    def run(self) -> None:
        """What an injector of this run that was killed has left is undone first, and at the end what is left of this
        one, also where nobody waits for that any more."""
        self._undo()
        try:
            self._play_plan()
        except (_Stopped, InjectionEnded):
            return
        finally:
            self._undo()

    def _undo(self) -> None:
        undone = undo_all(self.context.undo.folder)
        for line in undone.done:
            log.warning("undone: %s", line)
        for line in undone.failed:
            log.error("not undone: %s", line)

    def end(self) -> None:
        """No further fault is injected, and none waited for."""
        self.stopping.set()
        self.context.end()

    def _play_plan(self) -> None:
        under_way = list[threading.Thread]()
        try:
            for trigger, faults in self.plan:
                if not (self._await_trigger(trigger) and self._await_room()
                        and self._await_trigger(self._recovered_at + self._rest_steps)):
                    return
                entry = threading.Thread(target=self._play_entry, args=(faults,), name="faults", daemon=True)
                under_way.append(entry)
                entry.start()
        finally:
            for entry in under_way:
                entry.join()

    def _await_trigger(self, trigger: Trigger) -> bool:
        """Returns whether it has come; False: the run has ended before."""
        while True:
            step = self._answered(self.context.step)
            if self._began_s is None and step:
                self._began_s = time.monotonic()
            if step >= trigger if isinstance(trigger, int) else (
                    self._began_s is not None and time.monotonic() >= self._began_s + trigger.seconds):
                return True
            if self.stopping.wait(0.1) or self._answered(self.context.finished):
                return False

    def _await_room(self) -> bool:
        while not self._rooms.acquire(timeout=0.1):
            if self.stopping.is_set():
                return False
        return True

    def _play_entry(self, faults: Sequence[Fault]) -> None:
        try:
            threads = [threading.Thread(target=self._play, args=(fault,), name=f"fault-{fault.name}", daemon=True)
                       for fault in faults]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            with contextlib.suppress(_Stopped, InjectionEnded):
                self._recovered_at = self._answered(self.context.step)
        finally:
            self._rooms.release()

    def _play(self, fault: Fault) -> None:
        began = time.time()
        times: dict[str, float | None] = {"injected_at": began, "detected_at": None, "healed_at": None}
        step, target, witness, problem, breaks = 0, "", "", "", ""
        unnoticed = fault.may_go_unnoticed
        with self._lock:
            self.under_way = {**self.under_way, fault: began}

        def detected() -> bool:
            if times["detected_at"] is None and fault.detected():
                times["detected_at"] = time.time()
            return times["detected_at"] is not None

        def healed() -> bool:
            return (detected() or unnoticed) and fault.healed()

        try:
            step = self._answered(self.context.step)
            with contextlib.ExitStack() as undo:
                # A fault that is not waited for any more is ended: those after it are to find what they strike.
                undo.callback(fault.give_up)
                try:
                    target, witness = self._inject(fault)
                finally:
                    if self.context.struck:
                        times["injected_at"] = self.context.struck[0][0]
                if not witness:
                    raise _DidNotHappen(f"{fault.name} was not seen to happen")
                if not unnoticed:
                    self._await(detected, _DETECT_TIMEOUT_S, f"detection of {fault.name}", poll_s=0.02)
                self._await(healed, self._heal_timeout_s, f"recovery from {fault.name}", poll_s=0.05)
                undo.pop_all()
            times["healed_at"] = time.time()
        except _Stopped:
            problem = "the run ended while etcd did not answer"
        except _DidNotHappen as e:
            problem = str(e)
        except Exception as e:  # whatever it is, the record says that this fault did not happen, or was not seen to end
            problem = str(e) if isinstance(e, ElasticRLError) else f"{type(e).__name__}: {e}"
            breaks = e.breaks if isinstance(e, RuleBroken) else ""
            log.exception("fault %s", fault.name)
            # What was done is in the record, whatever came afterwards.
            witness = witness or "; ".join(what for _, what in self.context.struck)
        record = {"name": fault.name, "step": step, "target": target, "state": fault.state,
                  "witness": witness, "problem": problem, "breaks": breaks, "said": fault.said,
                  "waited_s": max(0.0, float(times["injected_at"] or began) - began), "may_go_unnoticed": unnoticed,
                  "meanwhile": self._meanwhile(times), **times}
        with self._lock:
            self.over.append(record)
            self.under_way = {other: at for other, at in self.under_way.items() if other is not fault}
        self.records.write("fault", **record)

    def _inject(self, fault: Fault) -> tuple[str, str]:
        """A fault that finds that etcd is away, or that its victim has just ended, is begun again, unless it has
        struck."""
        until = time.monotonic() + INJECT_TIMEOUT_S

        def waiting(error: ElasticRLError) -> None:
            if self.context.struck or (isinstance(error, VictimTaken) and time.monotonic() >= until):
                raise error
            log.warning("beginning %s again: %s", fault.name, error)

        return patiently(fault.inject, away=(EtcdUnavailable, VictimTaken), pauses_s=AWAY_PAUSES_S, pause=self._pause,
                         waiting=waiting)

    def _meanwhile(self, times: dict[str, Any]) -> str:
        end = times["healed_at"] or time.time()
        steps = [r for path in self.steps for r in read_records_since(path, times["injected_at"])
                 if r["kind"] == "step" and times["injected_at"] <= r["at"] <= end]
        samples = sum(r["samples"] for r in steps)
        try:
            ready = str(self._answered(lambda: len(self.context.ready())))
        except (_Stopped, InjectionEnded):
            ready = "unknown"
        return f"{len(steps)} steps trained on {samples} samples; {ready} engines ready"

    def _await(self, check: Callable[[], bool], timeout_s: float, what: str, *, poll_s: float) -> None:
        """Returns once ``check`` holds. Time in which etcd does not answer does not count. Raises
        DeadlineExceeded, also when the run has ended."""
        left_s = timeout_s
        while left_s > 0:
            began = time.monotonic()
            try:
                if check():
                    return
                if self.stopping.wait(poll_s):
                    raise DeadlineExceeded(f"the run ended before the {what} was seen")
                left_s -= time.monotonic() - began
            except EtcdUnavailable:
                self._pause(AWAY_PAUSES_S[0])
        raise DeadlineExceeded(f"{what} was not seen within {timeout_s:g} s")

    def _answered(self, read: Callable[[], T]) -> T:
        """The result of a reading, as soon as etcd answers it."""
        return patiently(read, away=EtcdUnavailable, pauses_s=AWAY_PAUSES_S, pause=self._pause,
                         waiting=lambda e: log.warning("waiting for etcd: %s", e))

    def _pause(self, seconds: float) -> None:
        if self.stopping.wait(seconds):
            raise _Stopped


class _DidNotHappen(Exception):
    """What a fault did had no effect."""


class _Stopped(Exception):
    """The run has ended."""
