"""What every traffic is: clients in threads that go on while faults happen, and say what they did."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from chaos_tests.event_log import EventLog
from chaos_tests.history import Answer, Recorder, Unanswered, Unknown
from elastic_rl.errors import DeadlineExceeded, ElasticRLError, OutcomeUnknown
from elastic_rl.runtime.waiting import wait_until

_MORE_S = 300.0
_JOIN_S = 60.0


class Traffic(ABC):
    """``start`` it, wait for ``more`` while faults happen, ``close`` it. Its history is in ``recorder``, and as records
    in ``log``."""

    def __init__(self, *, log: EventLog | None = None, recorder: Recorder | None = None) -> None:
        """``recorder``: one that it shares with others, who close it; by default it has its own."""
        self.recorder = recorder or Recorder(log=log)
        self._owns_recorder = recorder is None
        self._stopping = threading.Event()
        self._accepted, self._lock = 0, threading.Lock()
        self._threads, self._errors = list[threading.Thread](), list[BaseException]()

    @abstractmethod
    def workers(self) -> Sequence[Callable[[], None]]:
        """What its threads run, until ``stopping``."""

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def pause(self, seconds: float) -> bool:
        """Waits between two calls; whether it is to end."""
        return self._stopping.wait(seconds)

    def start(self) -> Self:
        self._threads = [threading.Thread(target=self._run, args=(work,), name=type(self).__name__, daemon=True)
                         for work in self.workers()]
        for thread in self._threads:
            thread.start()
        return self

    def count(self) -> None:
        """A call was accepted."""
        with self._lock:
            self._accepted += 1

    def accepted(self) -> int:
        """Calls that were accepted so far: a floor for it proves that there was traffic."""
        with self._lock:
            return self._accepted

    def more(self, n: int) -> None:
        """Returns once ``n`` more calls were accepted: the fault is over for the clients. Raises DeadlineExceeded where
        that takes minutes, and what has ended a worker."""
        goal = self.accepted() + n
        wait_until(lambda: self._errors or self.accepted() >= goal, timeout_s=_MORE_S,
                   what=f"{n} more accepted calls of {type(self).__name__}")
        self._raise()

    def stop(self) -> None:
        """The threads are asked to end, and waited for. One that does not end is an error of ``close``."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(_JOIN_S)
            if thread.is_alive():
                self._errors.append(DeadlineExceeded(f"a client of {type(self).__name__} has not ended "
                                                     f"{_JOIN_S:g} s after it was asked to"))

    def close(self) -> None:
        """Ends it. Raises what has ended a worker."""
        self.stop()
        if self._owns_recorder:
            self.recorder.close()
        self._raise()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as e:  # for whoever waits for it
            self._errors.append(e)

    def _raise(self) -> None:
        if self._errors:
            raise self._errors[0]


@contextmanager
def call(recorder: Recorder, client: str, key: str, what: str, argument: object = None, *, model: str
         ) -> Iterator[Answer]:
    """``Recorder.operation`` for a call of this project's clients, by the errors that they raise: only of
    OutcomeUnknown it is unknown whether the call had its effect; after any other one that is no answer, the call was
    not served. The error leaves the block."""
    raised: ElasticRLError | None = None
    with recorder.operation(client, key, what, argument, model=model) as answer:
        try:
            yield answer
        except OutcomeUnknown as e:
            raised = e
            raise Unknown from e
        except ElasticRLError as e:
            if not answer.known:
                raised = e
                raise Unanswered from e
            raised = e
    if raised is not None:
        raise raised
