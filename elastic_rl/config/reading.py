"""Reads settings from a YAML file and overrides. Errors name the key and, for an unknown one, the nearest known key."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from elastic_rl.config import secrets, yaml_text
from elastic_rl.config.meant import meant
from elastic_rl.errors import ConfigError

_Model = TypeVar("_Model", bound=BaseModel)
_NOT_YAML = (yaml.YAMLError, ValueError, RecursionError, AttributeError, KeyError, IndexError, TypeError)
"""What PyYAML raises for a text: 2024-13-45 is a date to it, and its own checks do not cover what ``!!bool``,
``!!timestamp`` and the like are put before."""

_MAX_SHOWN = 200
_MAX_BYTES = 4 << 20
"""Bytes of a file of settings, at most."""
_ENGINE_KEY = "engines ask for the key in <run_dir>/<job>/cluster/engine.key, which `elastic-rl up` makes"
_JUDGE = "a judge is a pool: set pools.genrm.model to the folder of its model"
_TEACHER = "set algorithm.teacher=large and pools.large.model to the folder of its model"
_OF_TOKENS = ("algorithm.clip_low", "algorithm.clip_high")
"""Bounds of the ratios of tokens: they are far too large for those of sequences, whose options have the same names."""
_INSTEAD = {"engine.api_key": _ENGINE_KEY, "engine.key": _ENGINE_KEY, "genrm": _JUDGE, "judge": _JUDGE,
            "teacher": f"a teacher is a pool: {_TEACHER}"}
"""What to set instead of keys that there are not, and for which there is no other key."""
_FORMS = {("mode", "literal_error"): "how generation and training follow each other is train.schedule",
          ("pools", "dict_type"): "write pools by name, such as {genrm: {model: /models/judge}}",
          ("algorithm.teacher", "string_type"): f"it is the name of a pool: {_TEACHER}"}
"""What to write for values that are often of another form, by key and pydantic's type of the error."""


def _read(path: Path) -> str:
    """The text of a file, which may be a pipe. Raises OSError, also for a text that is too long, and ValueError."""
    with path.open("rb") as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {_MAX_BYTES >> 20} MiB", str(path))
    return content.decode("utf-8")


def known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key of a configuration, sections included."""
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                keys += known_keys(kind, f"{prefix}{name}.")
    return keys


def mappings(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Paths of the settings that are mappings with keys of the user's own."""
    found = []
    for name, field in model.model_fields.items():
        if get_origin(field.annotation) is dict:
            found.append((*prefix, name))
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += mappings(field.annotation, (*prefix, name))
    return found


def values(model: type[BaseModel], path: Path | str | None, overrides: Iterable[str]) -> dict[str, Any]:
    """The settings of a YAML file with ``key.sub=value`` overrides applied, in the forms that a ``model`` takes. Raises
    ConfigError, which names the file or override."""
    found: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml_text.load(_read(Path(path)))
        except OSError as e:
            raise ConfigError(f"cannot read the config {path}: {e.strerror}", hint="name a readable YAML file") from e
        except _NOT_YAML as e:
            raise ConfigError(f"{path} is not YAML: {_fault(e)}") from e
        if not isinstance(loaded or {}, dict):
            raise ConfigError(f"{path} must hold a mapping of settings, not a {type(loaded).__name__}")
        found = loaded or {}
    for override in overrides:
        _set(found, override)
    return yaml_text.resolve(model, found)


def validate(model: type[_Model], found: Mapping[str, Any]) -> _Model:
    """The configuration that a nested mapping describes. Raises ConfigError with every fault in it."""
    try:
        return model.model_validate(dict(found))
    except ValidationError as e:
        faults = [_explain(err, model, found) for err in e.errors()]
        raise ConfigError("the configuration is invalid:\n  " + "\n  ".join(faults),
                          hint="`elastic-rl config schema` lists every key") from e
    except OverflowError as e:  # the checks compare settings as numbers of a float's range
        keys = ", ".join(_too_large(found)) or "a setting"
        raise ConfigError(f"the configuration is invalid: too large a number for {keys}") from e


def _too_large(value: Any, key: str = "") -> Iterator[str]:
    """Keys of integers that no float holds."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _too_large(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, int) and abs(value) > sys.float_info.max:
        yield key


def _set(found: dict[str, Any], override: str) -> None:
    key, sep, text = override.removeprefix("--").partition("=")
    if not sep or not key:
        raise ConfigError("an override is not of the form --key.sub=value")  # not shown: it may hold secrets
    try:
        override.encode()  # arguments that are no UTF-8 have halves of surrogate pairs
        value = yaml_text.load_value(text)
    except _NOT_YAML as e:
        shown = "" if secrets.is_secret(key) else f": {_shortened(text)}"
        raise ConfigError(f"the value of --{key} is not YAML{shown} ({_fault(e)})",
                          hint="put text that YAML takes for something else in quotes") from e
    *path, leaf = key.split(".")
    for part in path:
        inner = found.get(part)
        if inner is None:  # not there, or a section all of which is commented out
            inner = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"--{key}: {part!r} is a value, not a section")
        # A copy: sections that an anchor of YAML has made equal are one object, and only this one is changed.
        found[part] = dict(inner)
        found = found[part]
    found[leaf] = value


def _fault(error: Exception) -> str:
    """What is wrong, and where, without the text itself: it may hold secrets."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem} in line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
    if isinstance(error, UnicodeEncodeError):
        return "it is not UTF-8 text"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 text ({error.reason} at byte {error.start})"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, (AttributeError, KeyError, IndexError, TypeError)):
        return "a value does not fit its tag"
    return str(error).partition("\n")[0]


def _shortened(value: Any) -> str:
    """A value that someone has written, to be shown in an error."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write an integer of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def _explain(err: Any, model: type[BaseModel], found: Mapping[str, Any]) -> str:
    key = ".".join(str(p) for p in err["loc"])
    if err["type"] == "extra_forbidden":
        if key in _OF_TOKENS and found["algorithm"].get("name") == "gspo":
            return f"unknown key {key!r}; leave it out: gspo does not read it, since it clips ratios of sequences"
        near = [] if key in _INSTEAD else meant(key, known_keys(model), most=1, cutoff=0.5)
        instead = _INSTEAD.get(key, f"did you mean {' or '.join(map(repr, near))}?" if near else "")
        return f"unknown key {key!r}{f'; {instead}' if instead else ''}"
    shown = key and not isinstance(err["input"], dict) and not secrets.is_secret(key)
    return f"{key or 'config'}: {err['msg'].removeprefix('Value error, ')}" + (
        f" (got {_shortened(err['input'])})" if shown else "") + right_form(err, key)


def right_form(err: Mapping[str, Any], key: str) -> str:
    """``; …``: how to write a value that is of another form than the setting ``key``; "" where its error says it. The
    value itself is not shown."""
    if err["type"] == "string_type" and isinstance(err["input"], bool | int | float | None):
        return "; put what is meant as text in quotes"
    if err["type"] == "list_type":
        return "; write [a, b], or [a] for a single one"
    return f"; {_FORMS[key, err['type']]}" if (key, err["type"]) in _FORMS else ""
