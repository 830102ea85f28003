"""What each rank of a group does that computes with the policy and does not train it (``actor_fwd``, ``reference``).

Such a group has no state: when it re-forms, it loads the version that the next command asks for, and nothing of the run
goes back. A command names the RL step whose policy it is about and the least number of its version, and is executed by
exactly such a version or refused; the answer has the number and the step that it was computed with.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

import torch

from elastic_rl.data.batch import Batch
from elastic_rl.data.branch import Branch
from elastic_rl.errors import Conflict, EtcdUnavailable, Fenced, TrainerFailed, VersionNotFound
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.membership import Membership
from elastic_rl.etcd.records import StatedWork
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.trainer.broadcast import Message, Order, broadcast_message
from elastic_rl.trainer.checkpoint.rounds import Unavailable
from elastic_rl.trainer.forward import ForwardPass
from elastic_rl.trainer.group_worker import GroupWorker, restarts
from elastic_rl.trainer.megatron import parallel
from elastic_rl.trainer.megatron.policy import ModelArch, Policy
from elastic_rl.trainer.policy_version import PolicyVersion
from elastic_rl.trainer.progress import Progress
from elastic_rl.trainer.service.board import Board
from elastic_rl.trainer.service.commands import Command, ForwardVersion
from elastic_rl.trainer.service.dispatch import executed_by, executes

log = logging.getLogger(__name__)


class ForwardWorker(GroupWorker):
    """One rank. Rank 0 takes commands from its board, checks them and has their version loaded; the others follow."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient, par: parallel.ParallelDims, member: Membership,
                 board: Board, share_urls: list[str]) -> None:
        super().__init__(ctx, etcd, par, member, board, share_urls)
        self.policy = Policy(ModelArch.read(ctx.model_dir), self.cfg, par, trains=False)
        self.passes = ForwardPass(self.policy, self.cfg, par, self._report)
        self.version = PolicyVersion(ctx, etcd, par, self.policy, member.incarnation, self._on_load)
        self._pending: Command | None = None
        """The command (rank 0 has it) whose version is being looked for or loaded."""

    def run(self) -> None:
        self._report(ready=True)
        while True:
            message = broadcast_message(self._next() if self.par.rank == 0 else None, self.par)
            if message.order is Order.STOP:
                return
            if message.order is Order.EXECUTE:
                self._execute(Command.decode(message.payload))
            elif message.order is Order.LOAD:
                self._load(int(message.payload))
            elif message.order is Order.DISCARD:
                self.board.discard_share(message.payload.decode())
            else:
                self._report()  # idle, not hung

    def _next(self) -> Message:
        """Rank 0: the next message. etcd is asked here, while no other rank waits: it may be away for an hour."""
        self._read_claims()
        if (discard := self._discard()) is not None:
            return discard
        command, self._pending = self._pending or self.board.next(), None
        if command is None:
            return self._idle()
        try:
            self._learn_term()
            self.gate.admit(command, Progress("rl"))
            number = (self.version.number_of(command.step, command.at_least) if isinstance(command, ForwardVersion)
                      else self.version.number)  # every rank refuses it
        except EtcdUnavailable as e:
            self._pending, self.board.waits_for = command, f"etcd, to find a version of the policy: {e}"
            self._pause.wait(min(1.0, self._idle_s))
            return Message(Order.IDLE)
        except (Fenced, Conflict, TrainerFailed) as e:
            self.board.waits_for = ""
            self._refuse(command, e)
            return Message(Order.IDLE)
        if number == self.version.number:
            self.board.waits_for = ""
            return Message(Order.EXECUTE, command.encode())
        self._pending, self.board.waits_for = command, f"the group {self.ctx.group.name} to load policy {number}"
        return Message(Order.LOAD, str(number).encode())

    def _load(self, number: int) -> None:
        try:
            self.version.load(number)
        except Unavailable as e:
            log.warning("policy %d is not available: %s", number, e)
            command, self._pending = self._pending, None
            if command is not None:
                self.board.waits_for = ""
                self._refuse(command, VersionNotFound(f"version {number} of the policy is not available: {e}"))
        self._report()

    @executes(ForwardVersion)
    def _forward_version(self, command: ForwardVersion, share: Batch) -> dict[str, torch.Tensor]:
        return self.passes.forward_logprobs(share, greedy=False)

    def _facts(self) -> dict[str, Any]:
        return {"version": self.version.number, "step": self.version.step}

    def _on_load(self, phase: str, detail: str) -> None:
        """A sign of life during a load, which may wait for etcd or a node for as long as they are away."""
        self.member.progress(max(self.version.step, 0), phase, restoring=detail)

    def _report(self, phase: str = "", work: StatedWork | None = None, *, ready: bool = False) -> None:
        self._ready = self._ready or ready
        step = max(self.version.step, 0)
        self.member.progress(step, phase or "waiting for a command", work=work, ready=self._ready)
        if self.par.rank == 0 and work is None:  # what the board has does not change between micro-batches
            self.board.set_status(
                group=self.member.incarnation, epoch=self.ctx.epoch, step=step, phase="rl", pair="", cursor={},
                branch=Branch().to_json(), consumed={}, policy_version=self.version.number, state_version=0,
                reference_version=0, share_urls=self._share_urls, minibatches=1,
                cost=asdict(self.passes.cost), restarts=restarts(),
                **({"ready": True} if ready else {}))


ForwardWorker.methods = executed_by(ForwardWorker)
