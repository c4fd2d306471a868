"""Calls of the op moe: their tensors by the op's names, what they must give, and the calls that are recognised."""

import torch
from nvfp4.dispatch import table
from nvfp4.kernels import reference, registry
from nvfp4.kernels.device import describe
from nvfp4.kernels.problem import Problem
from nvfp4.testing import assert_moe_close
from nvfp4.testing.experts import MoeCase

op = torch.ops.nvfp4.moe.default
CPU = torch.device("cpu")
# Of w13 [E, 2 * inter, hidden/2] every other view has another shape, even with the last two dimensions exchanged.
PROBLEM = Problem(op="moe", n=32, k=64, experts=4, top_k=2, activation="swiglu")
WEIGHTS = ("w13", "w13_scale", "w13_scale_2", "w2", "w2_scale", "w2_scale_2")


def noted_launches():
    """The list that will hold the arguments of every launch of PROBLEM, which a CPU kernel runs."""
    launched = []
    kernel = registry.get("cpu_moe")
    device = describe(CPU)
    inner = kernel.build(device, PROBLEM, kernel.default_config(device, PROBLEM, 9))

    def launch(arguments, out):
        launched.append(arguments)
        inner(arguments, out)

    table._bound[CPU, PROBLEM, "checkpoint"] = ((), (launch,))
    return launched


def given(seed=0, m=9, **options):
    """A case, and its tensors by the names of the op; block scales are uint8, so that nothing has to be converted."""
    case = MoeCase.random(PROBLEM, m, seed, CPU, nan=False, **options)
    tensors = dict(zip(WEIGHTS, case.weights, strict=True))
    tensors |= {"topk_ids": case.ids, "topk_weights": case.router} | case.options
    return case, {"x": case.x} | tensors


def close(tensors, out):
    options = dict(tensors)
    x, *others = (options.pop(name) for name in ("x", *WEIGHTS, "topk_ids", "topk_weights"))
    right = reference.moe(x, *others, round_output=False, **options)
    assert_moe_close(out, right, hidden=PROBLEM.k, inter=PROBLEM.n, top_k=PROBLEM.top_k, dtype=x.dtype)


def known(tensors):
    for _ in range(2):
        out = op(**tensors)
    close(tensors, out)
    return out


def shifted(tensor):
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)
