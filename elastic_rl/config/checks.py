"""Settings that depend on one another: every check between them, as tables. Pure.

- ``CHECKS``: combinations of settings that are refused. Most rows are a condition and the text of the error.
- ``LIMITS``: pairs of limits of which one stays below the other. A wait that encloses another one must be the longer
  one: else the outer one ends first, and blames the part that waited for the one that was slow.
- ``PARTS``: what parts of a job (pools, the critic, groups of ranks) have otherwise than the job.
- ``READERS``: settings that are read only under a condition, so that setting them without it changes nothing.

What needs the algorithm's functions, the model or the data is checked where these are read (``algorithms/registry.py``,
``job/check.py``), and what may not change when a job is resumed in ``fixed_settings.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from elastic_rl.config.critic import CriticConfig
from elastic_rl.config.forward import ForwardConfig
from elastic_rl.config.groups import ACTOR, ACTOR_FWD, CRITIC, REFERENCE
from elastic_rl.config.pools import ROLLOUT_POOL
from elastic_rl.config.rollout import ENVIRONMENT, SINGLE_TURN
from elastic_rl.config.section import Section, faults_of_changes

Config = Any
"""The configuration of ``root.py``, which checks itself with this module and so cannot be imported here."""
Check = Callable[[Config], Iterable[str]]
"""Gives a text for each fault, with what to set."""


@dataclass(frozen=True)
class Refused:
    """A combination of settings that is refused."""

    when: Callable[[Config], object]
    fault: str
    """Text of the error, in which ``{section.key}`` is the value of a setting."""

    def __call__(self, cfg: Config) -> Iterator[str]:
        if self.when(cfg):
            yield self.fault.format(**{name: getattr(cfg, name) for name in type(cfg).model_fields})


@dataclass(frozen=True)
class Ordered:
    """One setting stays below another. Both may be products of a number and settings, as in ``2 * a.b`` and
    ``a.b * (c.d + 1)``."""

    smaller: str
    larger: str
    why: str
    may_equal: bool = False
    only_if: str = ""
    """Property of the configuration that says whether it matters; "": always."""

    def __call__(self, cfg: BaseModel) -> Iterator[str]:
        if not self.holds(cfg):
            yield self.explain(cfg)

    def holds(self, cfg: BaseModel) -> bool:
        if self.only_if and not getattr(cfg, self.only_if):
            return True
        small, large = value_of(self.smaller, cfg), value_of(self.larger, cfg)
        return small <= large if self.may_equal else small < large

    def explain(self, cfg: BaseModel) -> str:
        """What is wrong, with both keys and values, and what to set."""
        small, large = value_of(self.smaller, cfg), value_of(self.larger, cfg)
        word = "at least" if self.may_equal else "larger than"
        return (f"{self.larger}={large:g} must be {word} {self.smaller}={small:g}: {self.why}; set a larger "
                f"{keys_of(self.larger)[0]} or a smaller {keys_of(self.smaller)[0]}")


_KEY = re.compile(r"[a-z_]+\.[a-z_]+")
_FACTOR = re.compile(r"(\d+) \* ")


def keys_of(expression: str) -> list[str]:
    """The settings in an expression, in order."""
    return _KEY.findall(expression)


def value_of(expression: str, cfg: BaseModel) -> float:
    """The value of a key, or of ``2 * a.b`` or ``a.b * (c.d + 1)``."""
    first, *rest = keys_of(expression)
    factor = _FACTOR.match(expression)
    value = float(_get(first, cfg)) * (int(factor[1]) if factor else 1)
    for key in rest:
        value *= float(_get(key, cfg)) + 1
    return value


def _get(key: str, cfg: Any) -> Any:
    for part in key.split("."):
        cfg = getattr(cfg, part)
    return cfg


def _multiple(key: str, of: str, when: Callable[[Config], object]) -> Refused:
    return Refused(lambda c: when(c) and _get(key, c) % _get(of, c),
                   f"{key}={{{key}}} is not a multiple of {of}={{{of}}}")


# -- combinations -----------------------------------------------------------------------------------------------------
def _built_in(c: Config) -> bool:
    """Whether the model is made here. One with a path has a shape of its own, which host/model_folder.py checks."""
    return not c.model.path


def _built_in_experts(c: Config) -> bool:
    return _built_in(c) and c.model.family == "qwen3_moe"


def _fully_async(c: Config) -> bool:
    return c.train.schedule == "fully_async"


def _samples_of_replica(c: Config) -> int:
    return c.train.prompts_per_step * c.train.group_size // c.trainer.data_parallel


def _way_to_generate(c: Config) -> Iterator[str]:
    rollout = c.rollout
    if rollout.generate in ("environment", "tools", "textarena"):
        yield (f"rollout.generate={rollout.generate}: leave it out, and set rollout.environment to what the policy "
               "acts in (tools, textarena, or package.module:name), which alone makes samples episodes")
    elif rollout.environment and rollout.generate != SINGLE_TURN:
        yield (f"rollout.environment={rollout.environment} with rollout.generate={rollout.generate}: either an "
               "environment or a function generates samples; leave one of them out")
    elif ENVIRONMENT in rollout.reward_names and not rollout.generates_apart:
        yield (f"rollout.reward={rollout.reward} with rollout.generate={rollout.generate}: the reward environment is "
               "what an environment says: set rollout.environment to what the policy acts in, or choose another reward")


def _forward_groups_of_other_modes(c: Config) -> Iterator[str]:
    for name, group in c.forward_groups.items() if c.mode != "rl" else ():
        if group.enabled:
            yield f"{name}.enabled=true with mode={c.mode}: only a job of mode=rl has use for it; leave it out"


def _colocated_forward_groups(c: Config) -> Iterator[str]:
    for name, group in c.forward_groups.items() if c.colocated else ():
        if group.enabled:
            yield (f"placement=colocated with {name}.enabled=true: only one trainer group alternates with engines; "
                   "set placement=disaggregated, or leave it out")


def _durable_states(c: Config) -> Iterator[str]:
    streams = {group.state for group in c.trainer_groups if group.trains}
    if c.uses_critic and c.dcs.durable_url and (missing := streams - set(c.dcs.durable_streams)) and missing != streams:
        yield (f"dcs.durable_streams has no {', '.join(missing)}: policy and critic resume at one step, so after a "
               "loss of the DCS nodes the state of one is worth nothing without that of the other; list "
               f"{' and '.join(sorted(streams))}, or neither")


def _engines_of_pools(c: Config) -> Iterator[str]:
    for key, engines in (("rollout.engines", c.rollout.engines),
                         *((f"pools.{name}.engines", pool.engines) for name, pool in c.pools.items())):
        if engines > c.coordinator.max_engines:
            yield (f"{key}={engines} is more than coordinator.max_engines={c.coordinator.max_engines}, the most that "
                   "a pool may be scaled to: raise the limit, or set fewer engines")


_OF_FOLLOWERS = ("follow_quorum", "follow_timeout_s", "catch_up_timeout_s")


def _updates_of_pools(c: Config) -> Iterator[str]:
    for name, pool in c.pools.items():
        if pool.engine.get("max_unavailable", "auto") != "auto":
            yield (f"pools.{name}.engine.max_unavailable bounds nothing: the engines of this pool serve the weights of "
                   "its folder, and never update; leave it out (engine.max_unavailable is for the policy's pool)")
        for setting in _OF_FOLLOWERS:
            if setting in pool.engine:
                yield (f"pools.{name}.engine.{setting} has no effect: the engines of this pool serve the weights of "
                       f"its folder, and follow nothing; leave it out (engine.{setting} is for the policy's pool)")


def _autoscaling(c: Config) -> Iterator[str]:
    for key, auto in (("rollout.autoscale", c.rollout.autoscale),
                      *((f"pools.{name}.autoscale", pool.autoscale) for name, pool in c.pools.items())):
        if auto.mode != "disabled" and auto.max_engines > c.coordinator.max_engines:
            yield (f"{key}.max_engines={auto.max_engines} is more than coordinator.max_engines="
                   f"{c.coordinator.max_engines}, the most that a pool may be scaled to: raise the limit, or lower "
                   f"{key}.max_engines")
    if c.colocated and c.rollout.autoscale.mode != "disabled":
        yield ("rollout.autoscale is for engines on devices of their own: with placement=colocated the GPUs of the "
               "trainer bound their number; leave it out")


def _teacher_is_a_pool(c: Config) -> Iterator[str]:
    teacher = c.algorithm.teacher
    if teacher is not None and teacher not in c.pools:
        name = "NAME" if teacher == ROLLOUT_POOL else teacher
        yield (f"algorithm.teacher={teacher} is no further pool of the job: set algorithm.teacher={name} and "
               f"pools.{name}.model to the folder of the teacher's model")


_PART = "train.prompts_per_part={train.prompts_per_part}"
_LEAVE_ONE_OUT = "leave one of them out"

CHECKS: tuple[Check, ...] = (
    # The built-in model.
    *(_multiple(f"model.{key}", f"trainer.{by}", _built_in) for key, by in (
        ("num_heads", "tensor_parallel"), ("num_kv_heads", "tensor_parallel"),
        ("intermediate_size", "tensor_parallel"), ("num_layers", "pipeline_parallel"))),
    _multiple("model.num_heads", "model.num_kv_heads", _built_in),
    Refused(lambda c: _built_in(c) and c.model.family == "qwen2" and c.model.hidden_size % (2 * c.model.num_heads),
            "model.hidden_size={model.hidden_size} is not a multiple of twice model.num_heads={model.num_heads}, which "
            "a qwen2 model needs"),
    Refused(lambda c: _built_in(c) and c.model.head_dim % 2,
            "model.head_dim={model.head_dim} is odd: the rotary position embedding turns pairs of values"),
    Refused(lambda c: _built_in(c) and c.model.family != "qwen3_moe" and c.trainer.expert_parallel > 1,
            "trainer.expert_parallel={trainer.expert_parallel} with model.family={model.family}, which has no experts: "
            "set it to 1"),
    Refused(lambda c: _built_in_experts(c) and c.model.experts_per_token > c.model.num_experts,
            "model.experts_per_token={model.experts_per_token} is more than model.num_experts={model.num_experts}"),
    _multiple("model.num_experts", "trainer.expert_parallel", _built_in_experts),
    _multiple("model.expert_intermediate_size", "trainer.tensor_parallel", _built_in_experts),
    Refused(lambda c: c.rollout.environment and _built_in(c),
            "rollout.environment={rollout.environment} with the built-in model, which has no chat template: set "
            "model.path"),
    # Rollout.
    _way_to_generate,
    Refused(lambda c: c.rollout.penalties and c.mode == "rl",
            "{rollout.penalties} in rollout with mode=rl: an engine's log-probs are those of the changed logits, with "
            "which the trainer's cannot be compared; leave them to eval, or to mode=rejection_sampling"),
    Refused(lambda c: c.rollout.top_k == 1 and c.train.group_size > 1 and c.mode in ("rl", "rejection_sampling"),
            "rollout.top_k=1: all samples of a prompt would be the same; set a larger one, or null for all tokens"),
    Refused(lambda c: (c.rollout.stop or c.eval.stop) and _built_in(c),
            "rollout.stop or eval.stop with the built-in model, which has no text; set model.path"),
    Refused(lambda c: (c.rollout.min_p or c.eval.min_p) and (c.deterministic or c.engine.seeded_sampling == "on"),
            "rollout.min_p={rollout.min_p} and eval.min_p={eval.min_p} with samples that are drawn by seeds "
            "(deterministic={deterministic}, engine.seeded_sampling={engine.seeded_sampling}): SGLang has no seeds "
            "with min_p; set min_p to 0"),
    Refused(lambda c: (any(options.get("min_p") for _, options in c.rollout.judge_options)
                       and (c.deterministic or c.engine.seeded_sampling == "on")),
            "min_p in the options of genrm with samples that are drawn by seeds (deterministic={deterministic}, "
            "engine.seeded_sampling={engine.seeded_sampling}): SGLang has no seeds with min_p; leave it out"),
    # Modes.
    Refused(lambda c: c.mode == "sft" and not c.sft.max_steps,
            "sft.max_steps=0 with mode=sft: there is nothing to do; set it to the number of steps"),
    Refused(lambda c: c.eval.samples > 1 and not c.eval.temperature,
            "eval.samples={eval.samples} with eval.temperature=0: all samples of a prompt would be the same; set a "
            "temperature, or one sample"),
    Refused(lambda c: c.eval.samples > 1 and c.eval.top_k == 1,
            "eval.samples={eval.samples} with eval.top_k=1: all samples of a prompt would be the same; set a larger "
            "top_k, or one sample"),
    Refused(lambda c: c.rejection.keep > c.train.group_size,
            "rejection.keep={rejection.keep} is more than train.group_size={train.group_size}, the samples that a "
            "prompt has"),
    # The trainer's ranks.
    Refused(lambda c: c.trainer.data_parallel * c.trainer.context_parallel % c.trainer.expert_parallel,
            "trainer.data_parallel={trainer.data_parallel} times trainer.context_parallel={trainer.context_parallel} "
            "is not a multiple of trainer.expert_parallel={trainer.expert_parallel}"),
    Refused(lambda c: (c.trainer.min_data_parallel or 1) > c.trainer.data_parallel,
            "trainer.min_data_parallel={trainer.min_data_parallel} is more than "
            "trainer.data_parallel={trainer.data_parallel}"),
    Refused(lambda c: (c.trainer.min_data_parallel or 0) * c.trainer.context_parallel % c.trainer.expert_parallel,
            "trainer.min_data_parallel={trainer.min_data_parallel} times trainer.context_parallel="
            "{trainer.context_parallel} is not a multiple of trainer.expert_parallel={trainer.expert_parallel}"),
    Refused(lambda c: (c.trainer.ranks_per_host or 0) % c.trainer.tensor_parallel,
            "trainer.ranks_per_host={trainer.ranks_per_host} is not a multiple of "
            "trainer.tensor_parallel={trainer.tensor_parallel}: ranks that split a layer are on one host"),
    Refused(lambda c: c.deterministic and c.trainer.min_data_parallel not in (None, c.trainer.data_parallel),
            "trainer.min_data_parallel={trainer.min_data_parallel} with deterministic=true: another number of replicas "
            "rounds in another way; leave it out"),
    Refused(lambda c: c.trainer.context_parallel > 1 and not c.trainer.packing,
            "trainer.context_parallel={trainer.context_parallel} with trainer.packing=false: only packed rows are "
            "split by positions; set trainer.packing=true"),
    Refused(lambda c: c.trainer.context_parallel > 1 and c.trainer.moe_aux_loss_coef,
            "trainer.moe_aux_loss_coef={trainer.moe_aux_loss_coef} with trainer.context_parallel="
            "{trainer.context_parallel}: the load-balancing loss of split sequences is not computed; set one of them "
            "to its default"),
    Refused(lambda c: c.device.type == "cpu" and c.device.dist_backend == "nccl",
            "device.dist_backend=nccl with device.type=cpu: nccl connects GPUs; set it to auto or gloo"),
    Refused(lambda c: c.mode == "rl" and c.train.minibatches > _samples_of_replica(c),
            "train.minibatches={train.minibatches} is more than the samples that a data-parallel replica has of a "
            "step, train.prompts_per_step={train.prompts_per_step} * train.group_size={train.group_size} / "
            "trainer.data_parallel={trainer.data_parallel}; set fewer"),
    # The algorithm.
    _teacher_is_a_pool,
    Refused(lambda c: c.algorithm.teacher is not None and c.rollout.temperature != 1.0 and c.mode == "rl",
            "algorithm.teacher={algorithm.teacher} with rollout.temperature={rollout.temperature:g}: the log-probs of "
            "a teacher are of temperature 1; set rollout.temperature to 1"),
    Refused(lambda c: c.algorithm.kl_coef and c.algorithm.kl_in == "reward" and c.algorithm.estimator != "k1",
            "algorithm.kl_in=reward with algorithm.kl_estimator={algorithm.kl_estimator}: what the policy learns from "
            "it does not keep it near its reference, and far from it pushes it away; leave algorithm.kl_estimator out, "
            "or set algorithm.kl_in to loss"),
    Refused(lambda c: c.algorithm.kl_coef and (c.algorithm.kl_in, c.algorithm.estimator) == ("loss", "k1"),
            "algorithm.kl_coef={algorithm.kl_coef} with algorithm.kl_estimator=k1 in the loss: the expectation of its "
            "gradient is 0; set algorithm.kl_estimator to k2 or k3, or algorithm.kl_in to reward"),
    # Jobs whose samples must be the same each time.
    Refused(lambda c: c.deterministic and c.train.max_staleness,
            "train.max_staleness={train.max_staleness} with deterministic=true: which version makes a sample would "
            "depend on time; set it to 0"),
    Refused(lambda c: c.deterministic and _fully_async(c) and c.rollout.filters,
            "train.schedule=fully_async with deterministic=true and rollout.filters: which groups "
            "rollout.max_dropped_groups still lets filters drop would depend on which finish first; set "
            "train.schedule=sync"),
    Refused(lambda c: c.deterministic and c.engine.seeded_sampling == "off",
            "engine.seeded_sampling=off with deterministic=true: samples must be drawn by seeds; leave it at auto"),
    Refused(lambda c: c.engine.pause_mode == "drain" and c.rollout.generates_apart and c.mode == "rl",
            "engine.pause_mode=drain with {rollout.generated_by}: all engines drain for the same version, "
            "and take no further turn of the samples that they have begun; set pause_mode to retract, in_place or "
            "abort"),
    # Steps whose gradients are computed in parts.
    Refused(lambda c: c.computes_parts and (c.train.prompts_per_part or 0) >= c.train.prompts_per_step,
            f"{_PART} with train.prompts_per_step={{train.prompts_per_step}}: a part is less than a step; set a "
            "smaller one, or leave it out"),
    Refused(lambda c: c.computes_parts and c.train.keep_steps,
            _PART + ": train.keep_steps is for steps that are made of one batch; leave one of them out"),
    Refused(lambda c: c.makes_batches and not c.uses_trainer and c.algorithm.measures_kl
            and c.algorithm.kl_in == "reward",
            "train.keep_steps with mode={mode} and algorithm.kl_in=reward: advantages would need log-probs of the "
            "reference policy, which the ranks of a trainer have; set algorithm.kl_coef=0 and "
            "algorithm.report_kl=false"),
    Refused(lambda c: c.makes_batches and not c.uses_trainer and c.algorithm.teacher is not None,
            "train.keep_steps with mode={mode} and algorithm.teacher={algorithm.teacher}: the teacher's pool has no "
            "engines in this mode; leave one of them out"),
    Refused(lambda c: c.computes_parts and c.train.updates > 1,
            f"{_PART} with train.updates_per_step={{train.updates_per_step}} and train.minibatches="
            "{train.minibatches}: a part is no update of its own, and a second pass needs all samples of the step "
            "again; set both to 1"),
    Refused(lambda c: c.computes_parts and c.uses_critic,
            f"{_PART} with a critic, which learns from all samples of a step together; set an algorithm without a "
            "critic"),
    Refused(lambda c: c.computes_parts and c.algorithm.teacher is not None,
            f"{_PART} with algorithm.teacher={{algorithm.teacher}}, which scores the samples of a step together; "
            f"{_LEAVE_ONE_OUT}"),
    Refused(lambda c: c.computes_parts and c.trainer.moe_aux_loss_coef,
            f"{_PART} with trainer.moe_aux_loss_coef={{trainer.moe_aux_loss_coef}}: the load-balancing loss is of all "
            f"samples of a step; {_LEAVE_ONE_OUT}"),
    Refused(lambda c: c.computes_parts and c.deterministic,
            f"{_PART} with deterministic=true: which groups are in which part depends on which finish first; "
            f"{_LEAVE_ONE_OUT}"),
    # Groups of ranks that compute with the policy.
    _forward_groups_of_other_modes,
    Refused(lambda c: c.uses_actor_fwd and (c.algorithm.tis_cap is None or c.train.updates == 1),
            "actor_fwd.enabled=true: log-probs before a step are needed with algorithm.tis_cap and more than one of "
            "train.updates_per_step or train.minibatches (the pass of a single update has them); set both, or leave it "
            "out"),
    # Engines on the devices of the trainer.
    Refused(lambda c: c.colocated and c.mode != "rl",
            "placement=colocated with mode={mode}: only a job of mode=rl has both a trainer and engines; set "
            "placement=disaggregated"),
    Refused(lambda c: c.colocated and c.train.max_staleness,
            "placement=colocated with train.max_staleness={train.max_staleness}: engines that generate while the "
            "trainer computes need devices of their own; set train.max_staleness=0, or placement=disaggregated"),
    Refused(lambda c: c.colocated and _fully_async(c),
            "placement=colocated with train.schedule=fully_async: groups are generated beside the steps, so engines "
            "need devices of their own; set train.schedule=sync, or placement=disaggregated"),
    Refused(lambda c: c.colocated and c.uses_critic,
            "placement=colocated with a critic: only one trainer group alternates with engines; set "
            "placement=disaggregated, or an algorithm without a critic"),
    _colocated_forward_groups,
    Refused(lambda c: c.colocated and c.rollout.host_selector,
            "placement=colocated with rollout.host_selector: the engines of the policy are where the trainer is; leave "
            "one of them out"),
    Refused(lambda c: c.selects_hosts and not c.cluster,
            "host_selector: only hosts of a cluster with a name have labels; set cluster, or leave it out"),
    # The critic.
    _durable_states,
    Refused(lambda c: c.uses_critic and c.critic.warmup_steps >= c.train.steps,
            "critic.warmup_steps={critic.warmup_steps} with train.steps={train.steps}: the policy would never learn; "
            "set fewer critic.warmup_steps"),
    # Addresses, certificates and sizes of the control plane.
    Refused(lambda c: c.dcs.host in ("", "0.0.0.0", "::") and not c.dcs.advertise_host,
            "dcs.host={dcs.host!r} is not an address that others can reach: set dcs.advertise_host"),
    Refused(lambda c: len({bool(file) for file in (c.dcs.tls_cert, c.dcs.tls_key, c.dcs.tls_ca)}) > 1,
            "dcs.tls_cert, dcs.tls_key and dcs.tls_ca belong together: set all three or none"),
    Refused(lambda c: bool(c.coordinator.tls_cert) != bool(c.coordinator.tls_key),
            "coordinator.tls_cert and coordinator.tls_key belong together: set both or none"),
    Refused(lambda c: c.coordinator.tls_ca and not c.coordinator.tls_cert,
            "coordinator.tls_ca needs coordinator.tls_cert and coordinator.tls_key"),
    Refused(lambda c: bool(c.etcd.tls_cert) != bool(c.etcd.tls_key),
            "etcd.tls_cert and etcd.tls_key belong together: set both or none"),
    Refused(lambda c: not c.etcd.tls_ca and (c.etcd.tls_cert or c.etcd.tls_server_name),
            "etcd.tls_cert and etcd.tls_server_name need etcd.tls_ca, the authority of the members' certificates"),
    Refused(lambda c: bool(c.etcd.user) != bool(c.etcd.password_file),
            "etcd.user and etcd.password_file belong together: set both or none"),
    Refused(lambda c: c.etcd.user and not c.etcd.endpoints,
            "etcd.user is for an etcd that someone else runs: set etcd.endpoints"),
    Refused(lambda c: 0 < c.dcs.orphan_grace_s <= c.dcs.staging_ttl_s,
            "dcs.orphan_grace_s={dcs.orphan_grace_s:g} must be larger than dcs.staging_ttl_s={dcs.staging_ttl_s:g}: a "
            "node would drop chunks of a version that is committed later"),
    Refused(lambda c: "memory" in c.trainer.profile and c.trainer.profile_steps and c.device.type == "cpu",
            "trainer.profile: memory is for GPUs, and device.type is cpu: leave it out"),
    Refused(lambda c: c.trainer.profile_steps and max(c.trainer.profile_ranks) >= c.trainer.ranks,
            "trainer.profile_ranks={trainer.profile_ranks} must be less than the number of ranks, {trainer.ranks}"),
    _engines_of_pools,
    _updates_of_pools,
    _autoscaling,
    Refused(lambda c: c.coordinator.ports and len(c.coordinator.ports) != c.coordinator.replicas,
            "coordinator.ports={coordinator.ports} must be as many ports as coordinator.replicas="
            "{coordinator.replicas}"),
)

# -- limits -----------------------------------------------------------------------------------------------------------
LIMITS = (
    # What the trainer's ranks and the leader wait for, from the inside to the outside.
    Ordered("dcs.io_timeout_s", "dcs.publish_timeout_s",
            "one answer of a node that is slow would take the whole publish"),
    Ordered("dcs.publish_timeout_s", "coordinator.hang_max_s",
            "a rank makes no progress while it waits for the publish before, and would count as hung"),
    Ordered("trainer.collective_timeout_s", "coordinator.hang_max_s",
            "a rank whose peer is lost must end by itself before it counts as hung"),
    Ordered("trainer.collective_timeout_s", "trainer.start_timeout_s",
            "ranks that wait for one that does not join must end, and join again, within the start"),
    # Engines.
    Ordered("engine.apply_timeout_s", "coordinator.hang_max_s",
            "an engine makes no progress while it loads a version, and would count as hung"),
    Ordered("dcs.io_timeout_s", "coordinator.hang_max_s",
            "whoever pulls makes no progress while it waits for a node, and would count as hung"),
    Ordered("engine.request_timeout_s", "engine.drain_timeout_s",
            "an engine that is scaled in must be able to finish a request that it has begun", may_equal=True),
    Ordered("engine.drain_timeout_s", "engine.release_timeout_s",
            "an engine whose phase is over must be able to finish the requests that it has", only_if="colocated"),
    Ordered("engine.apply_timeout_s", "engine.release_timeout_s",
            "an engine whose phase is over must be able to finish the update that it has begun", only_if="colocated"),
    Ordered("2 * engine.probe_interval_s", "engine.frozen_after_s",
            "an engine would be killed after a single probe without an answer", may_equal=True),
    Ordered("engine.frozen_after_s", "engine.busy_limit_s",
            "an engine that computes may answer no later than one that does not", may_equal=True),
    Ordered("engine.start_timeout_s", "engine.start_ceiling_s",
            "the limit of a start is lengthened up to its ceiling", may_equal=True),
    Ordered("engine.follow_timeout_s", "engine.catch_up_timeout_s",
            "an engine that is given up would be replaced before the time is over for which one is waited for"),
    Ordered("coordinator.reconcile_interval_s", "coordinator.hang_max_s",
            "the driver reports its progress once in each pass, and would count as hung"),
    Ordered("train.queue_call_timeout_s", "coordinator.hang_max_s",
            "the actor makes no progress while it waits for the queue, and would count as hung"),
    # The failure detector, etcd and leases.
    Ordered("coordinator.hang_min_s", "coordinator.hang_max_s",
            "they are the shortest and the longest time after which a part counts as hung", may_equal=True),
    Ordered("coordinator.host_lost_s", "coordinator.suspicion_s",
            "a member whose host is gone would be suspected longer than one whose host is heard", may_equal=True),
    Ordered("etcd.retry_budget_s", "coordinator.reconcile_deadline_s",
            "the leader would be blamed for an outage of etcd"),
    Ordered("coordinator.reconcile_interval_s", "coordinator.reconcile_deadline_s",
            "the leader would resign between two passes"),
    Ordered("coordinator.lease_ttl_s", "alerts.leader_gap_s",
            "another leader takes over only when the lease of the one before ends, which would be an alert"),
    # Failure policy.
    Ordered("failure_policy.fault_merge_s", "failure_policy.fault_window_s",
            "faults would be forgotten before a second one could count"),
    Ordered("failure_policy.backoff_initial_s", "failure_policy.backoff_max_s",
            "they are the first and the longest pause before a restart", may_equal=True),
)


# -- parts of a job ---------------------------------------------------------------------------------------------------
def _pools(c: Config) -> Iterator[str]:
    for name, pool in c.pools.items():
        if name == ROLLOUT_POOL:
            yield f"pools.{ROLLOUT_POOL}: this is the name of the policy's pool; give it another name"
        if name.startswith(f"{ROLLOUT_POOL}-"):  # as the names of the policy's engines, which are rollout-…
            yield (f"pools.{name}: a name that begins with {ROLLOUT_POOL}- cannot be told from those of the policy's "
                   "engines; give it another name")
        yield from faults_of_changes(c.engine, pool.engine, f"pools.{name}.engine")


def _critic(c: Config) -> Iterator[str]:
    for name in c.critic.train.keys() - CRITIC.train_keys:
        yield f"critic.train.{name}: a critic can have otherwise only {', '.join(CRITIC.train_keys)}"
    yield from faults_of_changes(c.trainer, c.critic.trainer, "critic.trainer")
    yield from faults_of_changes(c.train, c.critic.train, "critic.train")


def _forward_groups(c: Config) -> Iterator[str]:
    for name, group in c.forward_groups.items():
        yield from faults_of_changes(c.trainer, group.trainer, f"{name}.trainer")


PARTS: tuple[Check, ...] = (_pools, _critic, _forward_groups)


def faults(cfg: Config) -> list[str]:
    """Everything that does not fit together, of the job and, where nothing is wrong with that, of its parts."""
    if found := list(_found(cfg, *CHECKS, *PARTS, *LIMITS)):
        return found
    for pool in cfg.pool_settings("").values():
        own = cfg.model_copy(update={"engine": pool.engine,
                                     "placement": "colocated" if pool.colocated else "disaggregated"})
        found += (f"pools.{pool.name}: {fault}" for fault in _found(own, *LIMITS))
    for group in cfg.trainer_groups if not found else ():
        if group is not ACTOR:
            found += (f"of the group {group.name}: {group.with_own_keys(fault)}"
                      for fault in _found(cfg.of_group(group), *CHECKS, *LIMITS))
    return found


def _found(cfg: Config, *checks: Check) -> Iterator[str]:
    return (fault for check in checks for fault in check(cfg))


# -- settings that change nothing -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Readers:
    """Settings that a job reads only under a condition."""

    section: str
    names: tuple[str, ...]
    when: Callable[[Config], object]
    what: str
    """The condition, in words."""

    def unread(self, cfg: Config) -> Iterator[str]:
        """The settings of ``names`` that are set, in a job that does not read them, with what they are for. One that is
        set to its default is none: a job's stored settings name all there are."""
        if not self.when(cfg):
            section: BaseModel = getattr(cfg, self.section)
            yield from (f"{self.section}.{name} is for {self.what}" for name in self.names
                        if name in section.model_fields_set and getattr(section, name) != type(section).model_fields[
                            name].get_default(call_default_factory=True))


