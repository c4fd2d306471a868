"""A fake of the parts of vLLM 0.33.0 that the plug-in touches, put under vLLM's names.

Faithful to that release: the names of modules, classes, methods, parameters and attributes; the order of calls (config,
`create_weights` with the choice of a kernel, loading, `process_weights_after_loading`, `apply`); the names, shapes and
dtypes of stored tensors; that vLLM itself reduces global scales to one before a kernel sees them, and multiplies x by
router weights before experts see it. Fake: everything else; no line is vLLM's. Layers are bare modules whose parameters
a test fills, every device is a CUDA device in the fake's eyes, and the choice of a kernel or a backend is what a test
says. `test_real.py` compares these names with vLLM where that is installed.
"""

from types import ModuleType

from .fake_linear import (
    CompressedTensorsLinearMethod,
    CompressedTensorsW4A4Fp4,
    CutlassNvFp4LinearKernel,
    HummingNvFp4LinearKernel,
    MarlinNvFp4LinearKernel,
    ModelOptLinearMethod,
    NvFp4LinearKernel,
    NvFp4LinearLayerConfig,
    register_weight_loader_v2_supported_method,
    replace_parameter,
)
from .fake_moe import (
    CompressedTensorsW4A4Nvfp4MoEMethod,
    FusedMoEActivationFormat,
    FusedMoEConfig,
    FusedMoEExpertsModular,
    FusedMoEParallelConfig,
    ModelOptNvFp4FusedMoE,
    MoEActivation,
    NvFp4MoeBackend,
    TopKWeightAndReduceNoOP,
    make_nvfp4_moe_kernel,
)


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
