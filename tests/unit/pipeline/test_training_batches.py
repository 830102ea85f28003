"""What a step of an algorithm with a critic is trained on."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
from support.batches import in_rows

from elastic_rl import config
from elastic_rl.algorithms.ppo import estimated, whitened
from elastic_rl.data.batch import SCHEMA, Batch
from elastic_rl.data.queue.step_groups import StepGroups
from elastic_rl.data.samples import Group, Prompt, Sample, Segment
from elastic_rl.engine.scoring import ScoreRequest
from elastic_rl.errors import Fenced
from elastic_rl.pipeline.records.step_timer import StepTimer
from elastic_rl.pipeline.training.training_batch import MadeBatch, TrainingBatches
from elastic_rl.pipeline.waits import Waits


def sample(reward: float, *turns: tuple[int, ...]) -> Sample:
    """Turns of the policy, with an answer of its environment between two of them."""
    segments: list[Segment] = []
    for i, turn in enumerate(turns):
        if i:
            segments.append(Segment((7, 8), loss=False))
        segments.append(Segment(turn, tuple(-0.5 - 0.1 * t for t in turn), version=1))
    return Sample(tuple(segments), "stop", reward=reward)


GROUPS = (Group(0, Prompt((1, 2, 3)), (sample(1.0, (4, 5), (6,)), sample(0.0, (4,)))),
          Group(1, Prompt((1,)), (sample(0.0, (2, 2, 2)), sample(3.0, (5, 4), (3, 2)))))


HELD = StepGroups.from_groups(GROUPS)


class Passes:
    """A critic and a reference policy that say something of each token; which steps they were asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def _of(self, what: str, batch: Batch, step: int, scale: float) -> torch.Tensor:
        assert {name for name in SCHEMA if name in batch} == {"tokens", "lengths", "loss_mask"}
        self.asked.append((what, step))
        places = torch.cat([torch.arange(n) for n in batch["lengths"].tolist()])
        return (scale * (batch["tokens"] + 0.1 * places))[batch["loss_mask"]]

    def forward_values(self, batch: Batch, step: int) -> torch.Tensor:
        return self._of("values", batch, step, 0.1)

    def trainer_logprobs(self, batch: Batch, step: int) -> torch.Tensor:
        return self._of("trainer", batch, step, -0.3)

    def reference_logprobs(self, batch: Batch, step: int) -> torch.Tensor:
        return self._of("reference", batch, step, -0.2)


class Roles:
    def advantages(self, rewards: list[list[float]]) -> list[list[float]]:
        return rewards


def made(passes: Passes, groups: StepGroups = HELD, *, gae_lambda: float = 0.7,
         whiten_advantages: bool = True, **algorithm: object) -> MadeBatch:
    cfg = config.parse({"algorithm": {"name": "ppo", "options": {"gae_lambda": gae_lambda, "gamma": 0.9}, **algorithm},
                        "critic": {"whiten_advantages": whiten_advantages}})
    waits = Waits(lambda *_: None, threading.Event())
    batches = TrainingBatches(cfg, Roles(), waits, 16, passes)  # type: ignore[arg-type]
    return batches.make(groups, 5, StepTimer())


def test_critic_learns_returns_and_the_policy_whitened_advantages() -> None:
    passes = Passes()
    plain, found = made(passes, whiten_advantages=False), made(passes)
    batch = plain.batch
    rewards = torch.zeros(batch.loss_tokens)
    rewards[batch.loss_counts.cumsum(0) - 1] = torch.tensor([1.0, 0.0, 0.0, 3.0])
    expected = estimated(rewards, batch["values"], batch.loss_counts, gamma=0.9, lam=0.7).float()
    torch.testing.assert_close(batch["token_advantages"], expected)
    torch.testing.assert_close(batch["returns"], expected + batch["values"])
    torch.testing.assert_close(found.batch["token_advantages"], whitened(expected))
    assert torch.equal(found.batch["returns"], batch["returns"]), "what the critic learns from is not whitened"
    assert passes.asked == [("values", 5)] * 2
    assert found.metrics["value_mean"] == pytest.approx(float(batch["values"].mean()))
    assert found.metrics["return_mean"] == pytest.approx(float(batch["returns"].mean()), rel=1e-5)
    assert found.metrics["explained_variance"] <= 1


def test_each_turn_is_credited_with_its_own_reward() -> None:
    of_turns = [group if group.ordinal == 0 else Group(1, group.prompt, (
        group.samples[0].rewarded(0.0, {}, [2.0]), group.samples[1].rewarded(3.0, {}, [1.5, 0.5]))) for group in GROUPS]
    found = made(Passes(), StepGroups.from_groups(of_turns), whiten_advantages=False).batch
    mask = in_rows(found, found["loss_mask"])
    rewards = torch.zeros(mask.shape)
    for row, places in enumerate(({7: 1.0}, {3: 0.0}, {3: 2.0 - 2.0}, {2: 1.5, 6: 0.5 + 1.0})):
        for place, reward in places.items():
            assert bool(mask[row, place])
            rewards[row, place] = reward
    expected = estimated(rewards[mask], found["values"], found.loss_counts, gamma=0.9, lam=0.7).float()
    torch.testing.assert_close(found["token_advantages"], expected)
    assert "turn_rewards" not in found, "the loss has no use for it"