def _all_but_enabled(section: type[Section]) -> tuple[str, ...]:
    return tuple(name for name in section.model_fields if name != "enabled")


def _enabled(group: str) -> Callable[[Config], object]:
    return lambda c: c.forward_groups[group].enabled


def _own_algorithm(c: Config) -> bool:
    """Whether the algorithm is a user's own, which may read any of its section."""
    return ":" in c.algorithm.name


READERS = (
    Readers("train", ("max_groups_in_flight", "prompts_per_part", "queue"), _fully_async,
            "train.schedule=fully_async"),
    Readers("train", ("queue_units", "queue_call_timeout_s"), lambda c: c.uses_transfer_queue,
            "train.schedule=fully_async with train.queue=transfer_queue"),
    Readers("trainer", ("profile", "profile_ranks"), lambda c: c.trainer.profile_steps, "trainer.profile_steps"),
    Readers("trainer", ("min_data_parallel", "ranks_per_host"), lambda c: c.ranks_may_spread,
            "a cluster with a name (--cluster), and with train.queue=transfer_queue only where the operator has said "
            "`up --insecure-network`"),
    Readers("rollout", ("environment_options", "max_turns", "max_turn_tokens"), lambda c: c.rollout.environment,
            "rollout.environment"),
    Readers("critic", _all_but_enabled(CriticConfig), lambda c: c.uses_critic,
            "a critic (algorithm.name=ppo, and critic.enabled not false)"),
    *(Readers(group.name, _all_but_enabled(ForwardConfig), _enabled(group.name),
              f"{group.name}.enabled=true") for group in (ACTOR_FWD, REFERENCE)),
    Readers("algorithm", ("teacher_coef", "teacher_top_k"),
            lambda c: _own_algorithm(c) or c.algorithm.teacher is not None, "algorithm.teacher"),
    Readers("algorithm", ("kl_estimator", "kl_in", "reference_every_steps"),
            lambda c: _own_algorithm(c) or c.algorithm.measures_kl,
            "algorithm.kl_coef above 0, or algorithm.report_kl"),
    Readers("algorithm", ("overlong_penalty",),
            lambda c: _own_algorithm(c) or c.algorithm.overlong_buffer_tokens,
            "algorithm.overlong_buffer_tokens above 0"),
)
"""What an algorithm reads is not among them: another option than its own is refused."""


def unread_settings(cfg: Config) -> list[str]:
    """Settings that a job of ``mode: rl`` sets and that change nothing in it, each with what it is for. Only those that
    are plain from the settings: what a plug-in reads is not known here."""
    return [text for row in READERS for text in row.unread(cfg)] if cfg.mode == "rl" else []
