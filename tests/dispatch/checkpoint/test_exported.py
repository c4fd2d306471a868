"""Checkpoints that nvidia-modelopt and compressed-tensors wrote themselves; data/make.py says how."""

import warnings
from pathlib import Path

import pytest
import torch
from nvfp4.dispatch.checkpoint import load_experts, load_linear, open_checkpoint
from nvfp4.kernels.weights.codec import dequantize
from safetensors.torch import load_file

DATA = Path(__file__).with_name("data")
NAMES = sorted(path.parent.name for path in DATA.glob("*/model.safetensors"))
EXPERTS = "model.layers.0.mlp.experts"


@pytest.fixture(params=NAMES)
def exported(request):
    """(checkpoint, its tensors as safetensors reads them, two layers as the exporter decodes them)."""
    path = DATA / request.param
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # configs and tensors of an exporter agree
        checkpoint = open_checkpoint(path)
    return checkpoint, load_file(path / "model.safetensors"), load_file(path / "decoded.safetensors")


def test_there_is_one_of_each_kind():
    assert NAMES == [
        "compressed-tensors-nvfp4",
        "compressed-tensors-nvfp4a16",
        "minilm-compressed-tensors",
        "minilm-modelopt",
        "modelopt-moe",
        "modelopt-nvfp4",
        "modelopt-w4a16",
    ]


def test_every_layer_is_found_and_none_else(exported):
    checkpoint, tensors, _ = exported
    scaled = {name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")}
    found = {*checkpoint.linears}
    for experts, by_number in checkpoint.experts.items():
        found |= {f"{experts}.{number}.{role}" for number, roles in by_number.items() for role in roles}
    assert found == scaled and not checkpoint.foreign and not checkpoint.broken
    assert {name for name in scaled if checkpoint.config.answer(name).quantized} == scaled
    if checkpoint.path.name.startswith("minilm"):
        assert "embeddings.word_embeddings.weight" in checkpoint.dense
    else:
        assert not checkpoint.config.answer("lm_head").quantized and "lm_head.weight" in checkpoint.dense


def test_bytes_are_those_of_the_file(exported):
    checkpoint, tensors, _ = exported
    for name, info in checkpoint.linears.items():
        ct = info.dialect == "compressed-tensors"
        got = load_linear(checkpoint, name)
        assert torch.equal(got.weight, tensors[f"{name}.{'weight_packed' if ct else 'weight'}"])
        assert torch.equal(got.weight_scale.view(torch.uint8), tensors[f"{name}.weight_scale"].view(torch.uint8))
        stored = tensors[f"{name}.{'weight_global_scale' if ct else 'weight_scale_2'}"].reshape(1)
        assert torch.equal(got.weight_scale_2, 1 / stored if ct else stored)


def test_values_are_those_of_the_exporter(exported):
    checkpoint, _, decoded = exported
    assert len(decoded) == 2
    for name, expected in decoded.items():
        got = load_linear(checkpoint, name)
        value = dequantize(got.weight, got.weight_scale, got.weight_scale_2)
        torch.testing.assert_close(value, expected, rtol=2.0**-22, atol=0)  # products in another order


def test_experts_are_stacked_in_their_order():
    checkpoint = open_checkpoint(DATA / "modelopt-moe")
    tensors = load_file(DATA / "modelopt-moe" / "model.safetensors")
    got = load_experts(checkpoint, EXPERTS)
    assert got.w13.shape == (4, 64, 32) and got.w2.shape == (4, 64, 16)
    for expert in range(4):
        name = f"{EXPERTS}.{expert}"
        assert torch.equal(got.w13[expert, :32], tensors[f"{name}.gate_proj.weight"])
        assert torch.equal(got.w13[expert, 32:], tensors[f"{name}.up_proj.weight"])
        assert torch.equal(got.w2[expert], tensors[f"{name}.down_proj.weight"])
        factors = [tensors[f"{name}.{role}_proj.weight_scale_2"] for role in ("gate", "up", "down")]
        assert torch.equal(torch.cat((got.w13_scale_2[expert], got.w2_scale_2[expert])), torch.stack(factors))
