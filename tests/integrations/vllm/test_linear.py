"""Linear layers of vLLM on the CPU kernels here: what is taken, what it computes, and what stays with vLLM.

Real: everything of this package. Fake: vLLM 0.33.0 (fake.py says how far it is like that release).
"""

from importlib import import_module
from types import SimpleNamespace

import nvfp4
import pytest
import torch
from nvfp4.testing import assert_gemm_close
from torch import nn

SIZES = [64, 32, 32]  # rows of q, k and v
SPREAD = (1.0, 3.0, 0.2)  # of their values, so that their global scales differ


def linear(fake, dialect, config=None, **spec):
    names = fake.names
    if dialect == "compressed-tensors":
        scheme = names.CompressedTensorsW4A4Fp4(use_a16=True)
        return fake.ask(dialect, names.CompressedTensorsLinearMethod(None), scheme=scheme)
    method = names.ModelOptLinearMethod(SimpleNamespace(weight=spec.get("weight", "nvfp4 static")), "ctx", "fmt")
    return fake.ask(config or "modelopt_fp4", method)


def create(method, layer, dtype=torch.bfloat16):
    method.create_weights(
        layer, 64, SIZES, input_size=64, output_size=sum(SIZES), params_dtype=dtype, weight_loader=None
    )


def fill(layer, dialect, spread=SPREAD):
    """Load three shards as the dialect stores them; returns their values."""
    values, start = [], 0
    for shard, (rows, size) in enumerate(zip(SIZES, spread, strict=True)):
        weight, scale, factor = nvfp4.quantize(torch.randn(rows, 64) * size)
        values.append(nvfp4.dequantize(weight, scale, factor, dtype=torch.float64))
        stored, glob = (layer.weight, layer.weight_scale_2) if dialect == "modelopt" else (
            layer.weight_packed,
            layer.weight_global_scale,
        )  # fmt: skip
        stored.data[start : start + rows] = weight
        layer.weight_scale.data[start : start + rows] = scale
        glob.data[shard] = factor if dialect == "modelopt" else 1 / factor
        start += rows
    return torch.cat(values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_a_fused_layer_is_exact_row_by_row(fake_vllm, dialect, dtype):
    method, layer = linear(fake_vllm, dialect)
    create(method, layer, dtype)
    values = fill(layer, dialect)
    method.process_weights_after_loading(layer)
    assert layer.weight_global_scale.shape == (sum(SIZES),)  # vLLM alone would have left the largest
    x, bias = torch.randn(2, 3, 64).to(dtype), nn.Parameter(torch.randn(sum(SIZES)).to(dtype), requires_grad=False)
    with torch.inference_mode():
        got = method.apply(layer, x, bias)
    assert_gemm_close(got.reshape(6, -1), (x.double() @ values.t() + bias.double()).reshape(6, -1), k=64, dtype=dtype)
    assert not hasattr(layer, "nvfp4_factors")


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_equal_global_scales_stay_one(fake_vllm, dialect):
    method, layer = linear(fake_vllm, dialect)
    create(method, layer)
    values = fill(layer, dialect)
    glob = layer.weight_scale_2 if dialect == "modelopt" else layer.weight_global_scale
    factors = glob.data.clone() if dialect == "modelopt" else 1 / glob.data
    glob.data.fill_(0.5)
    method.process_weights_after_loading(layer)
    assert layer.weight_global_scale.tolist() == [0.5 if dialect == "modelopt" else 2.0]  # turned over once, or never
    rows = torch.tensor(SIZES)
    exact = values / factors.double().repeat_interleave(rows)[:, None] * float(layer.weight_global_scale)
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    assert_gemm_close(method.apply(layer, x), x.double() @ exact.t(), k=64, dtype=torch.bfloat16)


def test_a_packed_weight_is_run_as_such(fake_vllm, monkeypatch):
    method, layer = linear(fake_vllm, "modelopt")
    create(method, layer)
    values = fill(layer, "modelopt")
    module = import_module("nvfp4.integrations.vllm.linear")
    monkeypatch.setattr(module, "warmup", lambda packed, dtype: None)  # no kernel of a CPU reads this layout
    pack = module.pack
    monkeypatch.setattr(module, "pack", lambda *tensors, dtype: pack(*tensors, dtype=dtype, layout="fragment"))
    method.process_weights_after_loading(layer)
    assert layer.nvfp4_layout == "fragment1-bf16" and layer.weight_scale is None
    weight = torch.ops.nvfp4.dequantize(
        layer.weight, None, layer.weight_global_scale, torch.float64, layout="fragment1-bf16", out_features=128,
        in_features=64,
    )  # fmt: skip
    assert torch.equal(weight, values)
    meta = [None if t is None else t.to("meta") for t in (layer.weight, layer.weight_scale, layer.weight_global_scale)]
    layer.weight, layer.weight_scale, layer.weight_global_scale = None, None, None
    del layer.weight, layer.weight_scale, layer.weight_global_scale
    layer.weight, layer.weight_scale, layer.weight_global_scale = meta
    assert method.apply(layer, torch.empty(3, 64, dtype=torch.bfloat16, device="meta")).shape == (3, 128)


def test_a_layer_compiles_into_one_graph(fake_vllm):
    method, layer = linear(fake_vllm, "modelopt")
    create(method, layer)
    fill(layer, "modelopt")
    method.process_weights_after_loading(layer)
    compiled = torch.compile(lambda x: method.apply(layer, x), fullgraph=True, dynamic=True, backend="eager")
    for m in (3, 5):
        x = torch.randn(m, 64, dtype=torch.bfloat16)
        with torch.no_grad():
            assert torch.equal(compiled(x), method.apply(layer, x))


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_wrong_global_scale_is_refused(fake_vllm, value):
    method, layer = linear(fake_vllm, "modelopt")
    create(method, layer)
    fill(layer, "modelopt")
    layer.weight_scale_2.data[1] = value
    with pytest.raises(nvfp4.InvalidInput, match="weight_scale_2 is wrong"):
        method.process_weights_after_loading(layer)


def test_humming_is_replaced_too(fake_vllm):
    fake_vllm.chosen["kernel"] = fake_vllm.names.HummingNvFp4LinearKernel
    method, layer = linear(fake_vllm, "modelopt", config="modelopt_mixed")
    create(method, layer)
    assert type(method.kernel).__name__ == "PackedLinear"
    assert ("info", "Using nvfp4 for NVFP4 GEMM, not HummingNvFp4LinearKernel") in fake_vllm.lines


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_a_kernel_that_is_not_weight_only_stays(fake_vllm, dialect):
    fake_vllm.chosen["kernel"] = fake_vllm.names.CutlassNvFp4LinearKernel
    method, layer = linear(fake_vllm, dialect)
    create(method, layer)
    fill(layer, dialect)
    method.process_weights_after_loading(layer)
    assert layer.processed_by == "CutlassNvFp4LinearKernel" and layer.weight_global_scale.ndim == 0
    assert [line for line in fake_vllm.lines if line[0] == "debug"] == [
        (
            "debug",
            "NVFP4 linear 128x64: CutlassNvFp4LinearKernel stays, it is not one of MarlinNvFp4LinearKernel, "
            "HummingNvFp4LinearKernel",
        )
    ]


def test_a_layer_that_no_kernel_runs_stays(fake_vllm, monkeypatch):
    method, layer = linear(fake_vllm, "modelopt")
    choice = import_module("nvfp4.integrations.vllm.choice")
    monkeypatch.setattr(choice.registry, "kernels", lambda op: ())
    create(method, layer)
    assert type(method.kernel) is fake_vllm.names.MarlinNvFp4LinearKernel and method.supports_pre_processed_weights
    assert fake_vllm.lines[-1][1].endswith("MarlinNvFp4LinearKernel stays, there are no kernels")


def test_float32_layers_stay(fake_vllm):
    method, layer = linear(fake_vllm, "modelopt")
    create(method, layer, torch.float32)
    assert type(method.kernel) is fake_vllm.names.MarlinNvFp4LinearKernel


def test_other_methods_are_passed_on(fake_vllm):
    fp8, _ = linear(fake_vllm, "modelopt", weight="fp8 static")
    assert type(fp8) is fake_vllm.names.ModelOptLinearMethod
    assert fake_vllm.ask("modelopt_mixed", None)[0] is None
    other = SimpleNamespace(scheme="int4")
    method = fake_vllm.names.CompressedTensorsLinearMethod(None)
    got, layer = fake_vllm.ask("compressed-tensors", method, scheme=other)
    assert got is method and layer.scheme is other


def test_what_vllm_looks_for_by_name_is_there(fake_vllm):
    method, layer = linear(fake_vllm, "modelopt")
    assert type(method).__name__ in fake_vllm.v2  # its loader is chosen by the name of the class
    assert (method.spec.weight, method.ctx, method.fmt) == ("nvfp4 static", "ctx", "fmt")
    create(method, layer)
    assert not method.supports_pre_processed_weights
