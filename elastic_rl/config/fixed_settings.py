"""Settings that a job decides once: a job that is resumed with others would contradict what it has done (I13). Pure.

The table names keys, or whole sections by a dotted prefix. Every other setting may change between two starts of a job:
its number of steps, learning rates, limits of time and space, engines, the sizes of the parallel groups.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from elastic_rl.config import secrets
from elastic_rl.config.root import Config
from elastic_rl.config.sampling import SamplingOptions
from elastic_rl.config.section import Section

_MAX_VALUE = 300
"""Longest value, as JSON text, that is kept as it is; a longer one is kept as its digest."""
_MODEL_PATH = "model.path"
_MEASURES_KL = "algorithm.kl_coef or algorithm.report_kl"
"""Whether either asks for a reference policy. How much the divergence from it weighs decides nothing."""


_SAMPLED = ("eval", "rejection_sampling")


@dataclass(frozen=True)
class Fixed:
    """A setting, with a dot at the end a section, or what settings say together, that stays as it was."""

    key: str
    why: str
    after_sft: bool = False
    """It is fixed only once the SFT phase is over."""
    modes: tuple[str, ...] = ()
    """Modes in which it is fixed; none: all."""

    def covers(self, key: str, mode: str) -> bool:
        return (not self.modes or mode in self.modes) and (
            key == self.key or (self.key.endswith(".") and key.startswith(self.key)))


FIXED = (
    Fixed("seed", "the split and the order of the data, and the initial weights, come from it"),
    Fixed("mode", "the steps so far were made in the other one; begin another job with --from-job"),
    Fixed("deterministic", "the steps so far were made the other way"),
    Fixed("data.", "the trained and the held-out examples would not be those of the steps before"),
    Fixed("model.", "the committed weights have this model's shape"),
    Fixed("sft.batch_size", "it gives each supervised step its prompts, so some would be skipped or imitated twice"),
    Fixed("sft.", "the SFT phase is over, so it would have no effect", after_sft=True),
    Fixed("eval.", "the prompts so far were evaluated the other way", modes=("eval",)),
    Fixed("rejection.", "the samples so far were kept by the other rule", modes=("rejection_sampling",)),
    *(Fixed(f"rollout.{key}", "the output so far was made the other way", modes=modes) for key, modes in (
        ("reward", _SAMPLED), ("reward_options", _SAMPLED), ("generate", _SAMPLED),
        ("environment", _SAMPLED),
        *((key, ("rejection_sampling",)) for key in ("filters", "temperature", *SamplingOptions.model_fields)))),
    Fixed("train.prompts_per_step", "it gives each step its prompts, so some would be skipped or trained on twice"),
    Fixed("train.group_size", "rewards are compared within a group of this size"),
    Fixed("algorithm.name", "the committed optimizer state belongs to it"),
    Fixed(_MEASURES_KL, "a reference policy is kept from the beginning of RL or not at all", after_sft=True),
    Fixed("algorithm.reference_every_steps", "it decides which policy is the reference of a step", after_sft=True),
    Fixed("reference.enabled", "the ranks that train keep the reference policy from the beginning of RL or not at all",
          after_sft=True),
    Fixed("critic.enabled", "the states of the policy and of the critic belong together from the beginning of RL"),
    Fixed("critic.model", "the committed weights of the critic have this model's shape"),
    Fixed("device.dtype",
          "the committed weights have this dtype; another job, begun with --from-job, may have another"),
)


@dataclass(frozen=True)
class ChangedSetting:
    """A fixed setting with another value than the job has."""

    key: str
    old: Any
    new: Any
    why: str

    def __str__(self) -> str:
        return f"{self.key} was {_shown(self.old)} and is now {_shown(self.new)}: {self.why}"


def fixed_settings(cfg: Config) -> dict[str, Any]:
    """The settings of the table, by dotted key, as JSON-able values. Those that ``model.path`` overrides are left out.
    """
    return {key: _bounded(key, value) for key, value in (*_leaves(cfg, ""), (_MEASURES_KL, cfg.algorithm.measures_kl))
            if any(rule.covers(key, cfg.mode) for rule in FIXED)
            and not (cfg.model.path and key.startswith("model.") and key != _MODEL_PATH)}


def changes(old: Mapping[str, Any], new: Mapping[str, Any], *, sft_is_over: bool) -> list[ChangedSetting]:
    """What contradicts the job. ``old``: its settings as recorded, perhaps by another release: a key that only one of
    the two has is not compared."""
    found, mode = [], str(old.get("mode", "rl"))
    for key in sorted(old.keys() & new.keys()):
        rule = next((r for r in FIXED if r.covers(key, mode) and (sft_is_over or not r.after_sft)), None)
        if rule is not None and old[key] != new[key]:
            found.append(ChangedSetting(key, old[key], new[key], rule.why))
    return found


def _leaves(section: Section, prefix: str) -> Iterator[tuple[str, Any]]:
    dumped = section.model_dump(mode="json")
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", dumped[name]


def _bounded(key: str, value: Any) -> Any:
    text = json.dumps(value, sort_keys=True)
    if len(text) <= _MAX_VALUE and not secrets.is_secret(key):
        return value
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _shown(value: Any) -> str:
    return json.dumps(secrets.without_secrets(value))
