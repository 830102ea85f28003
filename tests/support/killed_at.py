"""Processes of the product that are killed, as by kill -9, at one of its functions.

``environment`` makes the environment of a command; the command, and all that it starts, have these points. Each one
kills one process, which makes the file of the point first: so a test sees that it has happened, and the command that
is repeated goes on.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_ENV = "ELASTIC_RL_TEST_KILLED_AT"
_SITE = "from support import killed_at\nkilled_at.install()\n"


@dataclass(frozen=True)
class Point:
    """The first call of a function, such as ``elastic_rl.host.local_cluster:Cluster.join``."""

    function: str
    returned: bool
    """Whether the process dies when that call has returned, without an error; else before it."""
    file: str

    @property
    def reached(self) -> bool:
        return Path(self.file).exists()

    def reach(self) -> None:
        """Kills this process, unless the point has killed another one."""
        try:
            os.close(os.open(self.file, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def before(function: str, folder: Path) -> Point:
    """The point at which a function is called. ``folder``: where the process that gets there says so."""
    return Point(function, False, str(folder / f"before-{function}"))


def after(function: str, folder: Path) -> Point:
    """The point at which a function has returned; ``folder`` as of ``before``."""
    return Point(function, True, str(folder / f"after-{function}"))


def environment(points: Sequence[Point]) -> dict[str, str]:
    """For processes that are forked (``support.forked``) and call ``install``."""
    return {_ENV: json.dumps([asdict(point) for point in points])}


def environment_of_commands(points: Sequence[Point], folder: Path) -> dict[str, str]:
    """For processes that start an interpreter. ``folder``: for the module that calls ``install`` in them."""
    (site := folder / "killed-at").mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(_SITE)
    return {**environment(points), "PYTHONPATH": f"{site}{os.pathsep}{os.environ['PYTHONPATH']}"}


def install() -> None:
    """Has this process die at the points of its environment that have killed none yet."""
    for point in (Point(**values) for values in json.loads(os.environ.get(_ENV, "[]"))):
        if not point.reached:
            _wrap(point)


def _wrap(point: Point) -> None:
    module, _, path = point.function.partition(":")
    *outer, name = path.split(".")
    owner: Any = functools.reduce(getattr, outer, importlib.import_module(module))
    function: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(function)
    def killed(*args: Any, **kwargs: Any) -> Any:
        if not point.returned:
            point.reach()
        result = function(*args, **kwargs)
        if point.returned:
            point.reach()
        return result

    setattr(owner, name, killed)
