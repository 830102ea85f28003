"""What a name of the form ``module:attribute`` stands for, imported where it is used and not where it is named."""

from __future__ import annotations

import importlib
from typing import Any


def imported(name: str) -> Any:
    """What ``module:attribute`` names. Raises whatever importing it raises."""
    module, _, attribute = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


def class_of(named: type | str) -> type:
    """Returns a class that is given itself or by its name (``module:Class``). Raises whatever importing it raises."""
    found: type = imported(named) if isinstance(named, str) else named
    return found
