"""Forward passes over this rank's share of a batch, which change nothing: log-probs by the policy, values by a critic.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from elastic_rl.config import Config
from elastic_rl.data.batch import Batch
from elastic_rl.errors import StepRefused
from elastic_rl.etcd.records import StatedWork
from elastic_rl.models.flops import BACKWARD, SequenceCost
from elastic_rl.trainer.broadcast import first_text
from elastic_rl.trainer.checkpoint.rounds import Rounds
from elastic_rl.trainer.context_parallel import joined, own_positions, places
from elastic_rl.trainer.megatron.parallel import ParallelDims, from_last_stage, max_over_data, synchronize
from elastic_rl.trainer.megatron.pipeline import run
from elastic_rl.trainer.megatron.policy import Policy
from elastic_rl.trainer.micro_batches import MicroBatch, cut
from elastic_rl.trainer.out_of_memory import free_unused, is_out_of_memory
from elastic_rl.trainer.vocab_parallel import most_probable, token_logprobs
from elastic_rl.trainer.work import WorkMeter, in_flight


@dataclass(frozen=True)
class LossTokens:
    """The tokens of a micro-batch that are trained on, M of them, in the order of its samples."""

    rows: torch.Tensor
    """[M] row of the sample."""
    targets: torch.Tensor
    """[m] the tokens that this rank has the logits for: all M, without context parallelism."""
    where: tuple[torch.Tensor, torch.Tensor]
    """Row and column [m] of these positions in this rank's logits."""
    own: torch.Tensor
    """[m] which of the M tokens these are."""
    par: ParallelDims

    @classmethod
    def of(cls, micro: MicroBatch, par: ParallelDims) -> LossTokens:
        tokens = micro.batch["loss_mask"].nonzero()[:, 0]
        rows = micro.batch.to_tokens(torch.arange(micro.batch.samples))
        flat = micro.starts[rows] + tokens - micro.batch.starts[rows] - 1  # of the token before
        width = micro.input.tokens.shape[1]
        own = torch.arange(len(rows))
        if par.cp > 1:
            found = places(own_positions(micro.input.packed, par.cp, par.cp_rank), width)[flat]
            own = (found >= 0).nonzero()[:, 0]
            flat, width = found[own], width // par.cp
        targets = micro.batch["tokens"][tokens[own]].long()
        return cls(rows.to(par.device), targets.to(par.device),
                   ((flat // width).to(par.device), (flat % width).to(par.device)), own.to(par.device), par)

    def logits(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        """[m, padded_vocab / TP] fp32: this rank's columns for each token, as a sampler of this temperature has them; a
        copy. ``logits``: the logits of all that went through the model, [R, P / CP, padded_vocab / TP]."""
        picked = logits[self.where].float()
        return picked / temperature if temperature != 1.0 else picked

    def joined(self, values: torch.Tensor) -> torch.Tensor:
        """[M] of this rank's values [m] and of those of the others of its context-parallel group."""
        return values if self.par.cp == 1 else joined(values, self.own, len(self.rows), self.par.cp_group)

    def to_tokens(self, tensor: torch.Tensor) -> torch.Tensor:
        """[M] from a tensor of the micro-batch with one value a sample."""
        return tensor.to(self.rows.device)[self.rows]


IN_PASSES, WAITING, AFTER_PASSES = "micro-batches", "waiting for the other ranks", "reducing"
"""Phases of a rank that executes a command: it goes from one micro-batch to the next; all of its own are done, and some
of other ranks may not be; all are, and the ranks reduce what they have and make the update."""
Report = Callable[[str, StatedWork | None], None]


class ForwardPass:
    """Forward passes of one rank. All ranks call the same method; each passes its replica's share of the batch. Each
    raises StepRefused, on every rank, when a pass needs more memory than one has.

    No collective waits for the micro-batches of another replica, which may have ten times as much work or be ten times
    as slow: the ranks meet in rounds when they have done theirs.
    """

    def __init__(self, policy: Policy, cfg: Config, par: ParallelDims,
                 report: Report = lambda phase, work: None) -> None:
        """``report``: called with each phase and, of IN_PASSES, before each micro-batch with the cost of that. A
        collective."""
        self.policy, self.cfg, self.par, self._report = policy, cfg, par, report
        self.cost = SequenceCost.of(policy.arch)
        self._meter = WorkMeter()
        self._rounds = Rounds.in_own_group(par, round_timeout_s=cfg.trainer.collective_timeout_s)

    def forward_logprobs(self, share: Batch, phase: str = "rl", *, greedy: bool = True) -> dict[str, torch.Tensor]:
        """Log-probs of this rank's share, at the sampler's temperature (in the SFT phase, which samples nothing, at 1):
        ``logprobs`` [l] fp32 of its loss tokens, and ``greedy`` [l] bool: whether the token is the most probable one,
        which needs all logits on each rank. On every rank of the replica."""
        return self._forward(share, 1.0 if phase == "sft" else self.cfg.rollout.temperature, greedy=greedy)

    def forward_values(self, share: Batch) -> dict[str, torch.Tensor]:
        """Values of this rank's share, by a critic: ``values`` [l] fp32 of the states in which its loss tokens were
        chosen. On every rank of the replica."""
        return {"values": self._forward(share, 1.0, greedy=False)["logprobs"]}

    # -- parts ----------------------------------------------------------------------------------------------------
    @property
    def _gives_values(self) -> bool:
        """Whether the model is a critic, whose output [R, P / CP, 1] is in the place of logits."""
        return self.policy.arch.value_head

    @torch.no_grad()
    def _forward(self, share: Batch, temperature: float, *, greedy: bool) -> dict[str, torch.Tensor]:
        """Computes what ``forward_logprobs`` returns. Without ``greedy`` that is left out: it needs all logits on each
        rank. Of a critic the log-probs are its values."""
        logprobs = torch.zeros(share.loss_tokens, device=self.par.device)
        best = torch.zeros_like(logprobs)
        micros = cut(share, self.cfg.trainer, self.cost)

        def finish(number: int, logits: torch.Tensor) -> torch.Tensor:
            index = LossTokens.of(micros[number], self.par)
            if len(index.rows):
                where = share.loss_rows(micros[number].rows).to(self.par.device)
                picked = index.logits(logits, temperature)
                logprobs[where] = index.joined(
                    picked[:, 0] if self._gives_values else token_logprobs(picked, index.targets))
                if greedy:
                    best[where] = index.joined((most_probable(logits[index.where]) == index.targets).float())
            return logits.new_zeros(())

        self._require_passed(self._run(micros, finish, train=False))
        both = from_last_stage(torch.stack([logprobs, best] if greedy else [logprobs]), self.par).cpu()
        return {"logprobs": both[0], **({"greedy": both[1].bool()} if greedy else {})}

    def _run(self, micros: list[MicroBatch], finish: Callable[[int, torch.Tensor], torch.Tensor], *, train: bool
             ) -> str:
        """Passes over this rank's micro-batches. Returns, once every rank has made its own, why this one could not end
        them, which needed more memory than there is; else "". A rank whose passes are collectives raises what the
        allocation raised: the others wait in them for what it cannot give."""
        costs = self._costs([micro.input.flops(self.cost) * (1.0 + BACKWARD * train) for micro in micros])
        failure = ""

        def state(number: int) -> None:
            self._report(IN_PASSES, self._meter.stated(in_flight(costs, number, self.par.pp)))

        def begin(number: int) -> None:
            if self.par.pp == 1:  # else the device still works on the one before, in the name and the time of this one
                synchronize(self.par)
            self._meter.begin(costs[number], time.monotonic())
            state(number)

        with self._rounds.until_all_are_done(lambda: self._report(WAITING, None)):
            state(-1)
            try:
                run(self.policy, [micro.input.to(self.par.device) for micro in micros], finish, train=train,
                    on_pass=begin)
                synchronize(self.par)  # else the others would wait in a collective for what is queued here
            except (RuntimeError, MemoryError) as e:
                if not self.par.passes_alone or not is_out_of_memory(e):
                    raise
                first = str(e).partition(chr(10))[0]
                failure = f"rank {self.par.rank} has too little memory for a pass: {first:.300}"
            if failure:
                free_unused(self.par.device)
            self._meter.end(time.monotonic())
        self._report(AFTER_PASSES, None)
        return failure

    def _costs(self, own: list[float]) -> list[float]:
        """Operations of each micro-batch. Replicas that share experts wait for one another in each of them, so there it
        is the most that one of the replicas has."""
        if self.par.ep == 1:
            return own
        most = max_over_data(torch.tensor([float(len(own))], device=self.par.device), self.par)
        costs = torch.zeros(int(most), dtype=torch.float64, device=self.par.device)
        costs[:len(own)] = torch.tensor(own, dtype=torch.float64)
        return max_over_data(costs, self.par).tolist()

    def _require_passed(self, failure: str) -> None:
        """Raises StepRefused, on every rank, when one has a failure. A collective, where ``_run`` returns failures."""
        if self.par.passes_alone and (failed := first_text(failure, self.par)):
            raise StepRefused(failed, hint="lower trainer.micro_batch_tokens, or the length of responses")
