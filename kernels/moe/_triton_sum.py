"""What `triton_moe` and `two_pass_moe` share on the host: the last sum of their chains, and biases as arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..problem import Device, Problem
from ..triton_launch import TRITON_TYPES, TritonLaunch
from .routing import as_words

if TYPE_CHECKING:
    from torch import Tensor

    from .arguments import MoeArguments

__all__ = ["SUM_BYTES", "TritonSum", "bias_arguments"]

SUM_BYTES = 1 << 30  # of results of both products held at a time
COLUMNS = 1024  # per block


class TritonSum:
    """Compiled for a device and a problem's dtype."""

    def __init__(self, device: Device, problem: Problem) -> None:
        from ._triton_grouped_device import sum_experts

        self.problem = problem
        pointers = {"results_ptr": "*fp32", "ids_ptr": "*i32", "map_ptr": "*i32"}
        pointers["out_ptr"] = f"*{TRITON_TYPES[problem.dtype]}"
        integers = ("N", "top_k", "experts", "id_words", "map_words", "map_size")
        self._sum = TritonLaunch(
            sum_experts,
            device,
            signature=pointers | dict.fromkeys(integers, "i32"),
            constants={"BLOCK": COLUMNS},
        )

    def __call__(self, a: MoeArguments, results: Tensor, out: Tensor) -> None:
        """out[t] = rounded sum of results [T * top_k, hidden] float32 over the slots that are not left out."""
        p = self.problem
        ids, id_words = as_words(a.topk_ids)
        known, map_words = (ids, 0) if a.expert_map is None else as_words(a.expert_map)
        map_size = 0 if a.expert_map is None else a.expert_map.numel()
        blocks = out.shape[0] * -(-p.k // COLUMNS)
        self._sum.launch(
            (blocks, 1, 1), results, ids, known, out, p.k, p.top_k, p.experts, id_words, map_words, map_size
        )


def bias_arguments(bias: Tensor | None, low: Tensor, full: Tensor) -> tuple[Tensor, Tensor, int]:
    """The bias in x's dtype, the bias in float32, and which of them is one: 0, 1 or 2. The others are never read."""
    if bias is None:
        return low, full, 0
    return (bias, full, 1) if bias.dtype == low.dtype else (low, bias, 2)
