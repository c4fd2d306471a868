"""Experts that are stored as 3-D tensors, `experts.gate_up_proj` and `experts.down_proj`.

They are quantised transposed: weight [E, K/2, N] (two codes a byte along K) and scales [E, K/16, N]. Some files have
[E, N, K/2] and [E, N, K/16] instead; the shapes tell the two apart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ...kernels.weights.codec import GROUP
from .files import TensorFiles, TensorInfo, listed
from .modules import FLOATS, GLOBAL_DTYPES, Broken

__all__ = ["FusedExperts", "StackedInfo", "fused_expert_leaves", "fused_experts", "read_stacked"]

# The suffix hangs on "_", not on ".": experts.gate_up_proj_weight_scale.
LEAF = re.compile(
    r"(gate_up_proj|up_proj|down_proj)(?:_(weight_scale|weight_scale_2|input_scale|bias|pre_quant_scale))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedInfo:
    """One projection of all experts, [N, K] each; `tensors` by role, as those of a single layer are called."""

    n: int
    k: int
    transposed: bool
    tensors: Mapping[str, TensorInfo]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedExperts:
    """Both projections; `first` holds gate and up where `gated`."""

    name: str
    count: int
    gated: bool
    first: StackedInfo
    second: StackedInfo


def fused_expert_leaves(leaves: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Those of a module's tensors that are of stacked NVFP4 experts; none when the stack is dense."""
    found = {leaf: info for leaf, info in leaves.items() if LEAF.fullmatch(leaf)}
    quantised = any(
        leaf.endswith(("_weight_scale", "_weight_scale_2")) or info.dtype == "U8" for leaf, info in found.items()
    )
    return found if quantised else {}


def fused_experts(name: str, leaves: Mapping[str, TensorInfo]) -> FusedExperts | Broken:
    """The experts that `leaves` make, or what is wrong with them."""
    by_projection: dict[str, dict[str, TensorInfo]] = {}
    for leaf, info in leaves.items():
        found = LEAF.fullmatch(leaf)
        assert found is not None
        by_projection.setdefault(found[1], {})[found[2] or "weight"] = info
    gated = "gate_up_proj" in by_projection
    expected = {"gate_up_proj" if gated else "up_proj", "down_proj"}
    if set(by_projection) != expected:
        got = f"{listed(by_projection)}; expected {' and '.join(sorted(expected))}"
        return Broken(problem=f"{name}: stacked experts are incomplete; got {got}")
    stacks = {}
    for projection, tensors in by_projection.items():
        stack = _stack(f"{name}.{projection}", tensors)
        if isinstance(stack, str):
            return Broken(problem=stack)
        stacks[projection] = stack
    first, second = stacks["gate_up_proj" if gated else "up_proj"], stacks["down_proj"]
    counts = {stack.tensors["weight"].shape[0] for stack in (first, second)}
    inter = first.n // 2 if gated else first.n
    if len(counts) > 1 or second.n != first.k or second.k != inter or (gated and first.n % 2):
        got = f"{first.tensors['weight']} and {second.tensors['weight']}"
        return Broken(problem=f"{name}: its two projections do not fit; got {got}")
    return FusedExperts(name=name, count=counts.pop(), gated=gated, first=first, second=second)


def _stack(name: str, tensors: Mapping[str, TensorInfo]) -> StackedInfo | str:
    """One projection, or the problem in words."""
    missing = [role for role in ("weight", "weight_scale", "weight_scale_2") if role not in tensors]
    if missing:
        return f"missing {', '.join(name if role == 'weight' else f'{name}_{role}' for role in missing)}"
    weight, scale, global_scale = tensors["weight"], tensors["weight_scale"], tensors["weight_scale_2"]
    if weight.dtype != "U8" or len(weight.shape) != 3:
        return f"wrong {name}; got {weight}; expected U8 with 3 dimensions"
    count, rows, columns = weight.shape
    if scale.dtype == "F8_E4M3" and scale.shape == (count, 2 * rows // GROUP, columns) and 2 * rows % GROUP == 0:
        n, k, transposed = columns, 2 * rows, True
    elif scale.dtype == "F8_E4M3" and scale.shape == (count, rows, 2 * columns // GROUP) and 2 * columns % GROUP == 0:
        n, k, transposed = rows, 2 * columns, False
    else:
        return (
            f"wrong {name}_weight_scale; got {scale} for a weight of {weight}; expected F8_E4M3 "
            f"({count}, {2 * rows / GROUP:g}, {columns}) or ({count}, {rows}, {2 * columns / GROUP:g})"
        )
    sizes = {1, count, 2 * count} if name.endswith("gate_up_proj") else {1, count}
    if global_scale.dtype not in GLOBAL_DTYPES or math.prod(global_scale.shape) not in sizes:
        return f"wrong {name}_weight_scale_2; got {global_scale}; expected F32 with one element, or one per expert"
    for role, numels in (("bias", (count * n,)), ("pre_quant_scale", (k, count * k))):
        if role in tensors and (tensors[role].dtype not in FLOATS or math.prod(tensors[role].shape) not in numels):
            expected = " or ".join(map(str, numels))
            return f"wrong {name}_{role}; got {tensors[role]}; expected {expected} floating point elements"
    return StackedInfo(n=n, k=k, transposed=transposed, tensors=tensors)


def read_stacked(files: TensorFiles, info: StackedInfo, expert: int) -> dict[str, Tensor]:
    """Tensors of one expert by role: weight [N, K/2], weight_scale [N, K/16], bias [N] …; views of the mapped file."""
    count = info.tensors["weight"].shape[0]
    found = {}
    for role in ("weight", "weight_scale"):
        part = files.part(info.tensors[role].name, slice(expert, expert + 1))[0]
        found[role] = part.t() if info.transposed else part
    for role in ("weight_scale_2", "bias", "pre_quant_scale"):
        if role in info.tensors:
            values = files.read(info.tensors[role].name)
            shared = values.numel() == (info.k if role == "pre_quant_scale" else 1)
            found[role] = values.reshape(-1) if shared else values.reshape(count, -1)[expert]
    return found
