"""How the inputs of a command are split over the data-parallel replicas of a group, and how what they give back is
collected. Said once for each command, by the decorator of its typed call (``calls.py``):

    @command(CommandKind.FORWARD_VALUES, split=Split.DP, collect=DP)
    def forward_values(self, batch: Batch, step: int) -> Call:
        return Call(batch, phase="rl", step=step)

and the ranks have one method that is marked with ``@executes(CommandKind.FORWARD_VALUES)``. The transport
(``client.py``) and the loop of the ranks (``group_worker.py``) know no command: both go by what is declared. Which step
a command is about, and who may send it, is said beside its kind (``commands.py``). Everything here is pure.

There is one controller, the actor, and SPMD inside a group: every rank executes the same command on what its replica
has. Who holds what of a batch:

- a replica: its own share and nothing of the others', except with ``Split.ALL``, which is for small inputs;
- rank 0: the share of its replica, like any other; commands carry no tensors;
- the controller: what it decides by. A baseline or a whitened advantage is of all groups of a step, and so is the order
  of samples; for most algorithms these are a few numbers for each sample. Where samples are in a queue that ranks can
  read (``QueuedBatch``), that is all it has, but for tensors that an algorithm asks for, which it has whole; each
  replica reads its own share. Where they are in the controller's memory, as in a synchronous run, it has the whole
  batch as tensors too, with the shares that are being sent, up to eight at a time (as tensors and as bytes). Outputs
  are two tensors [N, T] at most.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

import torch

from elastic_rl.data.batch import Batch
from elastic_rl.errors import ElasticRLError
from elastic_rl.trainer.service.commands import CommandKind

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=Callable[..., Any])
Outputs = Mapping[str, torch.Tensor]
"""Named tensors that a replica computed on its share."""


class Split(Enum):
    """Which samples of a command's batch a replica gets."""

    NONE = "none"
    """The command has no batch."""
    DP = "dp"
    """Each sample goes to one replica; those of a replica are in the batch's order, and as wide as the longest of them.
    Balanced by their tokens, see ``Batch.share_rows``: no replica has more than the average and the longest sample
    together."""
    ALL = "all"
    """Every replica gets every sample."""


@dataclass(frozen=True)
class Collect(Generic[R]):
    """What the caller gets."""

    name: str
    of_replicas: bool
    """Whether the first rank of each replica gives tensors; else rank 0 gives a small result, which is JSON."""
    join: Callable[[dict[str, Any], Batch | None, Sequence[torch.Tensor], Sequence[Outputs]], R]
    """From the result of rank 0, the batch, the rows of each replica, and what each gave back."""


def _joined(_result: dict[str, Any], batch: Batch | None, rows: Sequence[torch.Tensor], outputs: Sequence[Outputs]
            ) -> dict[str, torch.Tensor]:
    assert batch is not None  # by ``Dispatch``
    return {name: batch.joined(rows, [of_replica[name] for of_replica in outputs]) for name in outputs[0]}


FIRST: Collect[dict[str, Any]] = Collect("first", False, lambda result, batch, rows, outputs: result)
"""The result of rank 0; what other ranks return is the same, or of no interest."""
DP: Collect[dict[str, torch.Tensor]] = Collect("dp", True, _joined)
"""Tensors [N, T], in the order of the batch, from those [n, t] of each replica's samples. Raises ConfigError for others
than these."""
WITH_RESULT: Collect[tuple[dict[str, Any], dict[str, torch.Tensor]]] = Collect(
    "with_result", True, lambda result, batch, rows, outputs: (result, _joined(result, batch, rows, outputs)))
"""The result of rank 0, and tensors as those of ``DP``."""
ALL: Collect[list[Outputs]] = Collect("all", True, lambda result, batch, rows, outputs: list(outputs))
"""The tensors of each replica, by data-parallel rank."""


