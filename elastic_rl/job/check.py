"""Everything that is wrong with a job, found before a cluster starts: plug-ins, model, data, and how they fit together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from elastic_rl.config import ENVIRONMENT, Config, PoolSettings
from elastic_rl.config.checks import unread_settings
from elastic_rl.config.groups import CRITIC
from elastic_rl.data.model_tokenizer import ModelTokenizer
from elastic_rl.data.samples import Prompt, Sample, Segment, as_episode, demonstration
from elastic_rl.data.sources import CheckedSource, make_source, read_prompts
from elastic_rl.driver.formation import least_ranks
from elastic_rl.engine.own_generate import OwnGenerate, make_generate
from elastic_rl.engine.server.arguments import tensor_parallel
from elastic_rl.environments import job_hints
from elastic_rl.errors import ConfigError, ElasticRLError, PluginFailed
from elastic_rl.host import checkpoint_capacity, model_folder
from elastic_rl.host.address import own_address
from elastic_rl.models.arch import RESERVED_TOKENS, ModelArch, longest_sequence
from elastic_rl.pipeline.sampling.sampler import decoder
from elastic_rl.pipeline.untrained.sampled_modes import rejection_groups
from elastic_rl.plugins.process import CallLost
from elastic_rl.plugins.user_code import MAX_NAME, describe, is_name, plain, text_of
from elastic_rl.rewards.base import Decode, RewardAway, RewardFn, call_limit_s, plain_rewards
from elastic_rl.rewards.own import close_filter, named_filter
from elastic_rl.rewards.registry import close_reward, make_reward
from elastic_rl.runtime.words import counted

_READ = 16
"""Prompts of each set that are read, spread over it."""
_REWARDED = 4
_LARGE = 512
"""Hidden size from which on a model is not one that was made to be tried out."""
_TRAINED_TOKEN_BYTES = 29
"""Most bytes of a trained token in a share, without what a teacher's most probable tokens take."""
_HELD_TOKEN_BYTES = 90
"""Bytes of a token in the actor while a step is generated and trained: `bench loop` measures it as actor-bytes."""
_MUCH_MEMORY = 8 << 30
_SURE_TOKENS_PER_S = 20.0
"""Speed of one request; an engine on a GPU makes as many for each of hundreds."""
_PROMPTS, _REWARD_OF_ANSWERS, _ENVIRONMENT = "prompts", "reward of the answers", "environment"
_NEW_JOBS_ONLY = ("checkpoints", "evaluation sets", _PROMPTS, _REWARD_OF_ANSWERS, _ENVIRONMENT)
"""Parts that are required of a new job only."""
_LETTERS = 8
"""Letters that are named for which a tokenizer has no token."""
_SHOWN = 200
"""Characters of a prompt that are shown."""


@dataclass(frozen=True)
class JobFinding:
    """What was found of one part of a job. ``fault``: what is wrong; "" for nothing. ``hint``: what to do, or what to
    look at where there is no fault. ``skipped``: the part was not examined, and ``detail`` says why."""

    part: str
    detail: str = ""
    fault: str = ""
    hint: str = ""
    skipped: bool = False


def require(cfg: Config, *, begun: bool = False, goes_on: bool = False) -> list[JobFinding]:
    """All of ``check``, at each start of a run; returns what is no reason to refuse it and should be looked at. Raises
    ConfigError with everything that is wrong. ``begun``: the job has committed something; then nothing is refused that
    cannot be changed any more, or without which it may still go on. ``goes_on``: the run has begun, and another process
    goes on with it; then no prompt but the first ones is read, and no reward is called."""
    found = list((*_plug_ins(cfg), *_model_and_data(cfg)) if goes_on else check(cfg))
    faults = [f for f in found if f.fault and not (begun and f.part in _NEW_JOBS_ONLY)]
    if faults:
        raise ConfigError("\n  ".join(f.fault for f in faults),
                          hint="; ".join(dict.fromkeys(f.hint for f in faults if f.hint)))
    return [f for f in found if f.hint or f.fault]


