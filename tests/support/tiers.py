"""The two tiers of the suite: what runs by default, and what has the mark *full* and runs with ``--all`` only."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def full(*, proved_in: str, why: str) -> pytest.MarkDecorator:
    """For tests that run with ``--all`` only. ``proved_in``: files of the default tier that have their rule, with a
    space in between; ``why``: what these tests add to them. Raises ValueError for a file that is not there, so that the
    list of what runs with ``--all`` only (``ops/test.sh --list-full``) names no proof that was moved or deleted."""
    gone = [path for path in proved_in.split() if not (ROOT / path).is_file()]
    if gone or not proved_in:
        raise ValueError(f"proved_in names no test file: {gone}")
    return pytest.mark.full(proved_in=proved_in, why=why)


def parametrize(names: str | tuple[str, ...], cases: Iterable[Any], *, by_default: int = 1, proved_in: str, why: str,
                ids: Any = None) -> pytest.MarkDecorator:
    """Parametrizes as pytest does, but cases after the first ``by_default`` ones run with ``--all`` only."""
    mark = full(proved_in=proved_in, why=why)
    return pytest.mark.parametrize(names, [
        case if n < by_default else pytest.param(*(case if isinstance(names, tuple) else [case]), marks=mark)
        for n, case in enumerate(cases)], ids=ids)


def selected(request: pytest.FixtureRequest, *names: str) -> set[Any]:
    """The values of this parameter, or the tuples of these ones, in the tests of the requesting file that run. For
    fixtures that start something for each value: what no test asks for need not be started."""
    found = (item.callspec.params for item in request.session.items
             if item.path == request.path and isinstance(item, pytest.Function) and hasattr(item, "callspec"))
    return {params[names[0]] if len(names) == 1 else tuple(params[name] for name in names)
            for params in found if params.keys() >= set(names)}
