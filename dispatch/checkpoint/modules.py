"""What the tensors of one module are, by their names, dtypes and shapes: the headers decide, not the config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ...kernels.weights.codec import GROUP
from .files import TensorInfo, listed
from .names import fused_parts

__all__ = [
    "CT",
    "FLOATS",
    "GLOBAL_DTYPES",
    "IGNORED",
    "MODELOPT",
    "REQUIRED",
    "Broken",
    "Foreign",
    "LinearInfo",
    "classify",
]

MODELOPT, CT = "modelopt", "compressed-tensors"
REQUIRED = {
    MODELOPT: ("weight", "weight_scale", "weight_scale_2"),
    CT: ("weight_packed", "weight_scale", "weight_global_scale"),
}
OPTIONAL = ("bias", "pre_quant_scale")

# Of activations and of the KV cache: whatever they hold, weights do not depend on them.
IGNORED = (
    *("input_scale", "input_global_scale", "output_scale", "k_scale", "v_scale", "q_scale", "k_bias", "v_bias"),
    *("input_quantizer._amax", "prob_scale", "prob_output_scale"),
)
MARKS = (
    *("weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale", "weight_scale_inv"),
    *("weight_zero_point", "weight_shape", "svdquant_lora_a", "svdquant_lora_b", "pre_quant_scale"),
)
FLOATS = ("BF16", "F16", "F32", "F64")
GLOBAL_DTYPES = ("F32", "BF16", "F64")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearInfo:
    """A linear layer with an NVFP4 weight.

    Attributes
    ----------
    dialect
        MODELOPT or CT: what the tensors are called, and whether the global scale multiplies or divides.
    n, k
        out_features and in_features.
    tensors
        By role: the last part of the name ("weight", "weight_scale", …), without what is ignored.
    """

    name: str
    dialect: str
    n: int
    k: int
    tensors: Mapping[str, TensorInfo]

    @property
    def weight(self) -> TensorInfo:
        """The codes."""
        return self.tensors[REQUIRED[self.dialect][0]]

    @property
    def global_scale(self) -> TensorInfo:
        """The global scale, which multiplies or divides."""
        return self.tensors[REQUIRED[self.dialect][2]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A module that is quantised in another way."""

    algo: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A module whose tensors make no weight; `problem` names them."""

    problem: str


def classify(name: str, leaves: Mapping[str, TensorInfo]) -> LinearInfo | Foreign | Broken | None:
    """What a module holds; None when nothing of it is quantised.

    Parameters
    ----------
    leaves
        Its tensors by the last part of their names.
    """
    weight = leaves.get("weight")
    plain = weight is None or weight.dtype in FLOATS
    if plain and not any(mark in leaves for mark in MARKS):
        return None
    foreign = _foreign(leaves)
    if foreign:
        return Foreign(algo=foreign)
    return _linear(name, leaves)


def _foreign(leaves: Mapping[str, TensorInfo]) -> str:
    """The name of another algorithm that these tensors belong to, or ""."""
    weight = leaves.get("weight_packed", leaves.get("weight"))
    scale = leaves.get("weight_scale")
    if "svdquant_lora_a" in leaves or "svdquant_lora_b" in leaves:
        return "NVFP4_SVD"
    if weight is None:
        return ""
    if weight.dtype.startswith("F8"):
        return "MXFP8" if scale is not None and scale.dtype in ("U8", "F8_E8M0") else "FP8"
    if weight.dtype in ("I8", "I32"):
        return f"{weight.dtype} integers"
    if weight.dtype == "U8" and not {"weight_scale_2", "weight_global_scale"} & set(leaves) and scale is not None:
        halves = weight.shape[-1] if weight.shape else 0
        if scale.dtype in ("U8", "F8_E8M0") and scale.shape == (*weight.shape[:-1], halves // GROUP):
            return "MXFP4"
    return ""


def _linear(name: str, leaves: Mapping[str, TensorInfo]) -> LinearInfo | Broken:
    modelopt = {"weight", "weight_scale_2"} & set(leaves)
    ct = {"weight_packed", "weight_global_scale"} & set(leaves)

    def broken(what: str) -> Broken:
        return Broken(problem=f"{name}: {what}")

    if modelopt and ct:
        return broken(
            f"tensors of two dialects; got {listed((*modelopt, *ct))}; expected {' and '.join(REQUIRED[MODELOPT])}, "
            f"or {' and '.join(REQUIRED[CT])}"
        )
    dialect = CT if ct else MODELOPT
    missing = [role for role in REQUIRED[dialect] if role not in leaves]
    if missing:
        there = listed(f"{role} {info}" for role, info in leaves.items())
        hint = ""
        weight = leaves.get("weight")
        if weight is not None and weight.dtype in FLOATS:
            hint = "; the weight is dense: if that is meant, the layer belongs in the config's ignore list"
        return broken(f"missing {', '.join(f'{name}.{role}' for role in missing)}; got {there}{hint}")
    extra = set(leaves) - {*REQUIRED[dialect], *OPTIONAL, *IGNORED}
    if extra:
        return broken(f"unknown {listed(f'{name}.{role}' for role in extra)} beside an NVFP4 weight")
    problem = _shape_problem(name, leaves, dialect)
    if problem:
        return broken(problem)
    weight = leaves[REQUIRED[dialect][0]]
    return LinearInfo(
        name=name,
        dialect=dialect,
        n=weight.shape[0],
        k=2 * weight.shape[1],
        tensors={role: leaves[role] for role in (*REQUIRED[dialect], *OPTIONAL) if role in leaves},
    )


def _shape_problem(name: str, leaves: Mapping[str, TensorInfo], dialect: str) -> str:
    """The first tensor that does not fit, in words; "" when all do."""
    weight_role, scale_role, global_role = REQUIRED[dialect]
    weight, scale, global_scale = leaves[weight_role], leaves[scale_role], leaves[global_role]
    if weight.dtype != "U8" or len(weight.shape) != 2:
        hint = "; a dense layer belongs in the config's ignore list" if weight.dtype in FLOATS else ""
        return f"wrong {weight_role}; got {weight}; expected U8 [N, K/2], two codes a byte{hint}"
    n, k = weight.shape[0], 2 * weight.shape[1]
    if n == 0 or k == 0 or k % GROUP:
        return f"wrong {weight_role}; got {weight}, so K = {k}; expected K a multiple of {GROUP}, N and K at least 1"
    squeezed = scale.shape[1:] if len(scale.shape) == 3 and scale.shape[0] == 1 else scale.shape
    if squeezed == (n, k // 32):
        return f"weight_scale has group size 32; got {scale}; expected group size 16: ({n}, {k // GROUP})"
    if scale.dtype != "F8_E4M3" or squeezed != (n, k // GROUP):
        hint = "; 1-D or padded scales were swizzled for one kind of GPU: export again" if scale.dtype == "U8" else ""
        return f"wrong weight_scale; got {scale}; expected F8_E4M3 ({n}, {k // GROUP}){hint}"
    numel = math.prod(global_scale.shape)
    parts = len(fused_parts(name))
    if global_scale.dtype not in GLOBAL_DTYPES or numel not in {1, n, parts or 1}:
        return f"wrong {global_role}; got {global_scale}; expected F32 with one element, or one per row"
    for role, size, letter in (("bias", n, "N"), ("pre_quant_scale", k, "K")):
        if role in leaves and (leaves[role].dtype not in FLOATS or math.prod(leaves[role].shape) != size):
            return f"wrong {role}; got {leaves[role]}; expected {size} floating point elements ({letter})"
    return ""
