"""vLLM's configs of NVFP4 checkpoints, which give a layer this package's method where vLLM's is one of those replaced.

They are importable by name: vLLM pickles a config into its worker processes.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
    CompressedTensorsLinearMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4 import (  # noqa: E501
    CompressedTensorsW4A4Nvfp4MoEMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW4A4Fp4
from vllm.model_executor.layers.quantization.modelopt import (
    ModelOptLinearMethod,
    ModelOptMixedPrecisionConfig,
    ModelOptNvFp4Config,
    ModelOptNvFp4FusedMoE,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Static

from .choice import Layer
from .experts import CompressedTensorsExperts, ModelOptExperts, keeps_its_experts
from .linear import CompressedTensorsLinear, ModelOptLinear

__all__ = ["CONFIGS", "CompressedTensors", "ModelOpt", "ModelOptMixed"]


def replaced(method: Any, layer: Layer) -> Any:
    """What runs the layer: this package's method for an NVFP4 layer, or `method`, which vLLM chose, for any other."""
    kind = type(method)
    if kind is ModelOptLinearMethod and method.spec.weight == kNvfp4Static:
        return ModelOptLinear(method.spec, method.ctx, method.fmt)
    if kind is CompressedTensorsLinearMethod and type(layer.scheme) is CompressedTensorsW4A4Fp4:
        layer.scheme = CompressedTensorsLinear(use_a16=layer.scheme.use_a16)
    elif kind is ModelOptNvFp4FusedMoE and not keeps_its_experts(method):
        return ModelOptExperts(method.quant_config, method.moe)
    elif kind is CompressedTensorsW4A4Nvfp4MoEMethod and not keeps_its_experts(method):
        return CompressedTensorsExperts(method.moe, use_a16=method.use_a16)
    return method


class ModelOpt(ModelOptNvFp4Config):
    """Checkpoints of ModelOpt that are NVFP4 throughout."""

    def get_quant_method(self, layer: Layer, prefix: str) -> Any:
        """What runs the layer."""
        return replaced(super().get_quant_method(layer, prefix), layer)


class ModelOptMixed(ModelOptMixedPrecisionConfig):
    """Checkpoints of ModelOpt with several algorithms."""

    def get_quant_method(self, layer: Layer, prefix: str) -> Any:
        """What runs the layer."""
        return replaced(super().get_quant_method(layer, prefix), layer)


class CompressedTensors(CompressedTensorsConfig):
    """Checkpoints of compressed-tensors."""

    def get_quant_method(self, layer: Layer, prefix: str) -> Any:
        """What runs the layer."""
        return replaced(super().get_quant_method(layer, prefix), layer)


CONFIGS = {"modelopt_fp4": ModelOpt, "modelopt_mixed": ModelOptMixed, "compressed-tensors": CompressedTensors}
