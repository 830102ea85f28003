"""How commands are split over replicas and collected: what is collected is what was split, for every way and number of
replicas; and every command has one call and one method."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.data.batch import Batch
from elastic_rl.errors import ConfigError
from elastic_rl.trainer.forward_worker import ForwardWorker
from elastic_rl.trainer.service.calls import DISPATCH, TrainerCalls
from elastic_rl.trainer.service.commands import Command, CommandKind
from elastic_rl.trainer.service.dispatch import (
    ALL,
    DP,
    FIRST,
    WITH_RESULT,
    Call,
    Dispatch,
    Split,
    command,
    dispatched_by,
    executed_by,
    executes,
)
from elastic_rl.trainer.worker import TrainerWorker


def batch_of(lengths: list[int]) -> Batch:
    inside = torch.arange(max(lengths, default=0))[None] < torch.tensor(lengths, dtype=torch.int64)[:, None]
    return Batch({"tokens": torch.arange(1, 1 + inside.numel()).view(inside.shape) * inside,
                  "lengths": torch.tensor(lengths, dtype=torch.int64),
                  "loss_mask": inside & (torch.arange(inside.shape[1]) > 0)})


def echoed(how: Dispatch[Any], batch: Batch, replicas: int) -> tuple[list[Batch], Any]:
    """The shares, and what is collected when each replica gives back its own, in the wire's format."""
    rows = how.rows(batch, replicas)
    shares = [Batch.from_bytes(batch.share(of_replica).to_bytes()) for of_replica in rows]
    return shares, how.collected({}, batch, rows, [{"tokens": share["tokens"], "loss_mask": share["loss_mask"]}
                                                   for share in shares])


batches = st.lists(st.integers(1, 30), max_size=20).map(batch_of)


@given(batches, st.integers(1, 9))
def test_what_is_split_and_joined_is_the_batch(batch: Batch, replicas: int) -> None:
    shares, found = echoed(Dispatch(Split.DP, DP), batch, replicas)
    assert torch.equal(found["tokens"], batch["tokens"]) and torch.equal(found["loss_mask"], batch["loss_mask"])
    assert found["loss_mask"].dtype == torch.bool
    assert sum(share.samples for share in shares) == batch.samples and len(shares) == replicas


@given(batches, st.integers(1, 9))
def test_what_every_replica_gets_and_gives_is_the_batch_each_time(batch: Batch, replicas: int) -> None:
    shares, found = echoed(Dispatch(Split.ALL, ALL), batch, replicas)
    assert len(shares) == len(found) == replicas
    assert all(torch.equal(of_replica["tokens"], batch["tokens"]) for of_replica in found)


@given(batches, st.integers(1, 9))
def test_parts_collected_apart_are_the_batch_in_row_order(batch: Batch, replicas: int) -> None:
    how = Dispatch(Split.DP, ALL)
    rows, (_, found) = how.rows(batch, replicas), echoed(how, batch, replicas)
    assert sorted(torch.cat(rows).tolist()) == list(range(batch.samples))
    for of_replica, outputs in zip(rows, found, strict=True):
        width = outputs["tokens"].shape[1]
        assert torch.equal(outputs["tokens"], batch["tokens"][of_replica, :width])
        assert not batch["tokens"][of_replica, width:].any()


@given(batches, st.integers(1, 9))
def test_no_replica_has_more_than_the_average_and_the_costliest_sample(batch: Batch, replicas: int) -> None:
    own = batch["lengths"]
    loads = [int(own[rows].sum()) for rows in Dispatch(Split.DP, DP).rows(batch, replicas)]
    assert replicas * max(loads) <= int(own.sum()) + (replicas - 1) * max(own.tolist(), default=0)


@given(st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False)), st.integers(1, 9))
def test_result_of_rank_0_is_given_as_it_is(result: dict[str, Any], replicas: int) -> None:
    how = Dispatch(Split.NONE, FIRST)
    assert how.collected(result, None, how.rows(None, replicas), []) == result


def test_outputs_that_are_not_those_of_the_shares_are_refused() -> None:
    batch, how = batch_of([3, 5]), DISPATCH[CommandKind.FORWARD_VALUES]
    rows = how.rows(batch, 2)
    with pytest.raises(ConfigError, match="values of a share must be"):
        how.collected({}, batch, rows, [{"values": torch.zeros(1, 4)} for _ in rows])


def test_batch_belongs_to_the_commands_that_are_split() -> None:
    with pytest.raises(ValueError, match="takes no batch"):
        DISPATCH[CommandKind.SAVE].rows(batch_of([3]), 2)
    with pytest.raises(ValueError, match="needs a batch"):
        DISPATCH[CommandKind.UPDATE].rows(None, 2)


@pytest.mark.parametrize("split", [Split.ALL, Split.NONE])
@pytest.mark.parametrize("collect", [DP, WITH_RESULT])
def test_only_what_was_split_over_replicas_can_be_joined(split: Split, collect: Any) -> None:
    with pytest.raises(ValueError, match="only what was split"):
        Dispatch(split, collect)


def test_every_command_has_one_call_and_one_method_of_the_ranks() -> None:
    assert dispatched_by(TrainerCalls).keys() == set(CommandKind)
    assert executed_by(TrainerWorker, ForwardWorker).keys() == set(CommandKind)
    assert not TrainerWorker.methods.keys() & ForwardWorker.methods.keys()

    class Twice:
        @executes(*CommandKind)
        def first(self) -> None: ...

        @executes(CommandKind.SAVE)
        def second(self) -> None: ...

    with pytest.raises(TypeError, match="a second method for the command save"):
        executed_by(Twice)
    with pytest.raises(TypeError, match="no method for the commands"):
        dispatched_by(Twice)


class Recorded(TrainerCalls):
    """Keeps what it is to bring to the ranks, and answers with how it is collected."""

    def dispatch(self, kind: CommandKind, how: Dispatch[Any], call: Call) -> Any:
        self.command = Command("c", kind, 1, 1, "g", **call.fields)
        self.batch = call.batch
        return how.collect.name


def test_call_carries_what_its_arguments_say() -> None:
    calls, batch = Recorded(), batch_of([2])
    assert calls.forward_logprobs(batch, weights="reference", step=4) == "dp"  # type: ignore[comparison-overlap]
    assert calls.command == Command("c", CommandKind.FORWARD_LOGPROBS, 1, 1, "g", step=4, weights="reference")
    assert calls.batch is batch
    assert calls.load(7, "rl", 3) == "first"  # type: ignore[comparison-overlap]
    assert calls.command == Command("c", CommandKind.LOAD, 1, 1, "g", step=3, version=7) and calls.batch is None


def test_new_command_is_one_decorated_call() -> None:
    class Further(Recorded):
        @command(CommandKind.FORWARD_VALUES, split=Split.ALL, collect=ALL)
        def probe(self, batch: Batch) -> Call:
            """On every replica alike."""
            return Call(batch, step=1)

    assert Further().probe(batch_of([2])) == "all"  # type: ignore[comparison-overlap]
    assert Further.probe.__doc__ == "On every replica alike."
