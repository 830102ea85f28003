"""The stage teacher: a teacher's log-probs of what the policy sampled, as tensors of the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np
import torch

from elastic_rl.data.batch import Batch
from elastic_rl.engine.scoring import LEAST_LOGPROB, ScoreRequest, TokenScores
from elastic_rl.errors import ElasticRLError, PluginFailed
from elastic_rl.pipeline.waits import Waits

_REQUESTS = 32
"""Requests in flight at once."""
_REQUEST_ENTRIES = 1 << 16
"""Log-probs that one request with more than one sequence may ask for: all of a request go to one engine, and its answer
is JSON."""
_POLL_S = 0.5

Score = Callable[[Sequence[ScoreRequest], int], Sequence[TokenScores | None]]
"""One attempt to have some sequences scored, with so many of the most probable tokens beside each; None for one that
the teacher refuses. Raises ElasticRLError."""


class Teaching:
    """Has batches scored. Used by one thread."""

    def __init__(self, score: Score, top: int, waits: Waits) -> None:
        self._score, self._top, self._waits = score, top, waits
        self._threads = ThreadPoolExecutor(_REQUESTS, "teacher")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def scores(self, batch: Batch, *, may_refuse_all: bool = False) -> dict[int, TokenScores | None]:
        """What the teacher says of each row that has loss tokens; None of one that it refuses. One that refuses them
        all is waited for, unless it may. What fails is tried again without end. Raises Fenced."""
        tokens, masks = batch.by_sample("tokens"), batch.by_sample("loss_mask")
        first = {row: int(masks[row].int().argmax()) for row in batch.loss_counts.nonzero()[:, 0].tolist()}
        # Those with equally long prompts together: a request has one place from which on it is scored.
        rows = sorted(first, key=lambda row: first[row])
        found: dict[int, TokenScores | None] = {}

        def request(row: int) -> ScoreRequest:  # not before it is sent: tuples are large
            return ScoreRequest(tuple(tokens[row].tolist()), first[row])

        lengths = batch["lengths"].tolist()
        self._waits.retry("teacher", lambda: self._attempt({row: lengths[row] for row in rows}, request, found,
                                                            may_refuse_all))
        return found

    def _attempt(self, lengths: Mapping[int, int], request: Callable[[int], ScoreRequest],
                 found: dict[int, TokenScores | None], may_refuse_all: bool) -> None:
        """Adds the scores of those that have none. After the first request that fails no more is sent; what it raised
        is raised once those in flight have ended."""
        left = [row for row in lengths if row not in found]
        unsent = parts([lengths[row] * (1 + self._top) for row in left], left)[::-1]
        running: dict[Future[Sequence[TokenScores | None]], list[int]] = {}
        failed: ElasticRLError | None = None
        while running or (unsent and failed is None):
            while unsent and failed is None and len(running) < _REQUESTS:
                part = unsent.pop()
                running[self._threads.submit(self._score, [request(row) for row in part], self._top)] = part
            for future in wait(running, timeout=_POLL_S, return_when=FIRST_COMPLETED).done:
                part = running.pop(future)
                try:
                    found.update(zip(part, future.result(), strict=True))
                except ElasticRLError as e:
                    failed = e
            if failed is not None:
                self._waits.waits("teacher", f"teacher: {failed}")
            else:
                self._waits.pause(0.0)
        if failed is not None:
            raise failed
        if lengths and not any(found.values()) and not may_refuse_all:
            found.clear()
            raise PluginFailed("the teacher's engines refuse every sample", hint="the teacher must have the policy's "
                               "tokens, and take sequences as long as a prompt and a response; the role's log has why")


def with_scores(batch: Batch, scores: Mapping[int, TokenScores | None], top: int) -> Batch:
    """A batch with what a teacher said of its rows: ``teacher_logprobs``, and with a ``top`` the tensors that follow.
    Rows without are not trained on. Pure.

    ``teacher_top_ids`` and ``teacher_top_logprobs`` have ``top`` columns and one more, for the token itself where it is
    not among these (else its id is -1): a policy must not be able to hide what it does in the teacher's rest.
    """
    refused = [row for row in range(batch.samples) if scores.get(row) is None]
    batch = batch.without_loss(torch.tensor(refused, dtype=torch.int64)) if refused else batch
    logprobs, ids, tops = [np.zeros(0, np.float32)], [np.zeros((0, top + 1), np.int32)], [
        np.zeros((0, top + 1), np.float32)]
    for row, (tokens, mask) in enumerate(zip(batch.by_sample("tokens"), batch.by_sample("loss_mask"), strict=True)):
        if (own := scores.get(row)) is None:
            continue
        trained = mask.nonzero()[:, 0]
        # Scores begin with the first trained token.
        at = (trained - trained[0]).numpy()
        logprobs.append(own.logprobs[at])
        token, known = tokens[trained].numpy()[:, None], own.top_ids[at]
        is_known = (known == token).any(axis=1, keepdims=True)
        ids.append(np.concatenate([known, np.where(is_known, -1, token)], axis=1).astype(np.int32))
        tops.append(np.concatenate([own.top_logprobs[at], np.where(
            is_known, LEAST_LOGPROB, own.logprobs[at][:, None])], axis=1).astype(np.float32))
    found = batch.with_tensors(teacher_logprobs=torch.from_numpy(np.concatenate(logprobs)))
    return found.with_tensors(
        teacher_top_ids=torch.from_numpy(np.concatenate(ids)),
        teacher_top_logprobs=torch.from_numpy(np.concatenate(tops))) if top else found


def parts(costs: Sequence[int], numbers: Sequence[int]) -> list[list[int]]:
    """The numbers, in order, in requests whose costs are at most ``_REQUEST_ENTRIES``, or of a single sequence. Pure.
    """
    found: list[list[int]] = []
    room = 0
    for number, cost in zip(numbers, costs, strict=True):
        if not found or cost > room:
            found.append([])
            room = _REQUEST_ENTRIES
        found[-1].append(number)
        room -= cost
    return found
