"""Test files are imported without the garbage collector, which finds nothing then, and are left out of what it looks
through while the tests run: with torch, transformers and all test files there, one full collection takes half a CPU
second, and it made some twenty while they were imported."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def skip_module_without(module: str, *, reason: str) -> None:
    """As ``pytest.importorskip``, without importing the module: that is for the worker whose tests use it, and every
    worker collects all files. TransferQueue, with tensordict and half of torch's compiler, takes two CPU seconds."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(reason, allow_module_level=True)
