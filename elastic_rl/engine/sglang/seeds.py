"""A seed for each sample of a request.

SGLang samples by a seed of the request when ``--enable-deterministic-inference`` is on. One request of ours holds many
samples of many prompts, and the router accepts one set of sampling parameters for all of it. So the server derives the
seed of a sample from the request's seed, the prompt, and how often the prompt has occurred in the request before: the
same for every engine, and however prompts are put together into requests, since the client puts no two groups of one
prompt into a request.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch


def derived_seeds(seed: int, prompts: Sequence[Sequence[int]]) -> list[int]:
    """A seed of 31 bits for each sample of a request. Pure."""
    seen: Counter[bytes] = Counter()
    out = []
    for prompt in prompts:
        tokens = array("q", prompt).tobytes()
        raw = hashlib.blake2b(tokens, digest_size=8, salt=seed.to_bytes(8, "little"),
                              person=seen[tokens].to_bytes(8, "little")).digest()
        seen[tokens] += 1
        out.append(int.from_bytes(raw[:4], "little") & 0x7FFFFFFF)
    return out


def hashes(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bits; Austin Appleby, public domain) of (seed, position, column) for each row and column:
    ``seed`` and ``positions`` [n], ``columns`` [m] → [n, m] int64 with values of 32 bits. What SGLang's kernel
    computes, which the CPU does not have."""
    mask = 0xFFFFFFFF  # products wrap at 64 bits, which leaves the lower 32 as they are

    def rotate(x: torch.Tensor, bits: int) -> torch.Tensor:
        return ((x << bits) | (x >> (32 - bits))) & mask

    def mix(h: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        k = (rotate((block * 0xCC9E2D51) & mask, 15) * 0x1B873593) & mask
        return (rotate(h ^ k, 13) * 5 + 0xE6546B64) & mask

    seed, positions = seed.to(torch.int64), positions.to(torch.int64) & mask
    h = torch.zeros_like(seed)
    for block in (seed & mask, (seed >> 32) & mask, positions):
        h = mix(h, block)
    h = mix(h[:, None], (columns.to(torch.int64) & mask)[None]) ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = ((h ^ (h >> shift)) * factor) & mask
    return h ^ (h >> 16)


def install(*, seeded: bool) -> None:
    """Has the server of this process do it. It wraps a method of SGLang that is no public API. ``seeded``: whether the
    server samples by seeds. Its schedulers would end by an assertion at a request with ``min_p`` then, so that is
    refused."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    request_class: Any = GenerateReqInput
    normalize = request_class._normalize_sampling_params

    def normalize_and_seed(self: Any, num: int) -> None:
        seed = self.sampling_params.get("sampling_seed") if isinstance(self.sampling_params, dict) else None
        normalize(self, num)
        if seeded and any(params.get("min_p") for params in self.sampling_params):
            raise ValueError("min_p with seeded sampling: set engine.seeded_sampling=off, or leave min_p out")
        if seed is None or not self.input_ids or not isinstance(self.input_ids[0], list):
            return
        prompts = (self.input_ids * num)[:num]
        self.sampling_params = [{**params, "sampling_seed": own} for params, own in zip(
            self.sampling_params, derived_seeds(int(seed), prompts), strict=True)]

    request_class._normalize_sampling_params = normalize_and_seed
