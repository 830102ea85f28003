"""The stage generate: groups are sent to the rollout role in requests of some of them, until each has its samples."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from elastic_rl.config import Config
from elastic_rl.data.samples import Group, Sample
from elastic_rl.engine.generation import Generated, GenerateFault, PromptRequest
from elastic_rl.errors import ElasticRLError, Fenced, PluginFailed, RoleUnavailable
from elastic_rl.pipeline.sampling.reward_failures import RewardFailures
from elastic_rl.pipeline.waits import Waits
from elastic_rl.retry import RetryBackoff
from elastic_rl.runtime import batches

log = logging.getLogger(__name__)

_REQUESTS = 64
"""Requests in flight at once."""
_SHOW_S = 0.5
"""How often it is said that engines are missing."""
_RETRY_S = (0.2, 4.0)
"""First and longest pause before a request that failed is sent again."""
_PROBE = -1
"""Number of the request that probes whether the user's function works."""
_TOO_MANY = ("more of the last groups failed than rollout.max_failed_rewards allows, so none is dropped: correct "
             "rollout.generate")

Generate = Callable[[Sequence[PromptRequest], int], Sequence[Generated]]
"""One attempt: from prompt groups and the oldest version that is accepted to the samples of each, or why there are
none."""
Answer = tuple[PromptRequest, Sequence[Sample]]


@dataclass
class _Part:
    """Groups of one request."""

    requests: Sequence[PromptRequest]
    min_version: int
    generated: int | None = None
    """How many groups were generated when it failed last, or was sent first."""
    retry: RetryBackoff = field(default_factory=lambda: RetryBackoff(*_RETRY_S))
    together: int = 1
    """Of a suspect: how many of them are sent at once."""


