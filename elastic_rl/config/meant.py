"""Which setting is meant by a key that there is not: one that is written nearly like it, or that other frameworks have
by that name. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

OPTIONS: Mapping[str, Sequence[str]] = {
    "algorithm.options": ("clip_low", "clip_high", "normalize_std", "gamma", "gae_lambda", "reward_coef",
                          "tau_positive", "tau_negative", "max_weight"),
    "data.options": ("paths", "prompt_key", "messages_key", "template", "answer_key", "metadata_keys", "system_prompt",
                     "apply_chat_template", "chat_template_options", "chat_template_keys", "max_prompt_tokens",
                     "max_response_tokens", "long_prompts", "overlap", "duplicates", "eval_paths", "evals",
                     "max_eval_prompts")}
"""Options that are often looked for as settings, by the setting that holds them."""

_THEIRS: Mapping[str, Sequence[str]] = {
    # model and data
    "model.path": ("model_path", "model_name", "model_name_or_path", "base_model", "pretrain", "hf_checkpoint",
                   "ref_load", "load"),
    "data.options.paths": ("train_files", "train_file", "prompt_data", "data_path", "dataset", "dataset_path",
                           "dataset_name"),
    "data.source": ("dataset", "dataset_name"),
    "data.options.evals": ("val_files", "eval_files", "eval_prompt_data", "eval_dataset"),
    "data.options.prompt_key": ("input_key", "prompt_column", "text_column"),
    "data.options.messages_key": ("input_key", "messages"),
    "data.options.answer_key": ("label_key", "answer_column", "ground_truth"),
    "data.options.chat_template_options": ("apply_chat_template_kwargs", "chat_template_kwargs"),
    "data.options.max_prompt_tokens": ("max_prompt_length", "max_prompt_len", "prompt_max_len",
                                       "rollout_max_prompt_len"),
    "data.options.max_response_tokens": ("max_new_tokens", "max_tokens", "max_response_length", "max_response_len",
                                         "response_length", "max_completion_length", "generate_max_len",
                                         "rollout_max_response_len", "max_gen_len"),
    "data.options.long_prompts": ("filter_overlong_prompts",),
    # a step
    "train.prompts_per_step": ("train_batch_size", "batch_size", "rollout_batch_size",
                               "per_device_train_batch_size"),
    "train.group_size": ("n", "num_generations", "n_samples_per_prompt", "num_samples"),
    "train.minibatches": ("ppo_mini_batch_size", "mini_batch_size", "global_batch_size", "num_steps_per_rollout"),
    "train.updates_per_step": ("ppo_epochs", "num_iterations", "num_ppo_epochs"),
    "train.steps": ("max_steps", "num_steps", "total_training_steps", "total_epochs", "num_epochs",
                    "num_train_epochs", "epochs", "num_epoch", "num_rollout"),
    "train.lr": ("lr", "learning_rate", "actor_learning_rate"),
    "sft.lr": ("learning_rate",),
    "train.lr_warmup_steps": ("warmup_steps", "num_warmup_steps", "lr_warmup_iters", "warmup_ratio"),
    "train.lr_decay": ("lr_scheduler_type", "lr_scheduler", "lr_decay_style"),
    "train.max_grad_norm": ("clip_grad", "grad_clip", "gradient_clip_val"),
    "train.eval_every_steps": ("test_freq", "eval_interval", "eval_steps", "eval_freq"),
    "train.state_every_steps": ("save_freq", "save_interval", "save_steps"),
    "train.schedule": ("train_async", "async_train"),
    # reward and algorithm
    "rollout.reward": ("custom_reward_function", "reward_function", "reward_funcs", "reward_model", "reward_fn",
                       "rm_type", "custom_rm_path", "remote_rm_url"),
    "rollout.filters": ("filter_groups", "dynamic_sampling", "dynamic_sampling_filter_path"),
    "algorithm.name": ("adv_estimator", "advantage_estimator", "loss_mode", "loss_type"),
    "algorithm.aggregate": ("loss_agg_mode", "calculate_per_token_loss"),
    "algorithm.kl_coef": ("beta", "kl_loss_coef", "use_kl_loss", "init_kl_coef", "kl_beta"),
    "algorithm.kl_estimator": ("kl_loss_type",),
    "algorithm.kl_in": ("use_kl_in_reward",),
    "algorithm.entropy_coef": ("entropy_coeff",),
    "algorithm.tis_cap": ("use_tis", "tis_clip", "rollout_is_threshold", "rollout_is"),
    "algorithm.options.clip_low": ("epsilon", "clip_ratio", "clip_ratio_low", "clip_range", "cliprange", "eps_clip",
                                   "gspo_clip_low"),
    "algorithm.options.clip_high": ("epsilon_high", "clip_ratio_high", "eps_clip_high", "epsilon", "clip_ratio",
                                    "clip_range", "cliprange", "gspo_clip_high"),
    "algorithm.options.normalize_std": ("scale_rewards",),
    "algorithm.options.tau_positive": ("sapo_tau_positive",),
    "algorithm.options.tau_negative": ("sapo_tau_negative",),
    "algorithm.options.max_weight": ("cispo_max_weight",),
    "critic.warmup_steps": ("critic_warmup", "num_critic_only_steps"),
    # devices
    "trainer.tensor_parallel": ("tensor_model_parallel_size", "tensor_parallel_size", "tp_size"),
    "trainer.pipeline_parallel": ("pipeline_model_parallel_size", "pp_size"),
    "trainer.context_parallel": ("context_parallel_size", "cp_size"),
    "trainer.expert_parallel": ("expert_model_parallel_size", "ep_size"),
    "trainer.data_parallel": ("nnodes", "n_gpus_per_node", "num_gpus", "actor_num_nodes", "actor_num_gpus_per_node",
                              "data_parallel_size", "dp_size"),
    "trainer.distributed_optimizer": ("use_distributed_optimizer",),
    "trainer.micro_batch_tokens": ("max_tokens_per_gpu", "ppo_max_token_len_per_gpu", "micro_batch_size",
                                   "gradient_accumulation_steps", "use_dynamic_bsz", "use_dynamic_batch_size"),
    "trainer.recompute": ("recompute_granularity", "gradient_checkpointing"),
    "device.dtype": ("torch_dtype", "precision", "bf16", "fp16"),
    "placement": ("colocate", "colocate_all_models", "vllm_mode"),
    # engines
    "rollout.engines": ("num_engines", "rollout_num_gpus", "vllm_num_engines"),
    "engine.extra_args": ("engine_kwargs", "rollout_num_gpus_per_engine"),
    "engine.max_total_tokens": ("gpu_memory_utilization", "sglang_mem_fraction_static", "mem_fraction_static"),
    "rollout.temperature": ("temperature", "rollout_temperature", "sampling_temperature"),
    "rollout.top_p": ("top_p", "rollout_top_p"),
    "eval.samples": ("n_samples_per_eval_prompt",),
    "rollout.environment": ("multi_turn", "default_agent_loop"),
    "rollout.generate": ("custom_generate_function_path", "agent_func_path"),
    # the job
    "job": ("resume_mode", "resume_from_checkpoint"),
    "run_dir": ("default_local_dir", "output_dir", "save_dir"),
    "telemetry.trackers": ("logger", "report_to", "use_wandb", "use_tensorboard", "wandb")}
"""What verl, slime, TRL, OpenRLHF and transformers call a setting; the page "Coming from another framework" has what
differs."""


def _by_name() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for setting, options in OPTIONS.items():
        for option in options:
            found.setdefault(option, []).append(f"{setting}.{option}")
    for key, names in _THEIRS.items():
        for name in names:
            found.setdefault(name, []).append(key)
    return found


_MOST = 4
"""Keys that are named as meant, at most."""
BY_NAME: Mapping[str, Sequence[str]] = _by_name()
"""Keys by what may be written in their place; the likeliest first."""


def meant(key: str, known: Iterable[str], *, most: int, cutoff: float) -> list[str]:
    """Keys that one which there is not may mean, the likeliest first: those of the same last part, or that others call
    so, of its own section if it has some; else those that resemble it (``most`` at most; ``cutoff``: a share of 1)."""
    every = list(known)
    section, _, name = key.strip().lstrip("-").replace("-", "_").rpartition(".")
    found = [*dict.fromkeys((*BY_NAME.get(name.lower(), ()),
                             *(one for one in every if name and one.rpartition(".")[2] == name)))]
    if inside := [one for one in found if section and one.startswith(f"{section}.")]:
        return inside[:_MOST]
    if section:
        found.sort(key=lambda one: -difflib.SequenceMatcher(None, section, one.rpartition(".")[0]).ratio())
    return found[:_MOST] or difflib.get_close_matches(key, every, most, cutoff)


def suggestion(unknown: str, known: Iterable[str]) -> str:
    """The end of an error that names an unknown name of a section or of options: which of the known ones is meant, if
    any is."""
    names = list(known)
    theirs = [key.rpartition(".")[2] for key in BY_NAME.get(unknown, ())]
    found = [name for name in theirs if name in names] or difflib.get_close_matches(unknown, names, 1)
    return f"; did you mean {found[0]!r}?" if found else ""
