"""The rollout pool and sampling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field, field_validator

from elastic_rl.config.autoscale import AutoscaleConfig
from elastic_rl.config.host_selector import HostSelector
from elastic_rl.config.options import require_options
from elastic_rl.config.sampling import SamplingOptions
from elastic_rl.config.section import Positive, Seconds

SINGLE_TURN = "single_turn"
ENVIRONMENT = "environment"
"""``rollout.reward`` that is what the environment says of an episode."""


class RolloutConfig(SamplingOptions):
    engines: Annotated[int, Field(ge=1)] = 2
    """Number of engines that the pool starts with; change it later with ``elastic-rl scale``."""
    host_selector: HostSelector = {}
    """Labels that a host must have, all of them with these values, for engines of the policy to be placed on it
    (``elastic-rl node --label``), in a cluster with a name. Empty: any host. Engines that run stay where they are when
    labels change."""
    autoscale: AutoscaleConfig = AutoscaleConfig()
    temperature: Annotated[float, Field(ge=1e-3)] = 1.0
    """Sampling temperature. Logits are divided by it, so a value far below 0.001 would make them infinite."""
    generate: str = SINGLE_TURN
    """How samples are generated where there is no ``environment``: ``single_turn`` (one response to the prompt), or
    your own ``GenerateFn`` as ``package.module:name``. A prompt group for which that, or the environment, fails is
    tried ``reward_attempts`` times and then dropped, with the reason ``generate failed``, within
    ``max_failed_groups``."""
    environment: str = ""
    """What the policy acts in, so that a sample is an episode of several turns: ``tools`` (it calls functions),
    ``textarena`` (games), or your own factory as ``package.module:name``. Empty: samples are as ``generate`` says."""
    environment_options: dict[str, Any] = {}
    """Options of the environment."""
    max_turns: Positive = 8
    """Turns of the policy in one sample, with an ``environment``. ``max_response_tokens`` of the data bounds all turns
    together, with what the environment says."""
    max_turn_tokens: Positive = 4096
    """Tokens of one turn of the policy, with an ``environment``. A turn that is cut off ends the sample."""
    generate_timeout_s: Seconds = 300.0
    """Seconds that your own ``generate`` function may take for one prompt group, with all its calls of engines and
    tools. With an ``environment``: seconds that it may take in one episode, without those of the engines, and those in
    which a call of a tool, or a move, waits for a thread that others use."""
    reward: str = "exact_match"
    """What a sample is worth: ``exact_match`` (1 if the response equals the prompt's answer, else 0), ``f1`` (words in
    common with the answer), ``math_verify`` and ``deepscaler`` (the right mathematical result), ``code`` (the program
    in the response passes tests, in a sandbox), ``reasoning_gym`` (the verifier of the task), ``genrm`` (the verdict of
    a model, with a pool of its own), ``environment`` (what the environment says), ``remote`` (a service of yours, over
    HTTP), ``mix`` (a weighted sum of rewards), or your own ``RewardFn`` as ``package.module:name``."""
    reward_options: dict[str, Any] = {}
    """Options of the reward, of what JSON has: text, numbers, true, false, null, lists and mappings."""
    reward_timeout_s: Seconds = 60.0
    """Seconds that the reward of one prompt group may take, from when its turn comes, and each filter. What takes
    longer is cancelled; a reward of your own that does not end then is killed with its process, and the groups that
    were rewarded at the same time are tried again. Where the limits of the reward's own calls (``timeout_s``) add up to
    more for a group, that sum holds."""
    reward_concurrency: Positive = 16
    """Number of prompt groups that are rewarded at once. Lower it for a reward that is slow because many groups wait
    for its processes: a group's time begins when its turn comes."""
    reward_attempts: Positive = 3
    """Number of attempts to reward a prompt group, while others are rewarded. After the last one the group is dropped
    with the reason ``reward failed``, and another is generated in its place. An attempt does not count when no other
    group was rewarded since the one before: while none is, the run waits for the reward, and tries again without end.
    The same number holds for ``generate``, for filters, for engines that answer other prompts, and for the trainer."""
    max_failed_groups: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Fraction of the last groups, as many as a step has, that may be dropped for one of these reasons, each for
    itself: their reward failed; ``generate`` failed; no engine answered for them; a filter failed; the trainer cannot
    compute with them (a gradient that is not finite, too little memory); or the trainer has refused their samples twice
    for the policy versions that these say. With more, what failed is at fault, and not the groups: the run waits and
    tries again without end. 0: no group is dropped for that."""
    filters: list[str | dict[str, Any]] = []
    """Which prompt groups are dropped instead of trained on; others are generated in their place. Each entry is the
    name of a filter, or a mapping with its ``name`` and its options: ``uniform_reward`` (all samples of the group have
    the same reward); ``{name: difficulty, low: 0.1, high: 0.9}`` (the group's mean reward is outside); ``{name: length,
    max_prompt_tokens: 500, min_response_tokens: 10, max_response_tokens: 900}`` (the prompt is longer, or the mean of
    the responses is outside); your own ``Filter`` as ``package.module:name``; or, with options, your own function that
    makes a ``Filter`` from them."""
    max_dropped_groups: Positive = 256
    """Number of prompt groups that the filters may drop in one step; after that the step takes what comes."""
    groups_per_request: Positive | None = None
    """Most prompt groups in one request to the rollout role. Each group is answered as soon as its own responses have
    ended, and its rewards are computed while others are generated; a replica of the role that is lost costs the groups
    of its requests that were not answered. null: 16; with ``train.schedule: fully_async`` a quarter of
    ``train.prompts_per_part``, or of ``train.prompts_per_step`` without parts, if that is less, so that engines share
    them. Smaller requests cost the role and the actor about a millisecond of CPU each."""
    max_attempts: Positive = 4
    """Number of attempts to generate a prompt group before the wait for the engines is reported. The run then tries
    again without end."""

    @property
    def generates_apart(self) -> bool:
        """Whether samples are generated by code in a process of its own, which may be the user's."""
        return ":" in self.generate or self.plays_episodes

    @property
    def plays_episodes(self) -> bool:
        """Whether samples are episodes in an environment."""
        return bool(self.environment)

    @property
    def generated_by(self) -> str:
        """The setting that says how samples are generated, with its value."""
        return f"rollout.environment={self.environment}" if self.environment else f"rollout.generate={self.generate}"

    @property
    def reward_names(self) -> frozenset[str]:
        """Names of the rewards that samples get: that of ``reward``, and those of its parts."""
        return frozenset(name for name, _ in _rewards(self.reward, self.reward_options))

    @property
    def judges(self) -> frozenset[str]:
        """Pools that the rewards ask: of each ``genrm`` its ``pool``."""
        return frozenset(pool for pool, _ in self.judge_options)

    @property
    def judge_options(self) -> list[tuple[str, Mapping[str, Any]]]:
        """The pool that each ``genrm`` asks, and the options of the reward as they are given."""
        return [(str(options.get("pool", "genrm")), options) for name, options in _rewards(
            self.reward, self.reward_options) if name == "genrm"]

    @field_validator("filters")
    @classmethod
    def _require_names(cls, filters: list[str | dict[str, Any]]) -> list[str | dict[str, Any]]:
        """Raises ValueError for a filter with options, but without a name, and for what JSON does not have."""
        for entry in require_options(filters):
            if isinstance(entry, dict) and not isinstance(entry.get("name"), str):
                raise ValueError(f"a filter with options needs a name: {{name: …}}, not {entry}")
        return filters

    @field_validator("reward_options", "environment_options")
    @classmethod
    def _require_json(cls, options: dict[str, Any]) -> dict[str, Any]:
        return require_options(options)


def _rewards(reward: str, options: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields each reward with its options: the given one, and those that it is made of."""
    yield reward, options
    parts = options.get("parts") if reward == "mix" else None
    for part in parts if isinstance(parts, list) else []:
        if isinstance(part, dict) and isinstance(part.get("reward"), str):
            given = part.get("options")
            yield from _rewards(part["reward"], given if isinstance(given, dict) else {})