class GroupRequests:
    """Requests of one loop. One that fails is sent again, after a pause that grows, without end; a group for which the
    user's function fails is sent again alone, and fails in the end. That takes attempts between which another group was
    generated: what the function depends on may be away for all of them. Used by one thread."""

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
        self._generated = 0
        """Groups that were generated, so that it is known whether others were while one failed."""
        self._known_good: PromptRequest | None = None
        """A group that was generated, to probe with: as long as it can be again, the user's function works."""
        self._threads = ThreadPoolExecutor(_REQUESTS, "generate")
        self._show_at, self._quiet = 0.0, False
        self.begin()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def begin(self) -> None:
        """Forgets what is not answered yet."""
        self._numbers = itertools.count()
        self._parts: dict[int, _Part] = {}
        self._unsent: dict[int, None] = {}  # in order
        self._suspects: dict[int, None] = {}
        """Parts of one group that may have ended the process of others. They are sent while nothing else runs, half of
        those that ran together when it ended, so that few turns show which one it is, or that it was none."""
        self._isolated: set[int] = set()
        """Suspects that are under way."""
        self._running: dict[Future[Sequence[Generated]], int] = {}
        self._at_once = 0
        """Groups that were under way together, at most, since none was."""
        self._alone = -1
        """Number of the part that was last sent while nothing else ran."""
        self._failures.begin()

    @property
    def pending(self) -> bool:
        """Whether groups are not answered yet."""
        return bool(self._parts)

    @property
    def takes_more(self) -> bool:
        """Whether further groups may be added: with them, suspects would never be alone."""
        return not self._suspects and not self._isolated

    def add(self, requests: Sequence[PromptRequest], min_version: int) -> None:
        for some in batches(requests, self._groups_per_request):
            self._put(_Part(some, min_version), self._unsent)

    def poll(self, timeout_s: float, other: Future[Any] | None = None, *, quiet: bool = False
             ) -> tuple[list[Answer], list[Group]]:
        """The groups that were generated, and those that failed for good, as soon as there are any, or after this time,
        or when ``other`` has ended. ``quiet``: the loop shows another wait, which this must not end or take turns with:
        each would be too young to be seen. Raises Fenced."""
        self._quiet = quiet
        due, left_s = self._due(time.monotonic())
        self._send(due)
        others = [other] if other is not None else []
        if not self._running:
            if others:
                wait(others, timeout=min(left_s, timeout_s))
            elif self._parts:
                self._waits.pause(min(left_s, timeout_s))
            return [], []
        ended, _ = wait([*self._running, *others], timeout=timeout_s, return_when=FIRST_COMPLETED)
        if not ended and time.monotonic() >= self._show_at and (missing := self._no_engine()):
            self._show_at = time.monotonic() + _SHOW_S
            self._say("engines", missing)  # the requests themselves may wait in the router
        answered: list[Answer] = []
        faults: list[tuple[int, _Part, PromptRequest, GenerateFault]] = []
        for future in ended & self._running.keys():
            for number, part, request, found in self._take(future):
                if isinstance(found, GenerateFault):
                    faults.append((number, part, request, found))
                else:
                    answered.append((request, found))
        if answered:
            if not quiet:
                self._waits.works()
            self._generated, self._known_good = self._generated + len(answered), answered[-1][0]
            self._failures.rewarded(len(answered))
            self._failures.forget([request.ordinal for request, _ in answered])
        return answered, [failed for fault in faults if (failed := self._failed(*fault)) is not None]

    def _say(self, kind: str, what: str) -> None:
        if not self._quiet:
            self._waits.waits(kind, what)

    def _put(self, part: _Part, queue: dict[int, None]) -> None:
        number = next(self._numbers)
        self._parts[number], queue[number] = part, None

    def _due(self, now: float) -> tuple[list[int], float]:
        """Numbers of the parts that are to be sent now, and seconds until there are some."""
        if self._unsent or self._running:
            waiting = {n: self._parts[n].retry.left_s(now) for n in self._unsent}
            room = _REQUESTS - len(self._running)
            return [n for n, left_s in waiting.items() if not left_s][:room], min(waiting.values(), default=math.inf)
        first = next(iter(self._suspects), None)
        together = [] if first is None else list(itertools.islice(
            self._suspects, min(_REQUESTS, self._parts[first].together)))
        left_s = max((self._parts[n].retry.left_s(now) for n in together), default=math.inf)
        return ([] if left_s else together), left_s

    def _send(self, due: Sequence[int]) -> None:
        if not self._running:
            self._at_once = 0
        if due:
            self._alone = due[0] if len(due) == 1 and due[0] in self._suspects else -1
        for number in due:
            if number in self._suspects:
                del self._suspects[number]
                self._isolated.add(number)
            else:
                del self._unsent[number]
            part = self._parts[number]
            part.generated = self._generated if part.generated is None else part.generated
            self._running[self._threads.submit(self._generate, part.requests, part.min_version)] = number
        self._at_once = max(self._at_once, sum(
            len(self._parts[n].requests) for n in self._running.values() if n != _PROBE))

    def _take(self, future: Future[Sequence[Generated]]) -> list[tuple[int, _Part, PromptRequest, Generated]]:
        """What an ended request brought: with the number of its part, that part, and each group's own request."""
        number = self._running.pop(future)
        self._isolated.discard(number)
        try:
            results = future.result()
        except Fenced:
            raise
        except ElasticRLError as e:
            if number != _PROBE:
                self._parts[number].retry.failed(time.monotonic())
                self._unsent[number] = None
            self._say(*_waited_for(e))
            return []
        if number == _PROBE:
            self._generated += not isinstance(results[0], GenerateFault)
            return []
        part = self._parts.pop(number)
        return [(number, part, *one) for one in zip(part.requests, results, strict=True)]

    def _failed(self, number: int, part: _Part, request: PromptRequest, fault: GenerateFault) -> Group | None:
        """Has the group sent again alone; or returns it as failed, once that was in vain."""
        if not fault.away and self._is_dropped(
                request.ordinal, fault, self._generated > (part.generated or 0), number == self._alone):
            return Group(request.ordinal, request.prompt, (), fault.why)
        again = _Part([request], part.min_version, self._generated,
                      part.retry if len(part.requests) == 1 else RetryBackoff(*_RETRY_S), max(1, self._at_once // 2))
        again.retry.failed(time.monotonic())
        self._put(again, self._suspects if fault.shared else self._unsent)
        if fault.away:
            self._say(fault.away, fault.why)
            return None
        # As long as none was generated another prompt: of the first groups of an actor some may fail always.
        if _PROBE not in self._running.values() and (probe := self._known_good or self._other()) is not None:
            self._running[self._threads.submit(self._generate, [probe], part.min_version)] = _PROBE
        too_many = f" ({_TOO_MANY})" if self._failures.is_exhausted([request.ordinal]) else ""
        self._say("plugin", fault.why + too_many)
        return None

    def _is_dropped(self, ordinal: int, fault: GenerateFault, works: bool, alone: bool) -> bool:
        """Whether the group has failed for good. ``works``: another was generated since it failed before."""
        if not self._failures.failed([ordinal], reward_works=works and (alone or not fault.shared)):
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
