"""The settings in words: ``docs/settings.md``, which ``python -m elastic_rl.config.reference`` prints, and
``elastic-rl config explain``. Pure."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from elastic_rl.config.fixed_settings import FIXED
from elastic_rl.config.meant import meant
from elastic_rl.config.root import Config
from elastic_rl.errors import ConfigError

_HEAD = """# Settings

Every setting, by its key: in a YAML file as nested mappings, on the command line as `--key.sub=value`. Parts in
capitals stand for names of yours. `elastic-rl config explain KEY` shows the same in a terminal,
`elastic-rl config show -c FILE` what a file means with all defaults, and `elastic-rl config schema` everything as JSON
Schema. This page is made from the code by `python -m elastic_rl.config.reference`.
"""
_BOUNDS = (("minimum", ">= {}"), ("exclusiveMinimum", "> {}"), ("maximum", "<= {}"), ("exclusiveMaximum", "< {}"))
_UNBOUNDED = 1 << 60
"""Bounds beyond it are those of 64 bits, which tell nobody anything."""

_OPTIONS = {
    "data.options": ("what data.source names", "docs/data.md"),
    "algorithm.options": ("what algorithm.name names", "docs/algorithms.md#options"),
    "rollout.reward_options": ("what rollout.reward names", "docs/rewards.md"),
    "rollout.environment_options": ("what rollout.environment names", "docs/environments.md"),
    "rollout.filters": ("a filter", "docs/data.md#filters"),
    "critic.train": ("the section train", "`elastic-rl config explain train`"),
    **{f"{group}.trainer": ("the section trainer", "`elastic-rl config explain trainer`")
       for group in ("critic", "reference", "actor_fwd")}}
"""Settings that hold options: whose, and the page or the command that shows them."""


@dataclass(frozen=True)
class Setting:
    """One setting."""

    key: str
    kind: str
    """The values that the setting takes, in words."""
    default: str
    """The default as JSON; empty for a setting that must be given."""
    text: str

    @property
    def section(self) -> str:
        """The key of what it is in; empty for a setting of the job itself."""
        return self.key.rpartition(".")[0]

    @property
    def fixed(self) -> str:
        """Why a job that is resumed keeps it; empty for one that may change."""
        return next((f"{rule.why}{f' (in mode {modes})' if (modes := ' and '.join(rule.modes)) else ''}"
                     for rule in FIXED if rule.covers(self.key, rule.modes[0] if rule.modes else "rl")), "")


def settings() -> list[Setting]:
    """Every setting, in the order of the configuration."""
    schema = Config.model_json_schema()
    return list(_settings(schema, schema, ""))


def _settings(schema: Mapping[str, Any], section: Mapping[str, Any], prefix: str) -> Iterator[Setting]:
    """``schema``: the whole one, with its definitions."""
    for name, told in section["properties"].items():
        key = f"{prefix}{name}"
        if (inner := _section(schema, told)) is not None:
            yield from _settings(schema, inner, f"{key}.")
            continue
        values = [*told.get("patternProperties", {}).values(), told.get("additionalProperties")]
        named = next((found for value in values if isinstance(value, dict) and (
            found := _section(schema, value)) is not None), None)
        text = " ".join(told.get("description", "").split())
        if named is None:
            yield Setting(key, _kind(schema, told), json.dumps(told["default"], ensure_ascii=False)
                          if "default" in told else "", text)
        else:
            yield Setting(key, "mapping of names to settings", "{}", text)
            yield from _settings(schema, named, f"{key}.NAME.")


def _section(schema: Mapping[str, Any], told: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The section that a schema refers to, and nothing else."""
    named = told.get("$ref", "").rpartition("/")[2]
    found: Mapping[str, Any] = schema["$defs"].get(named, {})
    return found if "properties" in found else None


def _kind(schema: Mapping[str, Any], told: Mapping[str, Any]) -> str:
    if named := told.get("$ref", "").rpartition("/")[2]:
        return _kind(schema, schema["$defs"][named])
    if choices := told.get("anyOf"):
        return " or ".join(_kind(schema, choice) for choice in choices)
    if values := told.get("enum", [told["const"]] if "const" in told else []):
        return " or ".join(json.dumps(value) for value in values)
    kind = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false",
            "null": "null", "object": "mapping"}.get(told.get("type", ""), "anything")
    if told.get("type") == "array":
        kind = f"list of {_kind(schema, told['items'])}" if told.get("items") else "list"
    bounds = [text.format(f"{told[name]:g}" if abs(told[name]) < 1e6 else told[name])
              for name, text in _BOUNDS if name in told and abs(told[name]) < _UNBOUNDED]
    return " ".join((kind, *[" and ".join(bounds)] * bool(bounds)))


def explain(key: str) -> str:
    """A setting in words, or the settings of a section; of an option, the setting that holds it and the page that has
    it. ``key``: of one of these; a name of yours may stand for ``NAME``. Raises ConfigError for a key that there is
    not."""
    known = settings()
    wanted = [part for part in key.strip().lstrip("-").split(".") if part]
    exact = [one for one in known if _matches(one.key, wanted)]
    inside = [one for one in known if _matches(".".join(one.key.split(".")[:len(wanted)]), wanted)]
    if wanted and inside:
        return "\n\n".join([*(_shown(one) + _of_options(one.key) for one in exact), *(
            f"{one.key}\n  {_first_sentence(one.text)}" for one in inside if one not in exact)])
    for one in known:
        if one.key in _OPTIONS and wanted[:one.key.count(".") + 1] == one.key.split("."):
            return _shown(one) + _of_options(one.key, ".".join(wanted))
    close = meant(".".join(wanted), [one.key for one in known], most=3, cutoff=0.6)
    raise ConfigError(f"there is no setting {key!r}", hint=f"did you mean {' or '.join(close)}?" if close else (
        "`elastic-rl config explain train`, or another section, lists its settings"))


def _of_options(key: str, option: str = "") -> str:
    """Where the options are described that a setting holds, if it holds some. ``option``: the key of the one that is
    asked for."""
    if key not in _OPTIONS:
        return ""
    whose, page = _OPTIONS[key]
    return (f"\n\n{option} is an option of {whose}: {page} has them." if option else
            f"\n\nThe options are those of {whose}: {page} has them.")


def _matches(key: str, wanted: list[str]) -> bool:
    parts = key.split(".")
    return len(parts) == len(wanted) and all(part in ("NAME", other) for part, other in zip(parts, wanted, strict=True))


def _shown(one: Setting) -> str:
    lines = [one.key, f"  {one.kind}" + (f"; default {one.default}" if one.default else "; must be given"),
             *([f"  A resumed job keeps it: {one.fixed}."] if one.fixed else []), "", one.text.replace("``", "`")]
    return "\n".join(lines)


def _first_sentence(text: str) -> str:
    return text.replace("``", "`").partition(". ")[0].rstrip(".") + "."


def page() -> str:
    """The settings as Markdown."""
    sections: dict[str, list[Setting]] = {}
    for one in settings():
        sections.setdefault(one.section, []).append(one)
    lines = [_HEAD]
    for section, found in sections.items():
        lines.append(f"## {f'`{section}`' if section else 'The job'}\n")
        for one in found:
            kept = f" *A resumed job keeps it: {one.fixed}.*" if one.fixed else ""
            default = f", default `{one.default}`" if one.default else ", must be given"
            lines.append(f"**`{one.key}`** ({one.kind}{default})  \n{one.text.replace('``', '`')}{kept}\n")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(page())