def check(cfg: Config) -> Iterator[JobFinding]:
    """A finding for each part of the job, as it is examined. Prompts are read, and the reward is asked what the data's
    own answers are worth, and what is no answer."""
    usable = plays = True
    for found in _plug_ins(cfg):
        usable &= not (found.part == "reward" and found.fault)
        plays &= not (found.part == "generate" and found.fault)
        yield found
    made: list[CheckedSource] = []
    yield from _model_and_data(cfg, made.append)
    yield from _of_defaults(cfg)
    if unread := unread_settings(cfg):
        yield JobFinding("settings", "; ".join(unread),
                         hint="without that they change nothing: leave them out, or set it")
    yield from _of_seeds(cfg)
    for source in made:
        yield from _of_requests(cfg, source)
        yield from _of_memory(cfg, source)
        if source.rows_left_out:
            yield JobFinding("rows", "; ".join(source.rows_left_out),
                             hint="if that is more than you meant, look at data.options and at the files")
        prompts = _of_prompts(cfg, source)
        yield prompts
        if not prompts.fault and (unknown := _of_unknown_tokens(cfg, source)) is not None:
            yield unknown
        if cfg.uses_engines and cfg.rollout.environment and plays and not prompts.fault:
            yield _of_environment(cfg, source)
        if cfg.uses_engines and usable and not prompts.fault:
            yield _of_reward(cfg, source)


def _plug_ins(cfg: Config) -> Iterator[JobFinding]:
    from elastic_rl.algorithms.registry import algorithm_of  # these import torch, which no other command needs
    from elastic_rl.pipeline.flow.queues import make_queue
    rollout = cfg.rollout

    def algorithm() -> str:
        algorithm_of(cfg)
        return cfg.algorithm.name if cfg.makes_batches else "not used"

    def filters() -> str:
        names = []
        for entry in rollout.filters:
            name, drop_reason = named_filter(entry, rollout.reward_timeout_s)
            close_filter(drop_reason)
            names.append(name)
        return ", ".join(names) or "none"

    def reward() -> str:
        made = make_reward(rollout.reward, rollout.reward_options, pools=cfg.pool_settings(""))
        try:
            limit_s = call_limit_s(made, rollout.reward_timeout_s, cfg.train.group_size)
        finally:
            close_reward(made)
        return rollout.reward if limit_s == rollout.reward_timeout_s else (
            f"{rollout.reward}; by its own limits a group of {cfg.train.group_size} may take {limit_s:g} s, which "
            f"counts in place of rollout.reward_timeout_s={rollout.reward_timeout_s:g}")

    def generate() -> str:
        made = make_generate(cfg, "", 1, str(Path(cfg.model.path).expanduser()))
        if isinstance(made, OwnGenerate):
            made.close()
        return rollout.environment or rollout.generate

    def queue() -> str:
        if cfg.mode != "rl" or cfg.train.schedule != "fully_async":
            return "not used"
        make_queue(cfg, 1, own_address()).close()
        return cfg.train.queue

    for part, examine in (("algorithm", algorithm), ("generate", generate), ("filters", filters), ("reward", reward),
                          ("queue", queue)):
        found = _finding(part, examine)
        hint = "; ".join(job_hints.of_settings(cfg)) if part == "generate" and not found.fault else found.hint
        yield replace(found, hint=hint)


