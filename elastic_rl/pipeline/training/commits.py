"""Having the trainer commit its state, for as long as that takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from elastic_rl.pipeline.waits import Waits
from elastic_rl.runtime.backoff import RetryBackoff

_AGAIN_S = (1.0, 15.0)
"""Pauses before a commit is asked for again that the checkpoint service did not take."""


def until_committed(waits: Waits, save: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    """The result of the first save that is committed. Raises Fenced, and what ``save`` raises."""
    if (saved := save())["committed"]:
        return saved
    backoff = RetryBackoff(*_AGAIN_S)
    with waits.holding("dcs", "the checkpoint service to commit the last state: see the alert publish.failed"):
        while True:
            waits.works()  # but for what is held, which is shown when it has lasted a while
            if (saved := save())["committed"]:
                return saved
            backoff.failed(time.monotonic())
            waits.pause(backoff.left_s(time.monotonic()))
