"""Settings that a job sets and that change nothing in it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastic_rl.config.root import Config

READ_BY: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("clip_low", "clip_high"), ("grpo", "dapo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "ppo",
                                 "on_policy_distillation")),
    (("normalize_std",), ("grpo", "dapo", "gspo", "sapo", "cispo", "on_policy_distillation")),
    (("gspo_clip_low", "gspo_clip_high"), ("gspo",)),
    (("sapo_tau_positive", "sapo_tau_negative"), ("sapo",)),
    (("cispo_max_weight",), ("cispo",)),
    (("gamma", "gae_lambda", "whiten_advantages", "value_clip"), ("ppo",)),
    (("reward_coef",), ("on_policy_distillation",)))
"""Settings of the section ``algorithm`` that not every algorithm reads, and the built-in ones that do."""


def unused_settings(cfg: Config) -> list[str]:
    """Each with what it is for; of jobs of ``mode: rl`` alone. Only those that are plain from the settings: what a
    plug-in reads is not known here, nor is every setting that a built-in algorithm does not read."""
    return [f"{section}.{name} is for {what}" for what, section, names in _unused(cfg) for name in names
            if name in getattr(cfg, section).model_fields_set]


def _unused(cfg: Config) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """What some settings are for, their section, and their names, where this job has no such thing."""
    if cfg.mode != "rl":
        return
    train, algorithm = cfg.train, cfg.algorithm
    if train.schedule != "fully_async":
        yield "train.schedule=fully_async", "train", ("max_groups_in_flight", "prompts_per_part", "queue")
    if train.schedule != "fully_async" or train.queue != "transfer_queue":
        yield "train.schedule=fully_async with train.queue=transfer_queue", "train", (
            "queue_units", "queue_call_timeout_s")
    if not cfg.rollout.environment:
        yield "rollout.environment", "rollout", ("environment_options", "max_turns", "max_turn_tokens")
    if not cfg.uses_critic:
        yield "a critic (algorithm.name=ppo, and critic.enabled not false)", "critic", (
            "model", "trainer", "train", "warmup_steps")
    for section in ("actor_fwd", "reference"):
        if not getattr(cfg, section).enabled:
            yield f"{section}.enabled=true", section, ("trainer",)
    if ":" in algorithm.name:  # one's own may read any of its section
        return
    for settings, names in READ_BY:
        if algorithm.name not in names:
            yield f"algorithm.name={' or '.join(names)}", "algorithm", settings
    if algorithm.teacher is None:
        yield "algorithm.teacher", "algorithm", ("teacher_coef", "teacher_top_k")
    if not algorithm.measures_kl:
        yield "algorithm.kl_coef above 0, or algorithm.report_kl", "algorithm", (
            "kl_estimator", "kl_in", "reference_every_steps")
    if not algorithm.overlong_buffer_tokens:
        yield "algorithm.overlong_buffer_tokens above 0", "algorithm", ("overlong_penalty",)
