"""The evaluation of the supervised phase by a trainer that may have too little memory for some demonstrations."""

from __future__ import annotations

import pytest
import torch

from elastic_rl.data.batch import Batch
from elastic_rl.data.samples import Prompt
from elastic_rl.errors import Conflict, StepRefused
from elastic_rl.pipeline.training.supervised_evaluation import SupervisedEvaluation, SupervisedResult

DEMONSTRATIONS = [Prompt((7,) * size, answer_ids=(2, 3)) for size in (4, 8, 30, 98)]


class Trainer:
    """It has memory for sequences of so many tokens. It misses the second token of each answer to a long prompt."""

    def __init__(self, most: int, *, goes_back: bool = False) -> None:
        self.most, self._goes_back = most, goes_back
        self.longest: list[int] = []

    def forward(self, batch: Batch) -> dict[str, torch.Tensor]:
        lengths = batch["lengths"].tolist()
        self.longest.append(max(lengths))
        if max(lengths) > self.most:
            raise StepRefused("there is no memory", went_back=self._goes_back)
        greedy = torch.tensor([hit for length in lengths for hit in (True, length < 10)])
        return {"greedy": greedy, "logprobs": torch.full((len(greedy),), -0.5)}


def result_of(evaluation: SupervisedEvaluation, kind: type[Exception]) -> SupervisedResult:
    for _ in range(20):
        try:
            return evaluation.of(DEMONSTRATIONS)
        except kind:
            continue
    raise AssertionError("it goes on failing")


def test_all_demonstrations_are_evaluated_where_there_is_memory() -> None:
    assert SupervisedEvaluation(Trainer(100).forward).of(DEMONSTRATIONS) == SupervisedResult(0.25, 0.5, 0)


@pytest.mark.parametrize(("goes_back", "kind"), [(False, StepRefused), (True, Conflict)])
def test_demonstrations_without_room_are_left_out_of_this_evaluation_and_the_next(goes_back: bool,
                                                                                  kind: type[Exception]) -> None:
    evaluation = SupervisedEvaluation((trainer := Trainer(40, goes_back=goes_back)).forward)
    assert result_of(evaluation, kind).left_out == 1
    attempts = len(trainer.longest)
    assert trainer.longest[0] == 100 and max(trainer.longest[1:]) <= 75
    found = evaluation.of(DEMONSTRATIONS)
    assert found.left_out == 1 and len(trainer.longest) == attempts + 1
    assert found.exact_match == 0.25, "one that is left out is not right"


def test_trainer_with_memory_for_none_is_waited_for() -> None:
    evaluation = SupervisedEvaluation((trainer := Trainer(0)).forward)
    with pytest.raises(AssertionError, match="goes on failing"):
        result_of(evaluation, StepRefused)
    trainer.most = 100  # a person has corrected it
    assert evaluation.of(DEMONSTRATIONS).left_out < len(DEMONSTRATIONS)


SAME_LENGTH = DEMONSTRATIONS[2:3] * 3


def test_trainer_goes_back_three_times_from_what_it_has_no_memory_for_at_all() -> None:
    evaluation = SupervisedEvaluation((trainer := Trainer(0, goes_back=True)).forward)
    for _ in range(3):
        with pytest.raises(Conflict):
            evaluation.of(SAME_LENGTH)
    for _ in range(2):
        with pytest.raises(StepRefused, match="went back from 3 evaluations.*there is no memory") as held:
            evaluation.of(SAME_LENGTH)
        assert not held.value.went_back and "micro_batch_tokens" in held.value.hint
    assert len(trainer.longest) == 3, "no pass is sent that would end the ranks again"


def test_passes_that_leave_demonstrations_out_or_are_followed_by_one_that_works_are_not_in_vain() -> None:
    evaluation = SupervisedEvaluation((trainer := Trainer(0, goes_back=True)).forward)
    demonstrations = [DEMONSTRATIONS[0], DEMONSTRATIONS[-1]]
    for passes in (3, 2):  # the first one leaves the long one out
        trainer.most = 0
        for _ in range(passes):
            with pytest.raises(Conflict):
                evaluation.of(demonstrations)
        trainer.most = 100
        assert evaluation.of(demonstrations).left_out == 1
