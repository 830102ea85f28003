"""Floating-point operations of a model, from its shape. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_rl.models.arch import ModelArch

BACKWARD = 2.0
"""A backward pass costs so many forward ones (arXiv 2001.08361, section 2.1)."""


@dataclass(frozen=True)
class SequenceCost:
    """Operations of a forward pass over one sequence, by its number of positions."""

    linear: float
    """For each position."""
    square: float
    """For each square of the number of positions."""

    @classmethod
    def of(cls, arch: ModelArch) -> SequenceCost:
        """The formula of ``training_flops`` for one sequence and a forward pass, with half of its attention: a kernel
        that knows of the causal mask skips the blocks above the diagonal (arXiv 2307.08691, section 3.1)."""
        return cls(2.0 * _multiplied_parameters(arch), 2.0 * _attention_width(arch))

    def __call__(self, positions: int) -> float:
        return self.linear * positions + self.square * positions * positions

    def of_sample(self, tokens: int) -> float:
        """For a sample of so many tokens: nothing is predicted from its last one."""
        return self(max(tokens - 1, 1))


def training_flops(arch: ModelArch, tokens: int, squares: int) -> float:
    """Operations of a forward and a backward pass over sequences without padding.

    ``tokens``: positions of all sequences together; ``squares``: the sum of their squared lengths. An addition and a
    multiplication are two operations, the backward pass is twice the forward one, and attention counts whole matrices
    of positions, although what is above the diagonal is masked: so does PaLM (arXiv 2204.02311, appendix B), and most
    figures of model FLOPs utilisation compare with it. Of a mixture of experts those count that a token is sent to.
    Norms, activations, rotary embeddings, the look-up of embeddings, and what is computed again to save memory do not
    count.
    """
    return (1.0 + BACKWARD) * (2.0 * _multiplied_parameters(arch) * tokens + 4.0 * _attention_width(arch) * squares)


def _attention_width(arch: ModelArch) -> int:
    """Width of all attention heads of all layers."""
    return arch.layers * arch.heads * arch.head_dim


def _multiplied_parameters(arch: ModelArch) -> int:
    """Parameters that each token is multiplied by: the matrices of the layers, and the output layer."""
    attention = arch.hidden * arch.head_dim * (2 * arch.heads + 2 * arch.kv_heads)
    if arch.moe is None:
        mlp = 3 * arch.hidden * arch.ffn
    else:
        mlp = arch.hidden * arch.moe.experts + arch.moe.top_k * 3 * arch.hidden * arch.moe.ffn
    return arch.layers * (attention + mlp) + arch.hidden * (1 if arch.value_head else arch.vocab)
