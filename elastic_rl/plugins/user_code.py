"""Finds what a setting names: an entry of a registry, or ``package.module:attribute`` of the user's own code."""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import os
import sysconfig
import traceback
from collections.abc import Iterable, Mapping
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

from elastic_rl.errors import ConfigError
from elastic_rl.runtime.words import counted

T = TypeVar("T")

_TEXT = 2000
"""Longest text, in characters, that is taken from a user's code: it goes into records of etcd, which refuses large
ones."""
_PLACE = 300
"""Longest ``file:line`` that is shown, in characters."""
_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in {
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(__file__).parents[1])})
MAX_NAME = 64
"""Characters of a name that a user's code gives to a number, a set or a part of what it makes."""
_INSTALLED = {"site-packages", "dist-packages"}
"""Folders whose code is not a user's own, and names of such folders elsewhere."""


def plain(text: str, limit: int = _TEXT) -> str:
    """A text of a user's code as any record takes it: encodable as UTF-8, and cut to ``limit`` characters."""
    cut = str.encode(text, "utf-8", "replace").decode("utf-8")
    return cut if len(cut) <= limit else cut[:limit - 1] + "…"


def is_name(given: object, limit: int = MAX_NAME) -> bool:
    """Whether a user's code may call something so: text of 1 to ``limit`` printable characters. Names are shown within
    lines, which one with a line break could forge."""
    return isinstance(given, str) and 0 < len(given) <= limit and str.isprintable(given)


def scalar(given: Any) -> Any:
    """Python's value of what holds one value and has no dimension, as it is otherwise: a scalar of NumPy, such as
    ``numpy.bool_``, or an array or a tensor of shape ``()``. Raises what a user's own class raises."""
    item = getattr(given, "item", None)
    return item() if callable(item) and getattr(given, "shape", None) == () else given


def number_of(given: object) -> float | None:
    """The number that a user's code gives: one of Python's, a ``Decimal``, or a ``scalar`` that is one of these. None
    for what is no number. Raises what a user's own class raises."""
    value = scalar(given)
    try:
        return float(value) if isinstance(value, Real | Decimal) else None
    except (OverflowError, ValueError):  # an integer that is larger than any float; a signalling NaN
        return math.nan


def number_fault(given: object, what: str = "a number") -> str:
    """What a user's code gave in place of a number, and what to return instead; one line for an error."""
    if given is None:
        return f"not None: see that each way through it ends with a return of {what}"
    if isinstance(given, str):
        return "not str: return float(text)"
    if isinstance(given, Mapping):
        return "not a mapping: return Reward(value, parts) of elastic_rl.rewards.base to give numbers a name"
    name = plain(type(given).__name__, 100)
    if isinstance(given, list | tuple) or hasattr(given, "shape"):
        return f"not {name}: return one number of it, as float(values[0])"
    return f"not {name}: return float(value)"


def text_of(error: BaseException) -> str:
    """The text of an error of a user's code; as ``plain``. Raises nothing: what the error's own ``__str__`` raises is
    named instead."""
    try:
        return plain(str(error))
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # whatever a user's class raises
        return f"(its text cannot be made: {plain(type(e).__name__, 100)})"


def describe(error: BaseException) -> str:
    """``Type: text (file:line)`` of an error of a user's code, with the text as of ``text_of``, and the last line of
    the user's own that ran, if any did."""
    name, text, place = plain(type(error).__name__, 100), text_of(error), _place_of(error)
    return (f"{name}: {text}" if text else name) + (f" ({place})" if place else "")


def _place_of(error: BaseException) -> str:
    """``file:line`` of the innermost frame that is neither this project's nor of an installed package; "" for none."""
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if os.path.isabs(file) and not file.startswith(_LIBRARIES) and not _INSTALLED.intersection(file.split(os.sep)):
            found = f"{file}:{line}"
    return plain(found, _PLACE)


def call_fault(found: object, arguments: int, *, asynchronous: bool) -> str:
    """What a user's object is instead of a function of so many positional arguments; "" where it is one, or does not
    say. ``asynchronous``: one that is awaited; else one that is not."""
    if inspect.isclass(found) or not callable(found):
        return f"a {'class' if inspect.isclass(found) else plain(type(found).__name__, 100)}"
    call = inspect.unwrap(found if inspect.isroutine(found) else type(found).__call__)
    if (inspect.isfunction(call) or inspect.ismethod(call)) and inspect.iscoroutinefunction(call) is not asynchronous:
        return "no async function" if asynchronous else "an async function"
    try:
        inspect.signature(found).bind(*[None] * arguments)
    except TypeError:
        return f"a function that does not take {counted(arguments, 'argument')}"
    except ValueError:  # it has no signature: it is not written in Python
        pass
    return ""


def encodable(text: str) -> str:
    """The text as UTF-8 can hold it: a tokenizer, or a user's code, may give half of a surrogate pair."""
    return text.encode("utf-8", "replace").decode()


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean …?`` for what is almost a known name, in upper or lower case; else ""."""
    by_lower = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), list(by_lower), n=1)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else ""


def resolve(name: str, registry: Mapping[str, T], *, setting: str) -> T:
    """The registry's entry of this name or, for ``module:attribute``, the attribute of that module, which is imported.

    Raises ConfigError, which names the setting, for an unknown name, a module that cannot be imported or ends the
    process while it is, and a missing attribute. Importing runs the module's code: a plug-in is trusted as the
    configuration is that names it.
    """
    if name in registry:
        return registry[name]
    module_name, sep, attribute = name.partition(":")
    if not sep:
        raise ConfigError(f"{setting}={name!r} is not one of {', '.join(sorted(registry))}"
                          f"{did_you_mean(name, registry)}",
                          hint=f"name one of them, or your own code as {setting}=package.module:name")
    try:
        found: Any = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # whatever the user's module raises while it is imported: also SystemExit
        is_there = not isinstance(e, ModuleNotFoundError) or not f"{module_name}.".startswith(f"{e.name}.")
        raise ConfigError(f"{setting}={name!r}: the module {module_name!r} cannot be imported: {describe(e)}",
                          hint="correct the module, or install what it needs" if is_there else
                          "it must be importable in every process of the run: install it, or put its folder into "
                          "PYTHONPATH") from e
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as e:
            raise ConfigError(f"{setting}={name!r}: the module {module_name!r} has no {attribute!r}",
                              hint="check the spelling after the colon") from e
        except KeyboardInterrupt:
            raise
        except BaseException as e:  # a module or class may compute its attributes
            raise ConfigError(f"{setting}={name!r}: {attribute!r} of the module {module_name!r} cannot be read: "
                              f"{describe(e)}") from e
    return found
