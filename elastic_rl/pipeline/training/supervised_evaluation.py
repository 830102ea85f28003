"""What the policy makes of demonstrations that are held out: exact match and loss, in one pass that changes nothing.

A pass for which the trainer has too little memory is no loss of the trainer, and would fail in the same way after a
restart. Memory is a matter of the longest sequences, so the next attempt leaves them out, a quarter of the length at a
time, for as long as the actor lives; the record says how many. Where none is left, the refusal is raised, and the run
waits for a person. A trainer whose ranks end for the pass goes back each time, and supervised steps are made again: so
after three such passes no further one is sent.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from elastic_rl.data.batch import Batch, collate_answers
from elastic_rl.data.samples import Prompt
from elastic_rl.errors import Conflict, StepRefused

log = logging.getLogger(__name__)

_KEPT = 0.75
"""Share of the length of the longest sequence that the next attempt may have."""
_PASSES = 3
"""From so many passes in a row the trainer may go back although nothing is left to leave out. What takes the memory may
be something that passes."""


@dataclass(frozen=True)
class SupervisedResult:
    exact_match: float
    """Fraction of the demonstrations whose answers greedy decoding gives. One that is left out counts as not given: the
    longest are left out, and those are not the easiest."""
    loss: float
    """Mean over all tokens of the answers, in nats."""
    left_out: int
    """Demonstrations that the trainer has too little memory for."""


class SupervisedEvaluation:
    """The evaluations of one actor. Used by one thread."""

    def __init__(self, forward: Callable[[Batch], Mapping[str, torch.Tensor]]) -> None:
        """``forward``: gives the log-probs of the answers' tokens, and whether each is the most probable one (greedy).
        """
        self._forward = forward
        self._longest: float = math.inf
        """Tokens of the longest sequence that is sent."""
        self._in_vain = 0
        """Passes in a row from which the trainer went back, and after which there was nothing to leave out."""
        self._refusal = ""

    def of(self, demonstrations: Sequence[Prompt]) -> SupervisedResult:
        """Raises StepRefused where the trainer could not do it, after which this is to be called again; Conflict where
        its ranks have ended since, so that the loop has to resume first; and what ``forward`` raises."""
        if self._in_vain >= _PASSES:
            raise StepRefused(f"the trainer went back from {self._in_vain} evaluations, and gets no further one: "
                              f"{self._refusal}",
                              hint="lower trainer.micro_batch_tokens, or have shorter held-out demonstrations, and "
                                   "train again; where its devices have room now, `elastic-rl restart roles/actor`")
        sent = [one for one in demonstrations if _tokens(one) <= self._longest]
        batch = collate_answers(sent)
        try:
            outputs = self._forward(batch)
        except StepRefused as e:
            longest = _KEPT * max(map(_tokens, sent))
            if any(_tokens(one) <= longest for one in sent):
                log.warning("evaluating without demonstrations of more than %d tokens from now on: %s", longest, e)
                self._longest = longest
            elif e.went_back:
                self._in_vain, self._refusal = self._in_vain + 1, e.message
            if e.went_back:
                raise Conflict(f"the trainer goes back from an evaluation: {e}") from e
            raise
        self._in_vain = 0
        # Greedy decoding gives the answer exactly when each token of it is the most probable one after those before.
        missed = batch.sequence_sum((~outputs["greedy"]).long())
        return SupervisedResult(int((missed == 0).sum()) / len(demonstrations),
                                -float(outputs["logprobs"].double().mean()), len(demonstrations) - len(sent))


def _tokens(demonstration: Prompt) -> int:
    return len(demonstration.token_ids) + len(demonstration.answer_ids or ())
