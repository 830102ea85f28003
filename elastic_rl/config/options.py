"""Options of what a setting names: a source, a reward. Each has its own model of them; they are read in one way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from elastic_rl.config.meant import suggestion
from elastic_rl.config.reading import right_form
from elastic_rl.errors import ConfigError
from elastic_rl.runtime.json_values import require_json


class Options(BaseModel):
    """Base of the options."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


M = TypeVar("M", bound=BaseModel)
_Given = TypeVar("_Given", dict[str, Any], list[str | dict[str, Any]])


def require_options(given: _Given) -> _Given:
    """Options as they are given in settings. Raises ValueError for what is not passed on to other processes as JSON."""
    try:
        return require_json(given)
    except ValueError as e:
        raise ValueError(f"{e}; put what is meant as text in quotes") from e


def read_options(model: type[M], options: Mapping[str, Any], *, of: str, setting: str) -> M:
    """The options ``of`` something, in words, which are given in ``setting``. Raises ConfigError with every fault in
    them; no value is shown, it may be secret."""
    try:
        return model.model_validate(dict(options))
    except ValidationError as e:
        faults = "; ".join(f"{'.'.join((setting, *map(str, f['loc'])))}: {_explain(f, model)}" for f in e.errors())
        has = ", ".join(model.model_fields)
        raise ConfigError(f"the options of {of} are invalid: {faults}",
                          hint=f"it has {has}" if has else "it has none") from e


def _explain(fault: Mapping[str, Any], model: type[BaseModel]) -> str:
    if fault["type"] != "extra_forbidden":
        return f"{fault['msg']}{right_form(fault, '')}"
    of_model = len(fault["loc"]) == 1
    return "there is no such option" + (suggestion(str(fault["loc"][0]), model.model_fields) if of_model else "")
