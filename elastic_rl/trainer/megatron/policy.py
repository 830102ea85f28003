"""The policy, or the critic: a Megatron GPTModel with the shape of an HF folder, wrapped for data parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from elastic_rl.config import Config
from elastic_rl.dcs.versions import hf_folder
from elastic_rl.errors import ConfigError
from elastic_rl.models.arch import VALUE_HEAD, ModelArch, whole_model_name
from elastic_rl.models.layout import ShardLayout
from elastic_rl.trainer.context_parallel import own_positions
from elastic_rl.trainer.megatron import gpt_model
from elastic_rl.trainer.megatron.hf_layout import ShardRange
from elastic_rl.trainer.megatron.parallel import ParallelDims
from elastic_rl.trainer.megatron.shard_loader import ShardLoader
from elastic_rl.trainer.micro_batches import ModelInput

__all__ = ["FileTensor", "ModelArch", "Policy"]


class Policy:
    """This rank's part of the model: of the policy or, with ``arch.value_head``, of the critic."""

    def __init__(self, arch: ModelArch, cfg: Config, par: ParallelDims, *, trains: bool = True) -> None:
        """``trains``: whether it gets gradients, which take memory."""
        self.arch, self.par = arch, par
        self.dims = arch.attention_dims(par.tp)
        self.module: torch.nn.Module = gpt_model.build(arch, self.dims, cfg, par)
        for name, param in self.parameters():
            # By it Megatron counts a parameter in the norm of the gradient: once, or each rank's part of it. It sets it
            # only where it initialises parameters itself.
            param.tensor_model_parallel = arch.rule_of(name).layout is not ShardLayout.WHOLE  # type: ignore[attr-defined]
        # The optimizer and gradient code read the model through Megatron's DDP, so it is wrapped for one replica too.
        self.ddp = gpt_model.wrap(self.module, cfg) if trains else self.module
        self.masters: dict[str, ShardRange] = {}
        """Megatron name → what this rank's optimizer has of the fp32 master weights. Empty for fp32 parameters, which
        are their own, and without an optimizer."""
        self._masks = not gpt_model.uses_te(cfg, par)
        self._aux_loss_coef = cfg.trainer.moe_aux_loss_coef if arch.moe is not None else 0.0

    @property
    def has_aux_loss(self) -> bool:
        """Whether a load-balancing loss is added in the backward pass."""
        return self._aux_loss_coef > 0

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        dtype: torch.dtype = self.module.config.params_dtype
        return dtype

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """(Megatron name, this rank's shard), in a fixed order. Layers and experts are numbered over the whole model.
        """
        first_layer = self.par.pp_rank * (self.arch.layers // self.par.pp)
        first_expert = self.par.ep_rank * (self.arch.moe.experts // self.par.ep if self.arch.moe else 0)
        for name, param in self.module.named_parameters():
            yield whole_model_name(name, first_layer, first_expert), param

    def forward(self, given: ModelInput) -> torch.Tensor:
        """Computes from tokens [R, P] int64 this rank's columns of the logits [R, P, padded_vocab / TP]; before the
        last pipeline stage the hidden states [P, R, hidden]. Of packed sequences none sees another one, and the
        positions of each count from 0: their logits are those of the sequences in rows of their own, up to rounding.
        With context parallelism each rank is given all tokens, and computes its own P / CP positions
        (``own_positions``).

        Padding columns hold the dtype's minimum, so that they have no probability. A critic gives values [R, P, 1] fp32
        in the place of logits.
        """
        tokens, (n, length) = given.tokens, given.tokens.shape
        width = gpt_model.padded_length(self.module.config, length)
        if width > length:
            tokens = torch.nn.functional.pad(tokens, (0, width - length))
        # What fills the row up is a sequence too, so that it is in none of the others.
        lengths = given.packed + ((width - length,) if given.packed and width > length else ())
        if self.par.cp > 1:
            tokens = tokens[:, own_positions(lengths, self.par.cp, self.par.cp_rank).to(tokens.device)]
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(n, -1)  # Megatron rotates by others
        padding = {"padding_mask": self._padding(given, width)} if self.has_aux_loss else {}
        if given.packed:
            logits: torch.Tensor = self.ddp(tokens, positions, None, **padding,
                                            packed_seq_params=packed_sequences(lengths, tokens.device))
        else:
            # Transformer Engine masks by itself, without memory for the square of a long row.
            mask = torch.ones(width, width, dtype=torch.bool, device=tokens.device).triu(1)[None, None]\
                if self._masks else None
            logits = self.ddp(tokens, positions, mask, **padding)
        if not self.par.is_last_stage:
            return logits
        logits = logits[:, :length // self.par.cp]
        if self.arch.value_head:
            return logits
        first = self.par.tp_rank * logits.shape[-1]
        real = self.dims.vocab - first
        if real < logits.shape[-1]:
            logits = logits.clone()
            logits[..., max(real, 0):] = torch.finfo(logits.dtype).min
        return logits

    def _padding(self, given: ModelInput, width: int) -> torch.Tensor:
        """[R, width] bool, on a later pipeline stage the columns of this rank's positions: what fills rows up, which
        has no part in the load-balancing loss."""
        given_here = torch.zeros_like(given.tokens, dtype=torch.bool) if given.padding is None else given.padding
        mask = torch.nn.functional.pad(given_here, (0, width - given.tokens.shape[1]), value=True)
        # Megatron gives each rank of a tensor-parallel group its columns on the first stage only.
        return mask if self.par.pp_rank == 0 else mask.chunk(self.par.tp, dim=1)[self.par.tp_rank]

    def set_aux_loss_positions(self, positions: int) -> None:
        """Makes the load-balancing loss of a MoE model, in the backward pass of each micro-batch, the coefficient times
        the micro-batch's part of ``positions``: the positions of all replicas and micro-batches of a step, without
        padding."""
        # Megatron multiplies by the positions of the micro-batch (``calculate_per_token_loss``); of the whole one also
        # with sequence parallelism, as long as it is given a padding mask.
        self.module.config.moe_aux_loss_coeff = self._aux_loss_coef / max(positions, 1)

    def shard_loader(self) -> ShardLoader:
        """A loader that expects every parameter of this rank."""
        loader = ShardLoader(self.arch, self.par)
        for name, param in self.parameters():
            loader.expect(name, ShardRange.whole(param))
        return loader

    def load_folder(self, model_dir: Path | str, on_tensor: Callable[[], None] = lambda: None) -> None:
        """Initialises parameters and masters from the safetensors files of an HF folder, in any dtype; it reads this
        rank's part only, with a call of ``on_tensor`` for each tensor. A value head that no file has is zero. Raises
        ConfigError."""
        loader = self.shard_loader()
        for name, master in self.masters.items():
            loader.expect(name, master)
        if loader.wants(VALUE_HEAD):
            loader.set_to_zero(VALUE_HEAD)
        for file in hf_folder.files_of(Path(model_dir)):
            try:
                with safe_open(file, framework="pt") as opened:
                    for name in filter(loader.wants, opened.keys()):
                        loader.load(name, FileTensor(opened.get_slice(name)))
                        on_tensor()
            except SafetensorError as e:
                raise ConfigError(f"{file} is not a valid safetensors file: {e}") from e
        loader.require_complete()


def packed_sequences(lengths: tuple[int, ...], device: torch.device) -> Any:
    """Megatron's description of sequences of these lengths in one row."""
    from megatron.core.packed_seq_params import PackedSeqParams

    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=max(lengths),
                           max_seqlen_kv=max(lengths))


class FileTensor:
    """A tensor in an open safetensors file; only the ranges that are asked for are read."""

    def __init__(self, opened: Any) -> None:
        self._slice = opened

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._slice.get_shape())

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        ranges = [slice(None)] * dim + [slice(start, start + length)]
        return torch.as_tensor(self._slice[tuple(ranges)])