def _model_and_data(cfg: Config, made: Callable[[CheckedSource], object] = lambda source: None) -> Iterator[JobFinding]:
    """``made``: gets the source, if the data and the model fit."""
    facts: model_folder.Facts | None = None
    critic_arch: ModelArch | None = None
    source: CheckedSource | None = None

    def model() -> str:
        nonlocal facts
        model_folder.require(cfg, 0)
        if not cfg.model.path:
            return f"a small one of the family {cfg.model.family}, made from the seed"
        facts = model_folder.read(Path(cfg.model.path).expanduser())
        arch = facts.arch
        return f"{cfg.model.path}: {counted(arch.layers, 'layer')}, hidden size {arch.hidden}, {arch.vocab} tokens"

    def data() -> str:
        nonlocal source
        source = make_source(cfg)
        longest = source.max_prompt_tokens + source.max_response_tokens
        if facts is not None or not cfg.model.path:
            model_folder.require_positions(cfg, facts, longest)
        _require_room(cfg, longest)
        _require_share(cfg, longest)
        if cfg.critic.model and critic_arch is not None:
            model_folder.require_critic_positions(cfg, critic_arch, longest)
        if cfg.algorithm.teacher is not None and cfg.mode == "rl":
            _require_teacher(cfg, cfg.pool_settings("")[cfg.algorithm.teacher], longest)
        if cfg.mode == "rejection_sampling":
            rejection_groups(cfg, source)
        made(source)
        sets = ", ".join(f"{len(prompts)} in {name}" for name, prompts in source.evals.items())
        trained = f"{counted(len(source.train), 'prompt')} to train on, " if cfg.uses_training_prompts else ""
        return (f"{cfg.data.source}: {trained}to evaluate {sets}; prompts of up to "
                f"{source.max_prompt_tokens} tokens, responses of up to {source.max_response_tokens}")

    def critic() -> str:
        nonlocal critic_arch
        arch = critic_arch = model_folder.require_critic(cfg)
        if cfg.critic.model:
            _require_same_tokens("critic.model", Path(cfg.critic.model).expanduser(), cfg)
        size = "the policy's shape" if arch is None else f"{counted(arch.layers, 'layer')}, hidden size {arch.hidden}"
        return f"{size}; ranks of its own: {cfg.of_group(CRITIC).trainer.ranks}"

    found = _finding("model", model)
    yield found
    if cfg.uses_critic:
        yield _finding("critic", critic)
    if cfg.colocated:
        yield _finding("placement", lambda: _placement(cfg))
    for name, pool in cfg.pool_settings("").items():
        if pool.stream is None:
            found_pool = _finding(f"pool {name}", partial(_pool, pool))
            used = name in cfg.rollout.judges or name == cfg.algorithm.teacher
            yield found_pool if used or found_pool.fault else replace(
                found_pool, hint="no reward and no algorithm asks it: leave it out, or name it in "
                "rollout.reward_options or algorithm.teacher")
    if facts is not None:
        arch = facts.arch
        yield _finding("checkpoints", lambda: _capacity(cfg, arch))
    if found.fault and cfg.data.source != "addition":
        yield JobFinding("data", "not examined: it may need the model's tokenizer", skipped=True)
    else:
        yield _finding("data", data)
        if source is not None:
            yield from _of_eval_set_names(source)


def _placement(cfg: Config) -> str:
    """The placement of a colocated job. Raises ConfigError for engines that have no room on the trainer's GPUs, or
    could not release their memory."""
    import torch  # which no other command needs

    per_engine, ranks = tensor_parallel(cfg.engine.extra_args), cfg.trainer.ranks
    if cfg.device.uses_cuda(torch.cuda.is_available):
        if cfg.rollout.engines > ranks // per_engine:
            fewer = (f"set rollout.engines to {ranks // per_engine} or less" if per_engine <= ranks else
                     f"lower --tp-size of engine.extra_args to {ranks} or less")
            raise ConfigError(f"placement=colocated: {cfg.rollout.engines} engines of {per_engine} GPUs do not fit on "
                              f"the {ranks} GPUs of the trainer", hint=f"{fewer}, or more ranks of the trainer")
        if cfg.ranks_may_spread:
            _require_engine_on_a_host(cfg, per_engine)
        if find_spec("torch_memory_saver") is None:
            raise ConfigError("placement=colocated: SGLang cannot release GPU memory without torch_memory_saver",
                              hint="install the package torch_memory_saver of the release that SGLang names")
    return "engines on the devices of the trainer, in alternation"


def _require_engine_on_a_host(cfg: Config, gpus: int) -> None:
    """Raises ConfigError where an engine of so many GPUs has no room on any host of the trainer."""
    per_host, least = cfg.trainer.ranks_per_host or cfg.trainer.ranks, least_ranks(cfg.trainer)
    lower = f"lower --tp-size of engine.extra_args to {min(per_host, least)} or less"
    if gpus > per_host:
        raise ConfigError(f"placement=colocated: an engine of {gpus} GPUs does not fit on the {per_host} that the "
                          "trainer has on a host", hint=f"raise trainer.ranks_per_host to {gpus} or more, or {lower}")
    if gpus > least:
        raise ConfigError(f"placement=colocated: an engine of {gpus} GPUs does not fit on the {least} of a trainer "
                          "with the fewest replicas", hint=f"raise trainer.min_data_parallel, or {lower}")


