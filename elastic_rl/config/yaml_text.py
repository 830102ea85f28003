"""Settings as YAML text: what is read, and what is written so that it is read as the same.

A plain value, one without quotes, is what its setting takes: ``job: 42``, ``job: 1e5`` and ``job: no`` are text, as it
is written. Where a setting takes any value, plain values are what YAML 1.2 has them be, with the ``yes``, ``no``,
``on`` and ``off`` and the dates of 1.1: ``1e-6`` is a number, ``007`` and ``1:30`` are text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"""^(?:[-+]?0b[01_]+ | 0o[0-7]+ | [-+]?0x[0-9a-fA-F_]+ | [-+]?(?:0|[1-9][0-9_]*))$""", re.VERBOSE)
_FLOAT = re.compile(r"""^(?:[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)? | \.[0-9][0-9_]*)[eE][-+]?[0-9]+
                         | [-+]?[0-9][0-9_]*\.[0-9_]* | [-+]?\.[0-9][0-9_]*
                         | [-+]?\.(?:inf|Inf|INF) | \.(?:nan|NaN|NAN))$""", re.VERBOSE)
_PLAIN = ("int", "float", "bool", "timestamp")
"""Types of values that a setting for text takes as they are written."""
_MAX_NODES = 100_000
"""Keys and values of a text, at most, with its anchors written out."""


@dataclass(frozen=True)
class _Plain:
    """A value that YAML has made of text without quotes, and the text."""

    value: Any
    text: str


def _numbers_of_yaml_1_2(kind: Any) -> None:
    """Replaces YAML 1.1's forms of numbers, in which 1e-6 is text, 010 is eight and 1:30 is ninety."""
    kind.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in found if tag not in (f"{_TAG}int", f"{_TAG}float")]
        for first, found in kind.yaml_implicit_resolvers.items()}
    kind.add_implicit_resolver(f"{_TAG}int", _INT, list("-+0123456789"))
    kind.add_implicit_resolver(f"{_TAG}float", _FLOAT, list("-+0123456789."))


class _Loader(yaml.SafeLoader):
    """Refuses a mapping that has a key twice: PyYAML would take the last one without a word. Refuses a text whose
    anchors stand for more than any settings have: a few lines of them can stand for 10^9 values, and an anchor for
    itself."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _count(node, {})
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen:
                raise yaml.MarkedYAMLError(problem="a key is there for the second time", problem_mark=key.start_mark)
            seen.add((key.tag, key.value))
        return node

    def construct_yaml_int(self, node: Any) -> int:
        text = self.construct_scalar(node)
        return int(text.replace("_", "")[2:], 8) if text.startswith("0o") else super().construct_yaml_int(node)


def _count(node: yaml.Node, counted: dict[yaml.Node, int]) -> int:
    """The number of nodes that a node stands for, with anchors written out. ``counted``: those of nodes that were
    counted; 0 for one that is being counted. Raises yaml.MarkedYAMLError for too many, or without an end."""
    if node not in counted:
        counted[node] = 0
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        children = [child for part in parts for child in (part if isinstance(part, tuple) else (part,))]
        total = 1 + sum(_count(child, counted) for child in children)
        if total > _MAX_NODES:
            raise yaml.MarkedYAMLError(problem=f"its anchors stand for more than {_MAX_NODES} values",
                                       problem_mark=node.start_mark)
        counted[node] = total
    elif not counted[node]:
        raise yaml.MarkedYAMLError(problem="an anchor contains itself", problem_mark=node.start_mark)
    return counted[node]


class _Dumper(yaml.SafeDumper):
    """Puts text in quotes that ``_Loader`` would take for something else."""


_numbers_of_yaml_1_2(_Loader)
_numbers_of_yaml_1_2(_Dumper)


def _plain(kind: str, loader: Any, node: Any) -> _Plain:
    return _Plain(getattr(loader, f"construct_yaml_{kind}")(node), node.value)


for _kind in _PLAIN:
    _Loader.add_constructor(f"{_TAG}{_kind}", partial(_plain, _kind))


def load(text: str) -> Any:
    """What a document holds, for ``resolve``. Raises what PyYAML raises for what is no YAML."""
    return yaml.load(text, _Loader)


def load_value(text: str) -> Any:
    """What a value of a command line holds, for ``resolve``: one line without quotes is text as a whole, also where
    YAML would take the end of it, after a blank and ``#``, for a comment. Raises as ``load``, also for a comment after
    anything else, which would be lost without a word."""
    found, line = load(text), text.strip()
    if "\n" in line or "#" not in line:
        return found
    tokens = list(yaml.scan(line))
    if not any("#" in line[before.end_mark.index:after.start_mark.index]
               for before, after in zip(tokens, tokens[1:], strict=False)):
        return found
    values = [token for token in tokens if not isinstance(token, yaml.StreamStartToken | yaml.StreamEndToken)]
    if not values or (len(values) == 1 and isinstance(values[0], yaml.ScalarToken) and values[0].plain):
        return line
    raise yaml.MarkedYAMLError(problem="a comment begins with # after a blank: put text with one in quotes",
                               problem_mark=values[-1].end_mark)


def dump(values: Mapping[str, Any]) -> str:
    """The document of which ``load`` and ``resolve`` make the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)


