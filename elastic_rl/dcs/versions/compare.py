"""What changed between two versions. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from elastic_rl.dcs.manifest import Manifest, TensorEntry
from elastic_rl.models.arch import HF_OUTPUT

_PIECE = 1 << 22
"""Elements that are compared at once: the fp64 difference of a whole tensor would need many times its memory."""


@dataclass(frozen=True)
class Change:
    """One tensor that differs. ``what``: changed, added, removed, or reshaped (dtype or shape differ)."""

    name: str
    what: str
    elements: int
    changed: int = 0
    """Elements whose bytes differ."""
    max_abs: float | None = None
    """Largest absolute difference; None for dtypes without one."""
    relative_l2: float | None = None
    """Euclidean norm of the difference over that of the older tensor; None where that is 0."""

    @property
    def share(self) -> float:
        return self.changed / self.elements if self.elements else 0.0


def differing(old: Manifest, new: Manifest) -> tuple[list[Change], list[str]]:
    """Changes that show in the manifests, and names of the tensors whose bytes must be compared: those of equal layout
    that are not in the same chunks."""
    before, after = {t.name: t for t in old.tensors}, {t.name: t for t in new.tensors}
    changes = [Change(n, "removed", _elements(t)) for n, t in before.items() if n not in after]
    changes += [Change(n, "added", _elements(t)) for n, t in after.items() if n not in before]
    candidates = []
    for name, tensor in after.items():
        was = before.get(name)
        if was is None or was == tensor:
            continue
        if (was.dtype, was.shape) != (tensor.dtype, tensor.shape):
            changes.append(Change(name, "reshaped", _elements(tensor)))
        else:
            candidates.append(name)
    return changes, candidates


def fault_of_layout(found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], *, tied: bool) -> str:
    """Says in what a model's tensors, with their shapes, are not those of another; empty where they are the same.
    ``tied``: the output layer is the embedding, so that it may be left out."""
    names = found.keys() | wanted.keys()
    odd = sorted(name for name in names if found.get(name) != wanted.get(name) and not (
        tied and name == HF_OUTPUT and (name not in found or name not in wanted)))
    if not odd:
        return ""
    name = next((n for n in odd if n in wanted), odd[0])
    what = (f"it lacks {name}" if name not in found else f"{name} is there and not in the other" if name not in wanted
            else f"{name} has the shape {_shape(found[name])} and not {_shape(wanted[name])}")
    return f"{what}; {len(odd)} of {len(names)} tensors differ" if len(odd) > 1 else what


def _shape(sizes: tuple[int, ...]) -> str:
    return "×".join(map(str, sizes)) or "scalar"


def _elements(tensor: TensorEntry) -> int:
    return math.prod(tensor.shape)


def compare(names: Iterable[str], old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]) -> Iterator[Change]:
    """A Change for each named tensor whose bytes differ; dtype and shape of both are the same."""
    for name in names:
        change = _change(name, old[name], new[name])
        if change.changed:
            yield change


def _change(name: str, old: torch.Tensor, new: torch.Tensor) -> Change:
    width = old.element_size()
    a, b = old.reshape(-1), new.reshape(-1)
    changed, worst, squares, norm = 0, 0.0, 0.0, 0.0
    numeric = old.dtype.is_floating_point or not (old.dtype.is_complex or old.dtype is torch.bool)
    for start in range(0, len(a), _PIECE):
        x, y = a[start:start + _PIECE], b[start:start + _PIECE]
        differs = (x.view(torch.uint8).view(-1, width) != y.view(torch.uint8).view(-1, width)).any(dim=1)
        changed += int(differs.sum())
        if numeric:
            wide = x.to(torch.float64)
            difference = y.to(torch.float64) - wide
            worst = max(worst, float(difference.abs().max()))
            squares += float(difference.square().sum())
            norm += float(wide.square().sum())
    if not numeric:
        return Change(name, "changed", len(a), changed)
    return Change(name, "changed", len(a), changed, worst, math.sqrt(squares / norm) if norm else None)
