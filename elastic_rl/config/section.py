"""Base of every section of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

_Path = TypeVar("_Path", str, Path)


def _require_path(path: _Path) -> _Path:
    """Raises ValueError for what no file can be named, so that whoever opens it need not ask."""
    text = str(path)
    text.encode()  # raises UnicodeEncodeError, which is a ValueError
    if "\0" in text:
        raise ValueError("a path has no NUL character")
    try:
        Path(text).expanduser()
    except RuntimeError as e:
        raise ValueError("there is no such user whose home folder it could be in") from e
    return path


PathText = Annotated[str, AfterValidator(_require_path)]
"""A path; empty for none. ``~`` is the home folder."""
FolderPath = Annotated[Path, AfterValidator(_require_path)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
LrDecay = Literal["constant", "linear", "cosine", "wsd"]


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys. The docstring under a setting is its description in
    ``elastic-rl config schema``."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
