"""Stand-ins for the three packages that SGLang 0.5.23 imports on its CPU path and that have no CPU build.

``triton`` and ``torchvision`` are names only: calling one raises. ``sgl_kernel`` has the one small function that
the CPU scheduler uses, written in torch. An installed package is never replaced, and on a machine with CUDA no stand-in
is installed: it would hide a broken installation behind a slow engine.
"""

from __future__ import annotations

import enum
import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

from elastic_rl.errors import PreflightFailed

PACKAGES = ("triton", "torchvision", "sgl_kernel")
# SGLang asks for these by ImportError and, given one, would hook into it.
_NOT_THERE = frozenset({"triton.knobs"})


class Absent:
    """A name of a missing package: it can be passed on, used as a decorator and subscripted, but not called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Absent:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Absent(f"{self._name}.{attribute}")

    def __getitem__(self, grid: object) -> Absent:
        return self

    def __or__(self, other: object) -> Absent:  # `tl.tensor | None` in annotations
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[type, ...]) -> tuple[type, ...]:
        return (object,)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        raise NotImplementedError(f"{self._name} needs a GPU build, and this process runs SGLang on the CPU")


class StandIn(ModuleType):
    """A module that makes up every name on access. Capitalised names are classes (isinstance, base classes)."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or f"{self.__name__}.{name}" in _NOT_THERE:
            raise AttributeError(name)
        value: Any = type(name, (), {"__init__": _accept_anything}) if name[0].isupper() else Absent(
            f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class KernelStandIn(ModuleType):
    """``sgl_kernel``: SGLang probes it for GPU kernels, so every name but the ``*_cpu`` ones must look absent."""

    def __getattr__(self, name: str) -> Any:
        if not name.endswith("_cpu"):
            raise AttributeError(name)
        return Absent(f"sgl_kernel.{name}")


def _accept_anything(self: object, *args: object, **kwargs: object) -> None:
    return None


class StandInFinder(MetaPathFinder, Loader):
    """Resolves the given packages, and for all but ``sgl_kernel`` their submodules too, to stand-ins."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = tuple(packages)

    def find_spec(self, fullname: str, path: object = None, target: object = None
                  ) -> importlib.machinery.ModuleSpec | None:
        root = fullname.partition(".")[0]
        if root not in self.packages or fullname in _NOT_THERE or (root == "sgl_kernel" and fullname != root):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        kind = KernelStandIn if spec.name == "sgl_kernel" else StandIn
        return kind(spec.name, "stand-in of a package without a CPU build")

    def exec_module(self, module: ModuleType) -> None:
        names: dict[str, Any] = {"__version__": "0.0.0+standin"}
        names.update(_CONTENTS.get(module.__name__, dict)())
        module.__dict__.update(names)


def missing() -> list[str]:
    """The ones of the three packages that are not installed here."""
    return [name for name in PACKAGES if name not in sys.modules and importlib.util.find_spec(name) is None]


def install() -> list[str]:
    """Makes the missing packages importable in this process and returns their names; call before sglang is imported.

    Raises PreflightFailed where CUDA is available.
    """
    import torch

    if torch.cuda.is_available():
        raise PreflightFailed("the SGLang CPU stand-ins refuse to install where CUDA is available",
                           hint="install the `gpu` extra: SGLang runs there with its real kernels")
    absent = missing()
    if "triton" in absent:
        _keep_torch_without_triton()
    if "torchvision" in absent:
        _settle_torchvision_in_transformers()
    if absent:
        sys.meta_path.append(StandInFinder(absent))
    return absent


def _keep_torch_without_triton() -> None:
    """torch decides at import whether it has triton; it must have decided "no" before the name becomes importable."""
    import torch.utils._triton as probe

    def no(*args: object, **kwargs: object) -> bool:
        return False

    probe.has_triton_package = no
    probe.has_triton = no
    for decided_at_import in ("torch.utils.flop_counter", "torch._inductor.runtime.triton_compat"):
        importlib.import_module(decided_at_import)


def _settle_torchvision_in_transformers() -> None:
    """Makes transformers cache that torchvision is missing, so that it stays on the path that works without it."""
    from transformers.utils import import_utils

    for name in ("is_torchvision_available", "is_torchvision_v2_available"):
        answer = getattr(import_utils, name, None)
        if answer is not None:
            answer()


# -- contents of the stand-ins beyond made-up names ------------------------------------------------------------------
def _kernel_decorator(*args: Any, **kwargs: Any) -> Any:
    """``@triton.jit`` and ``@triton.jit(...)``."""
    if len(args) == 1 and callable(args[0]) and not kwargs:
        return Absent(getattr(args[0], "__name__", "kernel"))
    return lambda function: Absent(getattr(function, "__name__", "kernel"))


def _keep_decorator(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    """``@triton.autotune(...)`` and ``@triton.heuristics(...)`` over something that is a stand-in already."""
    return lambda kernel: kernel


def _triton() -> dict[str, Any]:
    return {
        "__version__": "3.6.0",  # SGLang and torch compare it
        "jit": _kernel_decorator, "autotune": _keep_decorator, "heuristics": _keep_decorator,
        "cdiv": lambda a, b: -(-a // b),
        "next_power_of_2": lambda n: 1 << max(n - 1, 0).bit_length(),
        "Config": _accept_anything,
    }


class _Constexpr:
    def __init__(self, value: object = None) -> None:
        self.value = value


def _triton_language() -> dict[str, Any]:
    return {"constexpr": _Constexpr, "dtype": type("dtype", (), {}), "tensor": type("tensor", (), {})}


def _interpolation() -> dict[str, Any]:
    return {"InterpolationMode": _InterpolationMode}


class _InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def _sgl_kernel() -> dict[str, Any]:
    return {"assign_req_to_token_pool_cpu": assign_req_to_token_pool_cpu}


def assign_req_to_token_pool_cpu(req_pool_indices: Any, req_to_token: Any, start_offset: Any, end_offset: Any,
                                 out_cache_loc: Any, pool_len: int) -> None:
    """Writes each request's new KV slots into its row: ``req_to_token[r, start:end] = next (end - start) slots``.

    ``req_pool_indices``, ``start_offset``, ``end_offset``: int [B]; ``req_to_token``: int [rows, pool_len], changed in
    place; ``out_cache_loc``: int [sum(end - start)], in the order of the requests.
    """
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        slots = out_cache_loc[taken:taken + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        taken += end - start


_CONTENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "triton": _triton,
    "triton.language": _triton_language,
    "torchvision.transforms": _interpolation,
    "torchvision.transforms.functional": _interpolation,
    "torchvision.transforms.v2": _interpolation,
    "torchvision.transforms.v2.functional": _interpolation,
    "sgl_kernel": _sgl_kernel,
}
