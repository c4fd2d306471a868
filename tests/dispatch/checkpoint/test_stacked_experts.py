"""Experts stored as 3-D tensors: the order of their rows, scales, biases, input vectors, and what does not fit."""

import pytest
import torch
from nvfp4.dispatch.checkpoint import Shard, load_experts, open_checkpoint
from nvfp4.errors import InvalidInput

from .expert_files import EXPERTS, HIDDEN, INTER, MLP, expected, first, second, separate, stacked


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
def test_3d_experts_are_the_same_experts(write, interleaved, transposed):
    tensors = separate(factor=2.0**-8)
    files = stacked(tensors, interleaved=interleaved, transposed=transposed, bias=True)
    model_type = "gpt_oss" if interleaved else "llama4"
    checkpoint = open_checkpoint(write(files, config={"model_type": model_type}))
    got = load_experts(checkpoint, MLP)
    assert got.gated and torch.equal(first(got), expected(tensors, ("gate_proj", "up_proj")))
    assert torch.equal(second(got), expected(tensors, ("down_proj",)))
    bias = files[f"{MLP}.gate_up_proj_bias"]
    halves = torch.cat((bias[:, 0::2], bias[:, 1::2]), 1) if interleaved else bias
    assert torch.equal(got.w13_bias, halves) and torch.equal(got.w2_bias, files[f"{MLP}.down_proj_bias"])
    with pytest.raises(InvalidInput, match=r'wrong gate_up; got \'pairs\'; expected "halves" or "interleaved"'):
        load_experts(checkpoint, MLP, gate_up="pairs")
    other = load_experts(checkpoint, MLP, gate_up="halves" if interleaved else "interleaved")
    assert not torch.equal(first(other), first(got))
    one = load_experts(checkpoint, MLP, experts=range(1, 2), shard=Shard(rank=1, size=2, how="row"))
    assert torch.equal(second(one), second(got)[1:2, :, INTER // 2 :])
    half = slice(INTER // 2, INTER)
    assert torch.equal(first(one)[:, : INTER // 2], first(got)[1:2, half])
    assert one.w2_bias is None  # the sum over ranks must have it once


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("shape", [(), (EXPERTS,), (EXPERTS, 1), (EXPERTS, 2)])
def test_3d_experts_may_have_global_scales_of_their_own(write, shape, interleaved):
    files = stacked(separate(), interleaved=interleaved)
    factors = torch.rand(shape) + 0.5
    files[f"{MLP}.gate_up_proj_weight_scale_2"] = factors
    files[f"{MLP}.down_proj_weight_scale_2"] = torch.arange(1.0, EXPERTS + 1)
    checkpoint = open_checkpoint(write(files))
    got = load_experts(checkpoint, MLP, gate_up="interleaved" if interleaved else "halves")
    right = factors.view(-1, 1) if factors.ndim < 2 else factors
    assert torch.equal(got.w13_scale_2, right.expand(EXPERTS, 2))
    assert got.w2_scale_2.tolist() == [[1.0], [2.0], [3.0]]
    last = load_experts(checkpoint, MLP, experts=range(2, 3))
    assert torch.equal(last.w13_scale_2, got.w13_scale_2[2:]) and last.w2_scale_2.tolist() == [[3.0]]


@pytest.mark.parametrize("shape", [(HIDDEN,), (EXPERTS, HIDDEN), (EXPERTS, 1, HIDDEN)])
def test_3d_experts_may_have_input_vectors(write, shape):
    files = stacked(separate())
    vector, inner = torch.rand(HIDDEN) + 0.5, torch.rand(EXPERTS, INTER) + 0.5
    files[f"{MLP}.gate_up_proj_pre_quant_scale"] = vector.expand(shape)
    files[f"{MLP}.down_proj_pre_quant_scale"] = inner
    got = load_experts(open_checkpoint(write(files)), MLP)
    assert torch.equal(got.pre_quant_scale, vector) and torch.equal(got.w2_pre_quant_scale, inner)


def test_a_bias_has_a_number_for_every_row_of_every_expert(write):
    inter, hidden = 16, 96  # as many rows in all experts as an expert has columns
    weights = {f"{MLP}.gate_up_proj": (2 * inter, hidden), f"{MLP}.down_proj": (hidden, inter)}
    files = {}
    for name, (n, k) in weights.items():
        files[name] = torch.zeros(EXPERTS, k // 2, n, dtype=torch.uint8)
        files[f"{name}_weight_scale"] = torch.ones(EXPERTS, k // 16, n).to(torch.float8_e4m3fn)
        files[f"{name}_weight_scale_2"] = torch.tensor(1.0)
        files[f"{name}_bias"] = torch.arange(EXPERTS * n).reshape(EXPERTS, n).float()
    got = load_experts(open_checkpoint(write(files)), MLP)
    assert torch.equal(got.w13_bias, files[f"{MLP}.gate_up_proj_bias"])
    assert torch.equal(got.w2_bias, files[f"{MLP}.down_proj_bias"])
    files[f"{MLP}.gate_up_proj_bias"] = torch.zeros(EXPERTS, hidden)
    with pytest.raises(InvalidInput, match=r"wrong .*gate_up_proj_bias; got F32 \(3, 96\); expected 96 floating"):
        load_experts(open_checkpoint(write(files, folder="wrong")), MLP)


def stack(name, experts, n, k):
    """One projection of all experts, transposed, every code 1 and every scale 1."""
    return {
        name: torch.full((experts, k // 2, n), 0x22, dtype=torch.uint8),
        f"{name}_weight_scale": torch.ones(experts, k // 16, n).to(torch.float8_e4m3fn),
        f"{name}_weight_scale_2": torch.arange(1.0, experts + 1),
    }


def test_3d_experts_without_a_gate_have_up_alone(write):
    files = stack(f"{MLP}.up_proj", 3, 32, 64) | stack(f"{MLP}.down_proj", 3, 64, 32)
    got = load_experts(open_checkpoint(write(files)), MLP)
    assert not got.gated and got.w13.shape == (3, 32, 32) and got.w2.shape == (3, 64, 16)
    assert got.w13_scale_2.tolist() == got.w2_scale_2.tolist() == [[1.0], [2.0], [3.0]]
    assert torch.equal(first(got), torch.tensor([1.0, 2.0, 3.0]).double().view(3, 1, 1).expand(3, 32, 64))


@pytest.mark.parametrize(
    ("leaf", "tensor", "words"),
    [
        ("gate_up_proj_weight_scale", None, r"missing .*experts\.gate_up_proj_weight_scale"),
        ("down_proj", None, r"missing .*experts\.down_proj$"),
        (
            "gate_up_proj_weight_scale",
            torch.zeros(EXPERTS, 4, 8).to(torch.float8_e4m3fn),
            r"expected F8_E4M3 \(3, 4, 64",
        ),
        ("gate_up_proj", torch.zeros(EXPERTS, 32, 64).bfloat16(), r"wrong .*gate_up_proj; got BF16"),
        ("down_proj_weight_scale_2", torch.zeros(2), r"wrong .*down_proj_weight_scale_2; got F32 \(2,\)"),
        ("down_proj_bias", torch.zeros(7), r"wrong .*down_proj_bias; got F32 \(7,\)"),
    ],
)
def test_3d_experts_that_do_not_fit_are_named(write, leaf, tensor, words):
    files = stacked(separate())
    if tensor is None:
        del files[f"{MLP}.{leaf}"]
    else:
        files[f"{MLP}.{leaf}"] = tensor
    with pytest.raises(InvalidInput, match=words):
        load_experts(open_checkpoint(write(files)), MLP)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("gate_up_proj", 3, 64, 96), (4, 96, 32)),
        (("gate_up_proj", 3, 64, 96), (3, 64, 32)),
        (("gate_up_proj", 3, 64, 96), (3, 96, 64)),
        (("gate_up_proj", 3, 65, 96), (3, 96, 32)),
        (("up_proj", 3, 64, 96), (3, 96, 32)),
    ],
    ids=["number", "hidden", "inner", "odd", "no gate"],
)
def test_3d_projections_that_do_not_fit_each_other_are_named(write, first, second):
    role, *sizes = first
    files = stack(f"{MLP}.{role}", *sizes) | stack(f"{MLP}.down_proj", *second)
    with pytest.raises(InvalidInput, match=r"mlp\.experts: its two projections do not fit; got .* and U8"):
        load_experts(open_checkpoint(write(files)), MLP)
