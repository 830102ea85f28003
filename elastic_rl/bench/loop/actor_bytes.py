"""actor-bytes: what a token takes in the actor while its group waits for its step, and on the way to a rank; and what a
step of 100,000 samples takes there whose tokens are in the queue."""

from __future__ import annotations

from collections.abc import Iterator

from elastic_rl.bench.loop.testbed import Testbed
from elastic_rl.bench.measurement import Row
from elastic_rl.bench.workers import Worker

_LIMIT_HELD, _LIMIT_WIRE = 8.0, 9.0
"""Bytes of a token id and a log-prob; of these and of a token's place in the loss mask."""
_GOAL_STEP_GIB = 8.0
_TIMEOUT_S = 600.0
_STEP = "GiB of memory that the actor takes for a step of 100,000 samples of 8,192 tokens, which are in TransferQueue"


def measure(testbed: Testbed) -> Iterator[Row]:
    def of(what: str) -> dict[str, float]:
        # A process each: what one measurement leaves in the allocator would be another one's.
        with Worker("elastic_rl.bench.loop.actor_worker", log=testbed.folder / "actor-worker.log") as worker:
            return worker.call(what, timeout_s=_TIMEOUT_S)

    if testbed.options.selects("actor-bytes"):
        held = of("held")
        yield Row(id="actor-bytes", name="bytes of a token, with its text, in a group that waits in the actor",
                  value=held["packed"], unit="B", limit=_LIMIT_HELD, samples=1,
                  alternatives={"Python's numbers": held["numbers"]})
    if testbed.options.selects("actor-bytes-wire"):
        wire = of("wire")
        yield Row(id="actor-bytes-wire", name="bytes of a token in the share of a rank, one response 16 times the mean",
                  value=wire["ragged"], unit="B", limit=_LIMIT_WIRE, samples=1,
                  alternatives={"padded to the longest": wire["padded"]})
    if testbed.options.selects("actor-bytes-step"):
        yield Row(id="actor-bytes-step", name=_STEP, value=of("step")["gib"], unit="GiB", goal=_GOAL_STEP_GIB,
                  samples=1)
