"""Work that each rank does by itself and that may take long, such as a download or the micro-batches of its share: no
collective waits for it.

Each rank runs its job in a thread. Its main thread meets those of the others about every second, in an exchange of two
numbers, until no job is running. So the ranks start the next collective together however different the times were, and
the timeout of collectives bounds one round and not the work: a rank that died or hangs is noticed within it. With
``until_all_are_done`` the work stays in the main thread, which torch's settings are of, and the exchange has the other.

A job may fail in a way that the whole group can answer (``Unavailable``): then every job is cancelled, and all ranks
learn why. Any other error ends its rank, and with it the group.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from enum import Enum
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from elastic_rl.errors import (
    ChunkCorrupt,
    ChunkMissing,
    ElasticRLError,
    EtcdUnavailable,
    NodeUnavailable,
    TrainerFailed,
    VersionNotFound,
)
from elastic_rl.runtime.patience import patiently
from elastic_rl.trainer.megatron.parallel import ParallelDims

log = logging.getLogger(__name__)
T = TypeVar("T")

UNAVAILABLE = (ChunkMissing, ChunkCorrupt, VersionNotFound)
"""What a job cannot have; the group can do without."""
AWAY = (EtcdUnavailable, NodeUnavailable)
"""What a job waits for."""
_ROUND_S = 1.0
_RETRY_S = (0.2, 4.0)
_REASON_BYTES = 512


class Unavailable(Exception):
    """A rank could not do its job; raised on every rank."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank}: {reason}")


class Cancelled(Exception):
    """Another rank could not do its job, so this one's is useless."""


class Verdict(Enum):
    """What one round says about all jobs."""

    WAIT = "wait"
    CANCEL = "cancel"
    """Some job failed; the others are to end, too."""
    DONE = "done"
    FAILED = "failed"
    """Some job failed, and none is running any more."""


def verdict(*, any_running: bool, any_failed: bool) -> Verdict:
    """Pure. Nobody goes on while a job is running: it still writes to what the next attempt would write to."""
    if any_running:
        return Verdict.CANCEL if any_failed else Verdict.WAIT
    return Verdict.FAILED if any_failed else Verdict.DONE


class Job(Generic[T]):
    """A function that runs in a thread of its own. The function calls ``check`` now and then."""

    def __init__(self, function: Callable[[Job[T]], T], device: torch.device) -> None:
        self._function, self._device = function, device
        self._ended, self.cancelled = threading.Event(), threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None
        # A daemon: when this rank ends for another reason, it does not wait for the job.
        threading.Thread(target=self._run, name="job", daemon=True).start()

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # every thread begins with device 0
            self._result = self._function(self)
        except BaseException as e:
            self._error = e
        finally:
            self._ended.set()

    def check(self) -> None:
        """Called by a job's function: raises Cancelled when the function's result is useless."""
        if self.cancelled.is_set():
            raise Cancelled

    def wait(self, timeout_s: float) -> None:
        """Waits for the end of the function, but no longer than this."""
        self._ended.wait(timeout_s)

    @property
    def running(self) -> bool:
        return not self._ended.is_set()

    def failure(self) -> ElasticRLError | None:
        """Why the function could not do its work. Raises any error of it that the group has no answer to."""
        if self.running or self._error is None or isinstance(self._error, Cancelled):
            return None
        if isinstance(self._error, UNAVAILABLE):
            return self._error
        raise self._error

    def result(self) -> T:
        """What the function returned; for a job that has ended well."""
        return self._result  # type: ignore[return-value]


def while_away(job: Job[Any], attempt: Callable[[], T], on_wait: Callable[[ElasticRLError], None]) -> T:
    """Returns to a job's function the result of ``attempt``, made again for as long as etcd or this host's node is
    away: such an outage pauses a run and does not end it. ``on_wait`` gets each reason. Raises Cancelled, and other
    errors of ``attempt``."""
    def pause(seconds: float) -> None:
        job.cancelled.wait(seconds)
        job.check()

    def waiting(error: ElasticRLError) -> None:
        log.warning("waiting: %s", error)
        on_wait(error)

    job.check()
    return patiently(attempt, away=AWAY, pauses_s=_RETRY_S, pause=pause, waiting=waiting)


