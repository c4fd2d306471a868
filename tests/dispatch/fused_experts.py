"""Layers of `nvfp4.nn.FusedMoE` with what they were loaded from, calls of them, and what those give."""

import nvfp4
import torch
from nvfp4.dispatch.checkpoint import open_checkpoint
from nvfp4.kernels import reference
from nvfp4.testing import relative_error
from nvfp4.testing.checkpoints import modelopt, write_checkpoint

EXPERTS, HIDDEN, INTER, TOP_K, TOKENS = 4, 64, 32, 2, 6
FAMILY = ("gate_proj", "up_proj", "down_proj")
NAME = "model.layers.0.mlp.experts"


def tensors(seed=0, names=FAMILY, pqs=False, **options):
    found = {}
    for e in range(EXPERTS):
        for i, name in enumerate(names):
            n, k = (HIDDEN, INTER) if name == names[-1] else (INTER, HIDDEN)
            found |= modelopt(f"{e}.{name}", n, k, 100 * seed + 10 * e + i, **options)
            if pqs:
                vector = torch.linspace(0.5, 2, k) * (1 if k == HIDDEN else 1 + e)
                found[f"{e}.{name}.pre_quant_scale"] = vector.bfloat16()
    return found


def made_of(found, names=FAMILY, **options):
    options.setdefault("bias", any(name.endswith(".bias") for name in found))
    made = nvfp4.nn.FusedMoE(EXPERTS, HIDDEN, INTER, names=names, **options)
    made.load_state_dict(found)
    return made


def routed(hidden=HIDDEN):
    """x [6, hidden], two ids of four experts for each of its tokens, and router weights."""
    g = torch.Generator().manual_seed(5)
    x = torch.randn(TOKENS, hidden, generator=g).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, generator=g)[:TOP_K] for _ in range(TOKENS)])
    return x, ids, torch.rand(TOKENS, TOP_K, generator=g)


def stacked(found, names, leaf):
    return torch.stack([torch.cat([found[f"{e}.{name}.{leaf}"] for name in names]) for e in range(EXPERTS)])


def expected(call, found, names=FAMILY, **options):
    """The reference on stacks that are put together here, from what the state dict holds."""
    first, second = names[:-1], names[-1:]

    def factors(roles):
        return torch.stack([torch.stack([found[f"{e}.{r}.weight_scale_2"] for r in roles]) for e in range(EXPERTS)])

    weights = []
    for roles in (first, second):
        scale = torch.stack(
            [torch.cat([found[f"{e}.{r}.weight_scale"].view(torch.uint8) for r in roles]) for e in range(EXPERTS)]
        )
        weights += [stacked(found, roles, "weight"), scale, factors(roles)]
    if f"0.{first[0]}.bias" in found:
        options |= {"w13_bias": stacked(found, first, "bias"), "w2_bias": stacked(found, second, "bias")}
    if f"0.{first[0]}.pre_quant_scale" in found:
        options["pre_quant_scale"] = found[f"0.{first[0]}.pre_quant_scale"]
        options["w2_pre_quant_scale"] = stacked(found, second, "pre_quant_scale")
    options = {"activation": "swiglu"} | options
    return reference.moe(call[0], *weights, call[1], call[2], round_output=False, **options)


def assert_right(y, ref):
    """One rounding leaves 1.7e-3; in so small a layer, one activation that is rounded the other way shows beside it."""
    error = relative_error(y, ref)
    assert error < 2.0**-8, error


def same_bytes(one, other):
    return one.shape == other.shape and torch.equal(
        one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8)
    )


def checkpoint(tmp_path, found, **options):
    stored = {f"{NAME}.{name}": t for name, t in found.items()}
    return open_checkpoint(write_checkpoint(tmp_path / "c", stored, **options))
