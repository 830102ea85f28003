"""The time between two tokens of an engine while its weights change, as a client that reads a stream of them sees it.

Unlike the pause, it includes work that the engine does before the pause in the thread that makes the tokens.
"""

from __future__ import annotations

import threading
import time
from typing import Self

import httpx

from elastic_rl.errors import EngineFailed
from elastic_rl.runtime.waiting import wait_until

_PROMPT = [5, 6, 3, 4, 7]
_TOKENS = 1500
_TOKEN_S, _WARM = 30.0, 5
"""Longest wait for a token; tokens before and after the change."""


class Listener:
    """Reads one request's tokens as they come, and notes when each one did."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, name="listener", daemon=True)
        self._error = ""
        self.at: list[float] = []

    def wait_for_more(self, count: int = _WARM) -> None:
        """Waits until so many more tokens came. Raises EngineFailed when the stream ended, and DeadlineExceeded."""
        goal = len(self.at) + count
        wait_until(lambda: len(self.at) >= goal or self._error or not self._thread.is_alive(), timeout_s=_TOKEN_S,
                   what="the next token of the engine", poll_s=0.005)
        if len(self.at) < goal:
            raise EngineFailed(f"a stream of tokens ended early: {self._error or 'all were made'}")

    def _read(self) -> None:
        body = {"input_ids": _PROMPT, "stream": True,
                "sampling_params": {"max_new_tokens": _TOKENS, "ignore_eos": True, "temperature": 0.0}}
        try:
            with httpx.stream("POST", self._url + "/generate", json=body, timeout=_TOKEN_S) as reply:
                for line in reply.iter_lines():
                    if self._stop.is_set():
                        return
                    if line.startswith("data:") and "[DONE]" not in line:
                        self.at.append(time.monotonic())
        except httpx.HTTPError as e:
            self._error = f"{type(e).__name__}: {e}"

    def __enter__(self) -> Self:
        self._thread.start()
        self.wait_for_more()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(_TOKEN_S)


def longest(at: list[float], begin: float, end: float) -> float:
    """The longest time between two tokens of which the later came after ``begin`` and the earlier before ``end``; 0 if
    there are none. Pure."""
    return max((b - a for a, b in zip(at, at[1:], strict=False) if b >= begin and a <= end), default=0.0)
