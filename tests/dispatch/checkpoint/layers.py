"""Names of layers in tiny checkpoints, and what was read of them."""

import torch
from nvfp4.kernels.weights.codec import dequantize

MLP = "model.layers.0.mlp"
ATTN = "model.layers.0.self_attn"


def same(tensors, name, got):
    """Whether the bytes are those that were written."""
    return (
        torch.equal(got.weight, tensors[f"{name}.weight"])
        and torch.equal(got.weight_scale.view(torch.uint8), tensors[f"{name}.weight_scale"].view(torch.uint8))
        and torch.equal(got.weight_scale_2, tensors[f"{name}.weight_scale_2"].reshape(1))
    )


def value(got):
    return dequantize(got.weight, got.weight_scale, got.weight_scale_2, torch.float64)
