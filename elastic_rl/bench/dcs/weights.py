"""The bytes that the rows move: bf16 tensors shaped like the layers of a transformer, all in one buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

_HIDDEN, _FFN, _HEADS, _KV = 1024, 3072, 2048, 1024
_LAYER: Mapping[str, tuple[int, ...]] = {
    "input_layernorm.weight": (_HIDDEN,),
    "self_attn.q_proj.weight": (_HEADS, _HIDDEN), "self_attn.k_proj.weight": (_KV, _HIDDEN),
    "self_attn.v_proj.weight": (_KV, _HIDDEN), "self_attn.o_proj.weight": (_HIDDEN, _HEADS),
    "self_attn.q_norm.weight": (128,), "self_attn.k_norm.weight": (128,),
    "post_attention_layernorm.weight": (_HIDDEN,),
    "mlp.gate_proj.weight": (_FFN, _HIDDEN), "mlp.up_proj.weight": (_FFN, _HIDDEN),
    "mlp.down_proj.weight": (_HIDDEN, _FFN),
}
"""Tensors of a layer of Qwen3-0.6B; about 30 MiB."""
_PAGE_INTS = 1024
_RANDOM_BYTES = 16 << 20


class Weights:
    """``tensors`` are views of ``flat`` [nbytes] uint8. ``renew`` makes another version out of them."""

    def __init__(self, nbytes: int, *, seed: int = 0) -> None:
        nbytes -= nbytes % 4096
        self.flat = torch.empty(nbytes, dtype=torch.uint8)
        block = torch.randn(min(_RANDOM_BYTES, nbytes) // 2, generator=torch.Generator().manual_seed(seed))
        raw = (block * 0.02).bfloat16().view(torch.uint8)
        for start in range(0, nbytes, len(raw)):
            part = self.flat[start:start + len(raw)]
            part.copy_(raw[:len(part)])
        self.tensors = list(_cut(self.flat))
        self._round = 0
        self.renew()

    @property
    def nbytes(self) -> int:
        return self.flat.numel()

    def renew(self) -> None:
        """Changes the low bits of every element, so that a delta saves nothing, and makes every page differ from all
        other pages of this and other versions, so that no chunk equals one that a node has."""
        self.flat.view(torch.int16).bitwise_xor_(self._round % 7 + 1)
        pages = self.flat.view(torch.int32)[::_PAGE_INTS]
        stamp = torch.arange(len(pages), dtype=torch.int32) + self._round * len(pages)
        self._round += 1
        # 14 bits in each of two bf16 numbers, which stay small ones: no page equals another of this or other versions.
        pages.copy_((stamp & 0x3FFF) | ((stamp >> 14 & 0x3FFF) << 16))


def _cut(flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Layers until the bytes are used up; the last tensor has what is left of them."""
    at, layer = 0, 0
    while True:
        for name, shape in _LAYER.items():
            nbytes = 2 * torch.Size(shape).numel()
            if at + nbytes > flat.numel():
                rest = flat[at:].view(torch.bfloat16)
                if rest.numel():
                    yield "lm_head.weight", rest
                return
            yield f"model.layers.{layer}.{name}", flat[at:at + nbytes].view(torch.bfloat16).view(shape)
            at += nbytes
        layer += 1
