"""What a problem is measured on: rotating copies of random weights, x, exact references, a poisoned output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..cache.routings import routings_of
from ..kernels import reference
from ..kernels.problem import Device, Problem
from ..kernels.weights.layouts import to_layout
from ..kernels.weights.weight import Weight
from ..testing.close import relative_tolerance
from .output import Output
from .variants import distinct_scales, variants

__all__ = [
    "COLD",
    "MAX_COPIES",
    "POOL_ROWS",
    "Inputs",
    "byte_sum",
    "copies_needed",
    "least_bytes",
    "rotating",
    "rows_to_check",
]

POOL_ROWS = 160  # rows of x whose result is known for every weight: numerics slices them at random
COLD = 3  # rotating copies cover this many times the last-level cache
MAX_COPIES = {"cuda": 256, "cpu": 64}
MEMORY_SHARE = 0.25  # of the device's memory, at most, for the rotating copies of one layout
TAIL_ROWS = 16
MOST_ROWS = POOL_ROWS  # compared at once


def copies_needed(device: Device, nbytes: int) -> int:
    """How many copies of a weight cover three times the cache: at least 2, bounded by memory and by count."""
    wanted = math.ceil(COLD * device.l2_bytes / nbytes)
    room = int(MEMORY_SHARE * device.memory_bytes / nbytes) if device.memory_bytes else wanted
    return max(2, min(wanted, room, MAX_COPIES[device.kind]))


def rows_to_check(m: int) -> tuple[int, ...]:
    """All rows of a small M; of a large one 32 spread over it and the last 16, where tails go wrong."""
    if m <= POOL_ROWS // 2:
        return tuple(range(m))
    return tuple(sorted({*(i * m // 32 for i in range(32)), *range(m - TAIL_ROWS, m)}))


def least_bytes(problem: Problem, ms: Sequence[int]) -> int:
    """Bytes without which a problem cannot be measured: x, the output, exact results, two copies of the weights."""
    n, k, most = problem.n, problem.k, max((*ms, POOL_ROWS))
    if problem.op != "gemm":
        width = k if problem.op == "moe" else n
        exact = 8 * width * sum(len(rows_to_check(m)) for m in ms) * len(routings_of(problem))
        return 2 * most * (width + k) + exact + 2 * problem.weight_bytes
    known = len(_known_rows(ms))
    exact = 8 * n * (known + 3 * POOL_ROWS)  # of the plain case; of the extreme one, its magnitudes and its variant
    return 2 * most * (n + k) + exact + 2 * problem.weight_bytes


def _known_rows(ms: Sequence[int]) -> set[int]:
    return {*range(POOL_ROWS), *(row for m in ms for row in rows_to_check(m))}


class Case:
    """One weight with what x times it is."""

    def __init__(self, problem: Problem, x: Tensor, rows: Sequence[int], *, extreme: bool) -> None:
        n, k, device = problem.n, problem.k, x.device
        self.weight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
        low, high = (0x00, 0x7F) if extreme else (0x30, 0x40)  # every scale from 0 to 448, or 0.5 to 2
        self.scale = torch.randint(low, high, (n, k // 16), dtype=torch.uint8, device=device)
        size = 448.0 if extreme else 3.6  # codes and scales have about this root mean square
        self.global_scale = torch.full((1,), 1 / (size * math.sqrt(k)), device=device)
        self.k, self.dtype, self._x = k, x.dtype, x
        self._known = tuple(sorted(rows))
        self._rows: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._tolerances: dict[int, float] = {}
        at = torch.tensor(rows, device=device)
        self._row_of = torch.full((x.shape[0],), -1, device=device)  # row of x -> row of exact
        self._row_of[at] = torch.arange(len(rows), device=device)
        self.exact = reference.gemm(x[at], self.weight, self.scale, self.global_scale, round_output=False)
        self.magnitude: Tensor | None = None
        if extreme:  # a few large blocks hide the error of small ones: element bounds need the true magnitudes
            plus = (self.weight & 0x77, self.scale & 0x7F)
            self.magnitude = reference.gemm(x[at].abs(), *plus, self.global_scale, round_output=False)

    def know(self, rows: Sequence[int]) -> None:
        """Keep the exact results of further rows of x, of an M that came later."""
        more = sorted({*rows} - {*self._known})
        if more:
            at = torch.tensor(more, device=self._x.device)
            self._row_of[at] = len(self.exact) + torch.arange(len(more), device=at.device)
            exact = reference.gemm(self._x[at], self.weight, self.scale, self.global_scale, round_output=False)
            self.exact = torch.cat([self.exact, exact])
            self._known = tuple(sorted((*self._known, *more)))

    def rows(self, start: int, m: int) -> tuple[Tensor, Tensor]:
        """Rows of an output of x[start : start + m] whose exact result is kept, and where `exact` holds them.

        All of a small M; of a large one those spread over it, and the last ones.
        """
        if (start, m) not in self._rows:
            known = [row - start for row in self._known if start <= row < start + m]
            if len(known) > MOST_ROWS:
                tail = known[-TAIL_ROWS:]
                known = [*known[: -TAIL_ROWS : len(known) // (MOST_ROWS - TAIL_ROWS) + 1], *tail]
            at = torch.tensor(known, device=self.exact.device)
            self._rows[start, m] = at, self._row_of[at + start]
        return self._rows[start, m]

    def tolerance(self, m: int) -> float:
        """The largest relative error that a right kernel shows on the rows of x[:m], with scales of common sizes."""
        if m not in self._tolerances:
            _, known = self.rows(0, m)
            self._tolerances[m] = relative_tolerance(self.exact[known], k=self.k, dtype=self.dtype)
        return self._tolerances[m]

    def pack(self, layout_id: str, global_scale: Tensor | None = None) -> Weight:
        """This weight in a layout, or one with another global scale."""
        gs = self.global_scale if global_scale is None else global_scale
        return to_layout(self.weight, self.scale, gs, layout_id=layout_id)


class Inputs(Output):
    """Everything one problem is measured on, on one torch device. Made once per problem, released by `close`."""

    def __init__(self, device: Device, place: torch.device, problem: Problem, ms: Sequence[int]) -> None:
        super().__init__(place, problem.n, getattr(torch, problem.dtype))
        self.device = device
        self.problem = problem
        self.max_m = max((*ms, POOL_ROWS))
        self.x = torch.randn(self.max_m, problem.k, device=place, dtype=self.dtype)
        self.plain = Case(problem, self.x, sorted(_known_rows(ms)), extreme=False)
        self.extreme = Case(problem, self.x, range(POOL_ROWS), extreme=True)
        self.row_scales = distinct_scales(self.extreme.global_scale, problem.n)
        plain = self.extreme.pack("checkpoint")
        self.variants = variants(self.x[:POOL_ROWS], plain, self.extreme.exact, self.row_scales)
        self._sets: dict[str, _Set] = {}
        self._dense: list[Tensor] | None = None

    def copies(self, layout_id: str) -> list[Weight]:
        """Rotating copies of the plain weight in one layout."""
        return self._set(layout_id).copies

    def extreme_weight(self, layout_id: str, *, per_row: bool = False) -> Weight:
        """The weight with extreme block scales, in one layout; with one global scale, or with `row_scales`."""
        made = self._set(layout_id)
        return made.per_row if per_row else made.extreme

    def _set(self, layout_id: str) -> _Set:
        if layout_id not in self._sets:
            first, extreme = self.plain.pack(layout_id), self.extreme.pack(layout_id)
            per_row = self.extreme.pack(layout_id, self.row_scales)
            count = copies_needed(self.device, first.nbytes)
            data = rotating(first.data, count)
            scale = [None] * count if first.scale is None else rotating(first.scale, count)
            copies = [replace(first, data=d, scale=s) for d, s in zip(data, scale, strict=True)]
            self._sets[layout_id] = made = _Set(copies, extreme, per_row)
            made.checksum = self._checksum(made)
        return self._sets[layout_id]

    def dense_copies(self) -> list[Tensor]:
        """Rotating copies [N, K] of the plain weight, dequantised to x's dtype: what the baseline multiplies with."""
        if self._dense is None:
            from ..kernels.weights.codec import dequantize

            first = dequantize(self.plain.weight, self.plain.scale, self.plain.global_scale, self.dtype)
            self._dense = [first, *(first.clone() for _ in range(copies_needed(self.device, first.nbytes) - 1))]
        return self._dense

    def unchanged(self, layout_id: str) -> bool:
        """Whether x and the weights of a layout still hold what was put there."""
        made = self._sets.get(layout_id)
        return made is None or self._checksum(made) == made.checksum

    def close(self) -> None:
        """Give all memory back."""
        self._buffer = self._dense = None
        self._sets.clear()
        del self.x, self.plain, self.extreme, self.row_scales, self.variants
        if self.place.type == "cuda":
            torch.cuda.empty_cache()

    def _checksum(self, made: _Set) -> int:
        first = made.copies[0]
        small = [
            first.global_scale,
            *(t for w in (made.extreme, made.per_row) for t in (w.data, w.scale, w.global_scale)),
        ]
        small += [t for variant in self.variants for t in (variant.bias, variant.pre_quant_scale)]
        whole = (first.data._base, None if first.scale is None else first.scale._base)  # the buffers of all copies
        return int(torch.stack([byte_sum(t) for t in (self.x, *small, *whole) if t is not None]).sum())


class _Set:
    """The weights of one layout."""

    def __init__(self, copies: list[Weight], extreme: Weight, per_row: Weight) -> None:
        self.copies = copies
        self.extreme = extreme
        self.per_row = per_row
        self.checksum = 0


def rotating(tensor: Tensor, count: int) -> list[Tensor]:
    """Copies of a uint8 tensor in one buffer, so that one sum covers them all; each starts on 256 bytes."""
    size = tensor.numel()
    buffer = torch.zeros(count * (-(-size // 256) * 256), dtype=torch.uint8, device=tensor.device)
    views = [part[:size].view(tensor.shape) for part in buffer.view(count, -1)]
    for view in views:
        view.copy_(tensor)
    return views


def byte_sum(tensor: Tensor) -> Tensor:
    """Sum of a tensor's bytes taken as integers (wrapping), int64 0-dim."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    return flat[:whole].view(torch.int64).sum() + flat[whole:].sum(dtype=torch.int64)
