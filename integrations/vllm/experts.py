"""Experts: where vLLM chose a weight-only backend, stacks are packed after loading and `nvfp4::moe` runs them.

The layout is the planned one, as `nvfp4.pack` takes it; in that of the checkpoint stacks stay as they are. vLLM takes
the gate's global scale for the up projection too. The methods here keep both.
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
from ...dispatch.layout import planned_layout
from ...dispatch.pack import pack
from ...dispatch.warmup import warmup
from ...kernels.problem import Problem
from ...kernels.weights.layouts import first_layout
from .activations import ACTIVATIONS, call_of
from .choice import Layer, log, runs_here, where, why_not

__all__ = ["CompressedTensorsExperts", "ModelOptExperts", "PackedExperts", "keeps_its_experts"]

STACKS = ("w13", "w2")
REPLACED = (NvFp4MoeBackend.MARLIN, NvFp4MoeBackend.HUMMING)  # what vLLM runs on GPUs without FP4 instructions


class PackedExperts(mk.FusedMoEExpertsModular):
    """`nvfp4::moe` behind vLLM's interface of experts."""

    layouts = ("checkpoint", "checkpoint")  # of w13 and w2; `_load` sets those of a layer

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

    def moe_problem_size(self, a1: Tensor, w1: Tensor, w2: Tensor, topk_ids: Tensor) -> tuple[int, int, int, int, int]:
        """Experts, tokens, rows of w13, hidden and top_k; blobs do not show them."""
        rows = self.moe_config.intermediate_size_per_partition * (2 if self.moe_config.is_act_and_mul else 1)
        return w1.shape[0], a1.shape[0], rows, a1.shape[-1], topk_ids.shape[1]

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
            topk_weights.float(), activation=name, inter=self.moe_config.intermediate_size_per_partition,
            expert_map=expert_map, w13_layout=self.layouts[0], w2_layout=self.layouts[1], **constants,
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
    problem, device = problem_of(moe), torch.device(moe.device)
    return why_not(problem, device, layout=planned_layout(where(device), problem))


def _load(method: Any, layer: Layer, dialect: str, w13_scales: Tensor, w2_scales: Tensor) -> None:
    """Check and pack what was loaded, and have vLLM's modular kernel run it."""
    problem, device = problem_of(method.moe), layer.w13_weight.device
    layout = planned_layout(device, problem)
    layouts = first_layout(layout, problem), layout
    for stack, stored, its_layout in zip(STACKS, (w13_scales, w2_scales), layouts, strict=True):
        _pack(layer, stack, global_factor(f"{stack} global scale", stored.data, dialect), its_layout)
    method.moe_quant_config = method.get_fused_moe_quant_config(layer)
    method.moe_kernel = make_nvfp4_moe_kernel(
        moe_quant_config=method.moe_quant_config,
        moe_config=method.moe,
        experts_cls=method.experts_cls,
        backend=method.nvfp4_backend,
        routing_tables=layer._expert_routing_tables(),
    )
    method.moe_kernel.fused_experts.layouts = layouts
    warmup(problem, device=device, layout=layout)


def _pack(layer: Layer, stack: str, factors: Tensor, layout: str) -> None:
    """Put a packed stack in the place of a layer's, and free the latter before the next one is packed."""
    weight, scale = getattr(layer, f"{stack}_weight"), getattr(layer, f"{stack}_weight_scale")
    experts = weight.shape[0]
    packed = pack(weight.data, scale.data, factors.reshape(experts, -1), layout=layout)
    replace_parameter(layer, f"{stack}_weight", packed.data)
    replace_parameter(layer, f"{stack}_weight_scale", packed.scale)  # None where the blobs contain them
    replace_parameter(layer, f"{stack}_weight_scale_2", packed.global_scale)
    replace_parameter(layer, f"{stack}_input_scale", None)


class ModelOptExperts(ModelOptNvFp4FusedMoE):
    """vLLM's method for ModelOpt's experts, with the backend replaced."""

    supports_pre_processed_weights = False
    supports_eplb = False

    def __init__(self, quant_config: Any, moe_config: FusedMoEConfig) -> None:
        super().__init__(quant_config, moe_config)
        self.nvfp4_backend, self.experts_cls = NvFp4MoeBackend.MARLIN, PackedExperts  # quantises no activations

    def process_weights_after_loading(self, layer: Layer) -> None:
        """Pack the weights, once, and build their kernels."""
        _load(self, layer, MODELOPT, layer.w13_weight_scale_2, layer.w2_weight_scale_2)


class CompressedTensorsExperts(CompressedTensorsW4A4Nvfp4MoEMethod):
    """vLLM's method for experts of compressed-tensors, with the backend replaced."""

    supports_eplb = False

    def __init__(self, moe: FusedMoEConfig, *, use_a16: bool) -> None:
        super().__init__(moe, use_a16=use_a16)
        self.nvfp4_backend, self.experts_cls = NvFp4MoeBackend.MARLIN, PackedExperts  # quantises no activations

    def process_weights_after_loading(self, layer: Layer) -> None:
        """Pack the weights, once, under the names that vLLM's kernels read; global scales divide as stored."""
        for stack in STACKS:
            stored = getattr(layer, f"{stack}_weight_packed").data
            delattr(layer, f"{stack}_weight_packed")
            setattr(layer, f"{stack}_weight", torch.nn.Parameter(stored, requires_grad=False))
        del stored  # the layer alone holds it while it is packed
        _load(self, layer, CT, layer.w13_weight_global_scale, layer.w2_weight_global_scale)
