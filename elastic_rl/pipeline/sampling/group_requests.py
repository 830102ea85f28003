"""The stage generate: groups are sent to the rollout role in requests of some of them, until each has its samples."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence, Set
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from elastic_rl.config import Config
from elastic_rl.data.samples import Group, Sample
from elastic_rl.engine.generation import Generated, GenerateFault, PromptRequest, oldest_version
from elastic_rl.errors import ElasticRLError, Fenced, PluginFailed, RoleUnavailable, Unanswered
from elastic_rl.pipeline.sampling.fault_isolation import Failure, FaultIsolation, Lane, Trial, Verdict
from elastic_rl.pipeline.waits import Waits
from elastic_rl.runtime.sequences import batches

log = logging.getLogger(__name__)

_LEAST, _MOST, _IN_PROBATION = 64, 1024, 32
"""Requests in flight at once: the least and the most by what engines can take, and those of groups in probation beside
them. A replica of the role takes as many (``roles/registry.py``)."""
_AHEAD = 1.5
"""Sequences in flight as a multiple of those that engines decode at once: others wait there when some end, since a
request is answered with its slowest one."""
_SHOW_S = 0.5
"""How often it is said that engines are missing."""
_RETRY_S = (0.2, 4.0)
"""First and longest pause before a request that failed is sent again."""

Generate = Callable[[Sequence[PromptRequest], int, bool], Sequence[Generated]]
"""One attempt: from prompt groups, the oldest version that is accepted, and whether they are in probation, where they
get another process of the user's function than all others, to the samples of each, or why there are none."""
Answer = tuple[PromptRequest, Sequence[Sample]]


class _Asked(NamedTuple):
    """A group that is to be generated."""

    request: PromptRequest
    min_version: int


class _Sent(NamedTuple):
    """A request in flight."""

    groups: Sequence[_Asked]
    trial: Trial[_Asked] | None
    """What it tries; None for a probe."""


def requests_at_once(running: int, sequences: int) -> int:
    """How many requests of so many sequences keep engines busy that decode ``running`` sequences at once, all of them
    together; 0 where that is not known. Pure."""
    return max(_LEAST, min(_MOST, math.ceil(_AHEAD * running / sequences)))


