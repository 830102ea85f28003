"""The stage generate: groups are sent to the rollout role in requests of some of them, until each has its samples."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence, Set
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from elastic_rl.config import Config
from elastic_rl.data.samples import Group, Sample
from elastic_rl.engine.generation import Generated, GenerateFault, PromptRequest
from elastic_rl.errors import ElasticRLError, Fenced, PluginFailed, RoleUnavailable
from elastic_rl.pipeline.sampling.reward_failures import RewardFailures
from elastic_rl.pipeline.waits import Waits
from elastic_rl.runtime.backoff import RetryBackoff
from elastic_rl.runtime.sequences import batches

log = logging.getLogger(__name__)

_REQUESTS, _SUSPECTS = 64, 32
"""Requests in flight at once, and those of suspects beside them. The role takes as many (``roles/registry.py``)."""
_SHOW_S = 0.5
"""How often it is said that engines are missing."""
_RETRY_S = (0.2, 4.0)
"""First and longest pause before a request that failed is sent again."""
_PROBE = -1
"""Number of the request that probes whether the user's function works."""
_TOO_MANY = ("more of the last groups failed than rollout.max_failed_rewards allows, so none is dropped: correct "
             "rollout.generate")

Generate = Callable[[Sequence[PromptRequest], int, bool], Sequence[Generated]]
"""One attempt: from prompt groups, the oldest version that is accepted, and whether they are suspects, which get
another process of the user's function than all others, to the samples of each, or why there are none."""
Answer = tuple[PromptRequest, Sequence[Sample]]


@dataclass
class _Part:
    """Groups of one request."""

    requests: Sequence[PromptRequest]
    min_version: int
    generated: int | None = None
    """How many groups its lane had generated when it failed last, or was sent first."""
    retry: RetryBackoff = field(default_factory=lambda: RetryBackoff(*_RETRY_S))
    together: int = 1
    """Of a suspect: how many of them are sent at once."""
    alone: bool = False
    """Whether it was sent as the only suspect, so that it has its process for itself."""


@dataclass
class _Lane:
    """Requests to one process of the user's function."""

    of_suspects: bool
    unsent: dict[int, None] = field(default_factory=dict)
    """Numbers of parts, in order."""
    running: dict[Future[Sequence[Generated]], int] = field(default_factory=dict)
    generated: int = 0
    """Groups, so that it is known whether others were generated while one failed. Those of the other process say
    nothing: this one may fail for a reason of its own, such as memory for one process only."""