def _pool(pool: PoolSettings) -> str:
    kind = model_folder.require_servable(Path(pool.model_dir))
    try:
        tensor_parallel(pool.engine.extra_args)
    except ConfigError as e:
        raise ConfigError(f"pools.{pool.name}.{e.message}", hint=e.hint) from e
    return f"{counted(pool.engines, 'engine')} with {pool.model_dir}, a {kind} model"


def _require_room(cfg: Config, longest: int) -> None:
    """Raises ConfigError for samples that no engine can hold. ``longest``: tokens of a prompt and a response."""
    if cfg.uses_engines and longest > (room := cfg.engine.max_total_tokens - RESERVED_TOKENS):
        raise ConfigError(f"engine.max_total_tokens={cfg.engine.max_total_tokens}: a prompt and a response have up to "
                          f"{longest} tokens, and an engine takes sequences of up to {room}",
                          hint="raise it, to several times the longest sequence, or shorten responses")


def _require_share(cfg: Config, longest: int) -> None:
    """Raises ConfigError for samples of which a rank would refuse a single one. ``longest``: tokens of a prompt and a
    response."""
    size = longest * (_TRAINED_TOKEN_BYTES + 8 * (cfg.algorithm.teacher_top_k + 1))
    if cfg.uses_trainer and size > cfg.trainer.share_piece_bytes:
        raise ConfigError(f"trainer.share_piece_bytes={cfg.trainer.share_piece_bytes}: a sample of up to {longest} "
                          f"tokens may have {size} bytes, and a rank takes a sample as one message",
                          hint="raise it, or shorten responses")


def _require_teacher(cfg: Config, pool: PoolSettings, longest: int) -> None:
    """Raises ConfigError for a teacher that cannot score the policy's samples. ``longest``: tokens of a prompt and a
    response."""
    folder = Path(pool.model_dir)
    if not folder.is_dir():
        return  # said of the pool
    room = longest_sequence(folder, pool.engine.max_total_tokens) - RESERVED_TOKENS
    if longest > room:
        raise ConfigError(f"algorithm.teacher={pool.name}: a prompt and a response have up to {longest} tokens, and "
                          f"the teacher's engines take sequences of up to {room}",
                          hint=f"raise pools.{pool.name}.engine.max_total_tokens if its model has more positions, or "
                          "shorten responses")
    if not cfg.model.path:
        raise ConfigError(f"algorithm.teacher={pool.name} with the built-in model, whose tokens no teacher has",
                          hint="set model.path to a model with the teacher's tokens")
    tokens = _require_same_tokens(f"pools.{pool.name}.model", folder, cfg)
    if (top := cfg.algorithm.teacher_top_k) >= tokens:
        raise ConfigError(f"algorithm.teacher_top_k={top}, and the teacher has {tokens} tokens",
                          hint="set a smaller algorithm.teacher_top_k")


def _require_same_tokens(setting: str, folder: Path, cfg: Config) -> int:
    """The number of tokens of a model that gets the policy's: of other ones it would read another text, and nothing
    would say so. Raises ConfigError unless its folder, which the setting names, has the tokenizer of ``model.path``."""
    own, other = ModelTokenizer(cfg.model.path).vocabulary, ModelTokenizer(folder, setting).vocabulary
    if own != other:
        wrong = sorted(token for token in own.keys() | other.keys() if own.get(token) != other.get(token))
        raise ConfigError(f"{setting}={folder}: its tokenizer differs from that of model.path in {len(wrong)} tokens, "
                          f"such as {wrong[0]!r}",
                          hint="it must have the policy's tokens: take another model of the same family")
    return len(other)


def _of_eval_set_names(source: CheckedSource) -> Iterator[JobFinding]:
    wrong = [name for name in source.evals if not is_name(name)]
    if wrong:
        yield JobFinding("evaluation sets", fault=f"the name {plain(wrong[0], 100)!r} of an evaluation set",
                         hint=f"names of sets have 1 to {MAX_NAME} printable characters")


