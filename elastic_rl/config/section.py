"""What every section of the configuration is built from."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """A frozen group of settings that knows no other keys than its own."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
