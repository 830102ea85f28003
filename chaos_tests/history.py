"""What clients did and what they were told: a history of operations, which checkers judge.

An operation is written down twice: when it is sent, and when its answer is known. One without a known answer may have
happened at any time since it was sent, or never: *unknown* is no error, and is never left out.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from chaos_tests.event_log import EventLog, Kind


@dataclass(frozen=True)
class Operation:
    """One call of one client. Times are seconds of one host's monotonic clock: histories of several hosts cannot be
    put together."""

    client: str
    """Who called. A client has one call under way at a time."""
    key: str
    """What it was about. Operations on different keys do not depend on one another."""
    call: str
    argument: Any
    began_s: float
    ended_s: float | None = None
    """When the answer was known; None: it is unknown whether and when the call had its effect."""
    result: Any = None
    model: str = ""
    """Name of the sequential model that judges it (``chaos_tests.model.models``)."""


class Refused(Exception):
    """A call that was refused, and certainly had no effect: it is left out of the history."""


class Unanswered(Refused):
    """A call that certainly had no effect, since nobody answered it, or nobody could do it: it is left out of the
    history, and the log has it as a try."""


class Unknown(Exception):
    """A call of which nobody knows whether it had its effect: a lost answer, a time-out, a server that died."""


class Recorder:
    """Writes the operations of any number of threads down. With a ``file`` each one is also a line of JSON there, so
    that the history of a process that is killed is whole up to then. With a ``log`` each one is a record there once its
    answer is known, or known to be lost, and those that are under way when it closes are recorded as unknown."""

    def __init__(self, file: Path | None = None, *, log: EventLog | None = None, model: str = "",
                 clock: Callable[[], float] = time.monotonic) -> None:
        """``model``: of operations that name none."""
        self._clock, self._log, self._model = clock, log, model
        self._under_way = set[int]()
        self._lock = threading.Lock()
        self._operations: dict[int, Operation] = {}
        self._numbers = itertools.count()
        self._file = file.open("a", encoding="utf-8") if file is not None else None

    @contextmanager
    def operation(self, client: str, key: str, call: str, argument: Any = None, *, model: str = "") -> Iterator[Answer]:
        """Inside, the call is made, and its result set. It ends as unknown where the body raises ``Unknown`` or sets no
        result, and is left out where it raises ``Refused``; neither of them leaves this block. Any other error does,
        and the operation is unknown."""
        answer = Answer()
        with self._lock:
            number = next(self._numbers)
            self._operations[number] = begun = Operation(client, key, call, argument, self._clock(),
                                                         model=model or self._model)
            self._under_way.add(number)
            self._write(number, begun)
        now: Operation | None = begun
        try:
            yield answer
            if answer.known:
                now = replace(begun, ended_s=self._clock(), result=answer.result)
        except Refused as e:
            now = None
            if isinstance(e, Unanswered) and self._log is not None:
                self._log.write(Kind.UNANSWERED, client=begun.client, key=key, call=call, model=begun.model)
        except Unknown:
            pass
        finally:
            with self._lock:
                self._end(number, now)

    def add(self, operation: Operation) -> None:
        """Writes an operation down that has ended, or whose answer is lost."""
        with self._lock:
            number = next(self._numbers)
            self._operations[number] = operation
            self._under_way.add(number)
            self._end(number, operation)

    def now(self) -> float:
        """The time of its clock, for operations that are written down later."""
        return self._clock()

    def operations(self) -> list[Operation]:
        """All so far, in the order in which they began; with a ``log``, which has the others, those that are under way.
        Those are unknown."""
        with self._lock:
            return [self._operations[number] for number in sorted(self._operations)]

    def close(self) -> None:
        with self._lock:
            for number in sorted(self._under_way):
                self._to_log(self._operations[number])
            self._under_way.clear()
            if self._file is not None:
                self._file.close()
                self._file = None

    def _end(self, number: int, operation: Operation | None) -> None:
        """Its outcome is known, or known to be lost; None: it had no effect."""
        under_way = number in self._under_way  # else it is in the log as unknown, and what is known now is too late
        self._under_way.discard(number)
        if operation is None:
            self._operations.pop(number, None)
        else:
            self._operations[number] = operation
            if under_way:
                self._to_log(operation)
        if self._log is not None:
            self._operations.pop(number, None)
        if operation is None or operation.ended_s is not None:
            self._write(number, operation)

    def _to_log(self, operation: Operation) -> None:
        if self._log is not None:
            self._log.write(Kind.OPERATION, **asdict(operation))

    def _write(self, number: int, operation: Operation | None) -> None:
        if self._file is not None:
            self._file.write(json.dumps([number, asdict(operation) if operation is not None else None]) + "\n")
            self._file.flush()


@dataclass
class Answer:
    """The answer of the call in the body of ``Recorder.operation``."""

    result: Any = None
    known: bool = False

    def is_(self, result: Any) -> None:
        self.result, self.known = result, True


def read(file: Path) -> list[Operation]:
    """The history in a file of a ``Recorder``. A last line without its end is that of a process that was killed while
    it wrote it, and is left out. Raises ValueError for any other line that is no operation."""
    operations: dict[int, Operation] = {}
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            if not line.endswith("\n"):
                break
            number, fields = json.loads(line)
            if fields is None:
                operations.pop(number, None)
            else:
                operations[number] = Operation(**fields)
    return [operations[number] for number in sorted(operations)]
