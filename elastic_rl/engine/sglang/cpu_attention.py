"""Attention of SGLang on the CPU for many short sequences at once.

SGLang's ``torch_native`` backend calls torch once for each sequence and layer: with 256 short sequences most of a
forward pass is Python. This one pads sequences of similar length into one call. It takes the name ``torch_native`` in
SGLang's registry, and leaves to SGLang what it does not batch: long prefills, sliding windows, cross attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

_MAX_WASTE = 2
"""A group's longest sequence is at most this many times as long as its shortest one, unless it is below ``_SHORT``."""
_SHORT = 64
_MAX_PADDED = 1 << 18
"""Largest size of a group, in keys: sequences times the longest one. Bounds the memory of one call."""
_LONG_PREFILL = 128
"""Tokens of a prefill from which on a call of its own costs less than padding."""
_FEW = 2
"""Sequences up to which calls of their own cost less than padding."""


def groups(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of sequences that are padded to one length, longest first. Pure.

    Each index occurs once; ``lengths`` are positive.
    """
    out: list[list[int]] = []
    longest = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = out and (longest <= _SHORT or longest <= _MAX_WASTE * lengths[i]) and (
            (len(out[-1]) + 1) * longest <= _MAX_PADDED)
        if fits:
            out[-1].append(i)
        else:
            out.append([i])
            longest = lengths[i]
    return out


@dataclass(frozen=True)
class PaddedGroup:
    """B sequences padded to Q queries and K keys.

    ``rows``: int64 [B, Q], each query's row in the batch's queries (padding: the sequence's first row); ``used``: bool
    [B, Q]; ``slots``: int64 [B, K], each key's place in the KV cache; ``mask``: bool [B, 1, Q, K], which keys a query
    sees.
    """

    rows: torch.Tensor
    used: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor

    @property
    def whole(self) -> bool:
        """Whether no query is padding."""
        return bool(self.used.all())


def pad(first_rows: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, table: torch.Tensor) -> PaddedGroup:
    """``first_rows``, ``queries``, ``keys``: int64 [B], of each sequence its first row among the queries, and how many
    queries and keys it has; the last query sees all keys. ``table``: [B, >= max keys], places of the keys."""
    width, depth = int(queries.max()), int(keys.max())
    at = torch.arange(width)
    used = at < queries[:, None]
    rows = first_rows[:, None] + torch.where(used, at, 0)
    key_at = torch.arange(depth)
    present = key_at < keys[:, None]
    # A padded key is the sequence's first one again: a slot that nobody has written may hold anything.
    slots = torch.where(present, table[:, :depth].long(), table[:, :1].long())
    last_seen = (keys - queries)[:, None] + at
    mask = (key_at <= last_seen[:, :, None]) & present[:, None, :]
    return PaddedGroup(rows, used, slots, mask[:, None])


def attend(group: PaddedGroup, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
           output: torch.Tensor, scale: float | None) -> None:
    """Writes the attention of the group's queries into ``output``.

    ``query``, ``output``: [rows, heads, head size]; ``k_cache``, ``v_cache``: [slots, KV heads, head size].
    """
    q = query[group.rows].transpose(1, 2)  # [B, heads, Q, size]
    k = k_cache[group.slots].to(q.dtype).transpose(1, 2)
    v = v_cache[group.slots].to(q.dtype).transpose(1, 2)
    batch, heads, width, size = q.shape
    shared = heads // k.shape[1]  # heads that a KV head serves: they become further queries of it
    q = q.reshape(batch, heads // shared, shared * width, size)
    found = scaled_dot_product_attention(q, k, v, attn_mask=group.mask.repeat(1, 1, shared, 1), scale=scale)
    found = found.reshape(batch, heads, width, -1).transpose(1, 2)
    if group.whole:
        output[group.rows.flatten()] = found.flatten(0, 1)
    else:
        output[group.rows[group.used]] = found[group.used]


def install() -> None:
    """Registers the backend with SGLang; call in the process that makes the schedulers, before it does."""
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    class BatchedAttention(TorchNativeAttnBackend):
        """Pads once for each forward pass; its layers share the result."""

        _padded: tuple[list[PaddedGroup], list[int]] | None = None

        def init_forward_metadata(self, forward_batch: Any) -> None:
            super().init_forward_metadata(forward_batch)
            self._padded = None

        def _run_sdpa_forward_decode(self, query: torch.Tensor, output: torch.Tensor, k_cache: torch.Tensor,
                                     v_cache: torch.Tensor, req_to_token: torch.Tensor,
                                     req_pool_indices: torch.Tensor, seq_lens: torch.Tensor,
                                     encoder_lens: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
            if encoder_lens is not None or options.get("sliding_window_size") is not None or len(seq_lens) <= _FEW:
                return super()._run_sdpa_forward_decode(query, output, k_cache, v_cache, req_to_token,
                                                        req_pool_indices, seq_lens, encoder_lens, **options)
            if self._padded is None:
                keys = seq_lens.long()
                ones, first = torch.ones_like(keys), torch.arange(len(keys))
                self._padded = _padded(first, ones, keys, req_to_token, req_pool_indices, groups(keys.tolist())), []
            for group in self._padded[0]:
                attend(group, query, k_cache, v_cache, output, options.get("scaling"))
            return output

        def _run_sdpa_forward_extend(self, query: torch.Tensor, output: torch.Tensor, k_cache: torch.Tensor,
                                     v_cache: torch.Tensor, req_to_token: torch.Tensor,
                                     req_pool_indices: torch.Tensor, seq_lens: torch.Tensor,
                                     extend_prefix_lens: torch.Tensor, extend_seq_lens: torch.Tensor,
                                     encoder_lens: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
            whole = super()._run_sdpa_forward_extend
            plain = encoder_lens is None and options.get("sliding_window_size") is None and options.get("causal")
            if not plain or len(seq_lens) <= _FEW:
                return whole(query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
                             extend_prefix_lens, extend_seq_lens, encoder_lens, **options)
            queries, keys = extend_seq_lens.long(), seq_lens.long()
            first = queries.cumsum(0) - queries
            if self._padded is None:
                lengths = keys.tolist()
                short = [i for i, n in enumerate(lengths) if n < _LONG_PREFILL]
                grouped = [[short[i] for i in g] for g in groups([lengths[i] for i in short])]
                self._padded = (_padded(first, queries, keys, req_to_token, req_pool_indices, grouped),
                                [i for i, n in enumerate(lengths) if n >= _LONG_PREFILL])
            for group in self._padded[0]:
                attend(group, query, k_cache, v_cache, output, options.get("scaling"))
            for i in self._padded[1]:
                rows = slice(int(first[i]), int(first[i] + queries[i]))
                whole(query[rows], output[rows], k_cache, v_cache, req_to_token, req_pool_indices[i:i + 1],
                      seq_lens[i:i + 1], extend_prefix_lens[i:i + 1], extend_seq_lens[i:i + 1], None, **options)
            return output

    attention_registry.ATTENTION_BACKENDS["torch_native"] = BatchedAttention


def _padded(first: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, req_to_token: torch.Tensor,
            req_pool_indices: torch.Tensor, grouped: list[list[int]]) -> list[PaddedGroup]:
    out = []
    for indices in grouped:
        chosen = torch.tensor(indices)
        depth = int(keys[chosen].max())
        out.append(pad(first[chosen], queries[chosen], keys[chosen],
                       req_to_token[req_pool_indices[chosen].long(), :depth]))
    return out
