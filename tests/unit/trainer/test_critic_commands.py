"""Which commands a group of a job with a critic admits, and how it names its states."""

from __future__ import annotations

import pytest

from elastic_rl.config.groups import TRAINER_GROUPS
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.data.ledger import Consumption
from elastic_rl.dcs.catalog.pairs import BEGINNING
from elastic_rl.errors import Conflict, Fenced, PluginFailed, StepRefused, StepsHeld, TrainerFailed
from elastic_rl.trainer.progress import Progress
from elastic_rl.trainer.service.commands import (
    ForwardValues,
    Load,
    Save,
    Update,
    WriterGate,
    after_begin_rl,
    after_update,
)

PROGRESS = Progress("rl", 4, step_id="a")
VALUES = ForwardValues(id="v-1", epoch=1, term=2, group="g", batch="b", step=5)
LOAD = Load(id="l-1", epoch=1, term=2, group="g", step=4, version=7)


@pytest.mark.parametrize("command", [VALUES, LOAD], ids=lambda c: c.kind)
def test_stale_actor_or_one_that_knows_another_formation_is_refused(command: ForwardValues | Load) -> None:
    gate = WriterGate(1, "g", term=2)
    for fenced in ({"epoch": 2}, {"term": 1}):
        with pytest.raises(Fenced):
            gate.admit(command.model_copy(update=fenced), PROGRESS)
    with pytest.raises(TrainerFailed, match="re-formed"):
        gate.admit(command.model_copy(update={"group": "before"}), PROGRESS)
    with pytest.raises(Conflict):
        gate.admit(command.model_copy(update={"step": command.step + 1}), PROGRESS)
    with pytest.raises(Conflict):
        gate.admit(command.model_copy(update={"phase": "sft"}), PROGRESS)
    assert gate.admit(command, PROGRESS) is None


def test_executed_load_whose_answer_was_lost_is_not_repeated() -> None:
    gate = WriterGate(1, "g", term=2)
    assert gate.admit(LOAD, PROGRESS) is None
    gate.executed(LOAD, {"loaded": True})
    assert gate.admit(LOAD, Progress("rl", 2)) == {"loaded": True}


@pytest.mark.parametrize("group", TRAINER_GROUPS)
def test_hint_names_the_group_whose_steps_are_held(group: str) -> None:
    step = Update(id="u", epoch=1, term=2, group="g", batch="b", step=5)
    back = step.went_back(PluginFailed("the loss is not finite", hint="lower lr"), group, 4, held=False)
    assert isinstance(back, StepRefused) and back.went_back and back.hint == "lower lr"
    assert back.message.endswith(f"; step 5 had made an update by then, so the {group} is back at step 4")
    held = step.went_back(PluginFailed("the loss is not finite", hint="lower lr"), group, 4, held=True)
    assert isinstance(held, StepsHeld)
    assert held.message.endswith(f"; step 5 had made an update by then, so the {group} is back at step 4 and makes "
                                 "no step")
    assert held.hint == f"lower lr correct it, and `elastic-rl restart {group}`"


def test_values_may_be_asked_for_again() -> None:
    gate = WriterGate(1, "g", term=2)
    for _ in range(2):
        assert gate.admit(VALUES, PROGRESS) is None
        gate.executed(VALUES, {})


def test_state_is_named_after_the_update_that_made_it() -> None:
    progress = Progress("sft", 30)
    assert progress.pair == BEGINNING, "the critic takes no part in this phase"
    progress = after_begin_rl(progress, Save(id="s", epoch=1, term=1, group="g", phase="sft", step=30))
    assert progress.pair == BEGINNING == Progress("rl").pair
    names = set()
    for step_id in ("x", "y"):
        made = after_update(progress, Update(id="u", epoch=1, term=1, group="g", batch="b", step=1, step_id=step_id,
                                             consumption=Consumption(IntervalSet(((0, 4),)))))
        assert Progress.from_json(made.to_json()) == made
        names.add(made.pair)
    assert len(names) == 2 and BEGINNING not in names
