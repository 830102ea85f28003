"""What the ranks of every group do with commands: rank 0 takes them from its board and checks who sends them; all ranks
execute them, each on the share of its replica."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from safetensors.torch import save

from elastic_rl.data.batch import Batch
from elastic_rl.errors import ConfigError, Conflict, ElasticRLError, EtcdUnavailable, Fenced, StepRefused
from elastic_rl.etcd import event_kinds, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.membership import Membership
from elastic_rl.etcd.records import Severity, StatedWork
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.trainer.broadcast import Message, Order, share_of_replica
from elastic_rl.trainer.megatron import parallel
from elastic_rl.trainer.out_of_memory import is_out_of_memory
from elastic_rl.trainer.service.board import Board
from elastic_rl.trainer.service.commands import (
    BatchCommand,
    Command,
    ForwardCommand,
    ForwardLogprobs,
    ForwardVersion,
    NextStepCommand,
    TrainCommand,
    WriterGate,
)
from elastic_rl.trainer.service.dispatch import Refused


class GroupWorker(ABC):
    """One rank of a trainer group."""

    methods: ClassVar[dict[type[Command], Callable[..., dict[str, Any] | None]]] = {}
    """What executes each command that the group has, see ``dispatch.executes``."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient, par: parallel.ParallelDims, member: Membership,
                 board: Board, share_urls: list[str]) -> None:
        """``share_urls``: the URLs of the ranks that take the shares of a batch, by data-parallel rank."""
        self.ctx, self.cfg, self.par, self.member, self.board = ctx, ctx.config, par, member, board
        self._etcd, self._share_urls = etcd, share_urls
        self._ready = False
        self._pause = threading.Event()  # never set
        self._idle_s = max(0.5, self.cfg.trainer.collective_timeout_s / 10)
        """So often the ranks say that they are alive while there is no command."""
        self.gate = WriterGate(ctx.epoch, member.incarnation)
        self._unused: list[str] = []
        """Batches (rank 0 has their names) of commands that were refused before other ranks knew of them."""

    @abstractmethod
    def run(self) -> None:
        """Executes commands until it is told to stop. Raises what ends the rank and makes the group re-form."""

    @abstractmethod
    def _report(self, phase: str = "", work: StatedWork | None = None, *, ready: bool = False) -> None:
        """Says where the group is. ``work``: the cost of what this rank begins now, in the middle of a command, which
        may take an hour: each micro-batch is progress."""

    def _require_possible(self, command: Command, share: Batch | None = None) -> None:
        """Raises Refused for what this group cannot execute now or at all; the same on every rank."""
        if type(command) not in self.methods:
            raise Refused(ConfigError(f"the group {self.ctx.group.name} has no {command.kind}"))

    def _facts(self) -> dict[str, Any]:
        """The result that rank 0 gives beside the tensors of a command."""
        return {}

    def _idle(self, most_s: float = math.inf) -> Message:
        """Rank 0: what the ranks do while there is no command; waits for the next one. ``most_s``: seconds until there
        is something to do without one."""
        self.board.wake.wait(min(self._idle_s, most_s))
        self.board.wake.clear()
        return Message(Order.IDLE)

    def _refuse(self, command: Command, error: ElasticRLError) -> None:
        """Rank 0: a command is refused that no other rank knows of; the ranks that hold its shares discard them."""
        self.board.refused(command, error)
        if isinstance(command, BatchCommand):
            self._unused.append(command.batch)

    def _discard(self) -> Message | None:
        """Rank 0: the message for shares that are to be discarded, if there are any."""
        return Message(Order.DISCARD, self._unused.pop().encode()) if self._unused else None

    def _read_claims(self) -> None:
        """An actor that has taken over fences its predecessor off here, also while etcd is unavailable."""
        with contextlib.suppress(queue.Empty):
            while True:
                epoch, term = self.board.claims.get_nowait()
                with contextlib.suppress(Fenced):
                    self.gate.claim(epoch, term)

    def _learn_term(self) -> None:
        """Raises the gate's term to the one in etcd: the newest actor may not have reached this group yet."""
        with contextlib.suppress(EtcdUnavailable):  # then no newer actor can have begun its term either
            self.gate.term = max(self.gate.term, fencing.current_term(self._etcd, self.ctx.keys))

    # -- commands -------------------------------------------------------------------------------------------------
    def _execute(self, command: Command) -> None:
        """Executes a command on every rank. What a rank raises here ends it, and the group re-forms from its last
        state. A rank that lacks memory where the others wait for it in a collective says so before."""
        self._report(command.kind)
        try:
            inputs = (self._share(command),) if isinstance(command, BatchCommand) else ()
            self._require_possible(command, *inputs)
            output = self.methods[type(command)](self, command, *inputs)
        except (Refused, StepRefused) as refusal:
            self._report()
            if self.par.rank == 0:
                self.board.refused(command, refusal.error if isinstance(refusal, Refused) else refusal)
        except (RuntimeError, MemoryError) as e:
            # Of a step that is made, or of an evaluation.
            if is_out_of_memory(e) and isinstance(command, NextStepCommand | ForwardVersion | ForwardLogprobs):
                self._leave_refusal(command, e)
            raise
        else:
            if isinstance(command, ForwardCommand):
                if self.par.is_share_leader:
                    self.board.put_output(command.id, save(output or {}))
                parallel.barrier(self.par)  # once rank 0 says that it is done, every output is there
                output = self._facts()
            if output is not None:
                self._finish(command, output)

    def _leave_refusal(self, command: Command, error: BaseException) -> None:
        """This rank ends, and with it the group, which cannot answer any more: an event says why. Its client finds that
        by the command's id, and the leader takes the end of the ranks for none of their faults. Without etcd it is the
        loss of a rank."""
        name, first = self.ctx.group.name, str(error).partition(chr(10))[0]
        groups = command.consumption.to_json() if isinstance(command, TrainCommand) else None
        with contextlib.suppress(EtcdUnavailable):
            self.ctx.writer_of_group(self._etcd).emit(
                event_kinds.TRAINER_GROUP_EVENTS[name].refused, name,
                f"rank {self.par.rank} has too little memory for {command}, and ends: {first:.300}",
                severity=Severity.WARNING, command=command.id, rank=self.par.rank, groups=groups)

    def _finish(self, command: Command, result: dict[str, Any]) -> None:
        self._report()
        # JSON has no other numbers.
        result = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in result.items()}
        if self.par.rank == 0:
            self.gate.executed(command, result)
            self.board.done(command, result)

    def _share(self, command: BatchCommand) -> Batch:
        """The share of this rank's replica."""
        held = self.board.take_share(command.batch) if self.par.is_share_leader else None
        pieces = share_of_replica(held, self.par, Batch.from_bytes)
        if pieces is None:
            raise Refused(Conflict(f"not every rank has its share of batch {command.batch}",
                                   hint="send the shares again, then the command"))
        return Batch.of_pieces(pieces)


def restarts() -> int:
    """How often torch elastic has restarted this group."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
