"""The version of the policy that a group which does not train has the weights of."""

from __future__ import annotations

from collections.abc import Callable

from elastic_rl.config import Stream
from elastic_rl.dcs.catalog import reads
from elastic_rl.dcs.catalog.references import oldest_of_step
from elastic_rl.dcs.fetch.puller import Puller
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.records import Version
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.job_secrets import dcs_security
from elastic_rl.trainer.checkpoint import state_reader
from elastic_rl.trainer.checkpoint.rounds import Job, Rounds, while_away
from elastic_rl.trainer.megatron.parallel import ParallelDims
from elastic_rl.trainer.megatron.policy import Policy
from elastic_rl.trainer.megatron.shard_loader import ShardLoader


class PolicyVersion:
    """All ranks make the same calls in the same order, except for ``number_of``."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient, par: ParallelDims, policy: Policy, incarnation: str,
                 report: Callable[[str, str], None]) -> None:
        """``report`` is called about every second of a load, in another thread, with a phase and a detail."""
        self.number, self.step = 0, -1
        """What the model has; 0 and -1 while it has nothing."""
        self._policy, self._etcd, self._keys, self._report = policy, etcd, ctx.keys, report
        dcs = self._cfg = ctx.config.dcs
        self._puller = Puller(etcd, ctx.keys, f"{ctx.group.name}-{par.rank}-{incarnation}",
                              io_timeout_s=dcs.io_timeout_s,
                              security=dcs_security(ctx.config))
        self._rounds = Rounds.in_own_group(par, round_timeout_s=ctx.config.trainer.collective_timeout_s)

    def number_of(self, step: int, at_least: int) -> int:
        """Number of the version to compute with, see ``oldest_of_step``; etcd is not asked where the model has the one
        with that very number. Raises Conflict when none is committed, and EtcdUnavailable."""
        if self.number and self.step == step and self.number == at_least:
            return self.number
        return oldest_of_step(reads.list_versions(self._etcd, self._keys, Stream.POLICY), step, at_least)

    def load(self, number: int) -> None:
        """Gives the model the weights of a version; each rank reads its own part, for as long as that takes. Raises
        Unavailable on every rank: then the model is torn, and has no version. Raises TrainerFailed when a rank was
        lost."""
        self.number, self.step = 0, -1
        version = self._rounds.run(lambda job: while_away(
            job, lambda: self._read(number, job), lambda e: self._report("waiting", e.message)))
        self.number, self.step = number, int(version.meta["step"])

    def _read(self, number: int, job: Job[Version]) -> Version:
        loader = self._policy.shard_loader()
        version = state_reader.read(
            self._puller, Stream.POLICY, number, _Selected(loader), bucket_bytes=self._cfg.bucket_bytes,
            check=job.check, on_progress=lambda done, total: self._report(
                "loading", f"policy {number}: {done >> 20} of {total >> 20} MiB are on this host"))
        loader.require_complete()
        return version


class _Selected:
    """The tensors of a loader, as ``state_reader.Target``."""

    def __init__(self, loader: ShardLoader) -> None:
        self.select, self.load = loader.wants, loader.load