def _capacity(cfg: Config, arch: ModelArch) -> str:
    sizes = checkpoint_capacity.version_sizes(cfg, arch)
    if found := list(checkpoint_capacity.faults(cfg, sizes)):
        raise ConfigError("; ".join(f.message for f in found), hint="; ".join(f.fix for f in found))
    state = f", one of the trainer's state {sizes.trainer_state >> 20} MiB" if sizes.trainer_state else ""
    return f"a version of the policy has {sizes.policy >> 20} MiB{state}"


def _of_defaults(cfg: Config) -> Iterator[JobFinding]:
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
        yield JobFinding("defaults", f"{', '.join(left)}: for the small built-in model",
                         hint="set them for yours: a learning rate of 1e-6 to 1e-5 is usual" + (
                             ", and sft.max_steps=0 begins RL at once" if cfg.mode == "rl" else ""))


def _of_seeds(cfg: Config) -> Iterator[JobFinding]:
    """Pools of which all samples lose their seeds by what some of them are sampled with."""
    if unseeded := [name for name, pool in cfg.pool_settings("").items() if pool.unseeded]:
        yield JobFinding(
            "seeds", f"no sample of the pool {', '.join(unseeded)} is drawn by a seed, since some are drawn with "
            "min_p, for which SGLang has none: a run that is repeated has other samples",
            hint="leave min_p out of rollout, eval and the options of genrm, or set engine.seeded_sampling=off to have "
            "it so")


def _of_requests(cfg: Config, source: CheckedSource) -> Iterator[JobFinding]:
    """Requests that engines under load would not end in time."""
    tokens, limit_s = source.max_response_tokens, cfg.engine.request_timeout_s
    if cfg.rollout.environment:  # a request for each turn
        tokens = min(tokens, cfg.rollout.max_turn_tokens)
    if cfg.uses_engines and tokens > _SURE_TOKENS_PER_S * limit_s:
        yield JobFinding(
            "requests", f"a response of up to {tokens} tokens within engine.request_timeout_s={limit_s:g}: "
            f"{tokens / limit_s:.0f} tokens/s",
            hint="set engine.request_timeout_s by what a request gets while an engine has many: one that takes longer "
                 "is ended and sent again, without end")


def _of_memory(cfg: Config, source: CheckedSource) -> Iterator[JobFinding]:
    """A step that the actor could not hold if all of its responses were as long as they may be."""
    if cfg.mode != "rl" or cfg.uses_transfer_queue:
        return
    samples, longest = (cfg.train.prompts_per_step * cfg.train.group_size,
                        source.max_prompt_tokens + source.max_response_tokens)
    if (size := samples * longest * _HELD_TOKEN_BYTES) > _MUCH_MEMORY:
        yield JobFinding("memory", f"{counted(samples, 'sample')} of a step, of up to {longest} tokens each: up to "
                         f"{size / (1 << 30):.0f} GiB in the actor",
                         hint="the actor's host needs as much, or set train.schedule=fully_async and train.queue="
                              "transfer_queue, with which tokens do not stay in the actor")


def _of_prompts(cfg: Config, source: CheckedSource) -> JobFinding:
    hint = ""

    def examine() -> str:
        nonlocal hint
        shown, longest = "", 0
        for name, prompts in (("train", source.train), *source.evals.items()):
            read = read_prompts(prompts, _spread(len(prompts)), named=cfg.data.source,
                                answers=cfg.imitates_answers and name == "train", vocabulary=source.vocabulary)
            if longer := next((p for p in read if len(p.token_ids) > source.max_prompt_tokens), None):
                raise ConfigError(f"a prompt of {name} has {len(longer.token_ids)} tokens, but the source allows "
                                  f"{source.max_prompt_tokens}", hint="correct max_prompt_tokens")
            shown = shown or (_as_text(source, read[0]) if read else "")
            longest = max([longest, *(len(p.answer_ids) for p in read if p.answer_ids)])
        if longest > source.max_response_tokens:
            hint = (f"an answer of the data has {longest} tokens, which no response of at most "
                    f"max_response_tokens={source.max_response_tokens} can have")
        return f"the first one: {plain(shown, _SHOWN)!r}"

    found = _finding(_PROMPTS, examine)
    return replace(found, hint=hint) if hint and not found.fault else found


