"""Experts of the fake of vLLM: their configs, their methods and the modular kernel around them."""

from enum import Enum
from types import SimpleNamespace

import torch

from .fake_linear import CHOSEN


class FusedMoEActivationFormat(Enum):
    Standard = "standard"
    BatchedExperts = "batched_experts"


class NvFp4MoeBackend(Enum):
    MARLIN = "MARLIN"
    HUMMING = "HUMMING"
    VLLM_CUTLASS = "VLLM_CUTLASS"


class MoEActivation(Enum):
    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    SWIGLUOAI = "swigluoai"
    SWIGLUOAI_UNINTERLEAVE = "swigluoai_uninterleave"
    SITU = "situ"
    RELU2_NO_MUL = "relu2_no_mul"


class FusedMoEParallelConfig:
    def __init__(self, **given):
        self.use_ep = self.enable_eplb = self.use_all2all_kernels = self.use_batched_activation_format = False
        self.use_passthrough_all2all = False
        vars(self).update(given)


class FusedMoEConfig:
    swiglu_alpha = swiglu_beta = activation_situ_beta = activation_situ_linear_beta = None

    def __init__(self, **given):
        self.has_bias = self.is_lora_enabled = False
        self.swiglu_limit = None
        self.device, self.in_dtype = "cpu", torch.bfloat16
        self.moe_parallel_config = FusedMoEParallelConfig()
        vars(self).update(given)
        self.is_act_and_mul = not self.activation.value.endswith("_no_mul")


class FusedMoEExpertsModular:
    def __init__(self, moe_config, quant_config):
        self.moe_config, self.quant_config = moe_config, quant_config
        alpha, beta = moe_config.swiglu_alpha, moe_config.swiglu_beta
        self.activation_config = SimpleNamespace(
            clamp_limit=moe_config.swiglu_limit,
            alpha=1.0 if alpha is None else alpha,
            beta=0.0 if beta is None else beta,
            activation_situ_beta=moe_config.activation_situ_beta,
            activation_situ_linear_beta=moe_config.activation_situ_linear_beta,
        )

    def __getattr__(self, name):  # w1_scale, g1_alphas and the like
        return getattr(self.quant_config, name)

    def moe_problem_size(self, a1, w1, w2, topk_ids):
        assert w1.ndim == 3 and w2.ndim == 3
        return w1.shape[0], a1.shape[0], w1.shape[1], a1.shape[1], topk_ids.shape[1]

    def is_supported_config(cls, moe_config, weight_key, activation_key, activation_format):
        checks = (
            (cls._supports_current_device(), "current device"),
            (moe_config.is_act_and_mul or cls._supports_no_act_and_mul(), "no act_and_mul MLP layer"),
            (cls._supports_activation(moe_config.activation), f"{moe_config.activation} activation"),
            (cls._supports_quant_scheme(weight_key, activation_key), "quantization scheme"),
            (cls._supports_parallel_config(moe_config.moe_parallel_config), "parallel config"),
            (cls._supports_shape(moe_config.hidden_dim), "hidden dim"),
            (activation_format == cls.activation_format(), "activation format"),
            (not moe_config.is_lora_enabled, "LoRA"),
        )
        return next(((False, f"kernel does not support {what}") for ok, what in checks if not ok), (True, None))

    is_supported_config = staticmethod(is_supported_config)


class ModularKernel:
    """What vLLM's kernel does around experts of the standard format on one rank."""

    def __init__(self, fused_experts):
        self.fused_experts = fused_experts

    def apply(
        self, hidden_states, w1, w2, topk_weights, topk_ids, activation, expert_map, apply_router_weight_on_input
    ):
        output = torch.full_like(hidden_states, float("nan"))
        if apply_router_weight_on_input:
            hidden_states = hidden_states * topk_weights.to(hidden_states.dtype)
        _, m, n, k, top_k = self.fused_experts.moe_problem_size(hidden_states, w1, w2, topk_ids)
        shapes = self.fused_experts.workspace_shapes(m, n, k, top_k, w1.shape[0], w1.shape[0], None, activation)
        assert shapes[2] == tuple(output.shape)
        spaces = [torch.empty(shape, dtype=output.dtype) for shape in shapes[:2]]
        left = self.fused_experts.apply(
            output=output,
            hidden_states=hidden_states,
            w1=w1,
            w2=w2,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=activation,
            global_num_experts=w1.shape[0],
            expert_map=expert_map,
            a1q_scale=None,
            a2_scale=None,
            workspace13=spaces[0],
            workspace2=spaces[1],
            expert_tokens_meta=None,
            apply_router_weight_on_input=apply_router_weight_on_input,
        )
        assert left is None
        self.fused_experts.finalize_weight_and_reduce_impl()
        return output


def make_nvfp4_moe_kernel(moe_quant_config, moe_config, experts_cls, backend, routing_tables=None):
    return ModularKernel(experts_cls(moe_config=moe_config, quant_config=moe_quant_config))


class Experts:
    """What vLLM's two methods for experts have in common."""

    def __init__(self, moe):
        self.moe, self.moe_quant_config, self.moe_kernel = moe, None, None
        self.nvfp4_backend, self.experts_cls = CHOSEN["backend"] or NvFp4MoeBackend.MARLIN, None

    def get_fused_moe_quant_config(self, layer):
        assert self.nvfp4_backend is NvFp4MoeBackend.MARLIN  # the one with 16-bit activations
        assert layer.w13_input_scale is None and layer.w2_input_scale is None
        return SimpleNamespace(
            w1_scale=layer.w13_weight_scale,
            w2_scale=layer.w2_weight_scale,
            g1_alphas=layer.w13_weight_scale_2,
            g2_alphas=layer.w2_weight_scale_2,
        )

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        return self.moe_kernel.apply(
            x,
            layer.w13_weight,
            layer.w2_weight,
            topk_weights,
            topk_ids,
            activation=layer.activation,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
        )


class ModelOptNvFp4FusedMoE(Experts):
    supports_pre_processed_weights = True

    def __init__(self, quant_config, moe_config):
        super().__init__(moe_config)
        self.quant_config = quant_config

    def process_weights_after_loading(self, layer):
        layer.processed_by = self.nvfp4_backend.value


class CompressedTensorsW4A4Nvfp4MoEMethod(Experts):
    def __init__(self, moe, layer_name=None, use_a16=False):
        super().__init__(moe)
        self.use_a16 = use_a16

    def process_weights_after_loading(self, layer):
        layer.processed_by = self.nvfp4_backend.value


class TopKWeightAndReduceNoOP:
    pass
