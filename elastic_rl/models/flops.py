"""Floating-point operations of a model, from its shape. Pure."""

from __future__ import annotations

from elastic_rl.models.arch import ModelArch


def training_flops(arch: ModelArch, tokens: int, squares: int) -> float:
    """Operations of a forward and a backward pass over sequences without padding.

    ``tokens``: positions of all sequences together; ``squares``: the sum of their squared lengths. An addition and a
    multiplication are two operations, the backward pass is twice the forward one, and attention counts whole matrices
    of positions, although what is above the diagonal is masked: so does PaLM (arXiv 2204.02311, appendix B), and most
    figures of model FLOPs utilisation compare with it. Of a mixture of experts those count that a token is sent to.
    Norms, activations, rotary embeddings, the look-up of embeddings, and what is computed again to save memory do not
    count.
    """
    return 3.0 * (2.0 * _multiplied_parameters(arch) * tokens
                  + 4.0 * arch.layers * arch.heads * arch.head_dim * squares)


def _multiplied_parameters(arch: ModelArch) -> int:
    """Parameters that each token is multiplied by: the matrices of the layers, and the output layer."""
    attention = arch.hidden * arch.head_dim * (2 * arch.heads + 2 * arch.kv_heads)
    if arch.moe is None:
        mlp = 3 * arch.hidden * arch.ffn
    else:
        mlp = arch.hidden * arch.moe.experts + arch.moe.top_k * 3 * arch.hidden * arch.moe.ffn
    return arch.layers * (attention + mlp) + arch.hidden * (1 if arch.value_head else arch.vocab)