def _of_unknown_tokens(cfg: Config, source: CheckedSource) -> JobFinding | None:
    """A tokenizer that lacks tokens for what the prompts and answers are written with: the model sees the same token in
    the place of each, and no answer that has one can be right."""
    tokenizer = source.tokenizer
    if not isinstance(tokenizer, ModelTokenizer) or (unknown := tokenizer.unknown_id) is None:
        return None
    answers = cfg.imitates_answers and bool(source.train)
    sets = [(source.train, answers), *((prompts, False) for prompts in source.evals.values())]
    read = [prompt for prompts, with_answers in sets if prompts for prompt in read_prompts(
        prompts, _spread(len(prompts)), named=cfg.data.source, answers=with_answers, vocabulary=source.vocabulary)]
    found = [prompt for prompt in read if unknown in (*prompt.token_ids, *(prompt.answer_ids or ()))]
    if not found:
        return None
    letters = sorted(set("".join(f"{prompt.text}{prompt.metadata.get('answer', '')}" for prompt in found)))
    missing = [letter for letter, ids in zip(letters, tokenizer.encode_batch(letters, special_tokens=False),
                                             strict=True) if unknown in ids]
    named = f"{', '.join(map(repr, missing[:_LETTERS]))}{' …' if len(missing) > _LETTERS else ''}" or "some words"
    return JobFinding(
        "tokenizer", f"model.path has no token for {plain(named, _SHOWN)}, in {len(found)} of the {len(read)} prompts "
        f"that were read, with their answers: each is {tokenizer.decode([unknown], False)!r}, for what is unknown",
        hint="the model cannot tell these from one another, nor write them: take the model's own tokenizer files, or a "
             "tokenizer that was made from such texts")


def _spread(count: int) -> list[int]:
    """Indices of prompts to read, spread over a set of so many."""
    wanted = min(_READ, count)
    return [i * count // wanted for i in range(wanted)]


def _as_text(source: CheckedSource, prompt: Prompt) -> str:
    if prompt.text or source.tokenizer is None:
        return prompt.text or str(list(prompt.token_ids))
    return source.tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False)


def _first_prompts(cfg: Config, source: CheckedSource) -> Sequence[Prompt]:
    """The prompts that a reward or an environment is tried with. Raises SourceFailed."""
    given = source.train or source.eval
    return read_prompts(given, range(min(_REWARDED, len(given))), named=cfg.data.source, answers=False,
                        vocabulary=source.vocabulary)


def _of_environment(cfg: Config, source: CheckedSource) -> JobFinding:
    """Whether an episode begins with the first prompts."""
    hint = ""

    def examine() -> str:
        nonlocal hint
        prompts = _first_prompts(cfg, source)
        made = make_generate(cfg, "", 1, str(Path(cfg.model.path).expanduser()))
        assert isinstance(made, OwnGenerate)
        try:
            for prompt in prompts:
                asyncio.run(made.check(prompt))
        except PluginFailed as e:
            raise ConfigError(f"rollout.environment={cfg.rollout.environment} begins no episode with a prompt of the "
                              f"data: {e.message}", hint=e.hint) from e
        finally:
            made.close()
        hint = "; ".join(job_hints.of_tokens(cfg, source.max_response_tokens))
        return f"an episode begins with each of the first {len(prompts)} prompts"

    found = _finding(_ENVIRONMENT, examine)
    return replace(found, hint=hint) if hint else found


