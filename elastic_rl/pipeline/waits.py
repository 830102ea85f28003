"""How the loop waits (I11): a part that is away pauses the run, which says what it waits for, and goes on by itself."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from elastic_rl.errors import ConfigError, ElasticRLError, EtcdUnavailable, Fenced, OutputFailed, PluginFailed
from elastic_rl.runtime.patience import patiently

log = logging.getLogger(__name__)
T = TypeVar("T")

_RETRY_S = (0.1, 2.0)
"""First and longest pause between two attempts."""
_SAID_AFTER_S, _OWN_AFTER_S = 5.0, 60.0
"""A wait within an attempt that is repeated is part of it: after the first time the text says so, after the second one
it takes the attempts' place. Alternating with them, each would be too young to be seen."""
_SHOW_EVERY_S = 1.0
"""Interval in a pause at which what is waited for is written, once it is old enough."""
_LOG_AFTER_S = 1.0
"""Shorter waits are part of a step and are not logged."""


class StopAsked(Exception):
    """The operator stops the run, and what the loop does now need not be done first."""


class WaitReporter(Protocol):
    """Shows what the run does. Called often; writes rarely. Raises nothing but Fenced."""

    def __call__(self, stage: str, kind: str, what: str) -> None:
        """``kind``: the part of the system that it waits for, "" while it works; ``what``: in words."""


class WaitRelay:
    """The reporter of a second loop: keeps what that waits for, for the first one to show."""

    waiting = ("", "")
    """Kind and text of the wait; "" while there is none. Any thread may read it."""

    def __call__(self, stage: str, kind: str, what: str) -> None:
        self.waiting = kind, what


@dataclass(frozen=True)
class _Wait:
    kind: str
    what: str
    since: float
    """Monotonic."""


