"""Everything that is wrong with a job, found before a cluster starts: plug-ins, model, data, and how they fit together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from elastic_rl.config import Config
from elastic_rl.data.samples import Prompt, demonstration
from elastic_rl.data.sources import CheckedSource, make_source, read_prompts
from elastic_rl.engine.generation import GENERATE_FNS
from elastic_rl.engine.own_generate import OwnGenerate
from elastic_rl.errors import ConfigError, ElasticRLError, PluginFailed
from elastic_rl.host import checkpoint_capacity, model_folder
from elastic_rl.models.arch import ModelArch
from elastic_rl.pipeline.sampled_modes import rejection_groups
from elastic_rl.pipeline.sampling import decoder
from elastic_rl.plugin_process import CallLost
from elastic_rl.plugins import describe, plain, resolve, text_of
from elastic_rl.rewards.base import Decode, RewardFn, plain_rewards
from elastic_rl.rewards.own import close_filter, named_filter
from elastic_rl.rewards.registry import close_reward, make_reward

_READ = 16
"""Prompts of each set that are read, spread over it."""
_REWARDED = 4
_LARGE = 512
"""Hidden size from which on a model is not one that was made to be tried out."""
_NEW_JOBS_ONLY = ("checkpoints", "evaluation sets")
"""Parts that are required of a new job only."""
_MAX_SET_NAME = 64
"""Characters in the name of an evaluation set, which is shown everywhere."""
_SHOWN = 200
"""Characters of a prompt that are shown."""


@dataclass(frozen=True)
class Finding:
    """What was found of one part of a job. ``fault``: what is wrong; "" for nothing. ``hint``: what to do, or what to
    look at where there is no fault."""

    part: str
    detail: str = ""
    fault: str = ""
    hint: str = ""


def require(cfg: Config, *, begun: bool = False) -> None:
    """Raises ConfigError with everything that is wrong with what the settings name. Reads the data's first prompts
    only, and calls no reward: it is done at each start of a job. ``begun``: the job has committed something; then
    nothing is refused that cannot be changed any more, or without which it may still go on."""
    faults = [f for f in (*_plug_ins(cfg), *_model_and_data(cfg))
              if f.fault and not (begun and f.part in _NEW_JOBS_ONLY)]
    if faults:
        raise ConfigError("\n  ".join(f.fault for f in faults),
                          hint="; ".join(dict.fromkeys(f.hint for f in faults if f.hint)))


def check(cfg: Config) -> Iterator[Finding]:
    """A finding for each part of the job, as it is examined. Prompts are read, and the reward is asked what the data's
    own answers are worth."""
    usable = True
    for found in _plug_ins(cfg):
        usable &= not (found.part == "reward" and found.fault)
        yield found
    made: list[CheckedSource] = []
    yield from _model_and_data(cfg, made.append)
    yield from _of_defaults(cfg)
    for source in made:
        prompts = _of_prompts(cfg, source)
        yield prompts
        if cfg.uses_engines and usable and not prompts.fault:
            yield _of_reward(cfg, source)


def _plug_ins(cfg: Config) -> Iterator[Finding]:
    from elastic_rl.algorithms.registry import algorithm_of  # it imports torch, which no other command needs
    rollout = cfg.rollout

    def algorithm() -> str:
        algorithm_of(cfg)
        return cfg.algorithm.name if cfg.mode == "rl" else "not used"

    def filters() -> str:
        names = []
        for entry in rollout.filters:
            name, drop_reason = named_filter(entry, rollout.reward_timeout_s)
            close_filter(drop_reason)
            names.append(name)
        return ", ".join(names) or "none"

    def reward() -> str:
        close_reward(make_reward(rollout.reward, rollout.reward_options))
        return rollout.reward

    def generate() -> str:
        if ":" in rollout.generate:
            OwnGenerate(rollout.generate, "", timeout_s=1.0, retries=1, vocabulary=1).close()
        else:
            resolve(rollout.generate, GENERATE_FNS, setting="rollout.generate")
        return rollout.generate

    for part, examine in (("algorithm", algorithm), ("generate", generate), ("filters", filters), ("reward", reward)):
        yield _finding(part, examine)


def _model_and_data(cfg: Config, made: Callable[[CheckedSource], object] = lambda source: None) -> Iterator[Finding]:
    """``made``: gets the source, if the data and the model fit."""
    facts: model_folder.Facts | None = None
    source: CheckedSource | None = None

    def model() -> str:
        nonlocal facts
        model_folder.require(cfg, 0)
        if not cfg.model.path:
            return f"a small one of the family {cfg.model.family}, made from the seed"
        facts = model_folder.read(Path(cfg.model.path).expanduser())
        arch = facts.arch
        return f"{cfg.model.path}: {arch.layers} layers, hidden size {arch.hidden}, {arch.vocab} tokens"

    def data() -> str:
        nonlocal source
        source = make_source(cfg)
        if facts is not None or not cfg.model.path:
            model_folder.require_positions(cfg, facts, source.max_prompt_tokens + source.max_response_tokens)
        if cfg.mode == "rejection_sampling":
            rejection_groups(cfg, source)
        made(source)
        sets = ", ".join(f"{len(prompts)} in {name}" for name, prompts in source.evals.items())
        trained = f"{len(source.train)} prompts to train on, " if cfg.uses_training_prompts else ""
        return (f"{cfg.data.source}: {trained}to evaluate {sets}; prompts of up to "
                f"{source.max_prompt_tokens} tokens, responses of up to {source.max_response_tokens}")

    found = _finding("model", model)
    yield found
    if facts is not None:
        arch = facts.arch
        yield _finding("checkpoints", lambda: _capacity(cfg, arch))
    if found.fault and cfg.data.source != "addition":
        yield Finding("data", "not examined: it may need the model's tokenizer")
    else:
        yield _finding("data", data)
        if source is not None:
            yield from _of_eval_set_names(source)


def _of_eval_set_names(source: CheckedSource) -> Iterator[Finding]:
    wrong = [name for name in source.evals if not 0 < len(name) <= _MAX_SET_NAME or not name.isprintable()]
    if wrong:
        yield Finding("evaluation sets", fault=f"the name {plain(wrong[0], 100)!r} of an evaluation set",
                      hint=f"names of sets have 1 to {_MAX_SET_NAME} printable characters")


def _capacity(cfg: Config, arch: ModelArch) -> str:
    sizes = checkpoint_capacity.version_sizes(cfg, arch)
    if found := list(checkpoint_capacity.faults(cfg, sizes)):
        raise ConfigError("; ".join(f.message for f in found), hint="; ".join(f.fix for f in found))
    state = f", one of the trainer's state {sizes.trainer_state >> 20} MiB" if sizes.trainer_state else ""
    return f"a version of the policy has {sizes.policy >> 20} MiB{state}"


def _of_defaults(cfg: Config) -> Iterator[Finding]:
    """Settings that were left at defaults which are for the built-in model, of which a larger one would be ruined or
    not fit into memory."""
    if not cfg.model.path or not cfg.uses_trainer:
        return
    try:
        if ModelArch.read(Path(cfg.model.path).expanduser()).hidden < _LARGE:
            return
    except ElasticRLError:
        return  # a fault of the model's part
    left = []
    for section, name, applies in (("train", "lr", cfg.mode == "rl"), ("sft", "lr", cfg.sft.max_steps > 0),
                                   ("sft", "max_steps", True)):
        settings = getattr(cfg, section)
        if applies and name not in settings.model_fields_set:
            left.append(f"{section}.{name}={getattr(settings, name)}")
    if left:
        yield Finding("defaults", f"{', '.join(left)}: for the small built-in model",
                      hint="set them for yours: a learning rate of 1e-6 to 1e-5 is usual" + (
                          ", and sft.max_steps=0 begins RL at once" if cfg.mode == "rl" else ""))


def _of_prompts(cfg: Config, source: CheckedSource) -> Finding:
    hint = ""

    def examine() -> str:
        nonlocal hint
        shown, longest = "", 0
        for name, prompts in (("train", source.train), *source.evals.items()):
            count = min(_READ, len(prompts))
            read = read_prompts(prompts, [i * len(prompts) // count for i in range(count)], named=cfg.data.source,
                                answers=cfg.imitates_answers and name == "train")
            if longer := next((p for p in read if len(p.token_ids) > source.max_prompt_tokens), None):
                raise ConfigError(f"a prompt of {name} has {len(longer.token_ids)} tokens, but the source allows "
                                  f"{source.max_prompt_tokens}", hint="correct max_prompt_tokens")
            shown = shown or (_as_text(source, read[0]) if read else "")
            longest = max([longest, *(len(p.answer_ids) for p in read if p.answer_ids)])
        if longest > source.max_response_tokens:
            hint = (f"an answer of the data has {longest} tokens, which no response of at most "
                    f"max_response_tokens={source.max_response_tokens} can have")
        return f"the first one: {plain(shown, _SHOWN)!r}"

    found = _finding("prompts", examine)
    return replace(found, hint=hint) if hint and not found.fault else found


def _as_text(source: CheckedSource, prompt: Prompt) -> str:
    if prompt.text or source.tokenizer is None:
        return prompt.text or str(list(prompt.token_ids))
    return source.tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False)


def _of_reward(cfg: Config, source: CheckedSource) -> Finding:
    """What the reward gives for the data's own answers. 0 for each may show a wrong column or reward, or only that a
    response must have more than the answer; so it is no fault."""
    hint = ""

    def examine() -> str:
        nonlocal hint
        given = source.train or source.eval
        prompts = [p for p in read_prompts(given, range(min(_REWARDED, len(given))), named=cfg.data.source,
                                           answers=False) if p.answer_ids]
        if not prompts:
            return "not tried: the data have no answers"
        decode = decoder(source)
        reward = make_reward(cfg.rollout.reward, cfg.rollout.reward_options, decode=decode)
        try:
            values = asyncio.run(_rewards(cfg, reward, prompts, decode))
        finally:
            close_reward(reward)
        if max(values) <= 0:
            hint = "compare the data's answers with what rollout.reward expects of a response"
        elif cfg.mode == "rl" and cfg.train.stop_eval_accuracy is not None and max(values) > 1:
            hint = (f"RL stops at a mean reward of train.stop_eval_accuracy={cfg.train.stop_eval_accuracy:g}: set it "
                    "for rewards of this scale, or to null")
        return f"the data's own answers get {', '.join(f'{value:g}' for value in values)}"

    found = _finding("reward of the answers", examine)
    return replace(found, hint=hint) if hint else found


async def _rewards(cfg: Config, reward: RewardFn, prompts: Sequence[Prompt], decode: Decode | None) -> list[float]:
    values = []
    for prompt in prompts:
        sample = demonstration(prompt)
        if decode is not None:
            sample = replace(sample, text=decode(sample.response_ids))
        try:
            async with asyncio.timeout(cfg.rollout.reward_timeout_s):
                [found] = plain_rewards(await reward(prompt, [sample]), 1)
            values.append(found.value)
        except KeyboardInterrupt:
            raise
        except (TimeoutError, CallLost) as e:
            raise PluginFailed(f"rollout.reward={cfg.rollout.reward} took longer than rollout.reward_timeout_s="
                               f"{cfg.rollout.reward_timeout_s:g} for the data's own answer, or ended its process",
                               hint="raise rollout.reward_timeout_s, or correct the reward") from e
        except BaseException as e:  # whatever a user's function raises
            text = text_of(e) if isinstance(e, PluginFailed) else describe(e)
            raise PluginFailed(f"rollout.reward={cfg.rollout.reward} failed for the data's own answer: {text}") from e
    return values


def _finding(part: str, examine: Callable[[], str]) -> Finding:
    try:
        return Finding(part, examine())
    except ElasticRLError as e:
        return Finding(part, fault=e.message, hint=e.hint or "")
