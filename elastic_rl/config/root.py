"""The whole configuration of a job: its sections, and the checks between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from elastic_rl.config import critic as critics
from elastic_rl.config import forward, limits, pools, reading
from elastic_rl.config.alerts import AlertConfig
from elastic_rl.config.algorithm import AlgorithmConfig
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
from elastic_rl.config.groups import ACTOR, ACTOR_FWD, CRITIC, REFERENCE, GroupSpec
from elastic_rl.config.model import ModelConfig
from elastic_rl.config.pools import ROLLOUT_POOL, PoolConfig, PoolName, PoolSettings
from elastic_rl.config.rejection import RejectionConfig
from elastic_rl.config.rollout import RolloutConfig
from elastic_rl.config.section import FolderPath, Section, changed
from elastic_rl.config.sft import SftConfig
from elastic_rl.config.telemetry import TelemetryConfig
from elastic_rl.config.train import TrainConfig
from elastic_rl.config.trainer import TrainerConfig


class Config(Section):
    """The whole configuration of a job."""

    job: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")] = "quickstart"
    """Name of the job, at most 40 lowercase letters, digits and hyphens. It prefixes the job's keys in etcd and its
    shared-memory segments."""
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
    """Folder of all jobs: reports are in ``<run_dir>/<job>``; logs, pids and addresses of the cluster in
    ``<run_dir>/<job>/cluster``."""
    placement: Literal["disaggregated", "colocated"] = "disaggregated"
    """Where the engines of the policy run. ``disaggregated``: on devices of their own. ``colocated``: on those of the
    trainer, in turns: while the trainer computes, the engines have released the memory of their weights and KV cache,
    and while they generate, it keeps its weights and optimizer in host memory. For jobs of ``mode: rl`` with
    ``train.max_staleness: 0``, whose trainer and engines would wait for one another anyway. Further pools have devices
    of their own."""
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
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    train: TrainConfig = TrainConfig()

    @model_validator(mode="after")
    def _check(self) -> Config:
        faults = [*self._faults(), *pools.faults(self.engine, self.pools),
                  *critics.faults(self.trainer, self.train, self.critic),
                  *forward.faults(self.trainer, self._forward_groups), *limits.broken(self)]
        if not faults:
            faults = [f"pools.{pool.name}: {fault}" for pool in self.pool_settings("").values()
                      for fault in limits.broken(self.model_copy(update={
                          "engine": pool.engine, "placement": "colocated" if pool.colocated else "disaggregated"}))]
        for group in self.trainer_groups if not faults else ():
            if group is not ACTOR:
                own = self.of_group(group)
                faults += [f"of the group {group.name}: {group.with_own_keys(fault)}"
                           for fault in (*own._faults(), *limits.broken(own))]
        if faults:
            raise ValueError("\n  ".join(faults))
        return self

    def _faults(self) -> Iterator[str]:
        """What the sections say that does not fit together, besides their limits."""
        trainer, dcs, coordinator = self.trainer, self.dcs, self.coordinator
        # A model of its own has a shape of its own, which host/model_folder.py checks.
        for key, by in () if self.model.path else (
                ("num_heads", "tensor_parallel"), ("num_kv_heads", "tensor_parallel"),
                ("intermediate_size", "tensor_parallel"), ("num_layers", "pipeline_parallel")):
            if (n := getattr(self.model, key)) % (ranks := getattr(trainer, by)):
                yield f"model.{key}={n} is not a multiple of trainer.{by}={ranks}"
        if not self.model.path and self.model.num_heads % self.model.num_kv_heads:
            yield f"model.num_heads={self.model.num_heads} is not a multiple of model.num_kv_heads=" \
                  f"{self.model.num_kv_heads}"
        model = self.model
        if not model.path and model.family == "qwen2" and model.hidden_size % (2 * model.num_heads):
            yield (f"model.hidden_size={model.hidden_size} is not a multiple of twice model.num_heads="
                   f"{model.num_heads}, which a qwen2 model needs")
        if not self.model.path and self.model.head_dim % 2:
            yield f"model.head_dim={self.model.head_dim} is odd: the rotary position embedding turns pairs of values"
        if self.mode == "sft" and not self.sft.max_steps:
            yield "sft.max_steps=0 with mode=sft: there is nothing to do; set it to the number of steps"
        if self.eval.samples > 1 and not self.eval.temperature:
            yield (f"eval.samples={self.eval.samples} with eval.temperature=0: all samples of a prompt would be the "
                   "same; set a temperature, or one sample")
        if self.rejection.keep > self.train.group_size:
            yield (f"rejection.keep={self.rejection.keep} is more than train.group_size={self.train.group_size}, the "
                   "samples that a prompt has")
        if not self.model.path:
            yield from self._expert_faults()
        if trainer.data_parallel * trainer.context_parallel % trainer.expert_parallel:
            yield (f"trainer.data_parallel={trainer.data_parallel} times trainer.context_parallel="
                   f"{trainer.context_parallel} is not a multiple of trainer.expert_parallel={trainer.expert_parallel}")
        if trainer.context_parallel > 1 and not trainer.packing:
            yield (f"trainer.context_parallel={trainer.context_parallel} with trainer.packing=false: only packed rows "
                   "are split by positions; set trainer.packing=true")
        if trainer.context_parallel > 1 and trainer.moe_aux_loss_coef:
            yield (f"trainer.moe_aux_loss_coef={trainer.moe_aux_loss_coef} with trainer.context_parallel="
                   f"{trainer.context_parallel}: the load-balancing loss of split sequences is not computed; set one "
                   "of them to its default")
        if self.device.type == "cpu" and self.device.dist_backend == "nccl":
            yield "device.dist_backend=nccl with device.type=cpu: nccl connects GPUs; set it to auto or gloo"
        if (teacher := self.algorithm.teacher) is not None:
            if teacher not in self.pools:
                name = "NAME" if teacher == pools.ROLLOUT_POOL else teacher
                yield (f"algorithm.teacher={teacher} is no further pool of the job: set algorithm.teacher={name} and "
                       f"pools.{name}.model to the folder of the teacher's model")
            if self.rollout.temperature != 1.0 and self.mode == "rl":
                yield (f"algorithm.teacher={teacher} with rollout.temperature={self.rollout.temperature:g}: "
                       "the log-probs of a teacher are of temperature 1; set rollout.temperature to 1")
        if self.rollout.environment and not self.model.path:
            yield (f"rollout.environment={self.rollout.environment} with the built-in model, which has no chat "
                   "template: set model.path")
        if self.deterministic and self.train.max_staleness:
            yield (f"train.max_staleness={self.train.max_staleness} with deterministic=true: which version makes a "
                   "sample would depend on time; set it to 0")
        if self.deterministic and self.train.schedule == "fully_async" and self.rollout.filters:
            yield ("train.schedule=fully_async with deterministic=true and rollout.filters: which groups "
                   "rollout.max_dropped_groups still lets filters drop would depend on which finish first; set "
                   "train.schedule=sync")
        if self.deterministic and self.engine.seeded_sampling == "off":
            yield "engine.seeded_sampling=off with deterministic=true: samples must be drawn by seeds; leave it at auto"
        if self.engine.pause_mode == "drain" and self.rollout.generates_apart and self.mode == "rl":
            yield (f"engine.pause_mode=drain with rollout.generate={self.rollout.generate}: all engines drain for the "
                   "same version, and take no further turn of the samples that they have begun; set pause_mode to "
                   "retract, in_place or abort")
        if self.mode == "rl" and self.train.minibatches > (
                own := self.train.prompts_per_step * self.train.group_size // self.trainer.data_parallel):
            yield (f"train.minibatches={self.train.minibatches} of {own} samples: a data-parallel replica has "
                   "train.prompts_per_step * train.group_size / trainer.data_parallel of a step; set fewer")
        yield from self._part_faults()
        yield from self._forward_faults()
        if self.colocated:
            yield from self._colocation_faults()
        if self.uses_critic:
            yield from self._critic_faults()
        if dcs.host in ("", "0.0.0.0", "::") and not dcs.advertise_host:
            yield f"dcs.host={dcs.host!r} is not an address that others can reach: set dcs.advertise_host"
        if any(tls := (dcs.tls_cert, dcs.tls_key, dcs.tls_ca)) and not all(tls):
            yield "dcs.tls_cert, dcs.tls_key and dcs.tls_ca belong together: set all three or none"
        if bool(coordinator.tls_cert) != bool(coordinator.tls_key):
            yield "coordinator.tls_cert and coordinator.tls_key belong together: set both or none"
        if coordinator.tls_ca and not coordinator.tls_cert:
            yield "coordinator.tls_ca needs coordinator.tls_cert and coordinator.tls_key"
        for key, engines in (("rollout.engines", self.rollout.engines),
                             *((f"pools.{name}.engines", pool.engines) for name, pool in self.pools.items())):
            if engines > coordinator.max_engines:
                yield (f"{key}={engines} is more than coordinator.max_engines={coordinator.max_engines}, the most that "
                       "a pool may be scaled to: raise the limit, or set fewer engines")
        if coordinator.ports and len(coordinator.ports) != coordinator.replicas:
            yield f"coordinator.ports has {len(coordinator.ports)} ports for {coordinator.replicas} replicas"

    def _part_faults(self) -> Iterator[str]:
        """What does not fit together with steps whose gradients are computed in parts."""
        train = self.train
        if not self.computes_parts or train.prompts_per_part is None:
            return
        setting = f"train.prompts_per_part={train.prompts_per_part}"
        if train.prompts_per_part >= train.prompts_per_step:
            yield (f"{setting} with train.prompts_per_step={train.prompts_per_step}: a part is less than a step; set "
                   "a smaller one, or leave it out")
        if train.updates > 1:
            yield (f"{setting} with train.updates_per_step={train.updates_per_step} and train.minibatches="
                   f"{train.minibatches}: a part is no update of its own, and a second pass needs all samples of the "
                   "step again; set both to 1")
        if self.uses_critic:
            yield (f"{setting} with a critic, which learns from all samples of a step together; set an algorithm "
                   "without a critic")
        if self.algorithm.teacher is not None:
            yield (f"{setting} with algorithm.teacher={self.algorithm.teacher}, which scores the samples of a step "
                   "together; leave one of them out")
        if self.trainer.moe_aux_loss_coef:
            yield (f"{setting} with trainer.moe_aux_loss_coef={self.trainer.moe_aux_loss_coef}: the load-balancing "
                   "loss is of all samples of a step; leave one of them out")
        if self.deterministic:
            yield (f"{setting} with deterministic=true: which groups are in which part depends on which finish first; "
                   "leave one of them out")

    def _forward_faults(self) -> Iterator[str]:
        """What does not fit together with groups that compute with the policy."""
        if self.mode != "rl":
            for name, group in self._forward_groups.items():
                if group.enabled:
                    yield (f"{name}.enabled=true with mode={self.mode}: only a job of mode=rl has use for it; "
                           "leave it out")
            return
        if self.actor_fwd.enabled and (self.algorithm.tis_cap is None or self.train.updates == 1):
            yield ("actor_fwd.enabled=true: log-probs before a step are needed with algorithm.tis_cap and more than "
                   "one of train.updates_per_step or train.minibatches (the pass of a single update has them); set "
                   "both, or leave it out")
        if self.reference.enabled and not self.algorithm.measures_kl and ":" not in self.algorithm.name:
            yield ("reference.enabled=true, and nothing is compared with the reference policy: set algorithm.kl_coef "
                   "or algorithm.report_kl, or leave it out")

    def _colocation_faults(self) -> Iterator[str]:
        """What does not fit together with ``placement: colocated``."""
        if self.mode != "rl":
            yield (f"placement=colocated with mode={self.mode}: only a job of mode=rl has both a trainer and engines; "
                   "set placement=disaggregated")
        if self.train.max_staleness:
            yield (f"placement=colocated with train.max_staleness={self.train.max_staleness}: engines that generate "
                   "while the trainer computes need devices of their own; set train.max_staleness=0, or "
                   "placement=disaggregated")
        if self.train.schedule == "fully_async":
            yield ("placement=colocated with train.schedule=fully_async: groups are generated beside the steps, so "
                   "engines need devices of their own; set train.schedule=sync, or placement=disaggregated")
        if self.uses_critic:
            yield ("placement=colocated with a critic: only one trainer group takes turns with engines; set "
                   "placement=disaggregated, or an algorithm without a critic")
        for name, group in self._forward_groups.items():
            if group.enabled:
                yield (f"placement=colocated with {name}.enabled=true: only one trainer group takes turns with "
                       "engines; set placement=disaggregated, or leave it out")

    def _critic_faults(self) -> Iterator[str]:
        """What does not fit together in a job with a critic."""
        streams = {group.state for group in self.trainer_groups if group.trains}
        if self.dcs.durable_url and (missing := streams - set(self.dcs.durable_streams)) and missing != streams:
            yield (f"dcs.durable_streams has no {', '.join(missing)}: policy and critic resume at one step, so after "
                   "a loss of the DCS nodes the state of one is worth nothing without that of the other; list "
                   f"{' and '.join(sorted(streams))}, or neither")
        if self.critic.warmup_steps >= self.train.steps:
            yield (f"critic.warmup_steps={self.critic.warmup_steps} with train.steps={self.train.steps}: the policy "
                   "would never learn; set fewer critic.warmup_steps")

    def _expert_faults(self) -> Iterator[str]:
        """What does not fit together of the small model's experts."""
        model, trainer = self.model, self.trainer
        if model.family != "qwen3_moe":
            if trainer.expert_parallel > 1:
                yield (f"trainer.expert_parallel={trainer.expert_parallel} with model.family={model.family}, which has "
                       "no experts: set it to 1")
            return
        if model.experts_per_token > model.num_experts:
            yield (f"model.experts_per_token={model.experts_per_token} is more than model.num_experts="
                   f"{model.num_experts}")
        for key, by in (("num_experts", "expert_parallel"), ("expert_intermediate_size", "tensor_parallel")):
            if (n := getattr(model, key)) % (ranks := getattr(trainer, by)):
                yield f"model.{key}={n} is not a multiple of trainer.{by}={ranks}"

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
        """What the engines of each pool of the job are, by the pool's name. ``model_dir``: of the policy's model."""
        if not self.uses_engines:
            return {}
        # A colocated engine gets a version when it has no weights: there is nothing that could serve meanwhile, and a
        # copy beside them would take the memory of the device that the trainer needs.
        engine = self.engine.model_copy(update={"staging_limit_bytes": 0}) if self.colocated else self.engine
        policy = PoolSettings(ROLLOUT_POOL, model_dir, Stream.POLICY, self.rollout.engines, engine, self.colocated)
        idle = self.algorithm.teacher if self.mode != "rl" else None  # it teaches nobody
        return {ROLLOUT_POOL: policy, **{
            name: PoolSettings(name, str(Path(pool.model).expanduser()), None, pool.engines,
                               changed(self.engine, pool.engine), template_date=self.data.template_date)
            for name, pool in self.pools.items() if name != idle or name in self.rollout.judges}}

    @property
    def colocated(self) -> bool:
        """Whether trainer and engines of the policy share devices, in turns."""
        return self.placement == "colocated"

    @property
    def uses_transfer_queue(self) -> bool:
        """Whether finished groups wait in actors of the package TransferQueue."""
        return self.mode == "rl" and self.train.schedule == "fully_async" and self.train.queue == "transfer_queue"

    @property
    def uses_trainer(self) -> bool:
        """Whether the job trains. If not, what it makes is its output."""
        return self.mode in ("rl", "sft")

    @property
    def uses_critic(self) -> bool:
        """Whether a second trainer group trains a value model."""
        wanted = self.algorithm.name == "ppo" if self.critic.enabled is None else self.critic.enabled
        return wanted and self.mode == "rl"

    @property
    def trainer_groups(self) -> tuple[GroupSpec, ...]:
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
    def _forward_groups(self) -> dict[str, ForwardConfig]:
        return {ACTOR_FWD.name: self.actor_fwd, REFERENCE.name: self.reference}

    def of_group(self, group: GroupSpec) -> Config:
        """The configuration as the ranks of a trainer group have it."""
        if not group.trains:
            return self.model_copy(update={
                "trainer": changed(self.trainer, self._forward_groups[group.name].trainer)})
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

    @property
    def job_dir(self) -> Path:
        """Folder of everything that this job writes."""
        return self.run_dir / self.job

    @property
    def cluster_dir(self) -> Path:
        """Folder of the cluster's logs, pids and addresses."""
        return self.job_dir / "cluster"

    @property
    def log_dir(self) -> Path:
        """Folder of the logs of the cluster's processes."""
        return self.cluster_dir / "logs"

    @property
    def ray_token_file(self) -> Path:
        """The secret that whoever connects to the job's Ray must have."""
        return self.cluster_dir / "ray.token"

    @property
    def engine_key_file(self) -> Path:
        """The key that the job's engines and routers ask for (``elastic_rl.net.engine_key``)."""
        return self.cluster_dir / "engine.key"


def load(path: Path | str | None = None, overrides: Iterable[str] = ()) -> Config:
    """Reads a YAML file and applies ``key.sub=value`` overrides (a leading ``--`` is allowed; values are YAML).

    Raises ConfigError, which names the file or the key and, for an unknown key, the nearest known one.
    """
    return parse(reading.values(path, overrides))


def parse(values: Mapping[str, Any]) -> Config:
    """Validates a nested mapping. Raises ConfigError with every fault in it."""
    return reading.validate(Config, values)