def test_turn_is_what_the_policy_wrote_on_end() -> None:
    own, said = Segment((1, 2), (-0.1, -0.1), version=1), Segment((9,), loss=False)
    quoted = Segment((3,), (-0.1,), loss=False, version=1)
    assert Sample((own, own, said, quoted, own, said)).turn_ends == (3, 7)
    assert Sample((said, own, Segment((), loss=False), own)).turn_ends == (4,) and Sample((said,)).turn_ends == ()


def test_each_token_bears_its_own_divergence_from_the_reference() -> None:
    passes = Passes()
    with_kl = made(passes, whiten_advantages=False, kl_coef=0.5, kl_in="reward", kl_estimator="k1", gae_lambda=0.0)
    without = made(Passes(), whiten_advantages=False, gae_lambda=0.0)
    batch = with_kl.batch
    reference = Passes().reference_logprobs(batch.only("tokens", "lengths", "loss_mask"), 5)
    divergence = batch["old_logprobs"] - reference
    torch.testing.assert_close(batch["token_advantages"], without.batch["token_advantages"] - 0.5 * divergence)
    assert passes.asked == [("reference", 5), ("values", 5)]
    assert "ref_logprobs" not in batch, "the loss has no use for it"
    assert with_kl.metrics["kl_reference"] == pytest.approx(float(divergence.mean()), rel=1e-5)


def test_batch_of_a_step_that_is_tried_again_is_made_once() -> None:
    """While a loss is held for a person the step is tried for hours. A new attempt after a loss has other lists."""
    passes = Passes()
    cfg = config.parse({"algorithm": {"name": "ppo"}})
    batches = TrainingBatches(cfg, Roles(), Waits(lambda *_: None, threading.Event()), 16,  # type: ignore[arg-type]
                              passes)
    groups = HELD
    first = batches.make(groups, 5, StepTimer())
    assert batches.make(groups, 5, StepTimer()) is first and passes.asked == [("values", 5)]
    again = StepGroups.from_groups(GROUPS)
    assert batches.make(again, 5, StepTimer()) is not first, "made for the trainer's state after a loss"
    batches.forget()
    batches.make(groups, 6, StepTimer())
    assert passes.asked == [("values", 5), ("values", 5), ("values", 6)]


def test_what_groups_of_their_own_have_computed_is_in_the_batch() -> None:
    cfg = config.parse({"algorithm": {"name": "grpo", "tis_cap": 2.0, "kl_coef": 0.1, "reference_every_steps": 2},
                        "train": {"updates_per_step": 2}, "actor_fwd": {"enabled": True},
                        "reference": {"enabled": True}})
    passes, waits = Passes(), Waits(lambda *_: None, threading.Event())
    batches = TrainingBatches(cfg, Roles(), waits, 16, passes)  # type: ignore[arg-type]
    found = batches.make(HELD, 5, StepTimer())
    assert passes.asked == [("trainer", 5), ("reference", 5)] and found.metrics["reference_step"] == 4
    for name, scale in (("trainer_logprobs", -0.3), ("ref_logprobs", -0.2)):
        assert len(found.batch[name]) == found.batch.loss_tokens and bool((found.batch[name] <= scale * 2).all())


class Refusing(Roles):
    """Its teacher refuses every sample."""

    def score(self, sequences: Sequence[ScoreRequest], top: int) -> list[None]:
        return [None] * len(sequences)


def test_teacher_may_refuse_all_samples_of_groups_that_are_tried_only() -> None:
    cfg = config.parse({"algorithm": {"name": "on_policy_distillation", "teacher": "large"},
                        "pools": {"large": {"model": "/models/large"}}})
    stopping, shown = threading.Event(), list[str]()

    def report(stage: str, kind: str, what: str) -> None:
        if kind:
            shown.append(f"{kind}: {what}")
            stopping.set()

    batches = TrainingBatches(cfg, Refusing(), Waits(report, stopping), 16, Passes())  # type: ignore[arg-type]
    tried = batches.make(HELD, 5, StepTimer(), tried=True)
    assert tried.batch.loss_tokens == 0 and tried.metrics["teacher_refused"] == 1 and not shown
    batches.forget()
    with pytest.raises(Fenced):
        batches.make(HELD, 5, StepTimer())
    assert shown[0].startswith("plugin: the teacher's engines refuse every sample"), "a person is waited for"
    batches.close()
