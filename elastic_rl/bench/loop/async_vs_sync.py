"""async-vs-sync: the measured run with ``train.schedule: fully_async``, beside itself with ``sync``; who waits for whom
in it, how stale its groups are, and what a group costs in each queue."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import median

from elastic_rl.bench.loop.steps import intervals
from elastic_rl.bench.loop.testbed import Testbed
from elastic_rl.bench.measurement import Row
from elastic_rl.data.samples import Group, Prompt, Sample, Segment
from elastic_rl.errors import ElasticRLError
from elastic_rl.pipeline.fully_async.group_queue import EmbeddedQueue, GroupQueue
from elastic_rl.pipeline.fully_async.transfer_queue import TransferQueueQueue
from elastic_rl.report.build import Record

_IDLE = {"groups": "the trainer waits for groups", "producer": "generation waits for a part of the system",
         "producer_no_room": "generation has nothing to do, since the staleness allows no more groups"}
_GROUPS, _SAMPLES, _TOKENS = 64, 8, 1024
"""Of the groups that are put into the queues."""


def measure(testbed: Testbed) -> Iterator[Row]:
    sync = testbed.run().records
    yield from rows(sync, testbed.async_run().records)
    yield queue_row()


def rows(sync: Sequence[Record], fully_async: Sequence[Record]) -> list[Row]:
    """From the records of both runs. Pure."""
    alone = [seconds for _, seconds in intervals(sync)]
    steps = intervals(fully_async)
    idle = [step.get("idle_s") or {} for step, _ in steps]
    ages = [step["algorithm"] for step, _ in steps if "staleness_mean" in (step.get("algorithm") or {})]
    return [
        Row.of("async-vs-sync", "steps a second of the fully asynchronous schedule over the synchronous one's",
               [median(alone) / seconds for _, seconds in steps] if alone else [], "×", op=">="),
        Row.of("async-step-s", "a step of it", [seconds for _, seconds in steps], "s",
               alternatives={"sync": median(alone)} if alone else {}),
        *(Row.of(f"async-idle-s-{part.replace('_', '-')}", f"in a step of it {what}",
                 [i.get(part, 0.0) for i in idle], "s") for part, what in _IDLE.items()),
        Row.of("async-staleness", "versions by which a group of it is older than the policy, mean of a step",
               [age["staleness_mean"] for age in ages], "versions",
               alternatives={"the most": max(age["staleness_max"] for age in ages)} if ages else {})]


def queue_row() -> Row:
    """Seconds of one group into a queue, out of it, and gone: embedded, and in TransferQueue's actors on this host."""
    name = f"a group of {_SAMPLES} samples of {_TOKENS} tokens through the embedded queue"
    found: dict[str, float] = {}
    missing: dict[str, str] = {}
    try:
        found["TransferQueue"] = median(_through_actors())
    except (ElasticRLError, ImportError, RuntimeError, ConnectionError) as e:
        missing["TransferQueue"] = str(e)
    return Row.of("async-queue-s", name, _through(EmbeddedQueue(_GROUPS)), "s", alternatives=found,
                  unmeasured_alternatives=missing)


def _through_actors() -> list[float]:
    queue = TransferQueueQueue(_GROUPS, units=2, call_s=60.0)  # raises ConfigError before Ray is started for nothing
    import ray
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    try:
        return _through(queue)
    finally:
        ray.shutdown()


def _through(queue: GroupQueue) -> list[float]:
    """Of each group; the first one starts the queue and does not count."""
    segment = Segment(tuple(range(_TOKENS)), (-0.123456789,) * _TOKENS, version=1)
    seconds = []
    try:
        for ordinal in range(_GROUPS + 1):
            group = Group(ordinal, Prompt(tuple(range(100))), (Sample((segment,)),) * _SAMPLES)
            began = time.perf_counter()
            queue.put(group)
            queue.get([ordinal])
            queue.drop([ordinal])
            seconds.append(time.perf_counter() - began)
    finally:
        queue.close()
    return seconds[1:]
