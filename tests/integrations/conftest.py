"""A fake of the parts of vLLM 0.33.0 that the plug-in touches, put under vLLM's names.

Faithful to that release: the names of modules, classes, methods, parameters and attributes; the order of calls (config,
`create_weights` with the choice of a kernel, loading, `process_weights_after_loading`, `apply`); the names, shapes and
dtypes of stored tensors; that vLLM itself reduces global scales to one before a kernel sees them, and multiplies x by
router weights before experts see it. Fake: everything else; no line is vLLM's. Layers are bare modules whose parameters
a test fills, every device is a CUDA device in the fake's eyes, and the choice of a kernel or a backend is what a test
says. `test_vllm_real.py` compares these names with vLLM where that is installed.
"""

import sys
from enum import Enum
from types import ModuleType, SimpleNamespace

import pytest
import torch
from nvfp4.cache import lookup
from nvfp4.cache.records import Environment, LayoutPlan, Plan
from nvfp4.dispatch import table
from nvfp4.kernels import registry
from nvfp4.testing.fake_experts import KERNELS
from torch import nn


def replace_parameter(layer, param_name, new_tensor):
    if new_tensor is None:
        setattr(layer, param_name, None)
        return
    setattr(layer, param_name, nn.Parameter(new_tensor.data, requires_grad=False))


def parameter(*shape, dtype):
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Platform:
    device_type = "cpu"
    capability = 90

    def is_cuda(self):
        return True

    def has_device_capability(self, capability, device_id=0):
        return self.capability >= capability


class Logger:
    def __init__(self):
        self.lines = []

    def debug(self, msg, *args):
        self.lines.append(("debug", msg % args))

    def info_once(self, msg, *args):
        self.lines.append(("info", msg % args))


class NvFp4LinearLayerConfig:
    pass


class NvFp4LinearKernel:
    def __init__(self, config):
        assert self.can_implement(config)[0]
        assert self.is_supported()[0]
        self.config = config

    def process_weights_after_loading(self, layer):
        raise NotImplementedError

    def apply_weights(self, layer, x, bias=None):
        raise NotImplementedError


class OwnKernel(NvFp4LinearKernel):
    """What vLLM's kernels do here: note that they were called."""

    @classmethod
    def is_supported(cls, compute_capability=None):
        return True, None

    @classmethod
    def can_implement(cls, config):
        return True, None

    def process_weights_after_loading(self, layer):
        layer.processed_by = type(self).__name__


class MarlinNvFp4LinearKernel(OwnKernel):
    pass


class HummingNvFp4LinearKernel(OwnKernel):
    pass


class CutlassNvFp4LinearKernel(OwnKernel):
    pass


V2_SUPPORTED: list[str] = []
CHOSEN = {"kernel": MarlinNvFp4LinearKernel, "backend": None}


def register_weight_loader_v2_supported_method(cls):
    V2_SUPPORTED.append(cls.__name__)
    return cls


def sizes_of(layer, output_partition_sizes, input_size_per_partition):
    layer.logical_widths = output_partition_sizes
    layer.input_size_per_partition = input_size_per_partition
    layer.output_size_per_partition = sum(output_partition_sizes)
    return sum(output_partition_sizes), input_size_per_partition, len(output_partition_sizes)


