"""async-vs-sync: the measured run with ``train.schedule: fully_async``, beside itself with ``sync``; who waits for whom
in it, how stale its groups are, and what a group costs in each queue."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from elastic_rl.bench.loop import job, own_cores
from elastic_rl.bench.loop.steps import intervals
from elastic_rl.bench.loop.testbed import Testbed
from elastic_rl.bench.measurement import Row
from elastic_rl.data.samples import Group, Prompt, Sample, Segment
from elastic_rl.errors import ElasticRLError, QueueUnavailable
from elastic_rl.host.address import own_address
from elastic_rl.pipeline.flow.group_queue import EmbeddedQueue, GroupQueue
from elastic_rl.pipeline.flow.transfer_queue import TransferQueueQueue
from elastic_rl.report.build import Record, percentile
from elastic_rl.runtime.process import RAY_PRIORITY
from elastic_rl.runtime.waiting import wait_until

log = logging.getLogger(__name__)

_WAITS = {"async-idle-s-groups": "a step of it: the trainer waits for groups",
          "async-idle-s-producer": "beside it, a step: generation waits for a part of the system",
          "async-idle-s-producer-no-room": "beside it, a step: generation has nothing to do, since the staleness "
                                           "allows no more groups"}
_GROUPS, _SAMPLES, _TOKENS = 64, 8, 1024
"""Sizes of the groups that are put into the queues."""
_START_S = 300.0
"""Longest start of the queue's actors."""
_TOO_SHORT = "no step counts: the run was too short, or did not come far enough"


def measure(testbed: Testbed) -> Iterator[Row]:
    if testbed.options.selects("async-vs-sync", "async-step-s", "async-tokens", "async-staleness",
                               *_WAITS):
        yield from rows(testbed.run().records, testbed.variant("async", job.ASYNC_SETTINGS))
    if testbed.options.selects("async-queue-overhead", "async-queue-overhead-s"):
        yield from queue_rows(testbed.variant("async", job.ASYNC_SETTINGS),
                              testbed.variant("async-transfer-queue", job.TRANSFER_QUEUE_SETTINGS))
    if testbed.options.selects("async-queue-s"):
        yield queue_row()
    yield from _measured_apart(testbed)


def _measured_apart(testbed: Testbed) -> Iterator[Row]:
    """What generation beside training gains when neither takes the cores of the other. Raises Unmeasurable."""
    if testbed.options.selects("async-own-cores", "async-own-cores-s", "async-parts", "async-parts-s"):
        own_cores.of_this_machine()  # before a cluster is started for nothing
    if testbed.options.selects("async-own-cores", "async-own-cores-s"):
        yield from own_core_rows(testbed.variant("own-cores-sync", (), own_cores.plan),
                                 testbed.variant("own-cores-async", job.ASYNC_SETTINGS, own_cores.plan))
    if testbed.options.selects("async-parts", "async-parts-s"):
        yield from part_rows(testbed.long_variant("whole-steps", job.ONE_UPDATE_SETTINGS, own_cores.plan),
                             testbed.long_variant("steps-in-parts", job.PART_SETTINGS, own_cores.plan))


