"""Commands from rank 0 to the other ranks: two broadcasts of plain integers and bytes, nothing pickled.

Ranks wait for the next command inside a broadcast, which the collective timeout would end; so rank 0 sends ``IDLE``
well within it when there is nothing to do. The next broadcast fails at the latest when a rank has died.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.distributed as dist

from elastic_rl.errors import TrainerFailed
from elastic_rl.trainer.parallel import ParallelDims

_MAGIC = 0x656C7263
_MAX_PAYLOAD = 1 << 31


class Kind(IntEnum):
    IDLE = 0
    SFT = 1
    """``count`` supervised steps, then an evaluation."""
    TRAIN = 2
    """One RL step on the batch in the payload."""
    STOP = 3
    PUBLISH = 4
    """Publish the current weights again: their last publish was dropped."""


@dataclass(frozen=True)
class Command:
    kind: Kind
    count: int = 0
    payload: bytes = b""


def broadcast_command(command: Command | None, par: ParallelDims) -> Command:
    """Rank 0 passes a command, the others None; all return it. Blocks up to the collective timeout. Raises
    TrainerFailed when the ranks are out of step."""
    if par.world == 1:
        assert command is not None
        return command
    header = torch.zeros(4, dtype=torch.int64, device=par.device)
    if command is not None:
        header = torch.tensor([_MAGIC, command.kind, command.count, len(command.payload)], device=par.device)
    dist.broadcast(header, src=0)
    magic, kind, count, size = header.tolist()
    if magic != _MAGIC or not 0 <= size < _MAX_PAYLOAD:
        raise TrainerFailed(f"ranks are out of step: a command header reads {header.tolist()}")
    if not size:
        return command or Command(Kind(kind), count)
    body = (torch.frombuffer(bytearray(command.payload), dtype=torch.uint8).to(par.device) if command is not None
            else torch.empty(size, dtype=torch.uint8, device=par.device))
    dist.broadcast(body, src=0)
    return command or Command(Kind(kind), count, body.cpu().numpy().tobytes())


def broadcast_numbers(values: list[int], par: ParallelDims) -> list[int]:
    """Rank 0's integers on every rank; every rank passes a list of the same length."""
    tensor = torch.tensor(values, dtype=torch.int64, device=par.device)
    if par.world > 1:
        dist.broadcast(tensor, src=0)
    return tensor.tolist()
