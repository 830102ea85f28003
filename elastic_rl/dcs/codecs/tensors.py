"""Conversion between tensors and bytes. Pure."""

from __future__ import annotations

import torch

from elastic_rl.dcs.codecs.digests import digest_of


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in row-major order: uint8, shape [nbytes], on the CPU; a view where the tensor allows one."""
    # resolve_*: the bytes of lazy conjugates and negations (complex tensors) differ from their values
    plain = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def from_bytes(data: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A view of uint8 ``data`` [nbytes] in the given dtype and shape; no copy."""
    return data.view(getattr(torch, dtype)).view(shape)


def checksum(tensor: torch.Tensor) -> str:
    """xxh3-128 of the tensor's bytes, as 32 hex digits."""
    return digest_of(to_bytes(tensor).numpy())
