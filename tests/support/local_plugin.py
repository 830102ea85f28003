"""The user's code without a process, for tests of what it may be and answer; how processes start, die and are replaced
is tested on real ones (``tests/unit/rewards/test_own_reward_process.py``, ``tests/unit/plugins``)."""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_rl.errors import ConfigError, PluginFailed
from elastic_rl.plugins.user_code import describe
from elastic_rl.runtime.imports import imported


class LocalPlugin:
    """``PluginProcess`` whose function is made and called in this process. Its results are JSON there and back."""

    def __init__(self, what: str, maker: str, *arguments: Any) -> None:
        self._what, self._maker, self._arguments = what, maker, arguments
        self._call: Any = None
        self._is_sound = False

    def start(self) -> None:
        if not self._is_sound:
            try:
                self._call, self._is_sound = imported(self._maker)(*self._arguments), True
            except ConfigError:
                raise
            except BaseException as e:
                raise PluginFailed(f"{self._what} cannot be made: {describe(e)}") from e

    @property
    def about(self) -> Any:
        return getattr(self._call, "about", None)

    def start_first(self) -> None:
        try:
            self.start()
        except PluginFailed as e:
            raise ConfigError(e.message, hint=e.hint) from e

    async def call(self, *arguments: Any) -> Any:
        try:
            found = self._call(*arguments)
            return json.loads(json.dumps(await found if inspect.isawaitable(found) else found, allow_nan=False))
        except PluginFailed:
            raise
        except Exception as e:
            raise PluginFailed(describe(e)) from e

    def replace(self) -> None:
        self._is_sound = False

    stop = close = replace


@contextlib.contextmanager
def runs_locally(folder: Path) -> Iterator[None]:
    """Has the functions of the modules in a folder run in this process, which forgets the modules in the end."""
    with pytest.MonkeyPatch.context() as patched:
        for module in ("elastic_rl.rewards.own", "elastic_rl.engine.own_generate"):
            patched.setattr(f"{module}.PluginProcess", LocalPlugin)
        patched.syspath_prepend(folder)
        before = set(sys.modules)
        yield
    for path in folder.glob("*.py"):
        if path.stem not in before:
            sys.modules.pop(path.stem, None)


@pytest.fixture
def local_plugins(tmp_path: Path) -> Iterator[Path]:
    """A folder for modules of the user's, whose functions run in this process."""
    folder = tmp_path / "plugins"
    folder.mkdir()
    with runs_locally(folder):
        yield folder