def resolve(model: type[BaseModel], found: Any) -> Any:
    """What ``load`` returned, each plain value as the setting of a ``model`` takes it: as text, or as what YAML has it
    be. A section, mapping or list without a value, all of which is commented out, is left out."""
    return _Resolution().of(model, found)


class _Resolution:
    """One value may be there many times, through YAML's anchors: each is resolved once for each type."""

    def __init__(self) -> None:
        self._done: dict[tuple[int, int], Any] = {}
        self._kept = list[Any]()
        """What ``_done`` names by its id."""

    def of(self, kind: Any, found: Any) -> Any:
        if isinstance(found, _Plain):
            return found.text if _is_text(kind) else found.value
        if not isinstance(found, dict | list):
            return found
        key = id(kind), id(found)
        if key not in self._done:
            self._kept += (kind, found)
            made: Any = {} if isinstance(found, dict) else []
            self._done[key] = made  # before what it holds: that may be the value itself
            if isinstance(found, dict):
                self._fill(made, kind, found)
            else:
                inner = _inner(kind, list)
                made += (self.of(inner, value) for value in found)
        return self._done[key]

    def _fill(self, made: dict[Any, Any], kind: Any, found: dict[Any, Any]) -> None:
        model = next((k for k in _alternatives(kind) if isinstance(k, type) and issubclass(k, BaseModel)), None)
        inner = Any if model is not None else _inner(kind, dict)
        for key, value in found.items():
            name = key.value if isinstance(key, _Plain) else key
            field = model.model_fields.get(name) if model is not None else None
            of = field.annotation if field is not None else inner
            if value is None and field is not None and _holds_others(of):
                continue
            made[name] = self.of(of, value)


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """The types of which a value may be, without what is written about them."""
    if get_origin(kind) is Annotated:
        return _alternatives(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return tuple(found for each in get_args(kind) for found in _alternatives(each))
    return (kind,)


def _is_text(kind: Any) -> bool:
    of = _alternatives(kind)
    return any(k in (str, Path) or get_origin(k) is Literal and all(isinstance(word, str) for word in get_args(k))
               for k in of) and not any(k in (int, float, bool) for k in of)


def _inner(kind: Any, of: type) -> Any:
    """What the values of a list or a mapping are; anything where the type says nothing."""
    return next((get_args(k)[-1] for k in _alternatives(kind) if get_origin(k) is of and get_args(k)), Any)


def _holds_others(kind: Any) -> bool:
    of = _alternatives(kind)
    return type(None) not in of and all(
        get_origin(k) in (dict, list) or isinstance(k, type) and issubclass(k, BaseModel) for k in of)