class _Work:
    """What this rank's main thread does, as the thread of the exchange sees it."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.abandoned = False
        """Whether it failed; set before ``done``."""
        self.lost: TrainerFailed | None = None
        """Why the exchange ended before the work of all ranks did."""


class Rounds:
    """Runs jobs on all ranks. All ranks make the same calls in the same order."""

    def __init__(self, par: ParallelDims, group: dist.ProcessGroup | None, *, round_timeout_s: float) -> None:
        """``group``: the group of all ranks, over gloo; None for a group of one rank. Nothing else may use it at the
        same time."""
        self._par, self._group, self._timeout = par, group, timedelta(seconds=round_timeout_s)

    @classmethod
    def in_own_group(cls, par: ParallelDims, *, round_timeout_s: float) -> Rounds:
        """Rounds in a new group, which nothing else uses. A collective."""
        group = (dist.new_group(backend="gloo", timeout=timedelta(seconds=round_timeout_s)) if par.world > 1
                 else None)
        return cls(par, group, round_timeout_s=round_timeout_s)

    def run(self, function: Callable[[Job[T]], T]) -> T:
        """Runs the function on every rank; returns this rank's result once all have one. Raises Unavailable on every
        rank when one could not do its job, TrainerFailed when a rank was lost, and other errors of this rank's
        function."""
        job = Job(function, self._par.device)
        try:
            while True:
                job.wait(_ROUND_S)
                failure = job.failure()
                running, first_failed = self._maximum(
                    int(job.running), self._par.world - self._par.rank if failure is not None else 0)
                found = verdict(any_running=bool(running), any_failed=bool(first_failed))
                if found is Verdict.DONE:
                    return job.result()
                if found is Verdict.FAILED:
                    rank = self._par.world - first_failed
                    raise Unavailable(rank, self._reason(rank, failure))
                if found is Verdict.CANCEL:
                    job.cancelled.set()
        finally:
            job.cancelled.set()

    @contextlib.contextmanager
    def until_all_are_done(self, waiting: Callable[[], None]) -> Iterator[None]:
        """Inside, the caller does this rank's work. Returns once every rank has done its own, however long that takes.
        ``waiting`` is called when this one has.

        Raises TrainerFailed when a rank was lost meanwhile. An error of the work ends this rank's part in the exchange,
        so that the others find it lost.
        """
        work = _Work()
        exchange = threading.Thread(target=self._exchange, args=(work,), name="rounds", daemon=True)
        if self._group is not None:
            exchange.start()
        try:
            yield
            waiting()
        except BaseException:
            work.abandoned = True
            raise
        finally:
            work.done.set()
        if self._group is not None:
            exchange.join()  # each of its rounds is bounded, and it ends when the work of every rank has
        if work.lost is not None:
            raise work.lost

    def _exchange(self, work: _Work) -> None:
        """Meets the other ranks until none of them works any more."""
        try:
            while True:
                work.done.wait(_ROUND_S)
                works = not work.done.is_set()
                if work.abandoned or not self._maximum(int(works))[0]:
                    return
        except TrainerFailed as e:
            work.lost = e

    def _maximum(self, *values: int) -> list[int]:
        """The maximum of each value over all ranks."""
        tensor = torch.tensor(values)
        if self._group is not None:
            self._await(lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group, async_op=True))
        return [int(v) for v in tensor.tolist()]

    def _reason(self, rank: int, failure: ElasticRLError | None) -> str:
        """The failure of that rank, on every rank."""
        text = str(failure).encode()[:_REASON_BYTES] if rank == self._par.rank else b""
        buffer = torch.frombuffer(bytearray(text.ljust(_REASON_BYTES, b"\0")), dtype=torch.uint8)
        if self._group is not None:
            self._await(lambda: dist.broadcast(buffer, src=rank, group=self._group, async_op=True))
        return bytes(buffer.tolist()).rstrip(b"\0").decode(errors="replace")

    def _await(self, begin: Callable[[], dist.Work]) -> None:
        try:
            begin().wait(self._timeout)
        except RuntimeError as e:  # also a timeout
            raise TrainerFailed(f"a rank was lost: {e}") from e
