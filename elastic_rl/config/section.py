"""Base of every section of the configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from elastic_rl.config.meant import suggestion

_Path = TypeVar("_Path", str, Path)


def _require_path(path: _Path) -> _Path:
    """Raises ValueError for what no file can be named, so that whoever opens it need not ask."""
    text = str(path)
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise ValueError("a path, with the working folder of a relative one, is UTF-8 text") from e
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


_Section = TypeVar("_Section", bound=Section)


def changed(section: _Section, changes: Mapping[str, Any]) -> _Section:
    """The section with some settings changed, as a part of a job has it. Raises ValidationError."""
    return type(section).model_validate({**section.model_dump(), **changes})


def faults_of_changes(section: Section, changes: Mapping[str, Any], key: str) -> Iterator[str]:
    """What is wrong with changes of a section. ``key``: the setting that holds them."""
    try:
        changed(section, changes)
    except ValidationError as e:
        for fault in e.errors():
            name = ".".join(map(str, fault["loc"]))
            if fault["type"] == "extra_forbidden":
                yield f"unknown key {key}.{name}{suggestion(name, type(section).model_fields)}"
            else:
                yield f"{'.'.join(filter(None, (key, name)))}: {fault['msg'].removeprefix('Value error, ')}"
