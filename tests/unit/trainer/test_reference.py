"""The reference policy: which step's it is, through every restart, and that a pass with its weights leaves no trace."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.config.algorithm import reference_step
from elastic_rl.errors import Conflict, Fenced
from elastic_rl.trainer.progress import Progress
from elastic_rl.trainer.reference import Reference
from elastic_rl.trainer.service.commands import (
    Command,
    ForwardReference,
    Save,
    Update,
    WriterGate,
    after_begin_rl,
    after_update,
)

thorough = settings(deadline=None, max_examples=seeds(40))
EVERY = st.none() | st.integers(1, 6)


class Weights:
    """Parameters of a policy."""

    def __init__(self, *parameters: torch.Tensor) -> None:
        self._parameters = [torch.nn.Parameter(p) for p in parameters]

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((f"p{i}", p) for i, p in enumerate(self._parameters))

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for _, parameter in self.parameters():
                parameter.fill_(value)

    def copy(self) -> list[torch.Tensor]:
        return [p.detach().clone() for _, p in self.parameters()]


def reference_of(weights: Weights, every: int | None = None, bucket_bytes: int = 1 << 10) -> Reference:
    return Reference(weights, every, bucket_bytes)  # type: ignore[arg-type]


# -- which step it is of -----------------------------------------------------------------------------------------------


@thorough
@given(st.integers(1, 10_000), EVERY)
def test_reference_of_a_step_is_the_newest_policy_due_before_it(step: int, every: int | None) -> None:
    found = reference_step(step, every)
    if every is None:
        assert found == 0
    else:
        assert found < step and found % every == 0 and step - found <= every


def test_steps_count_from_one() -> None:
    with pytest.raises(ValueError, match="count from 1"):
        reference_step(0, 3)


@thorough
@given(EVERY, st.lists(st.sampled_from(["step", "step", "step", "commit", "lose"]), max_size=60))
def test_reference_is_that_of_the_step_through_every_loss_of_the_group(every: int | None, events: list[str]) -> None:
    """Each step makes weights that follow from it. What is lost comes back from what was committed, as JSON and
    tensors; another group has other memory."""
    weights = Weights(torch.empty(3, 2), torch.empty(5))
    reference = reference_of(weights, every)
    weights.fill(0.0)
    begin = Save(id="c", epoch=1, term=1, group="g", phase="sft", step=0, begin_rl=True)
    progress = reference.renew(after_begin_rl(Progress(), begin))
    saved = json.dumps(progress.to_json()), {n: s.clone() for n, s in reference.shards().items()}
    for event in events:
        if event == "step":
            step = progress.step + 1
            assert reference.fault(progress) is None
            assert progress.reference == reference_step(step, every)
            assert all((s == float(reference_step(step, every))).all() for s in reference.shards().values())
            weights.fill(float(step))
            update = Update(id="c", epoch=1, term=1, group="g", batch="b", step=step)
            progress = reference.renew(after_update(progress, update))
        elif event == "commit":
            saved = json.dumps(progress.to_json()), {n: s.clone() for n, s in reference.shards().items()}
        else:
            progress = Progress.from_json(json.loads(saved[0]))
            weights = Weights(torch.empty(3, 2), torch.empty(5))
            weights.fill(float(progress.step))
            reference = reference_of(weights, every)
            for name, shard in reference.shards().items():
                shard.copy_(saved[1][name])


def test_state_without_the_reference_of_its_next_step_is_refused() -> None:
    reference = reference_of(Weights(torch.zeros(2)), 4)
    none = reference.fault(Progress("rl", 5))
    assert none is not None and "has no reference policy" in none.message and "of RL step 4" in none.message
    assert "--from-job" in none.hint
    other = reference.fault(Progress("rl", 5, reference=0))
    assert other is not None and "the policy of RL step 0 as the reference" in other.message
    assert reference.fault(Progress("rl", 5, reference=4)) is None


def test_supervised_phase_has_no_reference() -> None:
    reference = reference_of(Weights(torch.zeros(2)), 1)
    assert reference.renew(Progress("sft", 3)) == Progress("sft", 3)
    assert Progress.from_json(json.loads(json.dumps(Progress("sft", 3).to_json()))).reference is None


# -- its weights in the place of the policy's --------------------------------------------------------------------------


@thorough
@given(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=4), st.integers(1, 200),
       st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 1000))
def test_model_has_reference_weights_inside_and_its_own_bits_after(
        shapes: list[list[int]], bucket_bytes: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = Weights(*(torch.randn(shape, generator=generator).to(dtype) for shape in shapes))
    reference = reference_of(weights, bucket_bytes=bucket_bytes)
    began_with = weights.copy()
    reference.renew(Progress("rl", 0))
    with torch.no_grad():
        for _, parameter in weights.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
            parameter.view(-1)[:1] = float("nan")  # bits, not values
    own = weights.copy()
    for fails in (False, True, False):
        try:
            with reference.in_place():
                assert all(map(torch.equal, weights.copy(), began_with))
                if fails:
                    raise RuntimeError("the pass fails")
        except RuntimeError:
            assert fails
        for before, now in zip(own, weights.copy(), strict=True):
            assert torch.equal(before.view(-1).view(torch.uint8), now.view(-1).view(torch.uint8))


def test_change_of_the_weights_is_one_that_torch_counts() -> None:
    """A publish takes tensors of one memory and one count for tied ones, and stores them once."""
    weights = Weights(torch.ones(4))
    reference = reference_of(weights)
    reference.renew(Progress("rl", 0))
    [(_, parameter)] = weights.parameters()
    counts = [parameter._version]
    with reference.in_place():
        counts.append(parameter._version)
    counts.append(parameter._version)
    assert len(set(counts)) == 3


# -- who may ask -------------------------------------------------------------------------------------------------------


def asked(step: int, term: int = 2) -> Command:
    made = ForwardReference(id="c", epoch=1, term=term, group="g", batch="b", step=step)
    assert Command.decode(made.encode()) == made
    return made


def test_reference_pass_is_for_the_newest_actor_and_may_be_repeated() -> None:
    gate, progress = WriterGate(1, "g", term=2), Progress("rl", 4, reference=0)
    for _ in range(2):
        assert gate.admit(asked(5), progress) is None
        gate.executed(asked(5), {})
    for step in (4, 6):
        with pytest.raises(Conflict, match="does not follow"):
            gate.admit(asked(step), progress)
    with pytest.raises(Conflict, match="does not follow"):
        gate.admit(asked(5), Progress("sft", 4))
    with pytest.raises(Fenced):
        gate.admit(asked(5, term=1), progress)