class GroupRequests:
    """Requests of one loop. One that fails is sent again, after a pause that grows, without end; a group for which the
    user's function fails is sent again alone, and fails in the end. That takes attempts between which another group was
    generated: what the function depends on may be away for all of them. Used by one thread.

    Groups that were under way when their process ended are suspects. They are sent to a process of their own, so that
    the one of them that is to blame ends no other group, and that none waits for them: half of those that ran together
    at first, so that few turns show which one it is, or that it was none."""

    def __init__(self, cfg: Config, generate: Generate, waits: Waits, *, other: Callable[[], PromptRequest | None],
                 no_engine: Callable[[], str], on_failed: Callable[[Sequence[int], str], None]) -> None:
        """``other``: another prompt each time, or None where there is none now. ``no_engine``: says which engines are
        missing while none serves; else "". ``on_failed``: called with groups that are dropped, and why; it raises
        nothing but Fenced."""
        self._generate, self._waits, self._other, self._no_engine = generate, waits, other, no_engine
        self._on_failed, self._groups_per_request = on_failed, cfg.groups_per_request
        self._failures = RewardFailures(
            attempts=cfg.rollout.reward_attempts, max_share=cfg.rollout.max_failed_rewards,
            window=max(cfg.train.prompts_per_step, cfg.groups_per_request))
        self._known_good: PromptRequest | None = None
        """A group that was generated, to probe with: as long as it can be again, the user's function works."""
        self._threads = ThreadPoolExecutor(_REQUESTS + _SUSPECTS, "generate")
        self._show_at, self._quiet = 0.0, False
        self.begin()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def begin(self) -> None:
        """Forgets what is not answered yet."""
        self._numbers = itertools.count()
        self._parts: dict[int, _Part] = {}
        self._main, self._suspects = _Lane(of_suspects=False), _Lane(of_suspects=True)
        self._failures.begin()

    @property
    def pending(self) -> bool:
        """Whether groups are not answered yet."""
        return bool(self._parts)

    def add(self, requests: Sequence[PromptRequest], min_version: int) -> None:
        for some in batches(requests, self._groups_per_request):
            self._put(_Part(some, min_version), self._main)

    def poll(self, timeout_s: float, other: Future[Any] | None = None, *, quiet: bool = False
             ) -> tuple[list[Answer], list[Group]]:
        """The groups that were generated, and those that failed for good, as soon as there are any, or after this time,
        or when ``other`` has ended. ``quiet``: the loop shows another wait, which this must not end or take turns with:
        each would be too young to be seen. Raises Fenced."""
        self._quiet = quiet
        now, lanes = time.monotonic(), (self._main, self._suspects)
        left_s = min(self._send_due(lane, now) for lane in lanes)
        others = [other] if other is not None else []
        running = [future for lane in lanes for future in lane.running]
        if not running:
            if others:
                wait(others, timeout=min(left_s, timeout_s))
            elif self._parts:
                self._waits.pause(min(left_s, timeout_s))
            return [], []
        ended, _ = wait([*running, *others], timeout=timeout_s, return_when=FIRST_COMPLETED)
        if not ended and time.monotonic() >= self._show_at and (missing := self._no_engine()):
            self._show_at = time.monotonic() + _SHOW_S
            self._say("engines", missing)  # the requests themselves may wait in the router
        answered: list[Answer] = []
        failed: list[Group] = []
        for lane in lanes:
            found, given_up = self._take_ended(lane, ended)
            answered, failed = answered + found, failed + given_up
        return answered, failed

    def _take_ended(self, lane: _Lane, ended: Set[Future[Any]]) -> tuple[list[Answer], list[Group]]:
        """As ``poll``, of what has ended in a lane."""
        at_once = sum(len(self._parts[n].requests) for n in lane.running.values() if n != _PROBE)
        answered: list[Answer] = []
        faults: list[tuple[_Part, PromptRequest, GenerateFault]] = []
        for future in ended & lane.running.keys():
            for part, request, found in self._take(lane, future):
                if isinstance(found, GenerateFault):
                    faults.append((part, request, found))
                else:
                    answered.append((request, found))
        if answered:
            if not self._quiet:
                self._waits.works()
            lane.generated, self._known_good = lane.generated + len(answered), answered[-1][0]
            self._failures.rewarded(len(answered))
            self._failures.forget([request.ordinal for request, _ in answered])
        return answered, [failed for fault in faults if (failed := self._failed(lane, at_once, *fault)) is not None]

    def _say(self, kind: str, what: str) -> None:
        if not self._quiet:
            self._waits.waits(kind, what)

    def _put(self, part: _Part, lane: _Lane) -> None:
        number = next(self._numbers)
        self._parts[number], lane.unsent[number] = part, None

    def _send_due(self, lane: _Lane, now: float) -> float:
        """Sends what is to be sent now. Seconds until there is something else."""
        if lane.of_suspects:
            due, left_s = self._next_turn(lane, now)
        else:
            waiting = {n: self._parts[n].retry.left_s(now) for n in lane.unsent}
            due = [n for n, left_s in waiting.items() if not left_s][:_REQUESTS - len(lane.running)]
            left_s = min(waiting.values(), default=math.inf)
        for number in due:
            del lane.unsent[number]
            part = self._parts[number]
            part.generated = lane.generated if part.generated is None else part.generated
            part.alone = lane.of_suspects and len(due) == 1
            self._submit(lane, part.requests, part.min_version, number)
        return left_s

    def _next_turn(self, lane: _Lane, now: float) -> tuple[list[int], float]:
        """The suspects that are to be sent now, which is when those before have ended; and seconds until then. They go
        by the pause of the first one: others may come at any time."""
        if lane.running or not lane.unsent:
            return [], math.inf
        first = self._parts[next(iter(lane.unsent))]
        if left_s := first.retry.left_s(now):
            return [], left_s
        return list(itertools.islice(lane.unsent, min(_SUSPECTS, first.together))), math.inf

    def _submit(self, lane: _Lane, requests: Sequence[PromptRequest], min_version: int, number: int) -> None:
        lane.running[self._threads.submit(self._generate, requests, min_version, lane.of_suspects)] = number

    def _take(self, lane: _Lane, future: Future[Sequence[Generated]]) -> list[tuple[_Part, PromptRequest, Generated]]:
        """What an ended request brought: its part, with each group's own request."""
        number = lane.running.pop(future)
        try:
            results = future.result()
        except Fenced:
            raise
        except ElasticRLError as e:
            if number != _PROBE:
                self._parts[number].retry.failed(time.monotonic())
                lane.unsent[number] = None
            self._say(*_waited_for(e))
            return []
        if number == _PROBE:
            lane.generated += not isinstance(results[0], GenerateFault)
            return []
        part = self._parts.pop(number)
        return [(part, *one) for one in zip(part.requests, results, strict=True)]

    def _failed(self, lane: _Lane, at_once: int, part: _Part, request: PromptRequest, fault: GenerateFault
                ) -> Group | None:
        """Has the group sent again alone; or returns it as failed, once that was in vain. ``at_once``: groups of the
        lane that were under way with it."""
        works = lane.generated > (part.generated or 0) and (part.alone or not fault.shared)
        if not fault.away and self._is_dropped(request.ordinal, fault, works):
            return Group(request.ordinal, request.prompt, (), fault.why)
        # Where something does not answer nothing is known: a suspect stays one, among as many as before.
        to = self._suspects if fault.shared or (fault.away and lane.of_suspects) else self._main
        again = _Part([request], part.min_version, to.generated,
                      part.retry if len(part.requests) == 1 else RetryBackoff(*_RETRY_S),
                      part.together if fault.away else max(1, at_once // 2))
        again.retry.failed(time.monotonic())
        self._put(again, to)
        if fault.away:
            self._say(fault.away, fault.why)
            return None
        if not fault.shared or again.together == 1:
            self._probe(to, part.min_version)
        too_many = f" ({_TOO_MANY})" if self._failures.is_exhausted([request.ordinal]) else ""
        self._say("plugin", fault.why + too_many)
        return None

    def _probe(self, lane: _Lane, min_version: int) -> None:
        """Has another group generated there, so that the next failure of one can count. As long as none was, that is
        another prompt each time: of the first groups of an actor some may fail always."""
        if _PROBE not in lane.running.values() and (probe := self._known_good or self._other()) is not None:
            self._submit(lane, [probe], min_version, _PROBE)

    def _is_dropped(self, ordinal: int, fault: GenerateFault, works: bool) -> bool:
        """Whether the group has failed for good. ``works``: another was generated there since it failed before."""
        if not self._failures.failed([ordinal], reward_works=works):
            return False
        log.warning("group %d is dropped since it cannot be generated: %s", ordinal, fault.why)
        self._on_failed([ordinal], fault.why)
        return True


def _waited_for(error: ElasticRLError) -> tuple[str, str]:
    """Kind and text of the wait for another attempt to generate."""
    if isinstance(error, PluginFailed):
        return "plugin", str(error)
    if isinstance(error, RoleUnavailable):
        return "rollout", str(error)
    return "engines", f"the engines to generate: {error}"
