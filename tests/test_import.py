"""`import nvfp4` is light, and its public names are real."""

import json
import subprocess
import sys

import nvfp4
import torch

CODE = """
import json, sys
import torch
before = set(sys.modules)
import nvfp4
print(json.dumps({
    "modules": sorted(set(sys.modules) - before),
    "cuda": torch.cuda.is_initialized(),
    "ops": sorted(name for name in ("gemm", "dequantize", "grouped_gemm", "moe") if hasattr(torch.ops.nvfp4, name)),
}))
"""


def imported() -> dict:
    done = subprocess.run([sys.executable, "-c", CODE], check=True, capture_output=True, text=True, timeout=120)
    return json.loads(done.stdout)


def test_import_loads_nothing_heavy():
    report = imported()
    roots = {name.split(".")[0] for name in report["modules"]}
    assert not roots & {
        "optuna",
        "sqlite_utils",
        "sqlite3",
        "triton",
        "cutlass",
        "cuda",
        "pebble",
        "rich",
        "click",
        "safetensors",
    }
    assert not report["cuda"]
    assert report["ops"] == ["dequantize", "gemm", "grouped_gemm", "moe"]


def test_public_names():
    assert nvfp4.__all__ == sorted(nvfp4.__all__)
    for name in nvfp4.__all__:
        assert getattr(nvfp4, name) is not None
    assert all(getattr(nvfp4, name).__doc__ for name in nvfp4.__all__ if not name.startswith("__"))


def test_modules_with_a_public_name_can_be_imported():
    from nvfp4.nn import FusedMoE, Linear, weights

    assert (FusedMoE, Linear, weights) == (nvfp4.nn.FusedMoE, nvfp4.nn.Linear, nvfp4.nn.weights)


def test_schemas():
    assert str(torch.ops.nvfp4.gemm.default._schema) == (
        "nvfp4::gemm(Tensor x, Tensor weight, Tensor? weight_scale, Tensor weight_scale_2, *, Tensor? bias=None, "
        'Tensor? pre_quant_scale=None, str layout="checkpoint", int? out_features=None) -> Tensor'
    )
    assert str(torch.ops.nvfp4.dequantize.default._schema) == (
        "nvfp4::dequantize(Tensor weight, Tensor? weight_scale, Tensor weight_scale_2, ScalarType dtype, *, "
        'str layout="checkpoint", int? out_features=None, int? in_features=None) -> Tensor'
    )
    assert str(torch.ops.nvfp4.grouped_gemm.default._schema) == (
        "nvfp4::grouped_gemm(Tensor x, Tensor weight, Tensor? weight_scale, Tensor weight_scale_2, "
        'Tensor expert_offsets, *, str layout="checkpoint", int? out_features=None) -> Tensor'
    )
    assert str(torch.ops.nvfp4.moe.default._schema) == (
        "nvfp4::moe(Tensor x, Tensor w13, Tensor? w13_scale, Tensor w13_scale_2, Tensor w2, Tensor? w2_scale, "
        'Tensor w2_scale_2, Tensor topk_ids, Tensor topk_weights, *, str activation="swiglu", int? inter=None, '
        "Tensor? pre_quant_scale=None, Tensor? w2_pre_quant_scale=None, Tensor? expert_map=None, "
        "bool apply_router_weight_on_input=False, float? limit=None, float? alpha=None, float? beta=None, "
        'Tensor? w13_bias=None, Tensor? w2_bias=None, str w13_layout="checkpoint", str w2_layout="checkpoint") '
        "-> Tensor"
    )
