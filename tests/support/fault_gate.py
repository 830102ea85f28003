"""The gate of a ``FaultContext``, which strikes and the end of the injection pass one after the other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from elastic_rl.faults.context import FaultContext


def end_waits(context: FaultContext) -> bool:
    """Whether an abort, which comes from another thread, has to wait for a strike that is under way."""
    with ThreadPoolExecutor(1) as other:
        free = other.submit(context._gate.acquire, blocking=False).result()
        if free:
            other.submit(context._gate.release).result()
    return not free
