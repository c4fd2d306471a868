"""Linear layers: where vLLM chose a weight-only kernel, the weight is packed after loading and `nvfp4::gemm` runs it.

vLLM takes the largest of the global scales of fused shards. The methods here keep one per row where they differ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.kernels.linear.nvfp4 import NvFp4LinearKernel, NvFp4LinearLayerConfig
from vllm.model_executor.kernels.linear.nvfp4.humming import HummingNvFp4LinearKernel
from vllm.model_executor.kernels.linear.nvfp4.marlin import MarlinNvFp4LinearKernel
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW4A4Fp4
from vllm.model_executor.layers.quantization.modelopt import ModelOptLinearMethod
from vllm.model_executor.utils import replace_parameter

from ...dispatch.checkpoint.modules import CT, MODELOPT
from ...dispatch.checkpoint.values import global_factor
from ...dispatch.checks import DTYPE_NAMES
from ...dispatch.pack import pack
from ...dispatch.warmup import warmup
from ...kernels.problem import Problem
from .choice import Layer, log, runs_here, why_not

__all__ = ["CompressedTensorsLinear", "ModelOptLinear", "PackedLinear"]

REPLACED = (MarlinNvFp4LinearKernel, HummingNvFp4LinearKernel)  # what vLLM runs on GPUs without FP4 instructions


class PackedLinear(NvFp4LinearKernel):
    """`nvfp4::gemm` behind vLLM's interface of NVFP4 kernels.

    A layer has `nvfp4_dtype`, of its x, and while it is loaded `nvfp4_factors`, its global scales: 1 or one per row.
    """

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Whether the device fits."""
        return (True, None) if runs_here() else (False, "needs CUDA and sm_80 or newer")

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> tuple[bool, str | None]:
        """Yes: `take` has looked at the layer."""
        return True, None

    def process_weights_after_loading(self, layer: Layer) -> None:
        """Pack the weight, once, and build its kernels."""
        packed = pack(layer.weight.data, layer.weight_scale.data, layer.nvfp4_factors, dtype=layer.nvfp4_dtype)
        del layer.nvfp4_factors
        replace_parameter(layer, "weight", packed.data)
        replace_parameter(layer, "weight_scale", packed.scale)
        replace_parameter(layer, "weight_global_scale", packed.global_scale)
        layer.nvfp4_layout = packed.layout
        warmup(packed, dtype=layer.nvfp4_dtype)

    def apply_weights(self, layer: Layer, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., K] to [..., N]."""
        return torch.ops.nvfp4.gemm.default(  # type: ignore[no-any-return]
            x,
            layer.weight,
            layer.weight_scale,
            layer.weight_global_scale,
            bias=bias,
            layout=layer.nvfp4_layout,
            out_features=layer.output_size_per_partition,
        )


def take(chosen: NvFp4LinearKernel, layer: Layer, dtype: torch.dtype) -> NvFp4LinearKernel:
    """A PackedLinear in the place of a weight-only kernel of vLLM, if it can run the layer; else `chosen`."""
    name, n, k = type(chosen).__name__, layer.output_size_per_partition, layer.input_size_per_partition
    if type(chosen) not in REPLACED:
        reason = "it is not one of " + ", ".join(kernel.__name__ for kernel in REPLACED)
    elif dtype not in DTYPE_NAMES:
        reason = f"nvfp4 has no kernels for {dtype}"
    else:
        weight = layer.weight_packed if hasattr(layer, "weight_packed") else layer.weight
        reason = why_not(Problem(n=n, k=k, dtype=DTYPE_NAMES[dtype]), weight.device)
    if reason:
        log.debug("NVFP4 linear %dx%d: %s stays, %s", n, k, name, reason)
        return chosen
    log.info_once("Using nvfp4 for NVFP4 GEMM, not %s", name)
    layer.nvfp4_dtype = dtype
    return PackedLinear(chosen.config)


def factors(stored: Tensor, dialect: str, rows: list[int]) -> Tensor:
    """The global scales of fused shards as factors: one, or one per row where they differ."""
    found = global_factor("weight_global_scale" if dialect == CT else "weight_scale_2", stored.data, dialect)
    if bool((found == found[0]).all()):
        return found[:1]
    return found.repeat_interleave(torch.tensor(rows, device=found.device))


@register_weight_loader_v2_supported_method
class ModelOptLinear(ModelOptLinearMethod):
    """vLLM's method for ModelOpt's linear layers, with the kernel replaced."""

    kernel: NvFp4LinearKernel

    @property
    def supports_pre_processed_weights(self) -> bool:
        """Not when packed: what another process has processed is in vLLM's layouts."""
        return not isinstance(self.kernel, PackedLinear) and bool(super().supports_pre_processed_weights)

    def create_weights(
        self,
        layer: Layer,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """Make the parameters, as vLLM does, and choose the kernel."""
        sizes = (input_size_per_partition, output_partition_sizes, input_size, output_size)
        super().create_weights(layer, *sizes, params_dtype, **attributes)
        self.kernel = take(self.kernel, layer, params_dtype)

    def process_weights_after_loading(self, layer: Layer) -> None:
        """As vLLM does, with the global scales that it would reduce to one kept."""
        if isinstance(self.kernel, PackedLinear):
            layer.nvfp4_factors = factors(layer.weight_scale_2, MODELOPT, layer.logical_widths)
        super().process_weights_after_loading(layer)


class CompressedTensorsLinear(CompressedTensorsW4A4Fp4):
    """vLLM's scheme for linear layers of compressed-tensors, with the kernel replaced."""

    kernel: NvFp4LinearKernel

    def create_weights(self, layer: Layer, *, params_dtype: torch.dtype, **given: Any) -> None:
        """Make the parameters, as vLLM does, and choose the kernel."""
        super().create_weights(layer, params_dtype=params_dtype, **given)
        self.kernel = take(self.kernel, layer, params_dtype)

    def process_weights_after_loading(self, layer: Layer) -> None:
        """As vLLM does, with the global scales that it would reduce to one kept; as stored they divide."""
        if isinstance(self.kernel, PackedLinear):
            layer.nvfp4_factors = factors(layer.weight_global_scale, CT, layer.logical_widths)
        super().process_weights_after_loading(layer)
