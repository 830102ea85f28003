"""async-vs-sync: the measured run with ``train.schedule: fully_async``, beside itself with ``sync``; who waits for whom
in it, how stale its groups are, and what a group costs in each queue."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from statistics import median

from elastic_rl.bench.loop import job, own_cores
from elastic_rl.bench.loop.steps import intervals
from elastic_rl.bench.loop.testbed import Testbed
from elastic_rl.bench.measurement import Row
from elastic_rl.data.samples import Group, Prompt, Sample, Segment
from elastic_rl.errors import ElasticRLError, QueueUnavailable
from elastic_rl.pipeline.fully_async.group_queue import EmbeddedQueue, GroupQueue
from elastic_rl.pipeline.fully_async.transfer_queue import TransferQueueQueue
from elastic_rl.report.build import Record
from elastic_rl.runtime import wait_until

log = logging.getLogger(__name__)

_IDLE = {"groups": "the trainer waits for groups", "producer": "generation waits for a part of the system",
         "producer_no_room": "generation has nothing to do, since the staleness allows no more groups"}
_GROUPS, _SAMPLES, _TOKENS = 64, 8, 1024
"""Of the groups that are put into the queues."""
_START_S = 300.0
"""Of the queue's actors."""


def measure(testbed: Testbed) -> Iterator[Row]:
    if testbed.options.selects("async-vs-sync", "async-step-s", "async-staleness", *(_idle_id(p) for p in _IDLE)):
        yield from rows(testbed.run().records, testbed.variant("async", job.ASYNC_SETTINGS))
    yield from _measured_alone(testbed)
    if testbed.options.selects("async-queue-s"):
        yield queue_row()


def _measured_alone(testbed: Testbed) -> Iterator[Row]:
    """What generation beside training gains when neither takes the cores of the other."""
    if testbed.options.selects("async-own-cores", "async-own-cores-s"):
        yield from own_core_rows(testbed.variant("own-cores-sync", (), own_cores.plan),
                                 testbed.variant("own-cores-async", job.ASYNC_SETTINGS, own_cores.plan))
    if testbed.options.selects("async-parts", "async-parts-s"):
        yield from part_rows(testbed.long_variant("whole-steps", job.ONE_UPDATE_SETTINGS, own_cores.plan),
                             testbed.long_variant("steps-in-parts", job.PART_SETTINGS, own_cores.plan))


def rows(sync: Sequence[Record], fully_async: Sequence[Record]) -> list[Row]:
    """From the records of both runs. Pure."""
    steps = intervals(fully_async)
    idle = [step.get("idle_s") or {} for step, _ in steps]
    ages = [step["algorithm"] for step, _ in steps if "staleness_mean" in (step.get("algorithm") or {})]
    return [
        *_faster("async-vs-sync", "steps a second of the fully asynchronous schedule over the synchronous one's",
                 "async-step-s", "a step of it", fully_async, "sync", sync),
        *(Row.of(_idle_id(part), f"in a step of it {what}", [i.get(part, 0.0) for i in idle], "s")
          for part, what in _IDLE.items()),
        Row.of("async-staleness", "versions by which a group of it is older than the policy, mean of a step",
               [age["staleness_mean"] for age in ages], "versions",
               alternatives={"the most": max(age["staleness_max"] for age in ages)} if ages else {})]


def own_core_rows(sync: Sequence[Record], fully_async: Sequence[Record]) -> list[Row]:
    """As ``rows``, where engines and ranks have cores of their own. The limit: all of a step but the longer one of
    generation and training takes no time. Pure."""
    longer = [max(seconds["generate"], seconds["train"]) for step, _ in intervals(sync)
              if {"generate", "train"} <= (seconds := step["seconds"]).keys()]
    return _faster("async-own-cores", "the same, with engines and ranks on cores of their own in both",
                   "async-own-cores-s", "a step of it", fully_async, "sync", sync, longer)


def part_rows(whole: Sequence[Record], parts: Sequence[Record]) -> list[Row]:
    """Of runs with long responses, where the last groups of a step come late. Pure."""
    return _faster("async-parts", "steps a second in parts of 2 prompts over those of whole steps of 8, with responses "
                   "of up to 256 tokens, staleness 0, one update, and cores of their own",
                   "async-parts-s", "a step of it", parts, "whole", whole)


def _faster(row_id: str, name: str, seconds_id: str, seconds_name: str, ours: Sequence[Record], than: str,
            others: Sequence[Record], least_s: Sequence[float] = ()) -> list[Row]:
    """``least_s``: seconds of each of the others' steps that no schedule could save."""
    alone = [seconds for _, seconds in intervals(others)]
    mine = [seconds for _, seconds in intervals(ours)]
    limit = median(least_s) if least_s else None
    return [Row.of(row_id, name, [median(alone) / seconds for seconds in mine] if alone else [], "×", op=">=",
                   limit=median(alone) / limit if alone and limit else None),
            Row.of(seconds_id, seconds_name, mine, "s", limit=limit,
                   alternatives={than: median(alone)} if alone else {})]


def _idle_id(part: str) -> str:
    return f"async-idle-s-{part.replace('_', '-')}"


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
    def took_first() -> bool:
        try:
            queue.put(group)
        except QueueUnavailable as e:  # its actors start
            log.info("%s", e)
            return False
        return True

    segment = Segment(tuple(range(_TOKENS)), (-0.123456789,) * _TOKENS, version=1)
    seconds = []
    try:
        for ordinal in range(_GROUPS + 1):
            group = Group(ordinal, Prompt(tuple(range(100))), (Sample((segment,)),) * _SAMPLES)
            if not ordinal:
                wait_until(took_first, timeout_s=_START_S, what="the queue")
            began = time.perf_counter()
            queue.put(group)
            queue.get([ordinal])
            queue.drop([ordinal])
            seconds.append(time.perf_counter() - began)
    finally:
        queue.close()
    return seconds[1:]
