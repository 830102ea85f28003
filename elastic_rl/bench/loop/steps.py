"""The rows of the measured run, from its own records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from elastic_rl.bench.loop.job import WARM_STEPS
from elastic_rl.bench.loop.testbed import Testbed
from elastic_rl.bench.measurement import Row
from elastic_rl.report.build import Record, effective_steps
from elastic_rl.report.charts import STAGE_ORDER

_STAGES = tuple(stage for stage in STAGE_ORDER if stage not in ("publish_stall", "groups", "teacher", "devices"))
_IDLE_STAGES = ("sync", "generate", "advantage", "train")


def measure(testbed: Testbed) -> Iterator[Row]:
    try:
        testbed.run()
    except BaseException:
        if measured := timed_steps(testbed.records())[WARM_STEPS:]:
            testbed.options.say(f"the run did not end; measured by {len(measured)} of its steps")
            yield from rows(testbed.records())
        raise
    yield from rows(testbed.records())


def rows(records: Sequence[Record]) -> list[Row]:
    """Rows from the records of a run. Pure."""
    steps = timed_steps(records)[WARM_STEPS:]
    seconds = [s["seconds"] for s in steps]
    out = [Row.of("samples-per-s", "samples trained a second",
                  [s["samples"] / s["seconds"]["total"] for s in steps], "1/s", op=">="),
           Row.of("step-s", "step time", [s["total"] for s in seconds], "s")]
    out += [Row.of(f"step-s-{stage.replace('_', '-')}", f"step time: {stage.replace('_', ' ')}",
                   [s[stage] for s in seconds if stage in s], "s") for stage in _STAGES]
    between = [interval - step["seconds"]["total"] for step, interval in intervals(records)]
    out.append(Row.of("step-s-between", "from a step's end to the next one: log, status, samples for people", between,
                      "s"))
    out.append(Row.of("step-s-train-ranks", "of train: the ranks' own step, without sending it to them",
                      [s["train_s"] for s in steps if s.get("train_s")], "s"))
    pulls = {(e["id"], e["version"]): float(e["pull_apply_s"])
             for s in steps for e in s.get("engines") or [] if e.get("pull_apply_s")}
    stalls = [s["publish_stall"] for s in seconds if "publish_stall" in s]
    out += [Row.of("publish-stall-s", "publish stall", stalls, "s"),
            Row.of("pull-apply-s", "pull and apply in an engine", list(pulls.values()), "s")]
    idle = [s.get("idle_s") or {} for s in steps]
    out += [Row.of(f"idle-s-{stage}", f"a step waits in {stage} for another part", [i.get(stage, 0.0) for i in idle],
                   "s") for stage in _IDLE_STAGES]
    return [*out, Row.of("idle-s-other", "… in any other stage",
                         [sum(v for k, v in i.items() if k not in _IDLE_STAGES) for i in idle], "s")]


def is_timed(step: Record) -> bool:
    """Whether the record is of the actor that did the step. A successor also records the last step of its predecessor,
    when it finds it done, without its seconds."""
    return bool((step.get("seconds") or {}).get("total"))


def timed_steps(records: Sequence[Record]) -> list[Record]:
    """The steps that were not undone and whose seconds are known, by step. Pure."""
    return [step for step in effective_steps(records) if is_timed(step)]


def intervals(records: Sequence[Record]) -> list[tuple[Record, float]]:
    """Each step's record with the seconds since the end of the step before it, which is all that a step takes. Pure.

    Left out: the first steps, steps after an evaluation, a rewind or a step of a predecessor, and steps that were
    undone.
    """
    kept = {id(record) for record in timed_steps(records)[WARM_STEPS:]}
    out: list[tuple[Record, float]] = []
    before: Record | None = None
    for record in records:
        if record["kind"] == "step":
            if id(record) in kept and before is not None and record["step"] == before["step"] + 1:
                out.append((record, record["at"] - before["at"]))
            before = record if is_timed(record) else None
        elif record["kind"] in ("eval", "rewind"):
            before = None
    return out
