"""How engines choose tokens, beside the temperature."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from elastic_rl.config.section import Section

_MOST = (1 << 31) - 1
"""Largest token id, and number of tokens, that engines take."""
_Text = Annotated[str, Field(min_length=1, max_length=200)]


class SamplingOptions(Section):
    """Options of a section that samples, which has a ``temperature`` of its own. The defaults change nothing."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Only the most probable tokens are sampled whose probabilities together reach this; 1: all."""
    top_k: Annotated[int, Field(ge=1, le=_MOST)] | None = None
    """Only so many of the most probable tokens are sampled; null: all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Only tokens are sampled whose probability is at least this fraction of the most probable one's; 0: all."""
    stop: Annotated[list[_Text], Field(max_length=16)] = []
    """Texts with which a response ends, each as soon as it is in the response, as its last part. Engines that look for
    them decode what they generate, which takes CPU."""
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, le=_MOST)]], Field(max_length=64)] = []
    """Further token ids that end a response, beside those of the data source."""
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Divides positive logits of tokens that the response has, and multiplies negative ones; 1: no penalty."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Is taken from the logits of each token that the response has."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Is taken from a token's logits for each time that the response has it."""

    @property
    def penalties(self) -> str:
        """The penalties that are not at their default, as name=value."""
        return ", ".join(f"{name}={getattr(self, name):g}" for name in (
            "repetition_penalty", "presence_penalty", "frequency_penalty")
            if getattr(self, name) != type(self).model_fields[name].default)
