"""What a node tells during a long fetch to whoever asked for it: how far it is, and which chunks are there already."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from elastic_rl.dcs.storage.tiers import Chunk
from elastic_rl.errors import ElasticRLError

_PROGRESS_S = 1.0
"""Also what lets the caller tell slow from dead."""
_CHUNKS_S = 0.02

Locate = Callable[[Iterable[Chunk]], list[tuple[str, int, int]]]
"""(digest, offset, bytes) of chunks, which stay in place from then on."""


class Arrivals:
    """Takes chunks as they arrive, and tells of them from a thread of its own."""

    def __init__(self, total: int, locate: Locate | None) -> None:
        """``total``: bytes of all, as far as it is known. ``locate``: for a caller that wants each chunk."""
        self._total, self._locate = total, locate
        self._lock = threading.Lock()
        self._done = 0
        self._new: list[Chunk] = []

    def __call__(self, chunk: Chunk) -> None:
        with self._lock:
            self._done += chunk.nbytes
            self._new.append(chunk)

    @contextlib.contextmanager
    def told(self, send: Callable[[dict[str, Any]], None]) -> Iterator[None]:
        """Sends now and then what there is to tell, until the context ends."""
        ended = threading.Event()

        def tell() -> None:
            quiet_s, pause_s = 0.0, _CHUNKS_S if self._locate else _PROGRESS_S
            with contextlib.suppress(OSError):  # the answer, or the next request, will find the same
                while not ended.wait(pause_s):
                    quiet_s += pause_s
                    if (message := self._message(quiet_s)) is not None:
                        send(message)
                        quiet_s = 0.0

        thread = threading.Thread(target=tell, name="arrivals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _message(self, quiet_s: float) -> dict[str, Any] | None:
        with self._lock:
            done, (new, self._new) = self._done, (self._new, [])
        message: dict[str, Any] = {"progress": [done, max(done, self._total)]}
        if self._locate is not None and new:
            with contextlib.suppress(ElasticRLError):  # the fetch itself will find the same, or mend it
                message["chunks"] = self._locate(new)
                return message
        return message if quiet_s >= _PROGRESS_S else None
