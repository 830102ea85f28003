"""The injector of ``--faults``: injects faults into a running job at fixed steps and records the consequences.

It records of each fault when it *happened* (with a witness: the process is gone, the request was accepted), when it was
*detected* (by the control plane's own report) and when it was *healed*. What the run did meanwhile is read from its own
records.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import psutil

from elastic_rl.errors import DeadlineExceeded, ElasticRLError, EtcdUnavailable
from elastic_rl.faults.context import Fault, FaultContext
from elastic_rl.faults.kinds import CoordinatorKilled, EngineKilled, PoolScaled, TrainerRankKilled
from elastic_rl.pipeline.records.run_log import RunLog
from elastic_rl.report.build import read_records_since

log = logging.getLogger(__name__)

_DETECT_TIMEOUT_S, _HEAL_TIMEOUT_S = 120.0, 900.0
_AWAY_PAUSE_S = 1.0
"""Pause between two readings while etcd does not answer."""
T = TypeVar("T")

FaultPlan = Callable[[FaultContext, int], list[tuple[int, Sequence[Fault]]]]
"""Returns (step, faults), in order, for the context and the run's number of steps. Faults of one entry happen at once.
"""


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
    """Plays the entries of a plan. Each waits for its step, and for the recovery from the faults before it. An etcd
    that is away makes it wait, however long."""

    def __init__(self, context: FaultContext, run_log: RunLog, plan: list[tuple[int, Sequence[Fault]]], steps: Path
                 ) -> None:
        """``run_log``: for the records of the faults. ``steps``: the file with those of the run."""
        super().__init__(name="fault-injector", daemon=True)
        self.context, self.run_log, self.plan, self.steps = context, run_log, plan, steps
        self.stopping = threading.Event()

    def run(self) -> None:
        try:
            self._play_plan()
        except _Stopped:
            return

    def _play_plan(self) -> None:
        for step, faults in self.plan:
            while self._answered(self.context.step) < step:
                if self.stopping.wait(0.1) or self._answered(self.context.finished):
                    return
            with ThreadPoolExecutor(len(faults), thread_name_prefix="fault") as threads:
                list(threads.map(self._play, faults))

    def _play(self, fault: Fault) -> None:
        times: dict[str, float | None] = {"injected_at": time.time(), "detected_at": None, "healed_at": None}
        step, target, witness = self._answered(self.context.step), "", ""
        try:
            target, witness = self._answered(fault.inject)  # it reads etcd before it does anything
            self._await(fault.detected, _DETECT_TIMEOUT_S, f"detection of {fault.name}", poll_s=0.02)
            times["detected_at"] = time.time()
            self._await(fault.healed, _HEAL_TIMEOUT_S, f"recovery from {fault.name}", poll_s=0.05)
            times["healed_at"] = time.time()
        except _Stopped:
            witness = f"{witness} — the run ended while etcd did not answer".strip(" —")
        except (ElasticRLError, psutil.Error) as e:
            witness = f"{witness} — {e}".strip(" —")
            log.exception("fault %s", fault.name)
        self.run_log.write("fault", name=fault.name, step=step, target=target, witness=witness,
                           said=getattr(fault, "said", ""), meanwhile=self._meanwhile(times), **times)

    def _meanwhile(self, times: dict[str, Any]) -> str:
        end = times["healed_at"] or time.time()
        steps = [r for r in read_records_since(self.steps, times["injected_at"])
                 if r["kind"] == "step" and times["injected_at"] <= r["at"] <= end]
        samples = sum(r["samples"] for r in steps)
        try:
            ready = str(self._answered(lambda: len(self.context.ready())))
        except _Stopped:
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
                if self.stopping.wait(_AWAY_PAUSE_S):
                    raise _Stopped from None
        raise DeadlineExceeded(f"{what} was not seen within {timeout_s:g} s")

    def _answered(self, read: Callable[[], T]) -> T:
        """The result of a reading, as soon as etcd answers it."""
        while True:
            try:
                return read()
            except EtcdUnavailable as e:
                log.warning("waiting for etcd: %s", e)
                if self.stopping.wait(_AWAY_PAUSE_S):
                    raise _Stopped from None


class _Stopped(Exception):
    """The run has ended."""
