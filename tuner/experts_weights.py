"""The experts' weights that kernels are measured on: random ones, and rotating copies of them in every layout."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..kernels.problem import Device, Problem
from ..kernels.weights.layouts import first_layout, layout, layout_ids
from ..kernels.weights.weight import Weight
from ..testing.experts import random_weight
from .inputs import COLD, byte_sum, copies_needed, rotating
from .outcome import Wrong

__all__ = ["ExpertWeights"]

CHUNK_WEIGHTS = 1 << 26  # made at once
MEMORY_SHARE = 0.75  # of the device's memory, for the copies in all layouts and the checkpoint's tensors
FEW_SHARE = 0.125  # of it: a larger problem is measured on one copy in each layout


@dataclass(slots=True, kw_only=True, eq=False)
class _Set:
    """Copies in one layout: of w13 and w2, or of the one weight."""

    copies: list[tuple[Weight, ...]]
    buffers: list[Tensor] = field(repr=False)  # all that the copies lie in
    checksum: int = 0


class ExpertWeights:
    """Made once per problem.

    Attributes
    ----------
    plain
        w13 and w2, or the one weight, each with its scales, as a checkpoint has them: for the reference.
    """

    def __init__(self, device: Device, place: torch.device, problem: Problem) -> None:
        self.device, self.problem = device, problem
        self.plain = self._random(place)
        self._sets: dict[str, _Set] = {}

    def copies(self, layout_id: str) -> list[tuple[Weight, ...]]:
        """Rotating copies for kernels of a layout. Raises Wrong if it is none for experts."""
        return self._set(layout_id).copies

    def unchanged(self, layout_id: str) -> bool:
        """Whether a layout's copies hold what was put there."""
        made = self._sets.get(layout_id)
        return made is None or _sum(made) == made.checksum

    def addresses(self) -> set[int]:
        """Where the large tensors of `plain` and of every first copy begin: not to be summed up every time."""
        first = [w for made in self._sets.values() for w in made.copies[0]]
        large = [*(tensor for w in first for tensor in (w.data, w.scale)), *self.plain]
        return {tensor.data_ptr() for tensor in large if tensor is not None and tensor.dtype == torch.uint8}

    def _set(self, layout_id: str) -> _Set:
        if layout_id not in self._sets:
            if layout_id not in layout_ids() or not layout(layout_id).experts:
                raise Wrong("invalid", f"the tuner makes no experts in layout {layout_id!r}")
            size, memory = self.problem.weight_bytes, self.device.memory_bytes
            count = copies_needed(self.device, size)
            if memory and size > FEW_SHARE * memory and size > COLD * self.device.l2_bytes:
                count = 1
            held = 1 + sum(len(made.copies) for made in self._sets.values())
            if memory and (held + count) * size > MEMORY_SHARE * memory:
                self._sets.clear()  # launches at hand keep what they need
            made = self._sets[layout_id] = self._make(layout_id, count)
            made.checksum = _sum(made)
        return self._sets[layout_id]

    def _make(self, layout_id: str, count: int) -> _Set:
        ids = [layout_id] if self.problem.op != "moe" else [first_layout(layout_id, self.problem), layout_id]
        copies: list[list[Weight]] = []
        buffers: list[Tensor] = []
        for i, one in enumerate(ids):
            first = layout(one).pack(*self.plain[3 * i : 3 * i + 3])
            data, scale = _copies(first.data, count), [None] * count
            buffers += [first.data, first.global_scale, *_bases(data)]
            if first.scale is not None:
                scale = _copies(first.scale, count)  # type: ignore[assignment]
                buffers += [first.scale, *_bases(scale)]  # type: ignore[arg-type]
            copies.append([replace(first, data=d, scale=s) for d, s in zip(data, scale, strict=True)])
        return _Set(copies=list(zip(*copies, strict=True)), buffers=buffers)

    def _random(self, place: torch.device) -> tuple[Tensor, ...]:
        p, g = self.problem, torch.Generator(place).manual_seed(torch.initial_seed() % (1 << 31))
        shapes = [(p.n * (2 if p.gated else 1), p.k), (p.k, p.n)] if p.op == "moe" else [(p.n, p.k)]
        found: list[Tensor] = []
        for i, (rows, k) in enumerate(shapes):
            # Two factors an expert where that is allowed: kernels read them anyhow.
            factors = 2 if i == 0 and (p.gated or (p.op == "grouped_gemm" and rows % 2 == 0)) else 1
            step = max(1, CHUNK_WEIGHTS // (rows * k))
            some = [
                random_weight(min(step, p.experts - first), rows, k, g, parts=factors)
                for first in range(0, p.experts, step)
            ]
            found += [torch.cat(part) for part in zip(*some, strict=True)]
        return tuple(found)


def _copies(tensor: Tensor, count: int) -> list[Tensor]:
    """The tensor itself, and copies of it that make `count`."""
    return [tensor, *(rotating(tensor, count - 1) if count > 1 else [])]


def _bases(tensors: list[Tensor]) -> list[Tensor]:
    """The one buffer behind what `_copies` added."""
    return [tensor._base for tensor in tensors[1:2] if tensor._base is not None]


def _sum(made: _Set) -> int:
    return int(torch.stack([byte_sum(tensor) for tensor in made.buffers]).sum())