class GroupRequests:
    """Generates groups; ``FaultIsolation`` says where and when those are tried again for which the user's function
    fails. A request that fails as a whole is sent again, after a pause that grows, without end. Used by one thread."""

    def __init__(self, cfg: Config, generate: Generate, waits: Waits, *, other: Callable[[int], PromptRequest],
                 no_engine: Callable[[], str], on_failed: Callable[[Sequence[int], str], None],
                 running: Callable[[], int] = lambda: 0) -> None:
        """``other``: a prompt to probe with, see ``FaultIsolation.probe``. ``no_engine``: says which engines are
        missing while none serves; else "". ``on_failed``: called with groups that are dropped, and why; it raises
        nothing but Fenced. ``running``: see ``requests_at_once``."""
        self._generate, self._waits, self._other, self._no_engine = generate, waits, other, no_engine
        self._on_failed, self._groups_per_request = on_failed, cfg.groups_per_request
        self._setting = cfg.rollout.generated_by
        # An episode may take minutes: halves show in few rounds which of many groups has ended their process.
        self._isolation: FaultIsolation[_Asked] = FaultIsolation.of(cfg, _RETRY_S, halves=True)
        self._running_of_pool, self._sequences = running, 1
        self._threads = ThreadPoolExecutor(_MOST + _IN_PROBATION, "generate")  # which starts those that it needs
        self._show_at, self._quiet, self._min_version = 0.0, False, 0
        self.begin()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def begin(self) -> None:
        """Forgets what is not answered yet."""
        self._isolation.reset()
        self._running: dict[Lane, dict[Future[Sequence[Generated]], _Sent]] = {lane: {} for lane in Lane}
        """Requests by lane."""

    @property
    def pending(self) -> bool:
        """Whether groups are not answered yet."""
        return self._isolation.is_pending

    def add(self, requests: Sequence[PromptRequest], min_version: int) -> None:
        self._min_version = min_version
        self._sequences = self._groups_per_request * max((request.samples for request in requests), default=1)
        for some in batches(requests, self._groups_per_request):
            self._isolation.add([_Asked(request, min_version) for request in some])

    def poll(self, timeout_s: float, other: Future[Any] | None = None, *, quiet: bool = False
             ) -> tuple[list[Answer], list[Group]]:
        """The groups that were generated, and those that failed for good, as soon as there are any, or after this time,
        or when ``other`` has ended. ``quiet``: the loop shows another wait, which this must not end or alternate with:
        each would be too young to be seen. Raises Fenced."""
        self._quiet = quiet
        now = time.monotonic()
        for lane in Lane:
            self._send_due(lane, now)
        others = [other] if other is not None else []
        running = [future for requests in self._running.values() for future in requests]
        if not running:
            pause_s = min(self._isolation.left_s(now), timeout_s)
            if others:
                wait(others, timeout=pause_s)
            elif self.pending:
                self._waits.pause(pause_s)
            return [], []
        ended, _ = wait([*running, *others], timeout=timeout_s, return_when=FIRST_COMPLETED)
        if not ended and time.monotonic() >= self._show_at and (missing := self._no_engine()):
            self._show_at = time.monotonic() + _SHOW_S
            self._say("engines", missing)  # the requests themselves may wait in the router
        answered: list[Answer] = []
        failed: list[Group] = []
        for lane in Lane:
            found, given_up = self._take_ended(lane, ended)
            answered, failed = answered + found, failed + given_up
        return answered, failed

    def _send_due(self, lane: Lane, now: float) -> None:
        if (probe := self._isolation.probe(lane, lambda number: _Asked(self._other(number), self._min_version))
                ) is not None:
            self._submit(lane, [probe], None)
        most = _IN_PROBATION if lane is Lane.PROBATION else requests_at_once(self._running_of_pool(), self._sequences)
        for trial in self._isolation.start(lane, now, most):
            self._submit(lane, trial.groups, trial)

    def _submit(self, lane: Lane, groups: Sequence[_Asked], trial: Trial[_Asked] | None) -> None:
        self._running[lane][self._threads.submit(
            self._generate, [asked.request for asked in groups], groups[0].min_version, lane is Lane.PROBATION
        )] = _Sent(groups, trial)

    def _take_ended(self, lane: Lane, ended: Set[Future[Any]]) -> tuple[list[Answer], list[Group]]:
        """Takes what has ended in a lane, as ``poll`` does."""
        found = [one for future in [*self._running[lane]] if future in ended
                 if (one := self._take(lane, future)) is not None]
        answered = [(asked, samples) for trial, results in found
                    for asked, samples in zip(trial.groups, results, strict=True)
                    if not isinstance(samples, GenerateFault)]
        if answered and not self._quiet:
            self._waits.works()
        verdicts = self._isolation.settle(lane, [(trial, [
            Failure.of(shared=one.shared, away=bool(one.away), unanswered=one.unanswered)
            if isinstance(one, GenerateFault) else None
            for one in results]) for trial, results in found], time.monotonic())
        dropped = [self._dropped(asked.request, fault) for (trial, results), of_trial in zip(
            found, verdicts, strict=True) for asked, fault, verdict in zip(trial.groups, results, of_trial, strict=True)
            if isinstance(fault, GenerateFault) and self._is_dropped(fault, verdict)]
        return [(asked.request, samples) for asked, samples in answered], dropped

    def _take(self, lane: Lane, future: Future[Sequence[Generated]]
              ) -> tuple[Trial[_Asked], Sequence[Generated]] | None:
        """What became of the groups of an ended request; None for a probe, and for one that failed as a whole."""
        groups, trial = self._running[lane].pop(future)
        try:
            results = [_accepted(found, asked.min_version)
                       for asked, found in zip(groups, future.result(), strict=True)]
        except Fenced:
            raise
        except Unanswered as e:
            if trial is not None:
                return trial, [GenerateFault(f"the engines to generate: {e}", away="engines", unanswered=True)
                               for _ in trial.groups]
            self._isolation.probed(lane, works=False)
            return None
        except ElasticRLError as e:
            if trial is not None:
                self._isolation.interrupted(trial, time.monotonic())
            else:
                self._isolation.probed(lane, works=False)
            self._say(*_waited_for(e))
            return None
        if trial is None:
            self._isolation.probed(lane, works=not isinstance(results[0], GenerateFault))
            return None
        return trial, results

    def _say(self, kind: str, what: str) -> None:
        if not self._quiet:
            self._waits.waits(kind, what)

    def _is_dropped(self, fault: GenerateFault, verdict: Verdict) -> bool:
        """Whether the group has failed for good; else says what is waited for."""
        if verdict is not Verdict.DROP:
            self._say(fault.away or "plugin", verdict.reason(
                fault.why, "the engines, or the prompts" if fault.unanswered else self._setting))
        return verdict is Verdict.DROP

    def _dropped(self, request: PromptRequest, fault: GenerateFault) -> Group:
        log.warning("group %d is dropped since it cannot be generated: %s", request.ordinal, fault.why)
        self._on_failed([request.ordinal], fault.why)
        return Group(request.ordinal, request.prompt, (), fault.why)


def _accepted(found: Generated, min_version: int) -> Generated:
    """The samples, unless some are older than what was asked for: the role generates those again itself, and reports
    engines that are behind, so that it is at fault for a group that it answers so."""
    if isinstance(found, GenerateFault) or (oldest := oldest_version(found)) >= min_version:
        return found
    return GenerateFault(f"the rollout role gave samples of policy version {oldest}, and {min_version} or newer was "
                         "asked for")


def _waited_for(error: ElasticRLError) -> tuple[str, str]:
    """Kind and text of the wait for another attempt to generate."""
    if isinstance(error, PluginFailed):
        return "plugin", str(error)
    if isinstance(error, RoleUnavailable):
        return "rollout", str(error)
    return "engines", f"the engines to generate: {error}"
