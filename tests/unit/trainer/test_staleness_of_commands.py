"""Steps that the gate refuses for the versions of their samples, and how the actor hears of it."""

from __future__ import annotations

import pytest

from elastic_rl.data.branch import Branch
from elastic_rl.data.staleness import StalenessRule
from elastic_rl.errors import ConfigError, Conflict, StaleSamples
from elastic_rl.trainer.progress import Progress
from elastic_rl.trainer.service.board import Board
from elastic_rl.trainer.service.client import _error_of
from elastic_rl.trainer.service.commands import Accumulate, Apply, Command, Update, WriterGate

PROGRESS = Progress("rl", 4)
RULE = StalenessRule(9, 1, Branch(5, 8), 9)
SENT = {"id": "c", "epoch": 1, "term": 2, "group": "g", "step": 5}
STEPS = (Update(batch="b", **SENT), Accumulate(batch="b", part=0, **SENT), Apply(parts=1, **SENT))


def _of(command: Command, *versions: int) -> Command:
    return command.model_copy(update={"sample_versions": versions})


@pytest.mark.parametrize("command", STEPS, ids=lambda c: c.kind)
def test_step_of_samples_beyond_the_staleness_is_refused_whatever_its_actor_believes(command: Command) -> None:
    gate = WriterGate(1, "g", term=2)
    assert gate.admit(_of(command, 8, 9), PROGRESS, RULE) is None
    for versions in ((5, 8), (7, 9), (9, 10), (0, 9)):
        with pytest.raises(StaleSamples) as refused:
            gate.admit(_of(command, *versions), PROGRESS, RULE)
        assert len(refused.value.versions) == 1 and refused.value.versions[0] in versions
    with pytest.raises(ConfigError, match="does not say which policy versions"):
        gate.admit(command, PROGRESS, RULE)
    with pytest.raises(Conflict, match="does not follow"):
        gate.admit(_of(command, 3).model_copy(update={"step": 4}), PROGRESS, RULE)
    assert gate.admit(command, PROGRESS) is None, "of a group that does not train the policy"


def test_supervised_step_has_no_versions() -> None:
    step = STEPS[0].model_copy(update={"phase": "sft"})
    assert WriterGate(1, "g", term=2).admit(step, Progress("sft", 4), RULE) is None


def test_refusal_reaches_the_actor_with_the_versions() -> None:
    board = Board(1 << 10)
    board.set_status(ready=True)
    board.submit(STEPS[2])
    with pytest.raises(StaleSamples) as sent:
        RULE.require([3, 9, 10])
    board.refused(STEPS[2], sent.value)
    found = _error_of(board.result("c", 0.0) or {})
    assert isinstance(found, StaleSamples) and found.versions == (3, 10)
    assert (found.message, found.hint) == (sent.value.message, sent.value.hint)
    assert _error_of({"error": "stale", "message": "m", "versions": "garbage"}).versions == ()  # type: ignore[attr-defined]
