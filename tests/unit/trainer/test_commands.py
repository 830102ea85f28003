"""Commands of a trainer group: each is read as it was sent, and has one call and one method of the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.data.batch import Batch
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.data.ledger import Consumption
from elastic_rl.errors import ConfigError
from elastic_rl.trainer.forward_worker import ForwardWorker
from elastic_rl.trainer.service.calls import Executed, TrainerCalls, Uploaded
from elastic_rl.trainer.service.commands import (
    KINDS,
    BatchCommand,
    Command,
    ForwardCommand,
    ForwardReference,
    Load,
    Save,
    Update,
)
from elastic_rl.trainer.service.dispatch import executed_by, executes
from elastic_rl.trainer.worker import TrainerWorker

BATCH = Batch({"tokens": torch.ones(2, dtype=torch.int32), "lengths": torch.tensor([2]),
               "loss_mask": torch.tensor([False, True])})
LOAD = Load(id="l-1", epoch=1, term=2, group="g", step=4, version=7)

texts = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=20)
numbers = st.integers(0, 1 << 62)
json_values = st.recursive(st.none() | st.booleans() | numbers | st.floats(allow_nan=False) | texts,
                           lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))
groups = st.sets(st.integers(0, 50)).map(IntervalSet.from_values)
by_name = {"id": st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=20),
           "phase": st.sampled_from(["sft", "rl"]), "cursor": st.dictionaries(texts, json_values, max_size=3),
           "consumption": st.builds(Consumption, groups, st.dictionaries(texts, groups, max_size=2))}
by_type: dict[Any, st.SearchStrategy[Any]] = {
    str: texts, int: numbers, bool: st.booleans(), tuple[int, ...]: st.lists(numbers, max_size=3).map(tuple)}


def commands_of(kind: type[Command]) -> st.SearchStrategy[Command]:
    hints = get_type_hints(kind)
    return st.builds(kind, **{name: by_name[name] if name in by_name else by_type[hints[name]]
                              for name in kind.model_fields if name != "kind"})


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=seeds(40))
@given(st.data())
def test_command_is_read_as_it_was_sent(kind: type[Command], data: st.DataObject) -> None:
    command = data.draw(commands_of(kind))
    assert Command.decode(command.encode()) == command


def test_cursor_keeps_what_is_no_finite_number() -> None:
    sent = Save(id="s", epoch=1, term=1, group="g", step=0, cursor={"mean": math.nan, "best": -math.inf})
    found = Command.decode(sent.encode())
    assert isinstance(found, Save) and math.isnan(found.cursor["mean"]) and found.cursor["best"] == -math.inf


@pytest.mark.parametrize(("sent", "wrong"), [
    (b'"version":7', b'"version":"newest"'), (b'"version":7', b'"version":7.5'), (b',"version":7', b""),
    (b'"version":7', b'"version":7,"cursor":{}'), (b'"kind":"load"', b'"kind":"save"'), (b'"group":"g"', b'"group":3'),
])
def test_command_with_other_fields_than_those_of_its_kind_is_refused(sent: bytes, wrong: bytes) -> None:
    raw = LOAD.encode()
    assert sent in raw
    with pytest.raises(ConfigError, match="not a command"):
        Command.decode(raw.replace(sent, wrong))


def test_command_that_is_executed_on_a_batch_names_it() -> None:
    for kind in (kind for kind in KINDS if issubclass(kind, BatchCommand)):
        assert kind.model_fields["batch"].is_required()
    assert issubclass(ForwardCommand, BatchCommand), "what a replica gives back is joined in the order of the batch"


class Recorded(TrainerCalls):
    """Keeps what it is to bring to the ranks."""

    def execute(self, make: Callable[..., Command], batch: Batch | Uploaded | None = None) -> Executed:
        self.command = make(id="c", epoch=1, term=1, group="g", **({} if batch is None else {"batch": "b"}))
        self.batch = batch
        return Executed({"version": 7}, {"logprobs": torch.zeros(1), "values": torch.ones(1)})


CALLS: tuple[Callable[[TrainerCalls], object], ...] = (
    lambda calls: calls.update("rl", 3, BATCH), lambda calls: calls.accumulate(3, BATCH, 0),
    lambda calls: calls.apply(3, 2), lambda calls: calls.check(3, BATCH), lambda calls: calls.forward_logprobs(BATCH),
    lambda calls: calls.forward_reference(BATCH, 3), lambda calls: calls.forward_values(BATCH, 3),
    lambda calls: calls.forward_version(BATCH, 3), lambda calls: calls.save("rl", 3),
    lambda calls: calls.load(7, "rl", 3), lambda calls: calls.offload(), lambda calls: calls.onload())


def test_every_command_has_one_call_and_one_method_of_the_ranks() -> None:
    calls, sent = Recorded(), list[type[Command]]()
    for call in CALLS:
        call(calls)
        assert (calls.batch is not None) is isinstance(calls.command, BatchCommand)
        sent.append(type(calls.command))
    assert sent == list(KINDS)
    assert executed_by(TrainerWorker, ForwardWorker).keys() == set(KINDS)
    assert not TrainerWorker.methods.keys() & ForwardWorker.methods.keys()


def test_call_carries_what_its_arguments_say() -> None:
    calls = Recorded()
    assert torch.equal(calls.forward_reference(BATCH, 4), torch.zeros(1))
    assert calls.command == ForwardReference(id="c", epoch=1, term=1, group="g", batch="b", step=4)
    assert calls.batch is BATCH
    assert calls.load(7, "rl", 4) == {"version": 7}
    assert calls.command == LOAD.model_copy(update={"id": "c", "term": 1}) and calls.batch is None
    for call in (lambda **how: calls.update("rl", 4, BATCH, **how), lambda **how: calls.accumulate(4, BATCH, 0, **how),
                 lambda **how: calls.apply(4, 1, **how)):
        call(versions=[3, 4])
        assert calls.command.sample_versions == (3, 4)  # type: ignore[attr-defined]
    calls.update("sft", 1, Uploaded("u", "g"), cursor={"a": 1}, step_id="x")
    assert calls.command == Update(id="c", epoch=1, term=1, group="g", batch="b", phase="sft", step=1, cursor={"a": 1},
                                   step_id="x")


def test_second_method_for_a_command_is_refused() -> None:
    class Twice:
        @executes(*KINDS)
        def first(self) -> None: ...

        @executes(Save)
        def second(self) -> None: ...

    with pytest.raises(TypeError, match="a second method for the command Save"):
        executed_by(Twice)
