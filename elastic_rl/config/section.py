"""Base of every section of the configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
LrDecay = Literal["constant", "linear", "cosine", "wsd"]


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys. The docstring under a setting is its description in
    ``elastic-rl config schema``."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
