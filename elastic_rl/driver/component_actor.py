"""The Ray actor of a component of the compute plane, which outlives the driver that made it.

A driver names its generation in each call. A component that was called by a newer driver refuses the calls of an older
one, which may have been suspended between its decision and its call.
"""

from __future__ import annotations

import threading
from typing import Any

from elastic_rl.errors import Fenced
from elastic_rl.runtime.imports import class_of


class ComponentActor:
    """The actor runs a body in a thread of its own. It needs a concurrency of 3 or more: one ``wait`` of the newest
    driver, one of an older driver that is just returning, and a call."""

    def __init__(self, body: type | str, *args: Any) -> None:
        """``body(*args)`` has the method ``run``, which returns when its work has ended, and those that drivers call.
        A body that is named (``module:Class``) is imported here, so that the driver need not import it.
        """
        self._body = class_of(body)(*args)
        self._changed = threading.Condition()
        self._generation = 0
        self._ended = False
        self._result: Any = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="component", daemon=True).start()

    def wait(self, generation: int, timeout_s: float) -> tuple[bool | None, Any]:
        """Whether ``run`` has ended, and what it returned, as soon as it has ended and after ``timeout_s`` seconds at
        the latest. None for an older driver, as soon as a newer one calls: its call would keep a thread of the actor
        otherwise. Raises what ``run`` raised, which may be Fenced, too."""
        with self._changed:
            if generation >= self._generation:
                self._admit(generation)
                self._changed.wait_for(lambda: self._ended or self._generation > generation, timeout_s)
            if generation < self._generation:
                return None, None
            if self._error is not None:
                raise self._error
            return self._ended, self._result

    def call(self, generation: int, method: str) -> Any:
        """What a method of the body returns. Raises what it raises, and Fenced for an older driver."""
        with self._changed:
            self._admit(generation)
        return getattr(self._body, method)()

    def _admit(self, generation: int) -> None:
        if generation < self._generation:
            raise Fenced(f"driver {generation} has been replaced by driver {self._generation}",
                         hint="stop; another driver has taken over")
        if generation > self._generation:
            self._generation = generation
            self._changed.notify_all()

    def _run(self) -> None:
        result, error = None, None
        try:
            result = self._body.run()
        except BaseException as e:  # whatever it is, the driver is to be told
            error = e
        with self._changed:
            self._ended, self._result, self._error = True, result, error
            self._changed.notify_all()