class ModelOptLinearMethod:
    def __init__(self, spec, ctx, format_scheme=None):
        self.spec, self.ctx, self.fmt, self.kernel = spec, ctx, format_scheme, None

    @property
    def supports_pre_processed_weights(self):
        return True

    def create_weights(
        self,
        layer,
        input_size_per_partition,
        output_partition_sizes,
        input_size,
        output_size,
        params_dtype,
        **extra_weight_attrs,
    ):
        n, k, shards = sizes_of(layer, output_partition_sizes, input_size_per_partition)
        layer.weight = parameter(n, k // 2, dtype=torch.uint8)
        layer.weight_scale = parameter(n, k // 16, dtype=torch.float8_e4m3fn)
        layer.weight_scale_2 = parameter(shards, dtype=torch.float32)
        self.kernel = CHOSEN["kernel"](NvFp4LinearLayerConfig())

    def process_weights_after_loading(self, layer):
        replace_parameter(layer, "weight_global_scale", layer.weight_scale_2.max().to(torch.float32))
        del layer.weight_scale_2
        self.kernel.process_weights_after_loading(layer)

    def apply(self, layer, x, bias=None):
        return self.kernel.apply_weights(layer=layer, x=x, bias=bias)


class CompressedTensorsW4A4Fp4:
    def __init__(self, use_a16=False):
        self.use_a16, self.kernel = use_a16, CHOSEN["kernel"](NvFp4LinearLayerConfig())

    def create_weights(
        self, layer, output_partition_sizes, input_size_per_partition, params_dtype, weight_loader, **kwargs
    ):
        n, k, shards = sizes_of(layer, output_partition_sizes, input_size_per_partition)
        layer.weight_packed = parameter(n, k // 2, dtype=torch.uint8)
        layer.weight_scale = parameter(n, k // 16, dtype=torch.float8_e4m3fn)
        layer.weight_global_scale = parameter(shards, dtype=torch.float32)

    def process_weights_after_loading(self, layer):
        layer.weight = layer.weight_packed
        del layer.weight_packed
        replace_parameter(layer, "weight_global_scale", 1.0 / layer.weight_global_scale.max().to(torch.float32))
        self.kernel.process_weights_after_loading(layer)

    def apply_weights(self, layer, x, bias=None):
        return self.kernel.apply_weights(layer=layer, x=x, bias=bias)


class CompressedTensorsLinearMethod:
    def __init__(self, quantization_config):
        self.quantization_config = quantization_config

    def create_weights(
        self,
        layer,
        input_size_per_partition,
        output_partition_sizes,
        input_size,
        output_size,
        params_dtype,
        **extra_weight_attrs,
    ):
        layer.scheme.create_weights(
            layer=layer,
            input_size=input_size,
            input_size_per_partition=input_size_per_partition,
            output_partition_sizes=output_partition_sizes,
            output_size=output_size,
            params_dtype=params_dtype,
            weight_loader=extra_weight_attrs.get("weight_loader"),
        )

    def process_weights_after_loading(self, layer):
        layer.scheme.process_weights_after_loading(layer)

    def apply(self, layer, x, bias=None):
        return layer.scheme.apply_weights(layer, x, bias=bias)


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


class _Config:
    """A config whose answer is what a test sets as `method`, with a scheme for the layer if there is one."""

    method = scheme = None

    def get_quant_method(self, layer, prefix):
        if self.scheme is not None:
            layer.scheme = self.scheme
        return self.method


class ModelOptNvFp4Config(_Config):
    pass


class ModelOptMixedPrecisionConfig(_Config):
    pass


class CompressedTensorsConfig(_Config):
    pass


def make_modules(version, registered, logger, platform):
    quantization = "vllm.model_executor.layers.quantization"
    compressed = f"{quantization}.compressed_tensors"
    moe = "vllm.model_executor.layers.fused_moe"
    kernels = "vllm.model_executor.kernels.linear"
    contents = {
        "vllm": {"__version__": version},
        "vllm.logger": {"init_logger": lambda name: logger},
        "vllm.platforms": {"current_platform": platform},
        "vllm.model_executor.utils": {"replace_parameter": replace_parameter},
        "vllm.model_executor.layers.linear": {
            "register_weight_loader_v2_supported_method": register_weight_loader_v2_supported_method
        },
        quantization: {
            "register_quantization_config": lambda name: lambda cls: registered.setdefault(name, []).append(cls) or cls
        },
        f"{quantization}.modelopt": {
            "ModelOptLinearMethod": ModelOptLinearMethod,
            "ModelOptMixedPrecisionConfig": ModelOptMixedPrecisionConfig,
            "ModelOptNvFp4Config": ModelOptNvFp4Config,
            "ModelOptNvFp4FusedMoE": ModelOptNvFp4FusedMoE,
        },
        f"{quantization}.utils.quant_utils": {"kNvfp4Static": "nvfp4 static", "QuantKey": str},
        f"{compressed}.compressed_tensors": {
            "CompressedTensorsConfig": CompressedTensorsConfig,
            "CompressedTensorsLinearMethod": CompressedTensorsLinearMethod,
        },
        f"{compressed}.schemes": {"CompressedTensorsW4A4Fp4": CompressedTensorsW4A4Fp4},
        f"{compressed}.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4": {
            "CompressedTensorsW4A4Nvfp4MoEMethod": CompressedTensorsW4A4Nvfp4MoEMethod
        },
        f"{kernels}.nvfp4": {
            "NvFp4LinearKernel": NvFp4LinearKernel,
            "NvFp4LinearLayerConfig": NvFp4LinearLayerConfig,
        },
        f"{kernels}.nvfp4.marlin": {"MarlinNvFp4LinearKernel": MarlinNvFp4LinearKernel},
        f"{kernels}.nvfp4.humming": {"HummingNvFp4LinearKernel": HummingNvFp4LinearKernel},
        f"{kernels}.nvfp4.cutlass": {"CutlassNvFp4LinearKernel": CutlassNvFp4LinearKernel},
        f"{moe}.activation": {"MoEActivation": MoEActivation},
        f"{moe}.config": {"FusedMoEConfig": FusedMoEConfig, "FusedMoEParallelConfig": FusedMoEParallelConfig},
        f"{moe}.modular_kernel": {
            "FusedMoEActivationFormat": FusedMoEActivationFormat,
            "FusedMoEExpertsModular": FusedMoEExpertsModular,
        },
        f"{moe}.oracle.nvfp4": {
            "NvFp4MoeBackend": NvFp4MoeBackend,
            "make_nvfp4_moe_kernel": make_nvfp4_moe_kernel,
        },
        f"{moe}.topk_weight_and_reduce": {"TopKWeightAndReduceNoOP": TopKWeightAndReduceNoOP},
    }
    modules = {}
    for name, values in contents.items():
        modules[name] = ModuleType(name)
        vars(modules[name]).update(values)
    return modules


def parents(modules):
    """The modules with the packages that they are in, each an attribute of its own."""
    found = dict(modules)
    for name in modules:
        while "." in name:
            child, name = name, name.rpartition(".")[0]
            found.setdefault(name, ModuleType(name)).__path__ = []
            setattr(found[name], child.rpartition(".")[2], found[child])
    return found


@pytest.fixture
def fake_modules():
    return make_modules("0.33.0", {}, Logger(), Platform())


@pytest.fixture
def fake_vllm(monkeypatch):
    """vLLM's names for the time of a test; it says what was registered, logged and chosen."""
    registered, logger, platform = {}, Logger(), Platform()
    modules = make_modules("0.33.0", registered, logger, platform)
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in parents(modules).items():
        monkeypatch.setitem(sys.modules, name, module)
    ours = "nvfp4.integrations.vllm."
    for name in [name for name in sys.modules if name.startswith(ours)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(CHOSEN, "kernel", MarlinNvFp4LinearKernel)
    monkeypatch.setitem(CHOSEN, "backend", NvFp4MoeBackend.MARLIN)
    monkeypatch.setenv("NVFP4_VLLM", "1")
    yield SimpleNamespace(
        modules=modules,
        registered=registered,
        lines=logger.lines,
        platform=platform,
        chosen=CHOSEN,
        v2=V2_SUPPORTED,
        names=SimpleNamespace(**{name: value for module in modules.values() for name, value in vars(module).items()}),
    )
    for name in [name for name in sys.modules if name.startswith(ours)]:
        del sys.modules[name]
        vars(sys.modules[ours[:-1]]).pop(
            name.removeprefix(ours), None
        )  # `from package import module` looks there first


@pytest.fixture
def fragments(monkeypatch):
    """Kernels of experts that read fragments, beside those that do not, and plans that mark such a layout."""
    kernels = (*KERNELS, registry.get("cpu_moe"), registry.get("cpu_grouped"))
    monkeypatch.setattr(registry, "_all", lambda: {kernel.name: kernel for kernel in kernels})

    def find_plan(device, problem):
        if problem.op != "moe":
            return None
        layout = "fragment1-bf16" if problem.dtype == "bfloat16" else "fragment1-fp16"
        layouts = (LayoutPlan(layout=layout, intervals=(), traffic_us=1.0),)
        environment = Environment(nvfp4="0", torch="0")
        return Plan(
            device=device, problem=problem, layout=layout, layouts=layouts, traffic="test", environment=environment
        )

    monkeypatch.setattr(lookup, "find_plan", find_plan)
    table.clear()
    yield
    table.clear()
