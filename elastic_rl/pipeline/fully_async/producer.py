"""The producing side of a fully asynchronous run: source → generate → reward → filters, in a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from elastic_rl.data.intervals import IntervalSet
from elastic_rl.data.samples import Prompt
from elastic_rl.errors import Fenced
from elastic_rl.pipeline.fully_async.shared_flow import SharedFlow
from elastic_rl.pipeline.group_flow import Grant
from elastic_rl.pipeline.pool_sync import PoolSync, VersionWait
from elastic_rl.pipeline.rollout_pool import serves
from elastic_rl.pipeline.sampling.prompt_reader import PromptReader
from elastic_rl.pipeline.sampling.samples import Sampler
from elastic_rl.pipeline.waits import WaitRelay, Waits
from elastic_rl.plugins.user_code import describe

log = logging.getLogger(__name__)

_LOOK_S = 0.05
"""Pause between two looks at engines that are waited for, while nothing is generated."""


@dataclass(frozen=True)
class Parts:
    """What the producer works with; each is used by its thread alone."""

    sampler: Sampler
    prompts: PromptReader
    pool: PoolSync


class MakeParts(Protocol):
    """Makes them in the thread of the producer, and waits for what they need. Raises Fenced."""

    def __call__(self, waits: Waits) -> Parts: ...


class Producer:
    """Generates what the flow grants until ``stopping`` is set."""

    def __init__(self, flow: SharedFlow, make: MakeParts, lease: Callable[[IntervalSet], None],
                 stopping: threading.Event) -> None:
        """``lease``: writes down that this actor works on these groups; raises Fenced and EtcdUnavailable."""
        self._flow, self._make, self._lease = flow, make, lease
        self._relay = WaitRelay()
        self.waits = Waits(self._relay, stopping)
        self._error: BaseException | None = None
        self._grant: Grant | None = None
        self._sync: VersionWait | None = None
        self._synced = 0
        """The newest version that every engine with requests was found to serve: they do not go back."""
        self._thread = threading.Thread(target=self._run, name="producer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    # -- called by the loop's thread --------------------------------------------------------------------------------
    @property
    def waiting(self) -> tuple[str, str]:
        """Kind and text of what it waits for; "" while it works."""
        return self._relay.waiting

    def require_alive(self) -> None:
        """Raises Fenced when it has ended since this actor is over, and RuntimeError, which no wait takes for an
        outage, when anything else has ended it."""
        if isinstance(error := self._error, Fenced):
            raise error
        if error is not None:
            raise RuntimeError(f"the producer ended: {describe(error)}") from error

    # -- in the thread ----------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            parts = self._make(self.waits)
            try:
                self._produce(parts)
            finally:
                parts.sampler.close()
        except Fenced as e:
            self._error = e
        except BaseException as e:  # a fault of ours or of a plug-in: the loop ends with it, and a new replica begins
            log.exception("the producer ended")
            self._error = e
        finally:
            self._end_sync()

    def _produce(self, parts: Parts) -> None:
        self.waits.stage("generate")
        for group, reason in parts.sampler.training_stream(lambda wait_s: self._more(parts, wait_s)):
            self._flow.finished(group, reason, self.waits)

    def _more(self, parts: Parts, wait_s: float) -> tuple[Sequence[tuple[int, Prompt]], int]:
        if self._grant is None:
            self._grant = self._flow.lease(wait_s)
            if self._grant is None:
                return (), 0
            self.waits.retry("etcd", lambda: self._lease(self._flow.open))
        if not self._in_sync(parts.pool, self._grant.min_version):
            # Others are being generated, or are to be harvested: so the wait is no pause of theirs.
            if wait_s > 0:
                self.waits.pause(_LOOK_S)
            return (), 0
        grant, self._grant = self._grant, None
        return parts.prompts.training(grant.ordinals), grant.min_version

    def _in_sync(self, pool: PoolSync, version: int) -> bool:
        """Whether every engine that takes requests serves the version or a newer one: else samples would be made in
        vain."""
        if version <= self._synced:
            return True
        if self._sync is None:
            self._sync = pool.begin(version, serves)
        if self._sync.poll():
            self._synced = version
            self._end_sync()
            return True
        return False

    def _end_sync(self) -> None:
        if self._sync is not None:
            self._sync.close()
            self._sync = None
