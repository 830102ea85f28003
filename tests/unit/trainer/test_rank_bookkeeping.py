"""What rank 0 of a trainer group remembers of its steps does not grow with them."""

from __future__ import annotations

import gc
from collections import Counter

from elastic_rl.data.branch import Branch
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.data.ledger import Consumption
from elastic_rl.data.staleness import StalenessRule
from elastic_rl.telemetry import traces
from elastic_rl.trainer.progress import Progress
from elastic_rl.trainer.service.board import Board
from elastic_rl.trainer.service.commands import Update, WriterGate, after_update

STEPS = 1000


class Rank:
    """What a rank does for a step, but to compute and to publish."""

    def __init__(self) -> None:
        self.board, self.gate = Board(1 << 20), WriterGate(1, "group", 1)
        self.board.set_status(ready=True)
        self.progress, self.branch = Progress("rl"), Branch()

    def make(self, step: int) -> None:
        command = Update(id=f"c{step}", epoch=1, term=1, group="group", batch=f"b{step}", phase="rl", step=step,
                         cursor={"step": step}, sample_versions=(step,), consumption=Consumption(
                             IntervalSet.from_values([3 * step, 3 * step + 1]),
                             {"uniform": IntervalSet.from_values([3 * step + 2])}))
        self.board.put_share(command.batch, b"samples")
        self.board.submit(command)
        assert self.board.next() is command and self.board.take_share(command.batch) == [b"samples"]
        with traces.span("trainer.step", step=step):
            assert self.gate.admit(command, self.progress, StalenessRule(step, 0, self.branch, step)) is None
            self.progress = after_update(self.progress, command)
            self.branch = self.branch.published(step)
        self.gate.executed(command, {"step": step})
        self.board.done(command, {"step": step})
        assert self.board.result(command.id, 0.0) == {"result": {"step": step}}


def _objects() -> Counter[str]:
    gc.collect()
    return Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())


def test_rank_keeps_as_many_objects_after_any_number_of_steps() -> None:
    rank = Rank()
    for step in range(1, 100):
        rank.make(step)
    before = _objects()
    for step in range(100, 100 + STEPS):
        rank.make(step)
    more = _objects() - before
    assert max(more.values(), default=0) < STEPS // 4, more.most_common(5)
    assert len(str(rank.progress.to_json())) < 300 and len(rank.branch.to_json()) == 2