def _of_reward(cfg: Config, source: CheckedSource) -> JobFinding:
    """What the reward gives for the data's own answers, for an empty response, and for one that is wrong. 0 for each of
    the answers, or as much for what is wrong, may show a wrong column or reward, or only that a response must have more
    than the answer; so it is no fault. One that raises for any of them is."""
    hint, skipped = "", False

    def examine() -> str:
        nonlocal hint, skipped
        first = _first_prompts(cfg, source)
        prompts = [p for p in first if p.answer_ids]
        decode = decoder(source)
        reward = make_reward(cfg.rollout.reward, cfg.rollout.reward_options, decode=decode, pools=cfg.pool_settings(""))
        try:
            if callable(check := getattr(reward, "check", None)):
                for prompt in first:
                    check(prompt)
            skipped = cfg.rollout.reward == ENVIRONMENT
            if skipped:
                return "not tried: it is what the environment says of an episode"
            right = asyncio.run(_rewards(cfg, reward, decode, [(p, demonstration(p)) for p in prompts],
                                         "the data's own answer"))
            [empty] = asyncio.run(_rewards(cfg, reward, decode, [(first[0], Sample((Segment(()),)))],
                                           "an empty response"))
            asked, wrong_ids, what = _wrong_response(prompts or first)
            [wrong] = asyncio.run(_rewards(cfg, reward, decode, [(asked, Sample((Segment(wrong_ids),)))], what))
        except RewardAway as e:
            skipped = True
            return f"not tried: {e.message}"
        finally:
            close_reward(reward)
        if right and max(right) <= 0:
            hint = "compare the data's answers with what rollout.reward expects of a response"
        elif right and max(empty, wrong) >= max(right):
            hint = (f"{'an empty response' if empty >= wrong else what} is worth as much as a right one: see whether "
                    "the reward reads the answer")
        elif right and cfg.mode == "rl" and cfg.train.stop_eval_accuracy is not None and max(right) > 1:
            hint = (f"RL stops at a mean reward of train.stop_eval_accuracy={cfg.train.stop_eval_accuracy:g}: set it "
                    "for rewards of this scale, or to null")
        got = f"the data's own answers get {', '.join(f'{value:g}' for value in right)}" if right else (
            "the data have no answers")
        return f"{got}; an empty response gets {empty:g}, {what} {wrong:g}"

    found = replace(_finding(_REWARD_OF_ANSWERS, examine), skipped=skipped)
    return replace(found, hint=hint) if hint else found


def _wrong_response(prompts: Sequence[Prompt]) -> tuple[Prompt, tuple[int, ...], str]:
    """A prompt with the tokens of a response to it that is wrong, and what that is: the answer of another prompt; where
    all have the same answer, or none, the prompt itself."""
    first = prompts[0]
    other = next((p for p in prompts if p.answer_ids and p.answer_ids != first.answer_ids), None)
    if other is not None and other.answer_ids is not None:
        return first, tuple(other.answer_ids), "another prompt's answer"
    return first, tuple(first.token_ids), "the prompt in place of a response"


async def _rewards(cfg: Config, reward: RewardFn, decode: Decode | None, tried: Sequence[tuple[Prompt, Sample]],
                   what: str) -> list[float]:
    """What the reward gives for responses to prompts, each alone. ``what``: what they are, for errors. Raises
    PluginFailed and RewardAway."""
    limit_s, values = call_limit_s(reward, cfg.rollout.reward_timeout_s, 1), []
    for prompt, response in tried:
        sample = as_episode(response)
        if decode is not None:
            sample = replace(sample, text=decode(sample.response_ids))
        try:
            async with asyncio.timeout(limit_s):
                [found] = plain_rewards(await reward(prompt, [sample]), 1)
            values.append(found.value)
        except (KeyboardInterrupt, RewardAway):
            raise
        except (TimeoutError, CallLost) as e:
            own = limit_s > cfg.rollout.reward_timeout_s
            limit = f"{limit_s:g} s" if own else f"rollout.reward_timeout_s={limit_s:g}"
            raise PluginFailed(f"rollout.reward={cfg.rollout.reward} took longer than {limit} for {what}, or ended its "
                               "process", hint="raise rollout.reward_timeout_s, or correct the reward") from e
        except BaseException as e:  # whatever a user's function raises
            text = text_of(e) if isinstance(e, PluginFailed) else describe(e)
            raise PluginFailed(f"rollout.reward={cfg.rollout.reward} failed for {what}: {text}",
                               hint="correct the reward: a model may write anything, also nothing, and each response "
                               "gets a number") from e
    return values


def _finding(part: str, examine: Callable[[], str]) -> JobFinding:
    try:
        return JobFinding(part, examine())
    except ElasticRLError as e:
        return JobFinding(part, fault=e.message, hint=e.hint or "")
