"""Experts: where vLLM chose a weight-only backend, `nvfp4::moe` runs them on the tensors of the checkpoint.

vLLM takes the gate's global scale for the up projection too. The methods here keep both.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend, make_nvfp4_moe_kernel
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4 import (  # noqa: E501
    CompressedTensorsW4A4Nvfp4MoEMethod,
)
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4FusedMoE
from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey, kNvfp4Static
from vllm.model_executor.utils import replace_parameter

from ...dispatch.checkpoint.modules import CT, MODELOPT
from ...dispatch.checkpoint.values import global_factor
from ...dispatch.checks import DTYPE_NAMES
from ...dispatch.experts import warm
from ...dispatch.pack import pack
from ...kernels.problem import Problem
from .activations import ACTIVATIONS, call_of
from .choice import Layer, log, runs_here, why_not

__all__ = ["CompressedTensorsExperts", "ModelOptExperts", "PackedExperts", "keeps_its_experts"]

REPLACED = (NvFp4MoeBackend.MARLIN, NvFp4MoeBackend.HUMMING)  # what vLLM runs on GPUs without FP4 instructions


class PackedExperts(mk.FusedMoEExpertsModular):
    """`nvfp4::moe` behind vLLM's interface of experts."""

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        """Tokens in rows, not sorted by expert."""
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return runs_here()

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: QuantKey | None, activation_key: QuantKey | None) -> bool:
        return bool(weight_key == kNvfp4Static)  # x stays in 16 bits, as it does in the backends replaced

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation.value in ACTIVATIONS

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool:
        parallel = moe_parallel_config
        return not (parallel.use_all2all_kernels or parallel.use_passthrough_all2all or parallel.enable_eplb)

    @staticmethod
    def _supports_shape(hidden_dim: int) -> bool:
        return hidden_dim % 16 == 0

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        """Nothing is left to do: the op adds up a token's experts."""
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """None but the output: the op allocates its own."""
        return (0,), (0,), (M, K)

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write the layer's result into `output`."""
        if apply_router_weight_on_input:  # vLLM has multiplied x by them
            topk_weights = torch.ones_like(topk_weights)
        name, constants = call_of(activation.value, self.activation_config)
        result = torch.ops.nvfp4.moe.default(
            hidden_states, w1, self.w1_scale, self.g1_alphas, w2, self.w2_scale, self.g2_alphas, topk_ids,
            topk_weights.float(), activation=name, expert_map=expert_map, **constants,
        )  # fmt: skip
        output.copy_(result)


def problem_of(moe: FusedMoEConfig) -> Problem:
    """What the experts of one rank compute."""
    return Problem(
        op="moe",
        n=moe.intermediate_size_per_partition,
        k=moe.hidden_dim,
        dtype=DTYPE_NAMES[moe.in_dtype],
        experts=moe.num_local_experts,
        top_k=moe.experts_per_token,
        activation=ACTIVATIONS[moe.activation.value],
    )


def keeps_its_experts(method: Any) -> str:
    """Why vLLM's method for a layer of NVFP4 experts stays, "" if it is replaced."""
    reason = _reason(method)
    if reason:
        log.debug("NVFP4 experts: %s stays, %s", method.nvfp4_backend.value, reason)
    else:
        log.info_once("Using nvfp4 for NVFP4 experts, not %s", method.nvfp4_backend.value)
    return reason


def _reason(method: Any) -> str:
    moe = method.moe
    if method.nvfp4_backend not in REPLACED:
        return "it is not one of " + ", ".join(backend.value for backend in REPLACED)
    batched = moe.moe_parallel_config.use_batched_activation_format
    form = mk.FusedMoEActivationFormat.BatchedExperts if batched else mk.FusedMoEActivationFormat.Standard
    supported, reason = PackedExperts.is_supported_config(PackedExperts, moe, kNvfp4Static, None, form)
    if not supported:
        return f"nvfp4: {reason}"
    if moe.has_bias:
        return "nvfp4: biases of NVFP4 experts are not taken from vLLM"
    if moe.in_dtype not in DTYPE_NAMES:
        return f"nvfp4 has no kernels for {moe.in_dtype}"
    if moe.intermediate_size_per_partition % 16:
        return f"nvfp4: {moe.intermediate_size_per_partition} is no multiple of 16"
    try:
        call_of(moe.activation.value, moe)
    except ValueError as error:
        return f"nvfp4: {error}"
    return why_not(problem_of(moe), torch.device(moe.device), layout="checkpoint")


def _load(method: Any, layer: Layer, dialect: str, w13_scales: Tensor, w2_scales: Tensor) -> None:
    """Check what was loaded, and have vLLM's modular kernel run it."""
    for stack, stored in (("w13", w13_scales), ("w2", w2_scales)):
        factor = global_factor(f"{stack} global scale", stored.data, dialect).reshape(stored.shape)
        weight, scale = getattr(layer, f"{stack}_weight"), getattr(layer, f"{stack}_weight_scale")
        packed = pack(weight.data, scale.data, factor, layout="checkpoint")
        replace_parameter(layer, f"{stack}_weight", packed.data)
        replace_parameter(layer, f"{stack}_weight_scale", packed.scale)
        replace_parameter(layer, f"{stack}_weight_scale_2", packed.global_scale)
        replace_parameter(layer, f"{stack}_input_scale", None)
    method.moe_quant_config = method.get_fused_moe_quant_config(layer)
    method.moe_kernel = make_nvfp4_moe_kernel(
        moe_quant_config=method.moe_quant_config,
        moe_config=method.moe,
        experts_cls=method.experts_cls,
        backend=method.nvfp4_backend,
        routing_tables=layer._expert_routing_tables(),
    )
    warm(problem_of(method.moe), layer.w13_weight.device, "checkpoint", (1,))


class ModelOptExperts(ModelOptNvFp4FusedMoE):
    """vLLM's method for ModelOpt's experts, with the backend replaced."""

    supports_pre_processed_weights = False
    supports_eplb = False

    def __init__(self, quant_config: Any, moe_config: FusedMoEConfig) -> None:
        super().__init__(quant_config, moe_config)
        self.nvfp4_backend, self.experts_cls = NvFp4MoeBackend.MARLIN, PackedExperts  # quantises no activations

    def process_weights_after_loading(self, layer: Layer) -> None:
        """Keep the weights as they are."""
        _load(self, layer, MODELOPT, layer.w13_weight_scale_2, layer.w2_weight_scale_2)


class CompressedTensorsExperts(CompressedTensorsW4A4Nvfp4MoEMethod):
    """vLLM's method for experts of compressed-tensors, with the backend replaced."""

    supports_eplb = False

    def __init__(self, moe: FusedMoEConfig, *, use_a16: bool) -> None:
        super().__init__(moe, use_a16=use_a16)
        self.nvfp4_backend, self.experts_cls = NvFp4MoeBackend.MARLIN, PackedExperts  # quantises no activations

    def process_weights_after_loading(self, layer: Layer) -> None:
        """Keep the weights as they are, under the names that vLLM's kernels read; global scales divide as stored."""
        for stack in ("w13", "w2"):
            stored = getattr(layer, f"{stack}_weight_packed")
            delattr(layer, f"{stack}_weight_packed")
            setattr(layer, f"{stack}_weight", torch.nn.Parameter(stored.data, requires_grad=False))
        _load(self, layer, CT, layer.w13_weight_global_scale, layer.w2_weight_global_scale)
