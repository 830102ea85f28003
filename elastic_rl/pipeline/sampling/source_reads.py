"""Reads of the data source, which may be a user's code: one that does not return is waited for, and is shown."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from elastic_rl.errors import ElasticRLError, Fenced, SourceFailed
from elastic_rl.pipeline.waits import Waits
from elastic_rl.plugins.user_code import describe
from elastic_rl.runtime.abandonable import AbandonableCalls, CallRefused

T = TypeVar("T")
_SLICE_S = 0.1
"""The loop's thread looks this often whether it is to end."""
SHOWN_AFTER_S = 10.0
"""A read that takes longer is a wait."""


class SourceReads:
    """Reads, one at a time. Used by one thread.

    No read is abandoned for another one: a source is asked by one thread only, and what it waits for is away for the
    next read too. Only a loop that is to end abandons one.
    """

    def __init__(self, named: str, waits: Waits, lock: threading.Lock | None = None) -> None:
        """``named``: the setting's value, for texts. ``lock``: shared by the readers of several threads, of which one
        asks the source at a time."""
        self._named, self._waits, self._lock = named, waits, lock or threading.Lock()
        self._calls = AbandonableCalls("source", 1)

    def of_thread(self, waits: Waits) -> SourceReads:
        """Reads of the same source by another thread, which has these waits."""
        return SourceReads(self._named, waits, self._lock)

    def read(self, what: str, call: Callable[[], T]) -> T:
        """What the call returns, whenever that is. Raises the project's own errors that the call raises, SourceFailed
        for any other, and Fenced when the loop is to end."""
        while not self._lock.acquire(timeout=_SLICE_S):
            self._waits.pause(0.0)
        try:
            return self._read(what, call)
        finally:
            self._lock.release()

    def _read(self, what: str, call: Callable[[], T]) -> T:
        began = time.monotonic()

        def look() -> None:
            if time.monotonic() - began > SHOWN_AFTER_S:
                self._waits.waits("source", f"data.source={self._named} to {what}, which has taken longer than "
                                  f"{SHOWN_AFTER_S:g} s (if it never returns, correct it, and `elastic-rl restart "
                                  "roles/actor`)")
            else:
                self._waits.pause(0.0)

        try:
            reading = self._calls.begin(call)
        except CallRefused as e:
            raise SourceFailed(f"data.source={self._named} is not asked to {what}: {e.message}") from e
        reading.wait(look, every_s=_SLICE_S)
        error = reading.future.exception()
        if error is None:
            return reading.future.result()
        if isinstance(error, ElasticRLError) and not isinstance(error, Fenced):
            raise error
        raise SourceFailed(f"data.source={self._named} failed to {what}: {describe(error)}") from error
