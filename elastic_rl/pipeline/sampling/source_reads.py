"""Reads of the data source, which may be a user's code: one that does not return is waited for, and is shown."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from elastic_rl.errors import ElasticRLError, Fenced, SourceFailed
from elastic_rl.pipeline.waits import Waits
from elastic_rl.plugins.user_code import describe

T = TypeVar("T")
_SLICE_S = 0.1
"""The loop's thread looks this often whether it is to end."""
SHOWN_AFTER_S = 10.0
"""A read that takes longer is a wait."""


class SourceReads:
    """Reads, one at a time, each in a daemon thread. Used by one thread.

    A read is not given up for another one: a source is asked by one thread only, and what it waits for is away for the
    next read too. So no more than one thread is ever left behind.
    """

    def __init__(self, named: str, waits: Waits, turn: threading.Lock | None = None) -> None:
        """``named``: the setting's value, for texts. ``turn``: shared by the readers of several threads, of which one
        asks the source at a time."""
        self._named, self._waits, self._turn = named, waits, turn or threading.Lock()

    def of_thread(self, waits: Waits) -> SourceReads:
        """Reads of the same source by another thread, which has these waits."""
        return SourceReads(self._named, waits, self._turn)

    def read(self, what: str, call: Callable[[], T]) -> T:
        """What the call returns, whenever that is. Raises the project's own errors that the call raises, SourceFailed
        for any other, and Fenced when the loop is to end."""
        while not self._turn.acquire(timeout=_SLICE_S):
            self._waits.pause(0.0)
        try:
            return self._read(what, call)
        finally:
            self._turn.release()

    def _read(self, what: str, call: Callable[[], T]) -> T:
        done, found, errors = threading.Event(), list[T](), list[BaseException]()

        def body() -> None:
            try:
                found.append(call())
            except BaseException as e:  # whatever a user's source raises
                errors.append(e)
            finally:
                done.set()

        threading.Thread(target=body, name="source", daemon=True).start()
        began = time.monotonic()
        while not done.wait(_SLICE_S):
            if time.monotonic() - began > SHOWN_AFTER_S:
                self._waits.waits("source", f"data.source={self._named} to {what}, which has taken longer than "
                                  f"{SHOWN_AFTER_S:g} s (if it never returns, correct it, and `elastic-rl restart "
                                  "roles/actor`)")
            else:
                self._waits.pause(0.0)
        if not errors:
            return found[0]
        if isinstance(errors[0], ElasticRLError) and not isinstance(errors[0], Fenced):
            raise errors[0]
        raise SourceFailed(f"data.source={self._named} failed to {what}: {describe(errors[0])}") from errors[0]
