"""Tiny checkpoints of experts, one by one and as 3-D tensors, and the values of what was read of them."""

import torch
from nvfp4.kernels.weights.codec import dequantize
from nvfp4.testing.checkpoints import dense, stacked_experts
from nvfp4.testing.checkpoints import experts as make_experts

HIDDEN, INTER, EXPERTS = 64, 32, 3
MLP = "model.layers.0.mlp.experts"


def separate(name=MLP, roles=("gate_proj", "up_proj", "down_proj"), experts=EXPERTS, inter=INTER, **options):
    return make_experts(name, experts, HIDDEN, inter, roles=roles, **options)


def stacked(tensors, *, bias=False, **options):
    """The same experts as 3-D tensors, with global scales in the forms that exporters write."""
    found = stacked_experts(tensors, MLP, **options) | {
        f"{MLP}.gate_up_proj_weight_scale_2": torch.tensor(2.0**-8),
        f"{MLP}.gate_up_proj_input_scale": torch.tensor(float("nan")),
        f"{MLP}.down_proj_weight_scale_2": torch.full((EXPERTS, 1, 1), 2.0**-8),
    }
    if bias:
        found[f"{MLP}.gate_up_proj_bias"] = torch.arange(EXPERTS * 2 * INTER).float().reshape(EXPERTS, 2 * INTER)
        found[f"{MLP}.down_proj_bias"] = torch.arange(EXPERTS * HIDDEN).float().reshape(EXPERTS, HIDDEN)
    return found


def rows(weight, scale, factors):
    """[E, N, K] float64 of a stack whose rows share out the factors."""
    each = weight.shape[1] // factors.shape[1]
    return torch.stack(
        [
            torch.cat(
                [
                    dequantize(w[i * each : (i + 1) * each], s[i * each : (i + 1) * each], f[i : i + 1], torch.float64)
                    for i in range(len(f))
                ]
            )
            for w, s, f in zip(weight, scale, factors, strict=True)
        ]
    )


def first(got):
    return rows(got.w13, got.w13_scale, got.w13_scale_2)


def second(got):
    return rows(got.w2, got.w2_scale, got.w2_scale_2)


def expected(tensors, roles, name=MLP, experts=range(EXPERTS)):
    return torch.stack([torch.cat([dense(tensors, f"{name}.{e}.{role}") for role in roles]) for e in experts])
