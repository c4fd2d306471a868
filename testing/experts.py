"""Random layers of experts, and what every kernel of grouped_gemm and moe must do with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..kernels import reference
from ..kernels.moe.activations import constants
from ..kernels.moe.arguments import GroupedLauncher, MoeArguments, MoeLauncher
from ..kernels.moe.routing import local_experts
from ..kernels.problem import Problem
from ..kernels.weights.layouts import first_layout, layout
from ..kernels.weights.weight import Weight
from .close import assert_gemm_close, assert_moe_close

__all__ = ["GroupedCase", "MoeCase", "experts_case", "poisoned", "random_weight"]

CONSTANTS = {"swiglu": {"limit": 1.5}, "swigluoai": {"limit": 1.0, "alpha": 1.3, "beta": 0.5}, "situ": {"limit": 2.0}}


@contextmanager
def poisoned() -> Iterator[None]:
    """What torch allocates is filled with NaN, or with the largest integer, until somebody writes it."""
    switch: Any = torch.utils.deterministic  # its stub lacks the field
    fill, mode = switch.fill_uninitialized_memory, torch.get_deterministic_debug_mode()
    # Not use_deterministic_algorithms, which imports torch's compiler: two seconds in every process that tunes experts.
    torch.set_deterministic_debug_mode("warn")
    switch.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        switch.fill_uninitialized_memory = fill


def random_weight(
    experts: int, rows: int, k: int, g: torch.Generator, *, parts: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 [E, rows, k/2], uint8 [E, rows, k/16] and float32 [E, parts], for products near 1 with x near 1.

    Every code; of the scales some are subnormal, some zero, some negative; global scales differ by up to ten times.
    """
    device = g.device
    weight = torch.randint(0, 256, (experts, rows, k // 2), dtype=torch.uint8, generator=g, device=device)
    kind = torch.randint(0, 12, (experts, rows, 1), generator=g, device=device).clamp_max(4)  # mostly 4
    low = torch.tensor([0x00, 0x00, 0x00, 0xB0, 0x30], device=device)[kind]
    high = torch.tensor([0x00, 0x08, 0x48, 0xC0, 0x40], device=device)[kind]
    share = torch.rand(experts, rows, k // 16, generator=g, device=device)
    scale = low + (share * (high - low + 1)).long().clamp_max(high - low)
    global_scale = 10 ** (-torch.rand(experts, parts, generator=g, device=device)) / (2 * math.sqrt(k))
    return weight, scale.to(torch.uint8), global_scale


def strided(x: Tensor, wide: bool) -> Tensor:
    """x, or a view of the same values with NaN between the rows."""
    if not wide:
        return x
    buffer = x.new_full((x.shape[0], x.shape[1] + 24), math.nan)
    buffer[:, : x.shape[1]] = x
    return buffer[:, : x.shape[1]]


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupedCase:
    """One random input of a grouped_gemm: the checkpoint's tensors, and the layout in which a kernel gets them."""

    problem: Problem
    x: Tensor
    weight: Tensor
    scale: Tensor
    global_scale: Tensor
    offsets: Tensor
    nan_row: int
    layout_id: str = "checkpoint"
    ready: Weight | None = None  # the weight in that layout, where there is one already

    @staticmethod
    def random(
        problem: Problem,
        m: int,
        seed: int,
        device: torch.device,
        *,
        weights: tuple[Tensor, ...] | None = None,
        layout_id: str = "checkpoint",
    ) -> GroupedCase:
        """Experts without rows, rows without an expert, one row of NaN; the seed decides which.

        Random weights too, unless a weight with its scales is given.
        """
        g = torch.Generator().manual_seed(seed)
        n, k, experts = problem.n, problem.k, problem.experts
        parts = 2 if n % 2 == 0 and seed & 1 else 1
        weight, scale, global_scale = weights or random_weight(experts, n, k, g, parts=parts)
        covered = m if seed & 2 else m - m // 3
        cuts = torch.randint(0, covered + 1, (experts - 1,), generator=g).sort().values
        offsets = torch.cat([torch.tensor([0]), cuts, torch.tensor([covered])]).int()
        x = torch.randn(m, k, generator=g).to(getattr(torch, problem.dtype))
        nan_row = int(torch.randint(m, (), generator=g))
        x[nan_row] = math.nan
        return GroupedCase(
            problem=problem,
            x=strided(x.to(device), bool(seed & 4)),
            weight=weight.to(device),
            scale=scale.to(device),
            global_scale=global_scale.to(device),
            offsets=offsets.to(device),
            nan_row=nan_row,
            layout_id=layout_id,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Of the result."""
        return self.x.shape[0], self.problem.n

    @cached_property
    def packed(self) -> Weight:
        """The weight as kernels of the layout take it."""
        return self.ready or layout(self.layout_id).pack(self.weight, self.scale, self.global_scale)

    def tensors(self) -> list[Tensor]:
        """What a launcher must not change."""
        return [self.x, *_tensors(self.packed), self.offsets]

    def launch(self, launcher: GroupedLauncher, out: Tensor) -> None:
        """Call it; what it allocates is poisoned."""
        w = self.packed
        with poisoned():
            launcher(self.x, w.data, w.scale, w.global_scale, self.offsets, out)

    def exact(self) -> tuple[Tensor, Tensor]:
        """Float64 [M, N], the result with zeros for the row of NaN, and the sum of |x| * |w|."""
        x, weight, scale, ends = self.x.where(~self.x.isnan(), 0), self.weight, self.scale, self.offsets
        ref = reference.grouped_gemm(x, weight, scale, self.global_scale, ends, round_output=False)
        magnitude = reference.grouped_gemm(
            x.abs(), weight & 0x77, scale & 0x7F, self.global_scale, ends, round_output=False
        )
        return ref, magnitude

    def compare(self, out: Tensor, exact: tuple[Tensor, Tensor] | None = None) -> None:
        """Raise AssertionError unless this is the result; `exact` is what `exact()` returned, if it is at hand."""
        has_expert = self.nan_row < int(self.offsets[-1])
        row = out[self.nan_row]
        assert bool(row.isnan().all() if has_expert else (row == 0).all()), "the row of NaN gives something else"
        got = out.clone()
        got[self.nan_row] = 0
        ref, magnitude = exact or self.exact()
        assert_gemm_close(got, ref, k=self.problem.k, dtype=out.dtype, magnitude=magnitude)


@dataclass(frozen=True, kw_only=True, eq=False)
class MoeCase:
    """One random input of a moe: the checkpoint's tensors, and the layout in which a kernel gets them.

    `options` are keyword arguments of the reference and of the op.
    """

    problem: Problem
    x: Tensor
    weights: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]  # w13 and w2, each with its scales
    ids: Tensor
    router: Tensor
    options: dict[str, Any]
    nan_row: int | None
    layout_id: str = "checkpoint"
    ready: tuple[Weight, Weight] | None = None  # w13 and w2 in that layout, where they are there already

    @staticmethod
    def random(
        problem: Problem,
        m: int,
        seed: int,
        device: torch.device,
        *,
        nan: bool = True,
        weights: tuple[Tensor, ...] | None = None,
        layout_id: str = "checkpoint",
        **options: Any,
    ) -> MoeCase:
        """A case whose optional tensors, id dtype and expert_map the seed decides.

        Always: ids that are negative or too large, tokens without any expert, duplicates, a row of NaN (`nan`).
        `options` replace or add to what the seed chose. `weights` are w13 and w2 with their scales, else random ones.
        """
        g = torch.Generator().manual_seed(seed)
        dtype, experts, top_k = getattr(torch, problem.dtype), problem.experts, problem.top_k
        hidden, inter, rows = problem.k, problem.n, problem.n * (2 if problem.gated else 1)
        if weights is None:
            first = random_weight(experts, rows, hidden, g, parts=2 if problem.gated and seed & 1 else 1)
            weights = (*first, *random_weight(experts, hidden, inter, g))
        known = 2 * experts if seed & 2 else experts
        ids = torch.randint(-1, known + 1, (m, top_k), generator=g)
        ids[torch.rand(m, generator=g) < 0.1] = -1
        x = torch.randn(m, hidden, generator=g).to(dtype)
        nan_row = int(torch.randint(m, (), generator=g)) if nan and m > 1 else None
        if nan_row is not None:
            x[nan_row] = math.nan
        found: dict[str, Any] = dict(CONSTANTS.get(problem.activation, {}) if seed & 4 else {})
        if seed & 2:
            found["expert_map"] = torch.randperm(known, generator=g).int()
            found["expert_map"][found["expert_map"] >= experts] = -1
        if seed & 8:
            bias_dtype = dtype if seed & 1 else torch.float32
            found["w13_bias"] = torch.randn(experts, rows, generator=g).to(bias_dtype)
            found["w2_bias"] = torch.randn(experts, hidden, generator=g).to(bias_dtype)
        if seed & 16:
            found["pre_quant_scale"] = (0.5 + torch.rand(hidden, generator=g)).to(dtype)
            shape = (experts, inter) if seed & 1 else (inter,)
            found["w2_pre_quant_scale"] = (0.5 + torch.rand(shape, generator=g)).to(dtype)
        if top_k == 1 and seed & 32:
            found["apply_router_weight_on_input"] = True
        found |= options
        found = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in found.items()}
        return MoeCase(
            problem=problem,
            x=strided(x.to(device), bool(seed & 4)),
            weights=tuple(part.to(device) for part in weights),  # type: ignore[arg-type]
            ids=ids.to(torch.int64 if seed & 1 else torch.int32).to(device),
            router=torch.rand(m, top_k, generator=g).to(device) + 0.1,
            options=found,
            nan_row=nan_row,
            layout_id=layout_id,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Of the result."""
        return self.x.shape[0], self.problem.k

    def tensors(self) -> list[Tensor]:
        """What a launcher must not change."""
        given = [value for value in self.options.values() if isinstance(value, Tensor)]
        first, second = self.packed
        return [self.x, *_tensors(first), *_tensors(second), self.ids, self.router, *given]

    @cached_property
    def packed(self) -> tuple[Weight, Weight]:
        """w13 and w2 as kernels of the layout take them."""
        if self.ready is not None:
            return self.ready
        first = layout(first_layout(self.layout_id, self.problem)).pack(*self.weights[:3])
        return first, layout(self.layout_id).pack(*self.weights[3:])

    @property
    def arguments(self) -> MoeArguments:
        """What a launcher takes."""
        options = dict(self.options)
        chosen = {name: options.pop(name, None) for name in ("limit", "alpha", "beta")}
        on_input = options.pop("apply_router_weight_on_input", False)
        assert options.keys() <= {field.name for field in fields(MoeArguments)}
        first, second = self.packed
        return MoeArguments(
            x=self.x,
            w13=first.data,
            w13_scale=first.scale,
            w13_scale_2=first.global_scale,
            w2=second.data,
            w2_scale=second.scale,
            w2_scale_2=second.global_scale,
            topk_ids=self.ids,
            topk_weights=self.router,
            constants=constants(self.problem.activation, **chosen),
            weights_on_input=on_input,
            **options,
        )

    def launch(self, launcher: MoeLauncher, out: Tensor) -> None:
        """Call it; what it allocates is poisoned."""
        with poisoned():
            launcher(self.arguments, out)

    def reference(self, **changed: Any) -> Tensor:
        """Float64 [T, hidden]; `changed` replaces options."""
        options = self.options | changed
        x = self.x.where(~self.x.isnan(), 0)
        return reference.moe(
            x, *self.weights, self.ids, self.router, activation=self.problem.activation, round_output=False, **options
        )

    def exact(self) -> tuple[Tensor]:
        """The reference's result, in the form that `compare` takes."""
        return (self.reference(),)

    def compare(self, out: Tensor, exact: tuple[Tensor] | None = None) -> None:
        """Raise AssertionError unless this is the result; `exact` is what `exact()` returned, if it is at hand."""
        p, got, (ref,) = self.problem, out.clone(), exact or self.exact()
        if self.nan_row is not None:
            row = out[self.nan_row]
            local = local_experts(self.ids[self.nan_row], p.experts, self.options.get("expert_map"))
            right = row.isnan() if bool((local >= 0).any()) else row == 0
            assert bool(right.all()), "the row of NaN gives something else"
            got[self.nan_row] = 0
            ref = ref.clone()
            ref[self.nan_row] = 0
        assert_moe_close(got, ref, hidden=p.k, inter=p.n, top_k=p.top_k, dtype=out.dtype)


def experts_case(
    problem: Problem,
    m: int,
    seed: int,
    device: torch.device,
    *,
    weights: tuple[Tensor, ...] | None = None,
    layout_id: str = "checkpoint",
) -> GroupedCase | MoeCase:
    """A random input of a problem with experts; with random weights unless they are given.

    `layout_id` is what `Kernel.layout` says; w13 with a gate is packed in its -glu form.
    """
    make: Callable[..., GroupedCase | MoeCase] = GroupedCase.random if problem.op == "grouped_gemm" else MoeCase.random
    return make(problem, m, seed, device, weights=weights, layout_id=layout_id)


def _tensors(w: Weight) -> list[Tensor]:
    return [tensor for tensor in (w.data, w.scale, w.global_scale) if tensor is not None]
