"""Environments in the process of the user's code: ``rollout.environment``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from elastic_rl.data.model_tokenizer import ModelTokenizer
from elastic_rl.engine.own_generate import Asked, ClientOptions, EnvironmentJob, answering
from elastic_rl.environments.episodes import EpisodeLimits, Episodes
from elastic_rl.environments.registry import make_environment
from elastic_rl.environments.turns import TurnWriter


def serve(job: EnvironmentJob, client: ClientOptions) -> Callable[[Asked], Awaitable[dict[str, Any]]]:
    """The function that the process runs. Raises ConfigError."""
    tokenizer = ModelTokenizer(job.model_dir, date=job.template_date)
    new_episode = make_environment(job.name, job.options, tokenizer)
    examples = getattr(new_episode, "examples", None)
    writer = TurnWriter(tokenizer, job.template_options, *(() if examples is None else (examples,)))
    return answering(Episodes(new_episode, writer, EpisodeLimits(job.turns, job.turn_tokens, job.seconds)), client)
