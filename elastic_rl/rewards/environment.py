"""The reward ``environment``: what the environment of an episode said (``rollout.environment``)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_rl.config.options import Options, read_options
from elastic_rl.data.samples import EPISODE, Prompt, Sample
from elastic_rl.errors import PluginFailed
from elastic_rl.rewards.base import Reward, RewardContext, RewardFn, plain_rewards


def environment(options: Mapping[str, Any], context: RewardContext) -> RewardFn:
    """The reward of each sample: the sum over its turns, with the reward of each. Raises ConfigError."""
    read_options(Options, options, of="the reward 'environment'", setting=context.setting)
    return _OfEpisode()


class _OfEpisode:
    async def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        """Raises PluginFailed for a sample that is no episode."""
        return [_reward(sample.metadata.get(EPISODE)) for sample in samples]


def episode_parts(sample: Sample) -> dict[str, float]:
    """What the environment said of an episode, to be shown whatever the reward is; nothing for another sample, and for
    what a user's own code wrote there that cannot be shown."""
    with contextlib.suppress(PluginFailed):
        return dict(plain_rewards([_reward(sample.metadata.get(EPISODE))], 1)[0].parts)
    return {}


def _reward(episode: Any) -> Reward:
    if not isinstance(episode, Mapping):
        raise PluginFailed("the sample is no episode of an environment",
                           hint="set rollout.environment to what the policy acts in, or choose another reward")
    try:
        return Reward(episode["reward"], {**episode["parts"], "turns": float(episode["turns"])},
                      episode.get("rewards", ()))
    except (KeyError, TypeError, ValueError) as e:
        raise PluginFailed(f"the record of an episode in the sample's metadata is none: {type(e).__name__}: {e}",
                           hint="see EPISODE in elastic_rl/data/samples.py") from e
