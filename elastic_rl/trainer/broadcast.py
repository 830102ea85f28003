"""Commands from rank 0 to the other ranks, and shares of a batch within a replica: plain bytes, nothing pickled.

Ranks wait for the next command inside a broadcast, which the collective timeout would end; so rank 0 sends ``IDLE``
well within it when there is nothing to do. The next broadcast fails at the latest when a rank has died.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

import torch
import torch.distributed as dist

from elastic_rl.errors import TrainerFailed
from elastic_rl.trainer.megatron.parallel import ParallelDims

T = TypeVar("T")

_MAGIC = 0x656C7263
_MAX_PAYLOAD = 1 << 31


class Order(IntEnum):
    IDLE = 0
    EXECUTE = 1
    """The command in the payload."""
    STOP = 2
    PUBLISH = 3
    """Publish the current weights under the numbers in the payload."""
    LOAD = 4
    """Load the version of the policy whose number is in the payload."""
    DISCARD = 5
    """Discard the share of the batch whose name is in the payload."""


@dataclass(frozen=True)
class Message:
    order: Order
    payload: bytes = b""


def broadcast_message(message: Message | None, par: ParallelDims) -> Message:
    """Rank 0 passes a message, the others None; all return it. Blocks up to the collective timeout. Raises
    TrainerFailed when the ranks are out of step."""
    if par.world == 1:
        assert message is not None
        return message
    header = torch.zeros(3, dtype=torch.int64, device=par.device)
    if message is not None:
        header = torch.tensor([_MAGIC, message.order, len(message.payload)], device=par.device)
    dist.broadcast(header, src=0)
    magic, order, size = header.tolist()
    if magic != _MAGIC or not 0 <= size < _MAX_PAYLOAD:
        raise TrainerFailed(f"ranks are out of step: a message header reads {header.tolist()}")
    body = broadcast_bytes(message.payload if message is not None else None, size, 0, None, par) if size else b""
    return message or Message(Order(order), body)


def broadcast_bytes(payload: bytes | None, size: int, src: int, group: dist.ProcessGroup | None, par: ParallelDims
                    ) -> bytes:
    """``size`` bytes from rank ``src`` (of the world), which passes them, to all of a group."""
    body = (torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(par.device) if payload is not None
            else torch.empty(size, dtype=torch.uint8, device=par.device))
    dist.broadcast(body, src=src, group=group)
    return payload if payload is not None else body.cpu().numpy().tobytes()


def broadcast_numbers(values: list[int], par: ParallelDims) -> list[int]:
    """Rank 0's integers on every rank; every rank passes a list of the same length."""
    tensor = torch.tensor(values, dtype=torch.int64, device=par.device)
    if par.world > 1:
        dist.broadcast(tensor, src=0)
    return tensor.tolist()


def share_of_replica(own: list[bytes] | None, par: ParallelDims, read: Callable[[bytes], T]) -> list[T] | None:
    """What ``read`` makes of each piece of the share of a batch that the leader of this replica holds, on each of its
    ranks. None on every rank of the *group* when any leader has none: no rank may begin a step that another cannot
    take.

    ``own``: on a leader the pieces of its share, or None if it has none; on others None. The list is emptied, so that
    no piece is in memory once more than it must be.
    """
    if par.world > 1:
        missing = torch.tensor([int(par.is_share_leader and own is None)], dtype=torch.int64, device=par.device)
        dist.all_reduce(missing, op=dist.ReduceOp.MAX)
        if int(missing):
            return None
    group, leader = par.replica_group, par.share_leader
    if group is None:
        return None if own is None else [read(own.pop(0)) for _ in range(len(own))]
    count = torch.tensor([len(own or ())], dtype=torch.int64, device=par.device)
    dist.broadcast(count, src=leader, group=group)
    sizes = torch.tensor([len(piece) for piece in own or [b""] * int(count)], dtype=torch.int64, device=par.device)
    dist.broadcast(sizes, src=leader, group=group)
    return [read(broadcast_bytes(None if own is None else own.pop(0), size, leader, group, par))
            for size in sizes.tolist()]


def gather_text(text: str, par: ParallelDims, width: int = 256) -> list[str]:
    """A short text of each rank, on every rank, in the order of ranks. Raises TrainerFailed for a longer one."""
    raw = text.encode()
    if len(raw) > width:
        raise TrainerFailed(f"{text!r} is longer than {width} bytes")
    if par.world == 1:
        return [text]
    own = torch.zeros(width, dtype=torch.uint8)
    own[:len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else own[:0]
    all_of = [torch.zeros(width, dtype=torch.uint8, device=par.device) for _ in range(par.world)]
    dist.all_gather(all_of, own.to(par.device))
    return [t.cpu().numpy().tobytes().rstrip(b"\0").decode() for t in all_of]


def first_text(text: str, par: ParallelDims, width: int = 1024) -> str:
    """The text of the first rank that has one, on every rank, cut to ``width`` bytes; "" when none has. All ranks wait
    for each other here."""
    if par.world == 1:
        return text
    has_one = torch.tensor([int(bool(text))], dtype=torch.int64, device=par.device)
    dist.all_reduce(has_one, op=dist.ReduceOp.MAX)
    if not int(has_one):
        return ""
    cut = text.encode()[:width].decode(errors="ignore")
    return next(found for found in gather_text(cut, par, width) if found)
