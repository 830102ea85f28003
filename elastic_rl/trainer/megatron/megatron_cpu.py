"""Makes megatron-core 0.16.1 run on a host without CUDA, over gloo. Not installed where CUDA is available.

Two layers. ``install`` redirects the few torch.cuda entry points that Megatron calls on every path; call it before any
``megatron.core`` import, because the jit decorator binds at import. ``cuda_literals`` is a context for the optimizer's
code, which writes ``device='cuda'`` and compares type names; it costs a Python call per torch function, so it is only
entered around the optimizer and the pipeline schedule, never around the model alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from elastic_rl.errors import PreflightFailed

_LOGGERS = ("wandb", "torch.utils.tensorboard")
_installed = False


def install() -> None:
    """Redirects torch.cuda to the CPU for Megatron. Raises PreflightFailed when CUDA is available. Idempotent."""
    global _installed
    if torch.cuda.is_available():
        raise PreflightFailed("the CPU stand-in for Megatron was requested on a host with CUDA",
                              hint="set device.type to cuda or auto")
    if _installed:
        return
    with _first_import_of_megatron():
        from megatron.core.jit import disable_jit_fuser

    disable_jit_fuser()
    patches: dict[str, Any] = {
        "current_device": lambda: torch.device("cpu"),
        "synchronize": lambda *_a, **_k: None,
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda *_a, **_k: torch.get_rng_state(),
        "set_rng_state": lambda state, *_a, **_k: torch.set_rng_state(state),
    }
    for name, replacement in patches.items():
        setattr(torch.cuda, name, replacement)
    from megatron.core.tensor_parallel import random as tp_random

    rng: Any = tp_random
    rng._get_cuda_rng_state = lambda *_a, **_k: torch.get_rng_state()
    rng._set_cuda_rng_state = lambda state, *_a, **_k: torch.set_rng_state(state)
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    dispatcher: Any = MoEAlltoAllTokenDispatcher
    dispatcher.cuda_dtoh_stream = ()  # anything but None: then no stream is made
    dispatcher._maybe_dtoh_and_synchronize = _splits_to_numpy
    _take_uneven_parts()
    _installed = True


@contextmanager
def _first_import_of_megatron() -> Iterator[None]:
    """Inside, ``torch.compile`` returns functions unchanged, and W&B and TensorBoard, which Megatron would import and
    no rank uses, cannot be imported. Megatron imports modules with its jit decorator before the decorator can be
    disabled: they would need a C++ compiler on the host. All this would be a quarter of a start's CPU time."""
    compiling, loggers = torch.compile, {name: sys.modules.get(name) for name in _LOGGERS}
    torch.compile = _uncompiled  # type: ignore[assignment]
    sys.modules.update(dict.fromkeys(_LOGGERS))  # type: ignore[arg-type]  # None makes an import fail
    try:
        yield
    finally:
        torch.compile = compiling
        for name, module in loggers.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def _uncompiled(model: Callable[..., Any] | None = None, **_options: Any) -> Any:
    return _uncompiled if model is None else model


def _take_uneven_parts() -> None:
    """Gloo gathers and scatters parts of one size only, and the ranks of a tensor-parallel group have different numbers
    of tokens for an expert: such parts go through a sum."""
    from megatron.core.tensor_parallel import mappings

    module: Any = mappings
    even_gather, even_scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    def gather(input_: torch.Tensor, group: Any, output_split_sizes: list[int] | None = None,
               use_global_buffer: bool = False) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return even_gather(input_, group, output_split_sizes, use_global_buffer)
        whole = input_.new_zeros(sum(output_split_sizes), *input_.shape[1:])
        whole.split(output_split_sizes)[group.rank()].copy_(input_)
        torch.distributed.all_reduce(whole, group=group)
        return whole

    def scatter(input_: torch.Tensor, group: Any, input_split_sizes: list[int] | None = None,
                use_global_buffer: bool = False) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return even_scatter(input_, group, input_split_sizes, use_global_buffer)
        whole = input_.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(whole, group=group)
        return whole.split(input_split_sizes)[group.rank()].clone()

    module._gather_along_first_dim, module._reduce_scatter_along_first_dim = gather, scatter


def _splits_to_numpy(dispatcher: Any, point: str, tokens_per_expert: torch.Tensor | None = None
                     ) -> torch.Tensor | None:
    """What Megatron's token dispatcher copies to the host before it sends tokens to experts: it is there already."""
    if point == dispatcher.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            value = getattr(dispatcher, name)
            setattr(dispatcher, name, value.numpy() if isinstance(value, torch.Tensor) else value)
    return tokens_per_expert


@contextmanager
def cuda_literals() -> Iterator[None]:
    """Inside, ``device='cuda'`` means the CPU and ``Tensor.type()`` names the CUDA type. No-op unless installed."""
    if not _installed:
        yield
        return
    with _CudaLiteralsAreCpu():
        yield


class _CudaLiteralsAreCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)
