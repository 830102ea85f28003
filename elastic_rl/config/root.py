"""The whole configuration of a job: its sections, and what follows from several of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from elastic_rl.config import checks, reading
from elastic_rl.config.alerts import AlertConfig
from elastic_rl.config.algorithm import AlgorithmConfig
from elastic_rl.config.autoscale import AutoscaleConfig
from elastic_rl.config.coordinator import CoordinatorConfig
from elastic_rl.config.critic import CriticConfig
from elastic_rl.config.data import DataConfig
from elastic_rl.config.dcs import DcsConfig, Stream
from elastic_rl.config.device import DeviceConfig
from elastic_rl.config.engine import EngineConfig
from elastic_rl.config.etcd import EtcdConfig
from elastic_rl.config.eval import EvalConfig
from elastic_rl.config.failure_policy import FailurePolicyConfig
from elastic_rl.config.forward import ForwardConfig
from elastic_rl.config.groups import ACTOR, ACTOR_FWD, CRITIC, REFERENCE, TrainerGroupSpec
from elastic_rl.config.model import ModelConfig
from elastic_rl.config.pools import ROLLOUT_POOL, PoolConfig, PoolName, PoolSettings
from elastic_rl.config.rejection import RejectionConfig
from elastic_rl.config.roles import RoleConfig, RoleName
from elastic_rl.config.rollout import RolloutConfig
from elastic_rl.config.section import FolderPath, Section, changed
from elastic_rl.config.sft import SftConfig
from elastic_rl.config.telemetry import TelemetryConfig
from elastic_rl.config.train import TrainConfig
from elastic_rl.config.trainer import TrainerConfig

JOB_NAME = "[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?"
"""Regular expression of a job's name."""
CLUSTER_SECTIONS = ("coordinator", "etcd")
"""Sections that a job takes from its cluster."""


