"""The stage generate: groups are sent to the rollout role in requests of some of them. Each is answered as it ends."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from elastic_rl.config import Config
from elastic_rl.data.samples import Group, Sample
from elastic_rl.engine.generation import Answers, Generated, GenerateFault, PromptRequest, oldest_version
from elastic_rl.errors import ElasticRLError, Fenced, PluginFailed, RoleUnavailable
from elastic_rl.etcd.records import GenerationCap
from elastic_rl.pipeline.sampling.fault_isolation import Failure, FaultIsolation, Lane, Trial, Verdict
from elastic_rl.pipeline.waits import Waits
from elastic_rl.runtime.sequences import batches

log = logging.getLogger(__name__)

_LEAST = 64
"""Full requests whose groups are in flight at once where it is not known what the engines can take, or that is less."""
_MOST, _IN_PROBATION = 4096, 32
"""The most requests in flight, each of which has a thread, and the most of groups in probation beside them. A replica
of the role takes as many (``roles/registry.py``)."""
_AHEAD = 1.5
"""Sequences in flight as a multiple of those that engines decode at once: others wait there when some end."""
_SHOW_S = 0.5
"""How often it is said that engines are missing."""
_RETRY_S = (0.2, 4.0)
"""First and longest pause before a group is sent again whose request failed."""

Generate = Callable[[Sequence[PromptRequest], int, bool], Iterable[Answers]]
"""One attempt: from prompt groups, the oldest version that is accepted, and whether they are in probation, where they
get another process of the user's function than all others, to what becomes of each, as it ends."""
Answer = tuple[PromptRequest, Sequence[Sample]]


@dataclass(frozen=True)
class _Asked:
    """A group that is to be generated."""

    request: PromptRequest
    min_version: int


@dataclass(eq=False)
class _Sent:
    """A request in flight. Its thread adds to ``answers``, and sets ``ended``."""

    lane: Lane
    groups: Sequence[_Asked]
    trials: dict[int, Trial[_Asked]]
    """What is tried of its groups and not answered yet, by the place in ``groups``; empty for a probe."""
    is_probe: bool
    answers: list[tuple[int, Generated]] = field(default_factory=list)
    ended: bool = False
    error: BaseException | None = None


def groups_at_once(running: int, samples: int, least: int) -> int:
    """How many groups of so many samples keep engines busy that decode ``running`` sequences at once, all of them
    together; ``least`` where that is less, or not known. Pure."""
    return max(least, math.ceil(_AHEAD * running / samples))


