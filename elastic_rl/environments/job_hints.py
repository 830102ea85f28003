"""What to look at in a job whose samples are episodes: settings with which it runs, but its policy learns nothing of
the environment."""

from __future__ import annotations

from collections.abc import Iterator

from elastic_rl.config import Config
from elastic_rl.data.model_tokenizer import ModelTokenizer
from elastic_rl.engine.own_generate import EnvironmentJob
from elastic_rl.environments.turns import TurnWriter

_RESULT = 'error: a tool gave 3.14 + [2, 0], and {"name": "x"} is what it was called with.'
"""Letters, digits and signs of what environments say."""
_MOSTLY = 0.5
_OF_ONE_TASK = 1000
"""Tokens of a tokenizer below which it was made for one task, whose texts and tools its model has learned."""


def of_settings(cfg: Config) -> Iterator[str]:
    """Hints that need the settings alone."""
    if cfg.rollout.environment != "tools":
        return
    missing = _undescribed(cfg)
    if missing and len(missing) < len(_tools(cfg)):
        yield _description_lacks(missing)
    if cfg.rollout.max_turns == 1:
        yield "rollout.max_turns=1: an episode ends with the first call, and no result is ever read; set 2 or more"


def of_tokens(cfg: Config, max_response_tokens: int) -> Iterator[str]:
    """Hints that need the policy's tokenizer. Raises ConfigError."""
    from elastic_rl.environments.tools import Tools  # slow to import, and most commands do without

    job = EnvironmentJob.of(cfg, cfg.model.path)
    tokenizer = ModelTokenizer(job.model_dir, date=job.template_date)
    writer = TurnWriter(tokenizer, job.template_options)
    examples = Tools.examples if job.name == "tools" else writer.examples
    between = min(len(writer.between(messages)) for messages in examples)
    first = 1 + min(map(len, tokenizer.encode_batch(_tools(cfg) or ["x"], special_tokens=False)))  # with its end
    if job.turns > 1 and first + between >= max_response_tokens:
        yield (f"max_response_tokens={max_response_tokens}, and the shortest turn of the policy with an answer of the "
               f"environment takes {first + between}: no second turn fits; raise it to what some turns take")
    if len(tokenizer.vocabulary) < _OF_ONE_TASK:
        return
    if (missing := _undescribed(cfg)) and len(missing) == len(_tools(cfg)):
        yield _description_lacks(missing)
    [ids] = tokenizer.encode_batch([_RESULT], special_tokens=False)
    if sum(i == tokenizer.unknown_id for i in ids) > _MOSTLY * len(ids):
        yield ("the tokenizer writes most of what an environment says as its unknown token, so the policy cannot read "
               "it: use a model whose tokenizer has a token for each byte")


def _undescribed(cfg: Config) -> list[str]:
    """Names of tools of which no prompt tells the policy."""
    options = cfg.data.options
    template = options.get("chat_template_options")
    told = str([template.get("tools") if isinstance(template, dict) else None, options.get("system_prompt"),
                options.get("template")])
    return [name for name in _tools(cfg) if name not in told]


def _description_lacks(missing: list[str]) -> str:
    return (f"data.options.chat_template_options.tools does not describe {', '.join(missing)}: the policy learns of "
            "them only if the prompts do; described() in elastic_rl/environments/tools.py writes it")


def _tools(cfg: Config) -> list[str]:
    """Names by which the policy calls the tools; none of another environment."""
    given = cfg.rollout.environment_options.get("tools") if cfg.rollout.environment == "tools" else None
    return [str(name).rpartition(":")[2].rpartition(".")[2] for name in given] if isinstance(given, list) else []