@dataclass(frozen=True)
class Counted:
    """The steps of a run that count: neither the first ones, nor the last ones, beside which ever fewer groups are
    left to be generated."""

    steps: list[tuple[Record, float]]
    """Records, with their seconds."""
    ahead: int

    @classmethod
    def of(cls, records: Sequence[Record], ahead: int) -> Counted:
        """``ahead``: steps whose groups may be generated before their turn."""
        found = intervals(records)[ahead:]
        return cls(found[:-(ahead + 1)], ahead)

    @property
    def mean_s(self) -> float:
        return sum(seconds for _, seconds in self.steps) / len(self.steps)

    @property
    def block_means_s(self) -> list[float]:
        """Mean seconds of each ``ahead + 1`` steps on end: groups that were generated together are trained one step
        after the other, so single steps are much longer and much shorter than what a run takes for one."""
        size = self.ahead + 1
        seconds = [seconds for _, seconds in self.steps]
        return [sum(block) / size for at in range(0, len(seconds) - size + 1, size)
                if (block := seconds[at:at + size])] or [self.mean_s]

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of responses that were trained on."""
        tokens = sum(step.get("samples", 0) * (step.get("response_tokens") or {}).get("mean", 0.0)
                     for step, _ in self.steps)
        return tokens / sum(seconds for _, seconds in self.steps)


def rows(sync: Sequence[Record], fully_async: Sequence[Record]) -> list[Row]:
    """Rows from the records of both runs. Pure."""
    ours, alone = Counted.of(fully_async, job.ASYNC_STALENESS), Counted.of(sync, job.ASYNC_STALENESS)
    said = [step.get("algorithm") or {} for step, _ in ours.steps]
    waits = ([(step.get("idle_s") or {}).get("groups", 0.0) for step, _ in ours.steps],
             *([one.get(name, 0.0) for one in said] for name in ("producer_wait_s", "producer_no_room_s")))
    ages = [one for one in said if "staleness_mean" in one]
    tokens = "response tokens trained a second, over the synchronous schedule's"
    return [
        *_faster("async-vs-sync", "steps a second of the fully asynchronous schedule over the synchronous one's",
                 "async-step-s", "a step of it", ours, "sync", alone),
        Row(id="async-tokens", name=tokens, value=ours.tokens_per_s / alone.tokens_per_s, unit="×", op=">=",
            samples=len(ours.steps)) if ours.steps and alone.steps and alone.tokens_per_s
        else Row.unmeasured("async-tokens", tokens, _TOO_SHORT, unit="×", op=">="),
        *(_mean(row_id, name, seconds, "s") for (row_id, name), seconds in zip(_WAITS.items(), waits, strict=True)),
        _mean("async-staleness", "versions by which a group of it is older than the policy that it trains",
              [age["staleness_mean"] for age in ages], "versions",
              alternatives={"the most": max(age["staleness_max"] for age in ages)} if ages else {})]


def own_core_rows(sync: Sequence[Record], fully_async: Sequence[Record]) -> list[Row]:
    """Rows as ``rows`` makes them, where engines and ranks have cores of their own. The limit: all of a step but the
    longer one of generation and training takes no time. Raises Unmeasurable. Pure."""
    alone = Counted.of(own_cores.records_with(sync), job.ASYNC_STALENESS)
    longer = [max(seconds["generate"], seconds["train"]) for step, _ in alone.steps
              if {"generate", "train"} <= (seconds := step["seconds"]).keys()]
    return _faster("async-own-cores", "the same, with engines and ranks on cores of their own in both",
                   "async-own-cores-s", "a step of it",
                   Counted.of(own_cores.records_with(fully_async), job.ASYNC_STALENESS), "sync", alone,
                   sum(longer) / len(longer) if longer else None)


def queue_rows(embedded: Sequence[Record], transfer_queue: Sequence[Record]) -> list[Row]:
    """Rows of a whole job with each queue. Pure."""
    return _faster("async-queue-overhead", "steps a second of the fully asynchronous schedule with TransferQueue over "
                   "those with the embedded queue", "async-queue-overhead-s", "a step with TransferQueue",
                   Counted.of(transfer_queue, job.ASYNC_STALENESS), "embedded",
                   Counted.of(embedded, job.ASYNC_STALENESS))


def part_rows(whole: Sequence[Record], parts: Sequence[Record]) -> list[Row]:
    """Rows of runs with long responses, where the last groups of a step come late. Raises Unmeasurable. Pure."""
    return _faster("async-parts", "steps a second in parts of 2 prompts over those of whole steps of 8, with responses "
                   "of up to 256 tokens, staleness 0, one update, and cores of their own",
                   "async-parts-s", "a step of it", Counted.of(own_cores.records_with(parts), 0), "whole",
                   Counted.of(own_cores.records_with(whole), 0))


def _faster(row_id: str, name: str, seconds_id: str, seconds_name: str, ours: Counted, than: str,
            others: Counted, least_s: float | None = None) -> list[Row]:
    """How many times as many steps a second: of all counted steps together, with the spread of blocks of them.
    ``least_s``: mean seconds of the others' steps that no schedule could save."""
    if not ours.steps or not others.steps:
        return [Row.unmeasured(row_id, name, _TOO_SHORT, unit="×", op=">="),
                Row.unmeasured(seconds_id, seconds_name, _TOO_SHORT, unit="s")]
    blocks = ours.block_means_s
    low, high = percentile(blocks, 0.05), percentile(blocks, 0.95)
    assert low and high
    return [Row(id=row_id, name=name, value=others.mean_s / ours.mean_s, unit="×", op=">=",
                limit=others.mean_s / least_s if least_s else None, samples=len(ours.steps),
                low=others.mean_s / high, high=others.mean_s / low),
            Row(id=seconds_id, name=seconds_name, value=ours.mean_s, unit="s", limit=least_s, samples=len(ours.steps),
                low=low, high=high, alternatives={than: others.mean_s})]


def _mean(row_id: str, name: str, values: Sequence[float], unit: str, **fields: Any) -> Row:
    """A row of the mean of steps: one of several bears the wait for all that were generated together."""
    row = Row.of(row_id, name, values, unit, **fields)
    return row.model_copy(update={"value": sum(values) / len(values)}) if values else row


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
    # It raises ConfigError before Ray is started for nothing.
    queue = TransferQueueQueue(_GROUPS, units=2, call_s=60.0, host=own_address())
    import ray
    os.environ |= RAY_PRIORITY  # as in a job
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    try:
        return _through(queue)
    finally:
        ray.shutdown()


def _through(queue: GroupQueue) -> list[float]:
    """Seconds of each group; the first one starts the queue and does not count."""
    def took_first() -> bool:
        try:
            queue.put(group)
        except QueueUnavailable as e:  # its actors start
            log.info("%s", e)
            return False
        return True

    draw = random.Random(0)
    samples = tuple(Sample((Segment(tuple(draw.randrange(150_000) for _ in range(_TOKENS)),
                                    tuple(-draw.expovariate(1.0) for _ in range(_TOKENS)), version=1),))
                    for _ in range(_SAMPLES))
    seconds = []
    try:
        for ordinal in range(_GROUPS + 1):
            group = Group(ordinal, Prompt(tuple(range(100))), samples)
            if not ordinal:
                wait_until(took_first, timeout_s=_START_S, what="the queue")
            began = time.perf_counter()
            queue.put(group)
            queue.reader(queue.get([ordinal]).values()).read([(ordinal, index) for index in range(_SAMPLES)])
            queue.drop([ordinal])
            seconds.append(time.perf_counter() - began)
    finally:
        queue.close()
    return seconds[1:]
