"""The thread of a fully asynchronous run that generates: source → generate → reward → filters."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence

from elastic_rl.data.intervals import IntervalSet
from elastic_rl.data.samples import Prompt
from elastic_rl.errors import Fenced
from elastic_rl.etcd.records import Engine
from elastic_rl.pipeline.flow.group_flow import Grant
from elastic_rl.pipeline.flow.shared_flow import SharedFlow
from elastic_rl.pipeline.pool_sync import PoolSync, VersionWait
from elastic_rl.pipeline.rollout_pool import serves
from elastic_rl.pipeline.rollouts import Rollouts
from elastic_rl.pipeline.waits import WaitRelay, Waits
from elastic_rl.plugins.user_code import describe

log = logging.getLogger(__name__)

_LOOK_S = 0.05
"""Pause between two looks at engines that are waited for, while nothing is generated."""


class Producer:
    """Generates what the flow grants until ``stopping`` is set."""

    def __init__(self, flow: SharedFlow, make: Callable[[Waits], Rollouts], lease: Callable[[IntervalSet], None],
                 stopping: threading.Event) -> None:
        """``make``: makes, in the thread, what it generates with; raises Fenced. ``lease``: writes down that this actor
        works on these groups; raises Fenced and EtcdUnavailable."""
        self._flow, self._make, self._lease = flow, make, lease
        self._relay = WaitRelay()
        self.waits = Waits(self._relay, stopping)
        self.engines: Sequence[Engine] = ()
        """The engines that a version was last waited for from, as they were then. Any thread may read it."""
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
            with contextlib.closing(self._make(self.waits)) as rollouts:
                self._produce(rollouts)
        except Fenced as e:
            self._error = e
        except BaseException as e:  # a fault of ours or of a plug-in: the loop ends with it, and a new replica begins
            log.exception("the producer ended")
            self._error = e
        finally:
            self._end_sync()

    def _produce(self, rollouts: Rollouts) -> None:
        self.waits.stage("generate")
        for group, reason in rollouts.sampler.training_stream(lambda wait_s: self._more(rollouts, wait_s)):
            self._flow.finished(group, reason, self.waits)

    def _more(self, rollouts: Rollouts, wait_s: float) -> tuple[Sequence[tuple[int, Prompt]], int]:
        if self._grant is None:
            self._grant = self._flow.lease(wait_s)
            if self._grant is None:
                return (), 0
            self.waits.retry("etcd", lambda: self._lease(self._flow.open))
        if not self._in_sync(rollouts.pool, self._grant.min_version):
            # Others are being generated, or are to be harvested: so the wait is no pause of theirs.
            if wait_s > 0:
                self.waits.pause(_LOOK_S)
            return (), 0
        grant, self._grant = self._grant, None
        return rollouts.prompts.training(grant.ordinals), grant.min_version

    def _in_sync(self, pool: PoolSync, version: int) -> bool:
        """Whether every engine that takes requests serves the version or a newer one: else samples would be made in
        vain."""
        if version <= self._synced:
            return True
        if self._sync is None:
            self._sync = pool.begin(version, serves)
        in_sync, self.engines = self._sync.poll(), pool.engines
        if in_sync:
            self._synced = version
            self._end_sync()
        return in_sync

    def _end_sync(self) -> None:
        if self._sync is not None:
            self._sync.close()
            self._sync = None
