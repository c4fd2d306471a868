"""Linear layers of the fake of vLLM: its methods, schemes and kernels."""

import torch
from torch import nn


def replace_parameter(layer, param_name, new_tensor):
    if new_tensor is None:
        setattr(layer, param_name, None)
        return
    setattr(layer, param_name, nn.Parameter(new_tensor.data, requires_grad=False))


def parameter(*shape, dtype):
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


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