class Waits:
    """Waits of one loop, by stage. Used by one thread, but for ``take_idle_s``, which any other one may call."""

    def __init__(self, report: WaitReporter, stopping: threading.Event, stop_asked: threading.Event | None = None
                 ) -> None:
        """``stopping``: ends every wait with Fenced. ``stop_asked``: ends those with StopAsked that are
        ``interruptible``."""
        self._report, self._stopping, self._stop_asked = report, stopping, stop_asked or threading.Event()
        self._interruptible = False
        self._stage = ""
        self._kind = self._what = ""
        self._since = self._counted_from = 0.0
        self._logged = False
        self._held: _Wait | None = None
        self._nested: _Wait | None = None
        """A wait for something else while one is held."""
        self._idle_s: dict[str, float] = {}
        self._booking = threading.Lock()
        """Guards ``_idle_s`` and what it is made of."""

    def stage(self, name: str) -> None:
        """The loop begins a stage. Raises Fenced."""
        self.works()
        self._stage = name
        self._report(name, self._kind, self._held.what if self._held is not None else "")

    def works(self) -> None:
        """The loop does not wait (any more), but for a wait that is held: see ``holding``. Raises Fenced."""
        held, self._nested = self._held, None
        if held is not None:
            self._set(held.kind, held.what, held.since)
        elif self._kind:
            self._set("", "", 0.0)

    def waits(self, kind: str, what: str) -> None:
        """The loop waits for a part of the system. Call it again and again while it does. Raises Fenced when the loop
        is to end."""
        held, now = self._held, time.monotonic()
        if held is None or held.kind == kind:
            self._wait(_Wait(kind, what, now if held is None else held.since))
            return
        if self._nested is None or self._nested.kind != kind:
            self._nested = _Wait(kind, what, now)
        lasted = now - self._nested.since
        if lasted >= _OWN_AFTER_S:
            self._wait(_Wait(kind, what, self._nested.since))
        else:
            self._wait(_Wait(held.kind, f"{held.what} (now for {what})" if lasted >= _SAID_AFTER_S else held.what,
                             held.since))

    @property
    def stop_asked(self) -> bool:
        return self._stop_asked.is_set()

    @contextlib.contextmanager
    def interruptible(self, yes: bool = True) -> Iterator[None]:
        """Inside, waits and pauses raise StopAsked once the run is to stop; unless ``yes`` they do not."""
        before, self._interruptible = self._interruptible, yes
        try:
            yield
        finally:
            self._interruptible = before

    def _require(self) -> None:
        """Raises Fenced when the loop is to end, and StopAsked."""
        if self._stopping.is_set():
            raise Fenced("this loop is to end")
        if self._interruptible and self._stop_asked.is_set():
            raise StopAsked

    def _wait(self, wait: _Wait) -> None:
        self._require()
        self._set(wait.kind, wait.what, wait.since)

    def _set(self, kind: str, what: str, since: float) -> None:
        now, self._what = time.monotonic(), what
        if kind != self._kind:
            if self._kind and self._logged:
                log.info("%s waited %.1f s for %s", self._stage, now - self._since, self._kind)
            with self._booking:
                self._book(now)
                self._kind, self._since, self._counted_from, self._logged = kind, since, now, False
        if kind and not self._logged and now - self._since >= _LOG_AFTER_S:
            self._logged = True
            log.warning("%s waits for %s", self._stage, what)
        self._report(self._stage, kind, what)

    @contextlib.contextmanager
    def holding(self, kind: str, what: str, since: float | None = None) -> Iterator[None]:
        """Inside, the loop waits for this whenever it waits for nothing else, or not for long: an attempt that is
        repeated begins new stages and waits, and without this each would end the wait before it is old enough to be
        shown."""
        outer, self._held = self._held, _Wait(kind, what, time.monotonic() if since is None else since)
        try:
            yield
        finally:
            self._held = outer

    def pause(self, seconds: float) -> None:
        """Raises Fenced when the loop is to end."""
        end = time.monotonic() + seconds
        self._require()
        while not self._stopping.wait(min(seconds, _SHOW_EVERY_S)):
            self._require()
            seconds = end - time.monotonic()
            if seconds <= 0:
                return
            if self._kind:
                self._report(self._stage, self._kind, self._what)
        raise Fenced("this loop is to end")

    def retry(self, kind: str, call: Callable[[], T], *, end_on: tuple[type[Exception], ...] = ()) -> T:
        """The result of a call that fails because some part is away, as soon as it succeeds. ``end_on``: errors that
        are the caller's, as Fenced always is. An error of etcd is a wait for etcd, and one of the job's folder
        for the disk, whatever ``kind`` is. A wait in which the call is made, as a look at what is waited for is, goes
        on when the call succeeds at once."""
        waited_for = self._kind
        failure: _Wait | None = None

        def attempt() -> T:
            with contextlib.nullcontext() if failure is None else self.holding(
                    failure.kind, failure.what, failure.since):
                return call()

        def waiting(error: ElasticRLError) -> None:
            nonlocal failure
            found = _waited_for(error, kind)
            since = failure.since if failure is not None and failure.kind == found[0] else time.monotonic()
            failure = _Wait(*found, since)
            self._wait(failure)

        result = patiently(attempt, away=ElasticRLError, unless=(Fenced, *end_on), pauses_s=_RETRY_S,
                           pause=self.pause, waiting=waiting)
        if failure is not None or not waited_for:
            self.works()
        return result

    def _book(self, now: float) -> None:
        """Counts what the wait in progress has lasted."""
        if self._kind:
            self._idle_s[self._stage] = self._idle_s.get(self._stage, 0.0) + now - self._counted_from
            self._counted_from = now

    def take_idle_s(self) -> dict[str, float]:
        """Seconds waited since the last call, by stage, with those of a wait in progress. Thread-safe."""
        with self._booking:
            self._book(time.monotonic())
            taken, self._idle_s = self._idle_s, {}
            return taken


def _waited_for(error: ElasticRLError, kind: str) -> tuple[str, str]:
    """What an error of a call has the loop wait for, and that in words. ``kind``: what it is where the error does not
    say."""
    match error:
        case EtcdUnavailable():
            return "etcd", f"etcd: {error}"
        case ConfigError() | PluginFailed():
            return "plugin", str(error)  # what the settings name does not fit; only a person helps
        case OutputFailed():
            return "disk", f"disk: {error}"
        case _:
            return kind, f"{kind}: {error}"