class GroupRequests:
    """Generates groups; ``FaultIsolation`` says where and when those are tried again that fail. The groups of a request
    that fails as a whole are sent again, after a pause that grows, without end. Used by one thread."""

    def __init__(self, cfg: Config, generate: Generate, waits: Waits, *, other: Callable[[int], PromptRequest],
                 no_engine: Callable[[], str], on_failed: Callable[[Sequence[int], str], None],
                 running: Callable[[], int] = lambda: 0) -> None:
        """``other``: a prompt to probe with, see ``FaultIsolation.probe``. ``no_engine``: says which engines are
        missing while none serves; else "". It is called regularly then, and what it raises ends the ``poll``.
        ``on_failed``: called with groups that are dropped, and why; it raises nothing but Fenced. ``running``: see
        ``groups_at_once``."""
        self._generate, self._waits, self._other, self._no_engine = generate, waits, other, no_engine
        self._on_failed, self._groups_per_request = on_failed, cfg.groups_per_request
        self._setting = cfg.rollout.generated_by
        # An episode may take minutes: halves show in few rounds which of many groups has ended their process.
        self._isolation: FaultIsolation[_Asked] = FaultIsolation.of(cfg, _RETRY_S, halves=True)
        self._running_of_pool, self._samples = running, 1
        self._threads = ThreadPoolExecutor(_MOST + _IN_PROBATION, "generate")  # which starts those that it needs
        self._lock = threading.Lock()
        """Guards ``_news`` and what the threads write of each request."""
        self._show_at, self._quiet, self._min_version = 0.0, False, 0
        self.generation_cap = GenerationCap.NONE
        """The limit for which groups were not sent at the last ``poll``, although they were due."""
        self.begin()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def begin(self) -> None:
        """Forgets what is not answered yet."""
        self._isolation.reset()
        self._running: dict[Lane, dict[_Sent, None]] = {lane: {} for lane in Lane}
        """Requests by lane."""
        self._news: Future[None] = Future()
        """Done when a thread has something to take."""

    @property
    def pending(self) -> bool:
        """Whether groups are not answered yet."""
        return self._isolation.is_pending

    def add(self, requests: Sequence[PromptRequest], min_version: int) -> None:
        self._min_version = min_version
        self._samples = max((request.samples for request in requests), default=self._samples)
        for request in requests:
            self._isolation.add([_Asked(request, min_version)])

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
        if not any(self._running.values()):
            pause_s = min(self._isolation.left_s(now), timeout_s)
            if others:
                wait(others, timeout=pause_s)
            elif self.pending:
                self._waits.pause(pause_s)
                self._missing_engines()  # what is waited for is said by the request that has failed
            return [], []
        ended, _ = wait([self._news, *others], timeout=timeout_s, return_when=FIRST_COMPLETED)
        if not ended and (missing := self._missing_engines()):
            self._say("engines", missing)  # the requests themselves may wait in the router
        with self._lock:
            self._news = Future()
        answered: list[Answer] = []
        failed: list[Group] = []
        for lane in Lane:
            found, given_up = self._take(lane)
            answered += found
            failed += given_up
        return answered, failed

    def _missing_engines(self) -> str:
        if time.monotonic() < self._show_at or not (missing := self._no_engine()):
            return ""
        self._show_at = time.monotonic() + _SHOW_S
        return missing

    def _send_due(self, lane: Lane, now: float) -> None:
        if (probe := self._isolation.probe(lane, lambda number: _Asked(self._other(number), self._min_version))
                ) is not None:
            self._submit(_Sent(lane, [probe], {}, is_probe=True))
        if lane is Lane.PROBATION:
            for trial in self._isolation.start(lane, now, _IN_PROBATION):
                self._submit(_Sent(lane, trial.groups, {0: trial}, is_probe=False))
            return
        size, running = self._groups_per_request, self._running[lane]
        tried = sum(len(sent.trials) for sent in running)
        due = defaultdict[int, list[Trial[_Asked]]](list)
        of_pool = groups_at_once(self._running_of_pool(), self._samples, _LEAST * size)
        of_requests = tried + max(0, _MOST - len(running)) * size
        for trial in self._isolation.start(lane, now, min(of_pool, of_requests)):
            due[trial.groups[0].min_version].append(trial)
        for trials in due.values():
            for some in batches(trials, size):
                self._submit(_Sent(lane, [trial.groups[0] for trial in some], dict(enumerate(some)), is_probe=False))
        self.generation_cap = GenerationCap.NONE
        if self._isolation.is_due(lane, now):
            self.generation_cap = GenerationCap.POOL if of_pool <= of_requests else GenerationCap.REQUESTS

    def _submit(self, sent: _Sent) -> None:
        self._running[sent.lane][sent] = None
        self._threads.submit(self._ask, sent)

    # -- in the threads of the requests ------------------------------------------------------------------------------
    def _ask(self, sent: _Sent) -> None:
        try:
            for some in self._generate([asked.request for asked in sent.groups], sent.groups[0].min_version,
                                       sent.lane is Lane.PROBATION):
                if sent not in self._running[sent.lane]:
                    return  # it was forgotten, and nobody waits for the rest
                if some:
                    self._answered(sent, some)
            self._ended(sent)
        except BaseException as e:  # which the loop raises, or waits for
            self._ended(sent, e)

    def _answered(self, sent: _Sent, some: Answers) -> None:
        with self._lock:
            sent.answers += some
            self._tell()

    def _ended(self, sent: _Sent, error: BaseException | None = None) -> None:
        with self._lock:
            sent.ended, sent.error = True, error
            self._tell()

    def _tell(self) -> None:
        if not self._news.done():
            self._news.set_result(None)

    # -- what they gave ----------------------------------------------------------------------------------------------
    def _take(self, lane: Lane) -> tuple[list[Answer], list[Group]]:
        """Takes what the requests of a lane have given, as ``poll`` does."""
        found: list[tuple[Trial[_Asked], Generated]] = []
        for sent in [*self._running[lane]]:
            with self._lock:
                answers, sent.answers = sent.answers, []
                ended, error = sent.ended, sent.error
            if ended or (sent.is_probe and answers):
                del self._running[lane][sent]
            if error is not None and (isinstance(error, Fenced) or not isinstance(error, ElasticRLError)):
                raise error
            answers = [(place, _accepted(one, sent.groups[place].min_version)) for place, one in answers]
            if sent.is_probe:
                self._take_probe(lane, answers, ended, error)
                continue
            found += [(sent.trials.pop(place), one) for place, one in answers if place in sent.trials]
            if ended:
                self._send_rest_again(sent, error)
        if any(not isinstance(one, GenerateFault) for _, one in found) and not self._quiet:
            self._waits.works()
        verdicts = self._isolation.settle(lane, [(trial, [
            Failure.of(shared=one.shared, away=bool(one.away), unanswered=one.unanswered)
            if isinstance(one, GenerateFault) else None]) for trial, one in found], time.monotonic())
        answered: list[Answer] = []
        dropped: list[Group] = []
        for (trial, one), [verdict] in zip(found, verdicts, strict=True):
            [asked] = trial.groups
            if not isinstance(one, GenerateFault):
                answered.append((asked.request, one))
            elif self._is_dropped(one, verdict):
                dropped.append(self._dropped(asked.request, one))
        return answered, dropped

    def _take_probe(self, lane: Lane, answers: Answers, ended: bool, error: ElasticRLError | None) -> None:
        if answers:
            self._isolation.probed(lane, works=not isinstance(answers[0][1], GenerateFault))
        elif ended:
            self._isolation.probed(lane, works=False)
            if error is not None:
                self._say(*_waited_for(error))

    def _send_rest_again(self, sent: _Sent, error: ElasticRLError | None) -> None:
        """Sends the groups again that a request has left when it ends."""
        left, sent.trials = [*sent.trials.values()], {}
        for trial in left:
            self._isolation.interrupted(trial, time.monotonic())
        if error is not None:
            self._say(*_waited_for(error))
        elif left:
            self._say("rollout", f"the rollout role ended a request without {len(left)} of its groups")

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
