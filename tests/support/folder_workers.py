"""A pytest plug-in: with ``--dist loadfile``, all files of some folders run in one worker.

Tests there have processes of theirs forked from one that has imported SGLang or Megatron (``support.forked``), which
takes longer than what most of them do. It is made once in a worker.
"""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

FOLDERS = ("tests/integration/engine", "tests/integration/trainer")


class FolderScheduling(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return next((folder for folder in FOLDERS if file.startswith(f"{folder}/")), file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    return FolderScheduling(config, log) if config.getvalue("dist") == "loadfile" else None
