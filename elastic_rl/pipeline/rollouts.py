"""What one thread makes rewarded groups with: prompts of the source, engines that serve a version, and the sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from elastic_rl.config import Config, Stream
from elastic_rl.coordinator.stragglers.rule import FollowLimits
from elastic_rl.data.sources import CheckedSource
from elastic_rl.dcs.catalog.holders import HeadHolders
from elastic_rl.dcs.client import DcsClient
from elastic_rl.engine.generation import Answers, PromptRequest
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import Keys
from elastic_rl.host.job_secrets import dcs_security
from elastic_rl.pipeline.pool_sync import OnNeeds, PoolSync
from elastic_rl.pipeline.records.run_events import RunEvents, emitter
from elastic_rl.pipeline.records.step_timer import StepTimer
from elastic_rl.pipeline.rollout_pool import living
from elastic_rl.pipeline.sampling.prompt_reader import PromptReader
from elastic_rl.pipeline.sampling.sampler import OnCap, Sampler
from elastic_rl.pipeline.sampling.source_reads import SourceReads
from elastic_rl.pipeline.waits import Waits
from elastic_rl.rewards.judging import Judgement, JudgeRequest
from elastic_rl.telemetry import traces

T = TypeVar("T")


class RolloutCalls(Protocol):
    """The roles that samples come from, one attempt a call. Each raises ElasticRLError when the attempt failed."""

    def generate(self, prompts: Sequence[PromptRequest], min_version: int, in_probation: bool = False
                 ) -> Iterable[Answers]:
        """Gives the samples of each prompt, none of them older than ``min_version``, or why there are none, as it ends.
        ``in_probation``: in another process of the user's function than those of all other groups."""

    def judge(self, request: JudgeRequest) -> Sequence[Judgement]:
        """What the judge model makes of each response."""


class Rollouts:
    """The rollouts as one thread uses them; ``of_thread`` gives another thread its own."""

    def __init__(self, cfg: Config, etcd: EtcdClient, keys: Keys, writer: FencedWriter, calls: RolloutCalls,
                 source: CheckedSource, needs: OnNeeds, reads: SourceReads, waits: Waits,
                 publish_again: Callable[[int], None], on_cap: OnCap) -> None:
        """``needs``, ``publish_again``: see ``PoolSync``. ``on_cap``: see ``Sampler``. Waits for the source, and for
        what the settings name of the user's functions. Raises Fenced."""
        self._shared = cfg, etcd, keys, writer, calls, source, needs
        self.reads, self.waits = reads, waits
        self._holders = HeadHolders(etcd, keys, DcsClient(
            etcd, keys, io_timeout_s=cfg.dcs.io_timeout_s, security=dcs_security(cfg)), Stream.POLICY)
        self.pool = PoolSync(etcd, keys, waits, publish_again, is_lost=self._holders.is_lost, needs=needs,
                             first_pull_s=cfg.engine.fetch_timeout_s, limits=FollowLimits.of(cfg))
        self.prompts = waits.retry("source", lambda: PromptReader(cfg, source, waits, reads))
        events = RunEvents(etcd, keys, emitter(writer, waits))
        self.sampler = waits.retry("plugin", lambda: Sampler(
            cfg, source, calls.generate, waits, self.pool.no_engine, events.groups_failed, calls.judge, reads,
            lambda: cfg.engine.max_running_requests * living(self.pool.engines), on_cap))

    def of_thread(self, waits: Waits, publish_again: Callable[[int], None], on_cap: OnCap) -> Rollouts:
        """The same for another thread, which calls this and has these waits."""
        return Rollouts(*self._shared, self.reads.of_thread(waits), waits, publish_again, on_cap)

    def await_version(self, version: int, timer: StepTimer) -> None:
        """Waits until the engines serve the version or a newer one. Raises Fenced, and what ``publish_again`` does."""
        self.waits.stage("sync")
        with timer.stage("sync"):
            self.pool.wait(version)

    def generate(self, step: int, min_version: int, timer: StepTimer, sample: Callable[[], T]) -> T:
        """What ``sample`` makes with the sampler, once the engines serve the version. Raises as ``await_version``."""
        with traces.span("generate", step=step):
            self.await_version(min_version, timer)
            self.waits.stage("generate")
            self.sampler.reward_s = 0.0
            with timer.stage("generate"):
                made = sample()
            timer.move("generate", "reward", self.sampler.reward_s)
        return made

    def close(self) -> None:
        self.sampler.close()
        self._holders.close()
