"""What counts as a lack of memory, and for which commands a rank says so before it ends. On real ranks:
tests/integration/trainer/test_out_of_memory.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_rl.trainer.group_worker import GroupWorker
from elastic_rl.trainer.out_of_memory import is_out_of_memory
from elastic_rl.trainer.service.commands import (
    Accumulate,
    Apply,
    Check,
    Command,
    ForwardLogprobs,
    ForwardReference,
    ForwardVersion,
    Load,
    Onload,
    Save,
    Update,
)

_SENT = {"id": "i", "epoch": 1, "term": 1, "group": "g"}
_LACK = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
OF_A_STEP: list[Command] = [
    Update(**_SENT, step=1, batch="b"), Check(**_SENT, step=1, batch="b"), Apply(**_SENT, step=1, parts=1),
    Accumulate(**_SENT, step=1, batch="b", part=0), ForwardReference(**_SENT, step=1, batch="b"),
    ForwardLogprobs(**_SENT, batch="b"), ForwardVersion(**_SENT, batch="b", step=1)]
OF_THE_GROUP: list[Command] = [Save(**_SENT, step=1), Load(**_SENT, step=1, version=0), Onload(**_SENT, kind="onload")]


def test_allocation_of_the_host_that_fails_is_a_lack_of_memory() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(error.value)


@pytest.mark.parametrize("error", [_LACK, MemoryError()])
def test_allocation_of_a_device_or_of_python_that_fails_is_a_lack_of_memory(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", [RuntimeError("a collective timed out"), RuntimeError("out of memory, says somebody"),
                                   OSError(12, "DefaultCPUAllocator: Cannot allocate memory")])
def test_other_errors_are_no_lack_of_memory(error: BaseException) -> None:
    assert not is_out_of_memory(error)


class Rank(GroupWorker):
    """A rank whose commands fail, and who notes what it would say of them."""

    def __init__(self, error: BaseException) -> None:
        self._error, self.said = error, list[str]()
        self.par: Any = SimpleNamespace(rank=0)
        self.methods = dict.fromkeys(map(type, (*OF_A_STEP, *OF_THE_GROUP)), Rank._fail)  # type: ignore[misc]

    def _fail(self, command: Command, *inputs: Any) -> None:
        raise self._error

    def _share(self, command: Any) -> Any:
        return None

    def _report(self, *args: Any, **values: Any) -> None: ...

    def _leave_refusal(self, command: Command, error: BaseException) -> None:
        assert error is self._error
        self.said.append(command.kind)

    def run(self) -> None: ...


@pytest.mark.parametrize("command", OF_A_STEP, ids=lambda command: command.kind)
def test_rank_that_lacks_memory_for_samples_says_so_and_ends(command: Command) -> None:
    rank = Rank(_LACK)
    with pytest.raises(torch.OutOfMemoryError):
        rank._execute(command)
    assert rank.said == [command.kind]


@pytest.mark.parametrize("command", OF_THE_GROUP, ids=lambda command: command.kind)
def test_lack_of_memory_that_no_samples_are_to_blame_for_is_a_loss_of_the_rank(command: Command) -> None:
    """Fewer samples would not help: excused, the group would be restarted for it without end."""
    rank = Rank(_LACK)
    with pytest.raises(torch.OutOfMemoryError):
        rank._execute(command)
    assert not rank.said


@pytest.mark.parametrize("command", OF_A_STEP, ids=lambda command: command.kind)
def test_other_error_of_a_step_is_a_loss_of_the_rank(command: Command) -> None:
    rank = Rank(RuntimeError("a collective timed out"))
    with pytest.raises(RuntimeError, match="timed out"):
        rank._execute(command)
    assert not rank.said
