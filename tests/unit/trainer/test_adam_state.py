"""The state of the Adams that Megatron may choose: torch's counts steps per parameter, the fused ones per group."""

from __future__ import annotations

import pytest
import torch

from elastic_rl.trainer.megatron.optimizer import MOMENTS, AdamState


class FusedAdam(torch.optim.Optimizer):
    """Counts and keeps its state as Transformer Engine's and Apex's optimizers of that name do."""

    def __init__(self, params: list[torch.nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            if "step" in group:
                group["step"] += 1
            else:
                group["step"] = 1
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                assert p.grad is not None
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                corrected = (state["exp_avg_sq"] / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
                p.addcdiv_(state["exp_avg"] / (1 - beta1 ** group["step"]), corrected, value=-group["lr"])


Trained = tuple[torch.nn.Parameter, torch.optim.Optimizer, AdamState]
OPTIMIZERS = [FusedAdam, torch.optim.AdamW, torch.optim.Adam]


def make(optimizer: type, start: torch.Tensor | None = None) -> Trained:
    param = torch.nn.Parameter(torch.ones(3, 2) if start is None else start.clone())
    inner = optimizer([param], lr=0.1)
    return param, inner, AdamState(inner, [("w", param)])


def train(trained: Trained, steps: range) -> torch.Tensor:
    param, inner, _ = trained
    for step in steps:
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step))
        inner.step()
    return param.detach().clone()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_step_after_a_reset_equals_the_first_step_of_a_new_optimizer(optimizer: type) -> None:
    used = make(optimizer)
    weights = train(used, range(5))
    used[2].reset()
    assert torch.equal(train(used, range(9, 10)), train(make(optimizer, weights), range(9, 10)))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_continues_bit_for_bit_from_loaded_moments(optimizer: type) -> None:
    undisturbed = make(optimizer)
    weights = train(undisturbed, range(4))
    saved = {kind: {name: t.clone() for name, t in of.items()} for kind, of in undisturbed[2].moments().items()}
    resumed = make(optimizer, weights)
    train(resumed, range(20, 22))  # what it did before is forgotten
    with torch.no_grad():
        resumed[0].copy_(weights)
    moments = resumed[2].allocate()
    for kind in MOMENTS:
        moments[kind]["w"].copy_(saved[kind]["w"])
    resumed[2].load(moments, 4)
    assert torch.equal(train(resumed, range(4, 8)), train(undisturbed, range(4, 8)))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_moments_before_the_first_step_are_zeros_without_memory(optimizer: type) -> None:
    param, _, state = make(optimizer)
    for kind in MOMENTS:
        zeros = state.moments()[kind]["w"]
        assert zeros.shape == param.shape and not zeros.any() and zeros.nbytes == param.nbytes
        assert zeros.untyped_storage().nbytes() == 4
