"""Algorithms by their name in the configuration: the ``AlgorithmSpec`` seam."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

from pydantic import BaseModel
from torch import Tensor

from elastic_rl.algorithms.advantages import (
    GroupRelativeOptions,
    batch_normalised,
    batch_normalised_with_baseline,
    group_centred,
    group_relative,
    leave_one_out,
)
from elastic_rl.algorithms.cispo import CispoOptions, clipped_weight_loss
from elastic_rl.algorithms.distillation import DistillationOptions, teacher_advantages
from elastic_rl.algorithms.gspo import GspoOptions, sequence_policy_loss
from elastic_rl.algorithms.loss_batch import LossBatch
from elastic_rl.algorithms.losses import ClipOptions, clipped_policy_loss, negative_log_likelihood
from elastic_rl.algorithms.ppo import PpoOptions, clipped_value_loss, gae_advantages, sample_rewards
from elastic_rl.algorithms.sapo import SapoOptions, soft_gated_loss
from elastic_rl.config import AlgorithmConfig, Config, CriticConfig
from elastic_rl.config.algorithm import Aggregate
from elastic_rl.config.options import Options, read_options
from elastic_rl.data.batch import Batch
from elastic_rl.errors import ConfigError
from elastic_rl.plugins.user_code import MAX_NAME, is_name, resolve
from elastic_rl.telemetry.training_metrics import PUBLISH

TokenLoss = Callable[[Tensor, LossBatch, Any], tuple[Tensor, dict[str, Tensor]]]
"""``(logp [M], the M tokens' other tensors and sequences, options) -> (loss [M], stats [M] by name)``. The loss may
depend on a whole sequence, never on another one: which sequences are in one call is not defined. Pure, and the same on
every rank that gets the same input."""


@dataclass(frozen=True)
class AlgorithmSpec:
    """The functions of an algorithm. The training step applies them to the loss tokens of a batch, M at a time, and
    owns the global denominator."""

    name: str
    needs: tuple[str, ...]
    """Tensors of the batch, besides the tokens, that the loss reads; ``data/batch.py`` has the schema."""
    token_loss: TokenLoss
    options: type[BaseModel] = Options
    """Model of ``algorithm.options``, which the functions get: what they read is what it has, and another option is
    refused. One that uses functions of the algorithms here has theirs, such as ``GrpoOptions``."""
    stats: tuple[str, ...] = ()
    """Names that ``token_loss`` returns; their means over all tokens become metrics."""
    advantages: Callable[[Tensor, Any], Tensor] | None = None
    """``(rewards [G, K] of all groups of a step, options) -> [G, K]``; None where no reward is used."""
    per_group: bool = False
    """Whether the advantages of a group depend on no other group of the step, so that a part of the step may be
    trained on before the others are there (``train.prompts_per_part``)."""
    token_advantages: Callable[[Batch, Any, AlgorithmConfig], Tensor] | None = None
    """``(a step's batch, options, the section algorithm) -> [L]``: an advantage for each loss token, which the loss
    gets in the place of one for each sample. The batch has ``advantages``, ``old_logprobs`` and ``inputs``, and
    ``turn_rewards`` where the rewards of samples say what of them is of each turn. The loss ``needs``
    "token_advantages" then."""
    inputs: tuple[str, ...] = ()
    """Further tensors of the batch that ``token_advantages`` reads: "teacher_logprobs", "values".
    With "values" the job has a critic: what the function returns are its errors, so values and these add up to the
    returns that it learns from, and the policy's loss gets them whitened with ``critic.whiten_advantages``. The batch
    has ``ref_logprobs`` too then, where the divergence from the reference policy is a part of the reward
    (``algorithm.kl_in``), which the function is to take off each token."""
    aggregate: Aggregate = "token"
    """How the losses of tokens become that of a batch, unless ``algorithm.aggregate`` says otherwise. ``token``: the
    mean over all tokens of the batch (DAPO). ``sequence``: the mean over samples of each one's mean (GRPO as
    published). ``constant``: the mean over samples of each one's sum, divided by ``algorithm.constant_length_tokens``
    (Dr. GRPO)."""


RESERVED_STATS = frozenset((
    "loss", "tokens", "lr", "grad_norm", "train_s", "logprob_diff_mean", "logprob_diff_max", "tis_weight_mean",
    "tis_capped_fraction", "kl_reference", "kl_teacher", "kl_teacher_top", "teacher_refused", "reference_step",
    "entropy", "advantage_mean", "advantage_std", "advantage_min", "advantage_max", "critic_loss", "critic_grad_norm",
    "critic_lr", "value_clip_fraction", "value_mean", "return_mean", "explained_variance", "train_tokens_per_s",
    "tflops_per_rank", "mfu", "peak_memory_bytes")) | PUBLISH
"""Metrics of the training step itself."""
_NEEDS = ("old_logprobs", "advantages")
_SUPPLIED = ("old_logprobs", "advantages", "ref_logprobs", "token_advantages")
"""Tensors that a step of RL has for a loss."""
_TEACHER, _VALUES = "teacher_logprobs", "values"
_INPUTS = (_TEACHER, _VALUES)
"""Tensors that a step of RL has for advantages of tokens."""
_TOP = ("teacher_top_ids", "teacher_top_logprobs")
_CLIP_STATS = ("ratio_mean", "clip_fraction", "kl")
_SAPO_STATS = ("ratio_mean", "gate_mean", "kl")


class GrpoOptions(ClipOptions, GroupRelativeOptions):
    """Options of ``grpo`` and ``dapo``."""


_GRPO = AlgorithmSpec("grpo", _NEEDS, clipped_policy_loss, GrpoOptions, _CLIP_STATS, group_relative, per_group=True)
"""GRPO with DAPO's clip and aggregate: ``dapo`` is another name of it."""
ALGOS: dict[str, AlgorithmSpec] = {spec.name: spec for spec in (
    _GRPO, replace(_GRPO, name="dapo"),
    AlgorithmSpec("dr_grpo", _NEEDS, clipped_policy_loss, ClipOptions, _CLIP_STATS, group_centred, per_group=True,
                  aggregate="constant"),
    AlgorithmSpec("gspo", _NEEDS, sequence_policy_loss, GspoOptions, _CLIP_STATS, group_relative, per_group=True,
                  aggregate="sequence"),
    AlgorithmSpec("sapo", _NEEDS, soft_gated_loss, SapoOptions, _SAPO_STATS, group_relative, per_group=True,
                  aggregate="sequence"),
    AlgorithmSpec("cispo", _NEEDS, clipped_weight_loss, CispoOptions, _CLIP_STATS, group_relative, per_group=True),
    AlgorithmSpec("rloo", _NEEDS, clipped_policy_loss, ClipOptions, _CLIP_STATS, leave_one_out, per_group=True),
    AlgorithmSpec("reinforce_pp", _NEEDS, clipped_policy_loss, ClipOptions, _CLIP_STATS, batch_normalised),
    AlgorithmSpec("reinforce_pp_baseline", _NEEDS, clipped_policy_loss, ClipOptions, _CLIP_STATS,
                  batch_normalised_with_baseline),
    AlgorithmSpec("on_policy_distillation", ("old_logprobs", "token_advantages"), clipped_policy_loss,
                  DistillationOptions, _CLIP_STATS, group_relative, token_advantages=teacher_advantages,
                  inputs=(_TEACHER,)),
    AlgorithmSpec("ppo", ("old_logprobs", "token_advantages"), clipped_policy_loss, PpoOptions, _CLIP_STATS,
                  sample_rewards, token_advantages=gae_advantages, inputs=(_VALUES,)),
    AlgorithmSpec("sft", (), negative_log_likelihood),
)}

CRITIC_LOSS = AlgorithmSpec("value", ("values", "returns"), clipped_value_loss, CriticConfig, ("value_clip_fraction",))
"""How a critic learns, in whose loss values are in the place of log-probs. Its options are the section ``critic``."""


def algorithm_of(cfg: Config, phase: str = "rl") -> AlgorithmSpec:
    """The algorithm of a phase. Raises ConfigError for an unknown name, one that cannot be trained with RL, options
    that it does not have, and settings that do not fit it."""
    name = cfg.algorithm.name
    offered = ALGOS if name in ALGOS else {n: spec for n, spec in ALGOS.items() if spec.advantages is not None}
    spec = ALGOS["sft"] if phase == "sft" else resolve(name, offered, setting="algorithm.name")
    if not isinstance(spec, AlgorithmSpec):
        raise ConfigError(f"algorithm.name={cfg.algorithm.name!r} is a {type(spec).__name__}, not an AlgorithmSpec")
    if phase == "rl":
        _require_trainable(spec, cfg.algorithm)
        if uses_values(spec) and cfg.mode == "rl" and not cfg.uses_critic:
            raise ConfigError(f"algorithm.name={cfg.algorithm.name!r} needs the values of a critic, and there is none",
                              hint="set critic.enabled=true")
        if uses_values(spec) and cfg.makes_batches and not cfg.uses_trainer:
            raise ConfigError(f"train.keep_steps with mode={cfg.mode} and algorithm.name={cfg.algorithm.name!r}, whose "
                              "advantages need the values of a critic, which a trainer group has",
                              hint="set an algorithm without a critic, such as grpo")
        if cfg.mode == "rl" and cfg.computes_parts and (not spec.per_group or spec.token_advantages is not None):
            raise ConfigError(f"train.prompts_per_part={cfg.train.prompts_per_part} with algorithm.name="
                              f"{cfg.algorithm.name!r}, whose advantages may depend on all groups of a step",
                              hint="leave train.prompts_per_part out; an algorithm of your own whose advantages are of "
                              "each group alone says so with per_group=True in its AlgorithmSpec")
        if cfg.uses_critic and not uses_values(spec):
            raise ConfigError(f"algorithm.name={cfg.algorithm.name!r} has no use for a critic",
                              hint="leave critic.enabled out, or set algorithm.name to ppo")
        if cfg.uses_reference_group and not uses_reference(spec, cfg.algorithm):
            raise ConfigError(f"reference.enabled=true, and algorithm.name={cfg.algorithm.name!r} compares nothing "
                              "with the reference policy",
                              hint="set algorithm.kl_coef or algorithm.report_kl, or leave reference.enabled out")
    return spec


def options_of(spec: AlgorithmSpec, algorithm: AlgorithmConfig) -> Any:
    """What the functions of an algorithm get: ``algorithm.options``, as its model has them. Supervised steps have none.
    Raises ConfigError for wrong options."""
    return Options() if spec.advantages is None else read_options(
        spec.options, algorithm.options, of=f"the algorithm {algorithm.name!r}", setting="algorithm.options")


def uses_values(spec: AlgorithmSpec) -> bool:
    """Whether advantages are made with the values of a critic."""
    return _VALUES in spec.inputs


def _require_trainable(spec: AlgorithmSpec, algorithm: AlgorithmConfig) -> None:
    if spec.advantages is None:
        raise ConfigError(f"algorithm.name={algorithm.name!r} has no advantages, so it cannot learn from rewards",
                          hint="supervised steps are set with sft.max_steps")
    if fault := next(_faults(spec), ""):
        raise ConfigError(f"algorithm.name={algorithm.name!r} {fault}", hint="AlgorithmSpec in "
                          "elastic_rl/algorithms/registry.py says what an algorithm has")
    if taken := sorted(RESERVED_STATS.intersection(spec.stats)):
        raise ConfigError(f"algorithm.name={algorithm.name!r} has stats with the names of metrics of the step: "
                          f"{', '.join(taken)}", hint="give them other names")
    if aggregate_of(spec, algorithm) == "constant" and algorithm.constant_length_tokens is None:
        raise ConfigError(f"algorithm.name={algorithm.name!r} divides by a constant length, which is not set",
                          hint="set algorithm.constant_length_tokens to the longest response, or algorithm.aggregate "
                               "to token or sequence")
    taught = bool(algorithm.teacher_top_k) or "teacher_logprobs" in spec.inputs
    if taught and algorithm.teacher is None:
        raise ConfigError(f"algorithm.name={algorithm.name!r} with algorithm.teacher_top_k={algorithm.teacher_top_k} "
                          "learns from a teacher, and there is none",
                          hint="set algorithm.teacher to a name, and pools.NAME.model to the folder of its model")
    if algorithm.teacher is not None and not taught:
        raise ConfigError(f"algorithm.name={algorithm.name!r} has no use for algorithm.teacher={algorithm.teacher}",
                          hint="set algorithm.name to on_policy_distillation, or algorithm.teacher_top_k")
    options = options_of(spec, algorithm)
    if isinstance(options, DistillationOptions) and not options.reward_coef and (
            algorithm.overlong_buffer_tokens or (algorithm.kl_coef and algorithm.kl_in == "reward")):
        raise ConfigError(f"algorithm.name={algorithm.name!r} learns nothing from rewards with reward_coef=0, so "
                          "algorithm.overlong_buffer_tokens and algorithm.kl_in=reward have no effect",
                          hint="set algorithm.options.reward_coef, or leave them out")
    if algorithm.kl_coef and algorithm.kl_in == "reward" and spec.advantages is group_relative \
            and options.normalize_std:
        raise ConfigError(f"algorithm.kl_in=reward with algorithm.name={algorithm.name!r}: in a group whose rewards "
                          "are equal the noise of the divergence would be divided by its own standard deviation",
                          hint="set algorithm.kl_in to loss, or algorithm.options.normalize_std to false, or "
                               "algorithm.name to rloo or reinforce_pp")


def _faults(spec: AlgorithmSpec) -> Iterator[str]:
    """What is wrong with a user's specification, which would else be found by the ranks, in the first update."""
    for what in ("token_loss", "advantages"):
        if not callable(getattr(spec, what)):
            yield f"has a {what} that is no function"
    if not (isinstance(spec.options, type) and issubclass(spec.options, BaseModel)):
        yield "has options that are no pydantic model"
    if spec.aggregate not in get_args(Aggregate):
        yield f"has aggregate={spec.aggregate!r}, which is none of {', '.join(get_args(Aggregate))}"
    for name in spec.needs:
        if name not in _SUPPLIED:
            yield f"needs {name!r}, and a batch has {', '.join(_SUPPLIED)}"
    if spec.token_advantages is not None and not callable(spec.token_advantages):
        yield "has token_advantages that are no function"
    if ("token_advantages" in spec.needs) != (spec.token_advantages is not None):
        yield "must both need 'token_advantages' and say by a function of this name how they are made, or neither"
    for name in spec.inputs:
        if name not in _INPUTS:
            yield f"has the input {name!r}, and a batch has {', '.join(_INPUTS)}"
    for name in spec.stats:
        if not is_name(name):
            yield f"has a stat whose name is not text of 1 to {MAX_NAME} printable characters: {name!r:.100}"


def aggregate_of(spec: AlgorithmSpec, algorithm: AlgorithmConfig) -> Aggregate:
    """How the losses of tokens become that of a batch. The settings are about RL only."""
    return spec.aggregate if spec.advantages is None else algorithm.aggregate or spec.aggregate


def required_tensors(spec: AlgorithmSpec, algorithm: AlgorithmConfig) -> tuple[str, ...]:
    """What a batch must have besides the tokens: what the loss reads, and what the settings add to it."""
    if spec.advantages is None:
        return spec.needs
    added = {"old_logprobs": algorithm.tis_cap is not None,
             "ref_logprobs": algorithm.measures_kl and algorithm.kl_in == "loss",
             **dict.fromkeys(_TOP, bool(algorithm.teacher_top_k))}
    return (*spec.needs, *(name for name, wanted in added.items() if wanted and name not in spec.needs))


def uses_reference(spec: AlgorithmSpec, algorithm: AlgorithmConfig) -> bool:
    """Whether RL with these settings has a reference policy: for its loss, for its rewards, or for a metric."""
    return spec.advantages is not None and (algorithm.measures_kl or "ref_logprobs" in spec.needs)