class Config(Section):
    """The whole configuration of a job."""

    job: Annotated[str, Field(pattern=f"^{JOB_NAME}$")] = "quickstart"
    """Name of the job, at most 40 lowercase letters, digits and hyphens. It prefixes the job's keys in etcd and its
    shared-memory segments."""
    cluster: Annotated[str, Field(pattern=r"^([a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?)?$")] = ""
    """Name of the cluster that the job runs on, which other jobs may run on too and which outlives them: ``elastic-rl
    up --cluster=NAME`` starts it. Empty: a cluster of the job's own."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    """Seed of the initial weights, the data and the sampling."""
    mode: Literal["rl", "sft", "eval", "rejection_sampling"] = "rl"
    """What the job does. ``rl``: reinforcement learning, after the supervised phase that ``sft`` describes. ``sft``:
    the supervised phase alone; no engine starts, and the policy is published at its end (``elastic-rl versions export
    policy``, or ``--from-job`` of an RL job). ``eval``: every evaluation set is sampled as ``eval`` says and rewarded;
    the result is in ``<run_dir>/<job>/eval.json``. ``rejection_sampling``: the training prompts are sampled, and the
    best samples kept as ``rejection`` says, in ``<run_dir>/<job>/kept.jsonl``, which ``mode: sft`` reads. In these two
    modes nothing is trained and no trainer starts: the engines serve ``model.path``, or the policy of ``--from-job``.
    """
    deterministic: bool = False
    """Whether the job, started again from the beginning with the same settings on the same kind of machine, gets the
    same samples and weights, bit for bit, also with other engines and when engines and trainer ranks fail on the way.
    Slower: kernels whose results do not depend on the batch on GPUs, one sequence at a time in each engine on a CPU.
    External engines must be started like that too."""
    run_dir: FolderPath = Path("runs")
    """Folder of all jobs: reports are in ``<run_dir>/<job>``; logs, pids and addresses of the job's own cluster in
    ``<run_dir>/<job>/cluster``, those of a cluster with a name in ``<run_dir>/_clusters/<cluster>``."""
    placement: Literal["disaggregated", "colocated"] = "disaggregated"
    """Where the engines of the policy run. ``disaggregated``: on devices of their own. ``colocated``: on those of the
    trainer, in alternation: while the trainer computes, the engines have released the memory of their weights and KV
    cache, and while they generate, it keeps its weights and optimizer in host memory. For jobs of ``mode: rl`` with
    ``train.max_staleness: 0``, whose trainer and engines would wait for one another anyway. On a cluster of several
    hosts each of the trainer's hosts has engines on its devices, and the loss of one of these hosts restarts the run.
    Further pools have devices of their own."""
    device: DeviceConfig = DeviceConfig()
    etcd: EtcdConfig = EtcdConfig()
    coordinator: CoordinatorConfig = CoordinatorConfig()
    failure_policy: FailurePolicyConfig = FailurePolicyConfig()
    alerts: AlertConfig = AlertConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    dcs: DcsConfig = DcsConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    sft: SftConfig = SftConfig()
    eval: EvalConfig = EvalConfig()
    rejection: RejectionConfig = RejectionConfig()
    trainer: TrainerConfig = TrainerConfig()
    critic: CriticConfig = CriticConfig()
    actor_fwd: ForwardConfig = ForwardConfig()
    reference: ForwardConfig = ForwardConfig()
    engine: EngineConfig = EngineConfig()
    pools: dict[PoolName, PoolConfig] = {}
    """Pools of engines by name, beside ``rollout``, which serves the policy: each with a model, a router and engines of
    its own. Jobs of ``mode: sft`` have none."""
    roles: dict[RoleName, RoleConfig] = {}
    """Replicas, resources and hosts of the roles ``rollout``, ``advantages``, ``genrm`` and ``teacher``, by name."""
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    train: TrainConfig = TrainConfig()

    @model_validator(mode="after")
    def _check(self) -> Config:
        if faults := checks.faults(self):
            raise ValueError("\n  ".join(faults))
        return self

    @property
    def uses_engines(self) -> bool:
        """Whether the job generates samples, so that it has a pool of engines, a router and the roles beside the
        actor."""
        return self.mode != "sft"

    @property
    def computes_parts(self) -> bool:
        """Whether the gradients of a step are computed in parts, as its groups finish."""
        return (self.mode == "rl" and self.train.schedule == "fully_async"
                and self.train.prompts_per_part is not None)

    @property
    def groups_per_request(self) -> int:
        """``rollout.groups_per_request``, with its default."""
        if (given := self.rollout.groups_per_request) is not None:
            return given
        if self.train.schedule != "fully_async":
            return 16
        return min(16, max(1, (self.train.prompts_per_part or self.train.prompts_per_step) // 4))

    def pool_settings(self, model_dir: str) -> dict[str, PoolSettings]:
        """What the engines of each pool of the job are, by the pool's name. ``model_dir``: the folder of the
        policy's model."""
        if not self.uses_engines:
            return {}
        # A colocated engine gets a version when it has no weights: there is nothing that could serve meanwhile, and a
        # copy beside them would take the memory of the device that the trainer needs.
        engine = self.engine.model_copy(update={"staging_limit_bytes": 0}) if self.colocated else self.engine
        policy = PoolSettings(ROLLOUT_POOL, model_dir, Stream.POLICY, self.rollout.engines, engine, self.colocated,
                              self.rollout.host_selector)
        idle = self.algorithm.teacher if self.mode != "rl" else None  # it teaches nobody
        return {ROLLOUT_POOL: self._for_samplings(policy), **{
            name: self._for_samplings(PoolSettings(name, str(Path(pool.model).expanduser()), None, pool.engines,
                               changed(self.engine, pool.engine), host_selector=pool.host_selector,
                               template_date=self.data.template_date))
            for name, pool in self.pools.items() if name != idle or name in self.rollout.judges}}

    def _for_samplings(self, pool: PoolSettings) -> PoolSettings:
        """The pool as those need it who sample from it."""
        asked = [options for name, options in self.rollout.judge_options if name == pool.name]
        if pool.name == ROLLOUT_POOL:
            asked += [self.rollout.model_dump(), self.eval.model_dump()]
        engine, unseeded = pool.engine, False
        if engine.seeded_sampling == "auto" and any(options.get("min_p") for options in asked):
            engine, unseeded = engine.model_copy(update={"seeded_sampling": "off"}), True  # SGLang has no seeds with it
        return replace(pool, engine=engine, unseeded=unseeded, reads_text=any(options.get("stop") for options in asked))

    def role_settings(self, role: str) -> RoleConfig:
        """How a role is deployed."""
        return next((settings for name, settings in self.roles.items() if name == role), RoleConfig())

    @property
    def selects_hosts(self) -> bool:
        """Whether something of the job is on hosts with certain labels only."""
        selectors = (self.rollout.host_selector, *(pool.host_selector for pool in self.pools.values()),
                     *(role.host_selector for role in self.roles.values()))
        return any(selectors)

    def autoscale_settings(self, pool: str) -> AutoscaleConfig:
        """Autoscaling of a pool as the settings have it; of one that they do not have, it is disabled."""
        if pool == ROLLOUT_POOL:
            return self.rollout.autoscale
        return self.pools[pool].autoscale if pool in self.pools else AutoscaleConfig()

    @property
    def colocated(self) -> bool:
        """Whether trainer and engines of the policy share devices, in alternation."""
        return self.placement == "colocated"

    @property
    def uses_transfer_queue(self) -> bool:
        """Whether finished groups wait in actors of the package TransferQueue."""
        return self.mode == "rl" and self.train.schedule == "fully_async" and self.train.queue == "transfer_queue"

    @property
    def ranks_may_spread(self) -> bool:
        """Whether the ranks of a trainer group may be on any host of the cluster. Other hosts reach TransferQueue's
        actors, which talk without a password, only where the operator has said that the network is trusted."""
        return bool(self.cluster) and (self.coordinator.insecure_network or not self.uses_transfer_queue)

    @property
    def cluster_name(self) -> str:
        """Name of the cluster in etcd: one of the job's own is named like it."""
        return self.cluster or self.job

    @property
    def uses_trainer(self) -> bool:
        """Whether the job trains. If not, what it makes is its output."""
        return self.mode in ("rl", "sft")

    @property
    def makes_batches(self) -> bool:
        """Whether groups are made into batches to train on: also in a job that trains nothing, which only keeps them
        (``train.keep_steps``)."""
        return self.mode == "rl" or self.mode == "rejection_sampling" and bool(self.train.keep_steps)

    @property
    def uses_critic(self) -> bool:
        """Whether a second trainer group trains a value model."""
        wanted = self.algorithm.name == "ppo" if self.critic.enabled is None else self.critic.enabled
        return wanted and self.mode == "rl"

    @property
    def trainer_groups(self) -> tuple[TrainerGroupSpec, ...]:
        """The trainer groups of the job."""
        wanted = ((ACTOR, self.uses_trainer), (CRITIC, self.uses_critic), (ACTOR_FWD, self.uses_actor_fwd),
                  (REFERENCE, self.uses_reference_group))
        return tuple(group for group, used in wanted if used)

    @property
    def uses_actor_fwd(self) -> bool:
        """Whether a group of its own has the log-probs before a step."""
        return self.actor_fwd.enabled and self.mode == "rl"

    @property
    def uses_reference_group(self) -> bool:
        """Whether a group of its own has the reference policy; else the ranks of the trainer have it, where there is
        one."""
        return self.reference.enabled and self.mode == "rl"

    @property
    def forward_groups(self) -> dict[str, ForwardConfig]:
        """The sections of groups that compute with the policy and do not train it, by name."""
        return {ACTOR_FWD.name: self.actor_fwd, REFERENCE.name: self.reference}

    def of_group(self, group: TrainerGroupSpec) -> Config:
        """The configuration as the ranks of a trainer group have it."""
        if not group.trains:
            return self.model_copy(update={
                "trainer": changed(self.trainer, self.forward_groups[group.name].trainer)})
        if group is not CRITIC:
            return self
        return self.model_copy(update={"trainer": changed(self.trainer, self.critic.trainer),
                                       "train": changed(self.train, self.critic.train)})

    @property
    def imitates_answers(self) -> bool:
        """Whether there is a supervised phase, so that prompts need answers."""
        return self.uses_trainer and self.sft.max_steps > 0

    @property
    def uses_training_prompts(self) -> bool:
        """Whether the source's prompts to train on are used, be it to sample them only."""
        return self.mode != "eval"

    @property
    def logprob_tolerance(self) -> float:
        """``train.logprob_tolerance``, or what is usual for the dtype."""
        usual = {"float32": 1e-4, "bfloat16": 0.5}[self.device.dtype]
        return usual if self.train.logprob_tolerance is None else self.train.logprob_tolerance

    @property
    def total_steps(self) -> int:
        """Steps that the job does at most, of its last phase; 0 where the number of prompts decides, which is not known
        here."""
        return {"sft": self.sft.max_steps, "rl": self.train.steps}.get(self.mode, 0)



def load(path: Path | str | None = None, overrides: Iterable[str] = ()) -> Config:
    """Reads a YAML file and applies ``key.sub=value`` overrides (a leading ``--`` is allowed; values are YAML).

    Raises ConfigError, which names the file or the key and, for an unknown key, the nearest known one.
    """
    return parse(given(path, overrides))


def given(path: Path | str | None, overrides: Iterable[str]) -> dict[str, Any]:
    """The settings that a YAML file and overrides name, and no defaults. Raises ConfigError."""
    return reading.values(Config, path, overrides)


def parse(values: Mapping[str, Any]) -> Config:
    """Validates a nested mapping. Raises ConfigError with every fault in it."""
    return reading.validate(Config, values)
