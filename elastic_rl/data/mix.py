"""The source ``mix``: several sources, each with its share of the prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from pydantic import Field, model_validator

from elastic_rl.config.options import Options, read_options
from elastic_rl.data.mixing import Concatenated, WeightedOrder
from elastic_rl.data.order import Order, order_of, probes
from elastic_rl.data.prompts import LazyPrompts, hashes
from elastic_rl.data.samples import Prompt
from elastic_rl.data.tokenizer import Tokenizer
from elastic_rl.errors import ConfigError


class Part(Options):
    """One source of the mix."""

    source: str
    """Name of the source, as in ``data.source``; not ``mix``."""
    options: dict[str, Any] = {}
    """Options of the source, as in ``data.options``."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the prompts, relative to the other parts."""
    name: str = ""
    """Name of the part: what its prompts have as ``part`` in their metadata; by default that of the source."""


class MixOptions(Options):
    """``data.options`` of this source."""

    parts: Annotated[list[Part], Field(min_length=1, max_length=1000)]
    """Sources of the mix."""

    @model_validator(mode="after")
    def _check_names(self) -> MixOptions:
        if any(part.source == "mix" for part in self.parts):
            raise ValueError("a part of a mix is no mix: list its parts instead")
        names = [part.name or part.source for part in self.parts]
        if again := next((name for name in names if names.count(name) > 1), ""):
            raise ValueError(f"two parts are called {again!r}: give each a name")
        if "eval" in names:
            raise ValueError("no part may be called 'eval', which is the evaluation set of all parts")
        return self


MakePart = Callable[[str, Mapping[str, Any], int], Any]
"""Makes a source from its name, its options and a seed."""


class Mix:
    """Which part an ordinal takes follows from the weights and the seed; the part's own order says which prompt. The
    evaluation set has all prompts that the parts evaluate; each part's own is there by its name."""

    def __init__(self, options: Mapping[str, Any], *, seed: int, make_part: MakePart, tokenizer: Tokenizer) -> None:
        """Raises ConfigError, and whatever the parts raise."""
        self._parts = read_options(MixOptions, options, of="the data source 'mix'", setting="data.options").parts
        self._names = [part.name or part.source for part in self._parts]
        self.tokenizer = tokenizer
        self._sources = [make_part(part.source, part.options, _seed_of(seed, name))
                         for part, name in zip(self._parts, self._names, strict=True)]
        self.stop_token_ids = tuple(self._sources[0].stop_token_ids)
        for name, source in zip(self._names, self._sources, strict=True):
            if set(source.stop_token_ids) != set(self.stop_token_ids):
                raise ConfigError(f"the parts {self._names[0]!r} and {name!r} of the mix end responses with other "
                                  f"tokens: {list(self.stop_token_ids)} and {list(source.stop_token_ids)}",
                                  hint="all parts must be tokenized for one model")
        self.max_prompt_tokens = max(source.max_prompt_tokens for source in self._sources)
        self.max_response_tokens = max(source.max_response_tokens for source in self._sources)
        evaluated = [_named(source.eval, name) for source, name in zip(self._sources, self._names, strict=True)]
        self.eval = Concatenated(evaluated)
        self.evals: dict[str, Sequence[Prompt]] = {"eval": self.eval, **dict(zip(self._names, evaluated, strict=True))}
        held_out = np.unique(np.concatenate([_held_out(source) for source in self._sources]))
        for source in self._sources:
            if hasattr(source, "exclude"):  # a source of the user's sees to this itself
                source.exclude(held_out)

    @cached_property
    def train(self) -> Concatenated:
        """What is trained on: read from the parts when it is first used."""
        return Concatenated([_named(source.train, name) for source, name in
                             zip(self._sources, self._names, strict=True)])

    @property
    def rows_left_out(self) -> Sequence[str]:
        """What the parts leave out, once ``train`` was read."""
        return [f"part {name}: {text}" for source, name in zip(self._sources, self._names, strict=True)
                for text in getattr(source, "rows_left_out", ())]

    def order(self, seed: int) -> Order:
        """Parts by weight, each in its own order. Raises ConfigError for a part without a prompt."""
        for name, prompts in zip(self._names, self.train.parts, strict=True):
            if not len(prompts):
                raise ConfigError(f"the part {name!r} of the mix has no prompt to train on",
                                  hint="check its options, such as paths")
        parts = [(order_of(source, _seed_of(seed, name)), len(source.train))
                 for source, name in zip(self._sources, self._names, strict=True)]
        return WeightedOrder(parts, [part.weight for part in self._parts], seed)


def _seed_of(seed: int, name: str) -> int:
    """63 bits for each part."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") >> 1


def _named(prompts: Sequence[Prompt], name: str) -> LazyPrompts:
    """The prompts with the name of their part in their metadata."""
    def one(index: int) -> Prompt:
        prompt = prompts[index]
        return replace(prompt, metadata={**prompt.metadata, "part": name})

    return LazyPrompts(len(prompts), one, fingerprint_indices=probes(prompts))


def _held_out(source: Any) -> np.ndarray:
    """Sorted hashes of the texts that a source evaluates."""
    own = getattr(source, "held_out", None)
    return own if own is not None else np.unique(hashes([prompt.text for prompt in source.eval if prompt.text]))
