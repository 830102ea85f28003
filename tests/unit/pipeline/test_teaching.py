"""The stage teacher: which sequences are asked for, how often, and where their scores go."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.batches import from_rows

from elastic_rl.data.batch import Batch
from elastic_rl.engine.scoring import LEAST_LOGPROB, ScoreRequest, TokenScores
from elastic_rl.errors import EngineFailed, Fenced
from elastic_rl.pipeline.training import teaching
from elastic_rl.pipeline.training.teaching import Teaching, parts, with_scores
from elastic_rl.pipeline.waits import Waits

BATCH = from_rows(torch.tensor([[1, 2, 3, 4, 5], [1, 9, 9, 0, 0], [7, 8, 0, 0, 0]]), torch.tensor([5, 3, 2]),
                  torch.tensor([[0, 0, 1, 0, 1], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]]))
"""The last sample has nothing that is trained on; the first one has a token of somebody else."""


def scores(sequences: Sequence[ScoreRequest], top: int) -> list[TokenScores]:
    return [TokenScores(-np.array(s.token_ids[s.first:], np.float32),
                        np.array([[t] * top for t in s.token_ids[s.first:]], np.int32).reshape(
                            len(s.token_ids) - s.first, top),
                        np.zeros((len(s.token_ids) - s.first, top), np.float32)) for s in sequences]


def taught(teaching: Teaching, top: int = 0) -> Batch:
    return with_scores(BATCH, teaching.scores(BATCH), top)


def test_scores_stand_at_their_tokens() -> None:
    asked: list[ScoreRequest] = []

    def score(sequences: Sequence[ScoreRequest], top: int) -> list[TokenScores]:
        asked.extend(sequences)
        return scores(sequences, top)

    made = Teaching(score, 2, Waits(lambda *_: None, threading.Event()))
    found = taught(made, 2)
    made.close()
    assert sorted((s.token_ids, s.first) for s in asked) == [((1, 2, 3, 4, 5), 2), ((1, 9, 9), 1)]
    assert found["teacher_logprobs"].tolist() == [-3, -5, -9, -9]
    assert found["teacher_top_ids"].tolist() == [[3, 3, -1], [5, 5, -1], [9, 9, -1], [9, 9, -1]], "of the loss tokens"
    assert "teacher_top_ids" not in taught(Teaching(scores, 0, Waits(lambda *_: None, threading.Event())))


def test_only_what_has_no_scores_yet_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teaching, "_REQUEST_ENTRIES", 1)
    asked: list[tuple[int, ...]] = []
    shown: list[tuple[str, str]] = []

    def score(sequences: Sequence[ScoreRequest], top: int) -> list[TokenScores]:
        [one] = sequences
        asked.append(one.token_ids)
        if one.token_ids == (1, 9, 9) and asked.count(one.token_ids) < 3:
            raise EngineFailed("the teacher is away")
        return scores(sequences, top)

    made = Teaching(score, 0, Waits(lambda stage, kind, what: shown.append((kind, what)), threading.Event()))
    found = taught(made)
    made.close()
    assert sorted(asked) == [(1, 2, 3, 4, 5), *[(1, 9, 9)] * 3]
    assert found.by_sample("teacher_logprobs")[1].tolist() == [-9, -9]
    assert ("teacher", "teacher: the teacher is away") in shown


def test_refused_sample_is_not_trained_on_unless_all_are_refused() -> None:
    def score(sequences: Sequence[ScoreRequest], top: int) -> list[TokenScores | None]:
        return [None if s.token_ids == (1, 9, 9) else one for s, one in zip(sequences, scores(sequences, top),
                                                                            strict=True)]

    found = taught(Teaching(score, 0, Waits(lambda *_: None, threading.Event())))
    assert found["loss_mask"].tolist() == [*BATCH.by_sample("loss_mask")[0].tolist(), *[False] * 5]
    assert found["teacher_logprobs"].tolist() == [-3, -5]

    stopping, shown = threading.Event(), list[str]()

    def report(stage: str, kind: str, what: str) -> None:
        shown.append(f"{kind}: {what}")
        stopping.set()

    with pytest.raises(Fenced):
        Teaching(lambda sequences, top: [None for _ in sequences], 0, Waits(report, stopping)).scores(BATCH)
    assert shown[0].startswith("plugin: the teacher's engines refuse every sample")


def test_wait_for_a_teacher_ends_with_the_run() -> None:
    stopping = threading.Event()

    def score(sequences: Sequence[ScoreRequest], top: int) -> list[TokenScores]:
        stopping.set()
        raise EngineFailed("the teacher is away")

    made = Teaching(score, 0, Waits(lambda *_: None, stopping))
    with pytest.raises(Fenced):
        made.scores(BATCH)
    made.close()


@given(st.lists(st.integers(1, 100_000), max_size=30))
def test_requests_have_all_sequences_and_are_bounded(costs: list[int]) -> None:
    found = parts(costs, list(range(len(costs))))
    assert [i for part in found for i in part] == list(range(len(costs)))
    assert all(len(part) == 1 or sum(costs[i] for i in part) <= 1 << 16 for part in found)


def test_token_outside_the_teachers_top_has_its_own_column() -> None:
    own = TokenScores(np.array([-7.0, -1.0], np.float32), np.array([[3], [9]], np.int32),
                      np.array([[-0.5], [-1.0]], np.float32))
    found = with_scores(BATCH, {1: own}, 1)
    assert found["teacher_top_ids"].tolist() == [[3, 9], [9, -1]]
    assert found["teacher_top_logprobs"].tolist() == [[-0.5, -7.0], [-1.0, LEAST_LOGPROB]]
    parted = found.rows(torch.tensor([2, 1]))
    assert parted["teacher_top_ids"].tolist() == found["teacher_top_ids"].tolist()


def test_teacher_may_refuse_all_of_some_groups_that_are_tried_and_not_all_of_a_step() -> None:
    """A teacher that was replaced by another one refuses whole steps: they may not be trained on nothing."""
    stopping, shown, refuses = threading.Event(), list[str](), False

    def score(sequences: Sequence[ScoreRequest], top: int) -> list[TokenScores | None]:
        return [None for _ in sequences] if refuses else [*scores(sequences, top)]

    def report(stage: str, kind: str, what: str) -> None:
        shown.append(f"{kind}: {what}")
        stopping.set()

    teacher = Teaching(score, 0, Waits(report, stopping))
    assert all(teacher.scores(BATCH).values())
    refuses = True
    assert teacher.scores(BATCH, may_refuse_all=True) == {0: None, 1: None} and not shown
    with pytest.raises(Fenced):
        teacher.scores(BATCH)
    assert shown[0].startswith("plugin: the teacher's engines refuse every sample")


def test_no_request_is_sent_after_one_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teaching, "_REQUEST_ENTRIES", 1)
    monkeypatch.setattr(teaching, "_REQUESTS", 1)
    asked, stopping = list[int](), threading.Event()

    def score(sequences: Sequence[ScoreRequest], top: int) -> list[TokenScores]:
        asked.append(len(sequences))
        raise EngineFailed("the teacher is away")

    with pytest.raises(Fenced):
        Teaching(score, 0, Waits(lambda stage, kind, what: stopping.set(), stopping)).scores(BATCH)
    assert asked == [1], "of two"
