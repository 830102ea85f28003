"""Processes that a measurement drives: one JSON line in, one JSON line out.

The parent's side is ``Worker``. A worker's module ends with ``serve({"op": handler, ...})``: each handler takes the
fields of a request and returns those of the answer. Times cross as ``time.monotonic()``, which all processes of a host
share.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from elastic_rl.errors import DeadlineExceeded, ElasticRLError
from elastic_rl.host.processes import python, stop
from elastic_rl.runtime.process import die_with_parent, freeze_heap, start_process

_READ = 1 << 16


class WorkerFailed(ElasticRLError):
    """A worker ended, or one of its handlers raised."""


class Worker:
    """A process that runs ``module`` with arguments; its stderr goes to ``log``. Used by one thread."""

    def __init__(self, module: str, *args: str, log: Path, env: Mapping[str, str] | None = None) -> None:
        self.name = module.rpartition(".")[2]
        self._log = log
        self._unread = b""
        with log.open("ab") as err:
            self._process = start_process(python(module, *args), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                          stderr=err, env={**os.environ, **(env or {})})

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, op: str, *, timeout_s: float = 120.0, **fields: Any) -> dict[str, Any]:
        """One request and its answer. Raises WorkerFailed and DeadlineExceeded."""
        self.send(op, **fields)
        return self.answer(timeout_s)

    def send(self, op: str, **fields: Any) -> None:
        """The first half of ``call``, so that several workers can be busy at once."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **fields}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as e:
            raise self._failed(f"cannot be written to: {e}") from e

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """The second half of ``call``."""
        assert self._process.stdout is not None
        fd, end = self._process.stdout.fileno(), time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            if not select.select([fd], [], [], max(end - time.monotonic(), 0.0))[0]:
                raise DeadlineExceeded(f"worker {self.name} did not answer in {timeout_s:g} s", hint=f"see {self._log}")
            data = os.read(fd, _READ)
            if not data:
                raise self._failed("ended")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self._failed(str(answer["error"]))
        return answer

    def _failed(self, how: str) -> WorkerFailed:
        return WorkerFailed(f"worker {self.name} {how}", hint=last_line(self._log))

    def close(self) -> None:
        """Ends the process and whatever it started."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        stop(self._process.pid, grace_s=2.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def last_line(log: Path) -> str:
    """The end of a log file, short; logs go with the run, so errors take it along."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    return next((line[-300:] for line in reversed(lines) if line.strip()), "its log is empty")


Handler = Callable[..., Mapping[str, Any] | None]


def serve(handlers: Mapping[str, Handler]) -> None:
    """A worker's main: answers until its stdin ends or its parent does. What a handler raises is the answer."""
    die_with_parent()
    freeze_heap()
    # Libraries print; only answers may go where the parent reads.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = dict(handlers[request.pop("op")](**request) or {})
            except Exception as e:  # the boundary of the process: whatever it is, the parent has to know
                traceback.print_exc()
                answer = {"error": f"{type(e).__name__}: {e}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