@dataclass(frozen=True)
class Dispatch(Generic[R]):
    """How a command is dispatched. Raises ValueError for what does not fit together."""

    split: Split
    collect: Collect[R]

    def __post_init__(self) -> None:
        if self.collect.name in (DP.name, WITH_RESULT.name) and self.split is not Split.DP:
            raise ValueError("only what was split over the replicas can be joined in the order of the batch")

    def rows(self, batch: Batch | None, replicas: int) -> list[torch.Tensor]:
        """For each replica the numbers of its samples, ascending; none without a batch. Raises ValueError for a command
        with a batch that it does not take, and without one that it does."""
        if (batch is None) is not (self.split is Split.NONE):
            raise ValueError(f"a command with split={self.split.value} "
                             f"{'takes no' if batch is not None else 'needs a'} batch")
        if batch is None:
            return []
        if self.split is Split.ALL:
            return [torch.arange(batch.samples)] * replicas
        return batch.share_rows(replicas)

    def collected(self, result: dict[str, Any], batch: Batch | None, rows: Sequence[torch.Tensor],
                  outputs: Sequence[Outputs]) -> R:
        """What the caller gets. ``rows``: as they were split; ``outputs``: of each replica, if they give any."""
        return self.collect.join(result, batch, rows, outputs)


@dataclass(frozen=True)
class Uploaded:
    """A batch whose shares a group has taken, for one command."""

    batch: str
    """Its name; empty for no batch."""
    group: str
    """The formation of the group that has them."""


class Call:
    """What a command carries: its batch, and the fields of ``Command`` that are its own. A batch that is uploaded
    already goes with commands whose outputs are not joined."""

    def __init__(self, batch: Batch | Uploaded | None = None, **fields: Any) -> None:
        self.batch, self.fields = batch, fields


class Caller(Protocol):
    """Who brings a call to the ranks."""

    def dispatch(self, kind: CommandKind, how: Dispatch[R], call: Call) -> R:
        """Returns what was collected."""


def command(kind: CommandKind, *, split: Split, collect: Collect[R]
            ) -> Callable[[Callable[Concatenate[Any, P], Call]], Callable[Concatenate[Any, P], R]]:
    """Makes of a method of a ``Caller``, which returns what the command carries, one that has the ranks execute it and
    returns what was collected."""
    how = Dispatch(split, collect)

    def decorate(carried: Callable[Concatenate[Any, P], Call]) -> Callable[Concatenate[Any, P], R]:
        @functools.wraps(carried)
        def call(self: Caller, *args: P.args, **kwargs: P.kwargs) -> R:
            return self.dispatch(kind, how, carried(self, *args, **kwargs))

        call.dispatched = {kind: how}  # type: ignore[attr-defined]
        return call

    return decorate


def dispatched_by(cls: type) -> dict[CommandKind, Dispatch[Any]]:
    """How each command is dispatched, by the decorated methods of a class. Raises TypeError unless each command has one
    method."""
    found = _by_kind((cls,), "dispatched")
    if missing := set(CommandKind) - found.keys():
        raise TypeError(f"{cls.__name__} has no method for the commands {', '.join(sorted(missing))}")
    return found


# -- the ranks' side ------------------------------------------------------------------------------------------------
class Refused(Exception):
    """A command is not executed; every rank raises it for the same reason, at the same place."""

    def __init__(self, error: ElasticRLError) -> None:
        super().__init__(str(error))
        self.error = error


def executes(*kinds: CommandKind) -> Callable[[M], M]:
    """Marks the method of a rank that executes commands of these kinds. It is called with the command and, unless that
    has none, the share of this rank's replica. It returns what ``collect`` is of: named tensors of the share, or the
    result; None for a result that follows later. It may raise ``Refused``."""

    def mark(method: M) -> M:
        method.executes = dict.fromkeys(kinds, method)  # type: ignore[attr-defined]
        return method

    return mark


def executed_by(*classes: type) -> dict[CommandKind, Callable[..., dict[str, Any] | None]]:
    """The marked methods of classes, by the commands that they execute. Raises TypeError for a command with two."""
    return _by_kind(classes, "executes")


def _by_kind(classes: Sequence[type], attribute: str) -> dict[CommandKind, Any]:
    found: dict[CommandKind, Any] = {}
    for cls in classes:
        for method in vars(cls).values():
            for kind, value in getattr(method, attribute, {}).items():
                if kind in found:
                    raise TypeError(f"{cls.__name__} has a second method for the command {kind}")
                found[kind] = value
    return found
