"""I10 and I11 of the end of a run: after its faults its job makes steps, and its clients get answers."""

from __future__ import annotations

from collections import Counter

from chaos_tests.event_log import Event, Kind
from chaos_tests.validate.attribution import began, ended
from chaos_tests.validate.replay import Transaction, is_job
from chaos_tests.validate.running import STATUS, RecoveryBounds
from chaos_tests.validate.times import Times
from chaos_tests.validate.verdict import OWN_TARGETS, Checker
from elastic_rl.etcd.job_records import ENDED_PHASES

_ANSWERED = 0.5
"""Least share of the operations of each kind that get an answer while no fault is under way."""
_FEWEST = 20
"""Of fewer operations nothing is said."""
_AFTER_S = 30.0
"""Time after a fault in which an operation may end that it has left without an answer."""
_SILENT_S = 60.0
"""Longest that a client, which calls every few seconds, is without an answer, not counting the time of faults."""


class _UntilTheEnd(Checker):
    """Knows when the job has ended."""

    keys = (STATUS,)

    def __init__(self) -> None:
        super().__init__()
        self._ended = 0.0
        """The time of the end; 0.0 while the job goes on."""

    def transaction(self, found: Transaction) -> None:
        for change in filter(is_job, found.changes):
            if change.name == STATUS and change.new:
                self._ended = found.at if change.new.get("phase") in ENDED_PHASES else 0.0


class LastSteps(_UntilTheEnd):
    """A run that asks its job to stop has waited for a further step; and one that was asked before made steps until
    then."""

    rule = "I11"
    reads = frozenset({Kind.FAULT, Kind.STEP, Kind.STOP})
    lacks = "the run did not ask its job to stop"

    def __init__(self) -> None:
        super().__init__()
        self._bounds, self._last = RecoveryBounds(), 0.0
        self._stop: Event | None = None

    def begin(self, run: Event) -> None:
        super().begin(run)
        self._bounds.begin(run)

    def see(self, event: Event) -> None:
        if event["kind"] == Kind.STOP:
            self._stop = event
            return
        self._bounds.see(event)
        if event["kind"] == Kind.STEP:
            self._last = max(self._last, float(event["at"]))

    @property
    def _judged(self) -> bool:
        return (self.end is not None and not self.end.get("aborted") and self.run.get("target") in OWN_TARGETS
                and bool(self._last and self._ended) and bool((self.run.get("schedule") or {}).get("minutes")))

    def finish(self, end: Event | None) -> None:
        super().finish(end)
        if not self._judged:
            return
        if self._stop is not None and self._last < float(self._stop["since"]):
            waited = float(self._stop["at"]) - float(self._stop["since"])
            self.violated(f"the job made no step for {waited:.0f} s, in which the run waited for one before it asked "
                          "the job to stop", self._stop)
        elif self._stop is None and self._ended - self._last > self._bounds.seconds:
            self.violated(f"the job made no step for {self._ended - self._last:.0f} s before it ended, and it took "
                          f"{self._bounds.seconds:.0f} s at most before")

    def evidence(self) -> str:
        return f"the last step {self._ended - self._last:.0f} s before the job ended" if self._judged else ""


class Answered(_UntilTheEnd):
    """While no fault is under way, clients get answers, and none of them waits long for the next one."""

    rule = "I10"
    reads = frozenset({Kind.FAULT, Kind.OPERATION, Kind.UNANSWERED})
    lacks = "the log has too few operations of clients while no fault was under way"

    def __init__(self) -> None:
        super().__init__()
        self._faults, self._operations = list[Event](), list[tuple[float, str, bool]]()
        self._of, self._answered = Counter[str](), Counter[str]()
        self._silences = list[tuple[str, float, float]]()
        """(client, from, to) of each time from the begin of a call to the next answer, or to the last call: of the
        first call since the answer before."""
        self._waits_since, self._tried = dict[str, float](), dict[str, float]()
        """When each client that waits for an answer tried first, and when each one tried last."""
        self._clock = 0.0
        """The time in the log when the clock of the clients was at 0."""

    def see(self, event: Event) -> None:
        if event["kind"] == Kind.FAULT:
            self._faults.append(event)
        elif not self._ended:
            at, client, answered = float(event["at"]), str(event.get("client")), event.get("ended_s") is not None
            self._operations.append((at, f"{event.get('call')} of {event.get('model')}", answered))
            self._tried[client] = at
            self._waits_since.setdefault(client, self._begin(event))
            if answered:
                self._silent(client, at)

    def finish(self, end: Event | None) -> None:
        super().finish(end)
        away = Times((began(fault) - 1.0, ended(fault)) for fault in self._faults
                      if fault.get("injected_at") is not None)
        for client in [*self._waits_since]:
            self._silent(client, self._tried[client])
        for client, since, until in self._silences:
            if (silent := away.beside(since, until)) > _SILENT_S:
                self.violated(f"{client} got no answer for {until - since:.0f} s, in {silent:.0f} s of which no fault "
                              "was under way")
        for at, what, answered in self._operations:
            if not away.has(at, after_s=_AFTER_S):
                self._of[what] += 1
                self._answered[what] += answered
        for what, count in self._of.items():
            if count >= _FEWEST and self._answered[what] < _ANSWERED * count:
                self.violated(f"{count - self._answered[what]} of {count} operations ({what}) got no answer, while no "
                              "fault was under way")

    def _begin(self, event: Event) -> float:
        """When a call was sent. A record is written when the call is over."""
        at, ended_s = float(event["at"]), event.get("ended_s")
        self._clock = at - float(ended_s) if ended_s is not None else self._clock
        return min(at, self._clock + float(event["began_s"])) if self._clock and "began_s" in event else at

    def _silent(self, client: str, until: float) -> None:
        since = self._waits_since.pop(client)
        if until - since > _SILENT_S:
            self._silences.append((client, since, until))

    def evidence(self) -> str:
        if self._of.total() < _FEWEST:
            return ""
        return f"{self._answered.total()} of {self._of.total()} operations answered while no fault was under way"


CHECKERS: tuple[type[Checker], ...] = (LastSteps, Answered)
