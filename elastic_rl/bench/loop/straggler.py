"""straggler: the throughput of a run beside an engine that never catches up, over its own before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from elastic_rl.bench.loop import job
from elastic_rl.bench.loop.steps import intervals
from elastic_rl.bench.loop.testbed import Testbed
from elastic_rl.bench.measurement import Row
from elastic_rl.bench.options import Unmeasurable
from elastic_rl.etcd.records import Engine, EngineState, Straggler
from elastic_rl.faults.context import INJECT_TIMEOUT_S, Fault, FaultContext
from elastic_rl.host.paths import JobPaths
from elastic_rl.report.build import Record, in_order, read_records
from elastic_rl.runtime.waiting import wait_until

GOAL = 0.9
_ENGINES = 3
_STEPS, _QUICK_STEPS = 30, 12
"""Steps that are measured with all engines, and as many without one of them."""
_NEVER = 1 << 62
"""A version that no run comes to."""


class GivenUp(Fault):
    """Has one engine of a pool given up for ever, in the form of a fault: its record asks, as the leader's would, for a
    version that never comes. From then on leader, driver, router, engine and loop do what they do beside one that does
    not catch up: it follows the head, and gets no requests."""

    name = "given_up"

    def __init__(self, context: FaultContext, engines: int) -> None:
        self._context, self._engines, self._id = context, engines, ""

    def inject(self) -> tuple[str, str]:
        wait_until(lambda: len(self._context.ready()) == self._engines, timeout_s=INJECT_TIMEOUT_S,
                   what="a pool of ready engines")
        self._id = max(self._context.ready())
        wait_until(self._asks, timeout_s=INJECT_TIMEOUT_S, what=f"the record of {self._id}")
        return f"engine {self._id}", f"it must have version {_NEVER}"

    def _asks(self) -> bool:
        """Whether the record asks for it; if not, has it do so. The engine may have written the record meanwhile."""
        engine = self._engine()
        if engine is None or engine.is_behind:
            return engine is not None
        asked = engine.replace(straggler=Straggler(needs=_NEVER, missed=engine.version, since=0.0))
        self._context.etcd.put(self._context.keys.engine(engine.id), asked.encode())
        return False

    def _engine(self) -> Engine | None:
        return next((engine for engine in self._context.engines() if engine.id == self._id), None)

    def detected(self) -> bool:
        engine = self._engine()
        return engine is not None and engine.state is EngineState.SYNCING and engine.is_behind

    def healed(self) -> bool:
        return True


def measure(testbed: Testbed) -> Iterator[Row]:
    count = _QUICK_STEPS if testbed.options.quick else _STEPS
    folder = testbed.folder / "straggler"
    folder.mkdir()
    before = job.WARM_STEPS + count
    cfg = job.configure_short_steps(folder, testbed.options, before + job.WARM_STEPS + count,
                                    [f"--rollout.engines={_ENGINES}"])

    def plan(context: FaultContext, _steps: int) -> list[tuple[int, Sequence[Fault]]]:
        return [(before, [GivenUp(context, cfg.rollout.engines)])]

    job.run(cfg, plan=plan)
    paths = JobPaths.of(cfg)
    yield from rows(in_order(read_records(paths.steps), read_records(paths.faults)), cfg.rollout.engines)


def rows(records: Sequence[Record], engines: int) -> list[Row]:
    """Rows from the records of a run with so many engines, one of which was given up in the middle. Raises
    Unmeasurable. Pure."""
    found = [record for record in records if record["kind"] == "fault" and record["name"] == GivenUp.name]
    if len(found) != 1 or not found[0].get("detected_at"):
        raise Unmeasurable(f"no engine was given up: {found[0].get('witness') if found else 'the run ended before'}")
    if engines < 2:
        raise Unmeasurable("an engine that is alone is never given up")
    steps = intervals(records)
    whole = [s["samples"] / took for s, took in steps if s["at"] <= found[0]["injected_at"]]
    without = [s["samples"] / took for s, took in steps if s["at"] - took >= found[0]["detected_at"]]
    if not whole:
        raise Unmeasurable("no step was made before the engine was given up")
    before = median(whole)
    return [Row.of("straggler", f"samples trained a second beside an engine that never catches up, over those with all "
                   f"{engines}, less its share", [rate / before * engines / (engines - 1) for rate in without], "×",
                   op=">=", goal=GOAL),
            Row.of("straggler-samples-per-s", "samples trained a second beside it", without, "1/s", op=">=",
                   alternatives={"with all engines": before})]
