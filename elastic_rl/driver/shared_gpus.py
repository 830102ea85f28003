"""GPUs that the trainer group and the engines of the policy share (``placement: colocated``).

Ray counts GPUs and gives each to one actor, so that it cannot place two sides on the same ones: its fractions are of
one GPU, and a group of ranks is one actor here. So one actor that does nothing holds the GPUs, for the whole
epoch; trainer and engines ask Ray for none, and are told which ones they use by ``CUDA_VISIBLE_DEVICES``. Rank i
has the i-th; an engine has as many as its tensor-parallel ranks, one after the other, which no other engine has. That
not all of them fill the same memory follows from the phases.
"""

from __future__ import annotations

import contextlib
import logging
import random
import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence

import ray
from ray.exceptions import RayError

from elastic_rl.driver.placement import Placer, ended, room_needed, stop_all
from elastic_rl.driver.plan import StartBudget
from elastic_rl.runtime.process import SOME_CPU

log = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 5.0
_KIND = "shared-gpus"


def free_gpus(gpus: Sequence[str], taken: Collection[str], count: int) -> str:
    """The first ``count`` GPUs in a row that no engine has, as ``CUDA_VISIBLE_DEVICES`` has them; "" for none.
    ``taken``: the GPUs of each engine, in that form. Rows begin at multiples of ``count``, so that none is
    cut."""
    used = {gpu for row in taken for gpu in row.split(",")}
    rows = (gpus[i:i + count] for i in range(0, len(gpus) - count + 1, count))
    return next((",".join(row) for row in rows if not used & set(row)), "")


class GpuHolder:
    """Body of the Ray actor."""

    def __init__(self) -> None:
        self._stop = threading.Event()

    def gpus(self) -> list[str]:
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    def run(self) -> None:
        self._stop.wait()

    def stop(self) -> None:
        self._stop.set()


class Holder:
    """One actor that holds GPUs."""

    def __init__(self, placer: Placer, count: int) -> None:
        """Adopts the one of this epoch, if it runs. Raises RayError, Fenced and EtcdUnavailable."""
        self._placed = next(iter(placer.adopt(_KIND)), None) or placer.place(
            _KIND, secrets.token_hex(3), GpuHolder, cpus=SOME_CPU, gpus=count)
        self._answer: ray.ObjectRef | None = None

    def ended(self) -> str:
        """Why its process has ended; empty while it has not."""
        return (self._placed.outcome()[1] or "it returned") if ended([self._placed]) else ""

    def gpus(self) -> tuple[str, ...]:
        """Ids of its GPUs; empty until Ray has given them, and it has answered. Raises RayError."""
        if not self._placed.is_placed():
            return ()
        asked = self._answer = self._answer or self._placed.call("gpus")
        if not ray.wait([asked], timeout=0)[0]:
            return ()
        self._answer = None  # one that failed is asked for again
        return tuple(ray.get(asked))

    @property
    def room(self) -> str:
        """What Ray must have free for it."""
        return room_needed([self._placed])

    def remove(self) -> None:
        self._placed.remove()

    def close(self) -> None:
        """Ends it, for the end of the compute plane."""
        stop_all([self._placed], timeout_s=_STOP_TIMEOUT_S)


class SharedGpus:
    """The GPUs of one epoch. Nothing here waits: they are there in a later pass.

    A holder whose process ends is replaced, with backoff and without end; trainer and engines go on meanwhile. Should
    Ray give the next one other GPUs, ``moved`` says so: those in use may be anyone's from then on.
    """

    def __init__(self, count: int, hold: Callable[[int], Holder], *,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._count, self._hold, self._clock = count, hold, clock
        self._holder: Holder | None = None
        self._is_known = False
        """Whether the present holder has answered."""
        self._budget = StartBudget()
        self._gpus: tuple[str, ...] = ()
        self.moved = ""
        """How the GPUs are others than before; empty while they are not."""

    def reconcile(self) -> None:
        """Makes one pass. Raises RayError."""
        if self._holder is not None and (reason := self._holder.ended()):
            log.warning("the holder of the shared GPUs ended (%s); replacing it", reason)
            holder, self._holder, self._is_known = self._holder, None, False
            self._failed()
            holder.remove()
        if self._holder is None and self._budget.open(self._clock()):
            try:
                self._holder = self._hold(self._count)
            except Exception:  # reported by the caller
                self._failed()
                raise
        if self._holder is not None and not self._is_known and (found := self._holder.gpus()):
            self._is_known = True
            if self._gpus and set(found) != set(self._gpus):
                self.moved = f"Ray gave the GPUs {','.join(found)} in place of {','.join(self._gpus)}"
            self._gpus = self._gpus or found

    def gpus(self) -> Sequence[str]:
        """Ids of the GPUs; empty until Ray has given them."""
        return self._gpus

    @property
    def waiting(self) -> str:
        """What is waited for; empty once the GPUs are there."""
        if self._gpus:
            return ""
        if self._holder is None:
            return "the next try to hold the shared GPUs"
        return (f"no room on the host of the run for {self._holder.room}, which trainer and engines share: submit it "
                "on a host with as many, set fewer ranks, or placement=disaggregated")

    def close(self) -> None:
        if self._holder is not None:
            with contextlib.suppress(RayError):  # Ray is away, and the holder with it
                self._holder.close()

    def _failed(self) -> None:
        self._budget = self._budget.after_failure(self._clock(), jitter=random.random())
