"""Commands, shares of batches and results between the HTTP threads of a rank and its working thread. Bounded."""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from typing import Any

from elastic_rl.errors import Conflict, ElasticRLError, StaleSamples, StepRefused
from elastic_rl.trainer.service.commands import REFUSALS, Command, TrainCommand

_QUEUE = 4
"""Commands that wait. One actor sends one at a time; a few more may be of actors that were replaced."""
_RESULTS = 16
_SHARES = 4


class Board:
    """State that both sides see. ``submit``, ``put_share`` and the reads are for HTTP threads, the rest for the rank's
    working thread."""

    def __init__(self, share_piece_bytes: int) -> None:
        self.share_piece_bytes = share_piece_bytes
        self.wake = threading.Event()
        """Set when there may be something to do."""
        self.waits_for = ""
        """What the trainer itself waits for, for people."""
        self.claims: queue.Queue[tuple[int, int]] = queue.Queue(maxsize=64)
        self._commands: queue.Queue[Command] = queue.Queue(maxsize=_QUEUE)
        self._lock = threading.Condition()
        self._pending: set[str] = set()
        self._executing: Command | None = None
        """The command that was taken last, until it is done."""
        self._results: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._shares: OrderedDict[str, list[bytes | None]] = OrderedDict()
        """The pieces of the share of each batch; None for those that have not come."""
        self._outputs: OrderedDict[str, bytes] = OrderedDict()
        self._status: dict[str, Any] = {"ready": False}

    # -- HTTP threads ---------------------------------------------------------------------------------------------
    def submit(self, command: Command) -> None:
        """Queues a command. One that is queued, running or done already is not queued again. Raises Conflict when too
        many wait or the trainer is not ready."""
        with self._lock:
            if not self._status["ready"]:
                raise Conflict("the trainer is starting", hint="ask again when its status says ready")
            if command.id in self._pending or command.id in self._results:
                return
            try:
                self._commands.put_nowait(command)
            except queue.Full:
                raise Conflict(f"{_QUEUE} commands wait already", hint="ask again later") from None
            self._pending.add(command.id)
        self.wake.set()

    def result(self, command_id: str, wait_s: float) -> dict[str, Any] | None:
        """The result of a command, as soon as there is one; None if it is not done after ``wait_s``. Raises KeyError
        for a command that is not known: it must be sent again."""
        with self._lock:
            self._lock.wait_for(lambda: command_id not in self._pending, timeout=wait_s)
            if command_id in self._pending:
                return None
            return self._results[command_id]

    def put_share(self, batch_id: str, raw: bytes, piece: int = 0, pieces: int = 1) -> None:
        with self._lock:
            share = self._shares.get(batch_id, [])
            if len(share) != pieces:
                share = [None] * pieces
            share[piece] = raw
            _keep(self._shares, batch_id, share, _SHARES)

    def output(self, command_id: str) -> bytes:
        """What a command computed on this rank's share. Raises KeyError."""
        with self._lock:
            return self._outputs[command_id]

    def status(self) -> dict[str, Any]:
        """With ``executing``: which step is being made; "" for none."""
        with self._lock:
            step = self._executing if isinstance(self._executing, TrainCommand) else None
            return {**self._status, "executing": "" if step is None else str(step)}

    # -- working thread -------------------------------------------------------------------------------------------
    def next(self) -> Command | None:
        with self._lock:
            try:
                self._executing = self._commands.get_nowait()
            except queue.Empty:
                return None
            return self._executing

    def take_share(self, batch_id: str) -> list[bytes] | None:
        """Returns what ``share`` does, and drops it."""
        with self._lock:
            found = self.share(batch_id)
            self._shares.pop(batch_id, None)
            return found

    def share(self, batch_id: str) -> list[bytes] | None:
        """The pieces of a share; None unless all are there. Any thread may call it."""
        with self._lock:
            found = self._shares.get(batch_id, [None])
            pieces = [piece for piece in found if piece is not None]
            return pieces if len(pieces) == len(found) else None

    def discard_share(self, batch_id: str) -> None:
        with self._lock:
            self._shares.pop(batch_id, None)

    def put_output(self, command_id: str, raw: bytes) -> None:
        with self._lock:
            _keep(self._outputs, command_id, raw, _SHARES)

    def done(self, command: Command, result: dict[str, Any]) -> None:
        """The command was executed."""
        self._finish(command, {"result": result})

    def refused(self, command: Command, error: ElasticRLError) -> None:
        """The command was not executed. It changed nothing, but for a group that went back to its last state."""
        kind = next((name for name, of in REFUSALS.items() if isinstance(error, of)), "failed")
        further = {"versions": list(error.versions)} if isinstance(error, StaleSamples) else {
            "went_back": error.went_back} if isinstance(error, StepRefused) else {}
        self._finish(command, {"error": kind, "message": error.message, "hint": error.hint, **further})

    def _finish(self, command: Command, outcome: dict[str, Any]) -> None:
        with self._lock:
            self._pending.discard(command.id)
            if self._executing is not None and self._executing.id == command.id:
                self._executing = None
            _keep(self._results, command.id, outcome, _RESULTS)
            self._lock.notify_all()

    def set_status(self, **fields: Any) -> None:
        with self._lock:
            self._status = {**self._status, **fields}


def _keep(items: OrderedDict[str, Any], key: str, value: Any, limit: int) -> None:
    items[key] = value
    items.move_to_end(key)
    while len(items) > limit:
        items.popitem(last=False)
