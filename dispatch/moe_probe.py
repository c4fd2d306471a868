"""What the experts of a model compute, found out by asking its own code with small numbers.

A copy of the module gets tiny random weights, and its results are compared with what `nvfp4.moe` would compute for
every activation it has, over seven powers of ten. So nothing is concluded from the name of a class, and it works for
models on the meta device.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.moe.activations import ACTIVATIONS, activate, constants

__all__ = ["Block", "Experts", "apart", "probe_block", "probe_stacked", "route"]

HIDDEN, INTER, TOKENS = 24, 16, 16
FAMILIES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("up_proj", "down_proj"))
STACKED = ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias")
ATTRIBUTES = {"limit": ("limit", "swiglu_limit"), "alpha": ("alpha", "swiglu_alpha"), "beta": ("beta", "swiglu_beta")}
CLOSE = 1e-5  # relative to a token's result; routers work in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """What a module of experts computes, and how its weights lie.

    Attributes
    ----------
    activation, values
        As for `nvfp4.moe`; values has limit, alpha and beta where they are not the activation's own.
    hidden, inter, count
        Of the module itself.
    transposed, interleaved
        Of stacks: [E, K, N] instead of [E, N, K]; rows g0, u0, g1, u1, ….
    bias
        Whether there are any.
    """

    activation: str
    values: Mapping[str, float]
    hidden: int
    inter: int
    count: int
    bias: bool
    transposed: bool = False
    interleaved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A router and experts that are linear layers, one by one."""

    experts: Experts
    top_k: int
    renormalize: bool
    returns_logits: bool


def probe_stacked(module: nn.Module) -> Experts | str | None:
    """What a module with experts as 3-D parameters computes; why that is unknown, in words; None for other modules."""
    held = {name: tensor for name, tensor in module._parameters.items() if tensor is not None}
    first = held.get("gate_up_proj", held.get("up_proj"))
    second = held.get("down_proj")
    if first is None or second is None or first.ndim != 3 or second.ndim != 3:
        return None
    gated = "gate_up_proj" in held
    strange = [*(set(held) - set(STACKED)), *_owners(module, ())]
    if strange:
        return f"it has weights of its own: {', '.join(strange)}"
    parts = 2 if gated else 1
    (count, a, b), (_, c, d) = first.shape, second.shape
    ways = [False] * (b == c and a == parts * d) + [True] * (a == d and b == parts * c)
    bias = any(name.endswith("_bias") for name in held)
    reason = f"shapes {tuple(first.shape)} and {tuple(second.shape)} do not fit"
    for transposed in ways:
        w13, w2, b13, b2 = weights = _tiny(count, parts, bias)
        turned = (w13.transpose(1, 2), w2.transpose(1, 2)) if transposed else (w13, w2)
        name = "gate_up_proj" if gated else "up_proj"
        tiny = {name: turned[0], "down_proj": turned[1], f"{name}_bias": b13, "down_proj_bias": b2}
        clone = _clone(module, {one: tiny[one].contiguous() for one in held})
        x, ids, router = _calls(count)
        got = _run(lambda: inspect.unwrap(type(module).forward)(clone, x, ids, router))  # noqa: B023  (called at once)
        if isinstance(got, str):
            reason = f"called with x, ids and weights, its forward failed ({got})"
            continue
        for interleaved in (False, True) if gated else (False,):
            w13, _, b13, _ = (apart(t) if interleaved and i in (0, 2) else t for i, t in enumerate(weights))
            found = _match(module, gated, lambda act: _reference(x, w13, w2, b13, b2, ids, router, act), got)  # noqa: B023
            if found is not None:
                hidden, inter = (d, c) if transposed else (c, d)
                return Experts(
                    activation=found[0], values=found[1], hidden=hidden, inter=inter, count=count, bias=bias,
                    transposed=transposed, interleaved=interleaved,
                )  # fmt: skip
        reason = "it computes something else than the activations that nvfp4.moe has"
    return reason


def probe_block(block: nn.Module) -> Block | None:
    """What a block of a linear `gate` and `experts` made of linear layers computes; None where that is unknown."""
    experts, gate = block._modules.get("experts"), block._modules.get("gate")
    if not isinstance(experts, nn.ModuleList) or type(gate) is not nn.Linear or not len(experts):
        return None
    alike = {_form(expert) for expert in experts}
    form = alike.pop()
    top_k = next((k for k in (getattr(block, a, None) for a in ("top_k", "num_experts_per_tok")) if type(k) is int), 0)
    if form is None or alike or gate.out_features != len(experts) or not 1 <= top_k <= len(experts):
        return None
    if _owners(block, ("experts", "gate")) or block._parameters or block._buffers:
        return None
    names, hidden, inter, bias = form
    w13, w2, b13, b2 = _tiny(len(experts), len(names) - 1, bias)
    linears = []
    for e in range(len(experts)):
        halves = torch.split(w13[e], INTER), torch.split(b13[e], INTER)
        linears.append(
            {n: _linear(w, b, bias) for n, w, b in zip(names, (*halves[0], w2[e]), (*halves[1], b2[e]), strict=True)}
        )
    clones = [_clone(expert, {}, own) for expert, own in zip(experts, linears, strict=True)]
    x, ids, router = _calls(len(experts))
    one, whole = torch.zeros_like(ids[:, :1]), torch.ones_like(router[:, :1])
    alone = _run(lambda: type(experts[0]).forward(clones[0], x))
    if isinstance(alone, str):
        return None
    found = _match(experts[0], len(names) == 3, lambda act: _reference(x, w13, w2, b13, b2, one, whole, act), alone)
    if found is None:
        return None
    logits_weight = torch.randn(len(experts), HIDDEN, generator=_generator(), dtype=torch.float64, device="cpu")
    logits_bias = torch.linspace(-1, 1, len(experts), dtype=torch.float64, device="cpu")
    router_clone = _linear(logits_weight, logits_bias, gate.bias is not None)
    clone = _clone(block, {}, {"gate": router_clone, "experts": nn.ModuleList(clones)})
    small = x / x.norm(dim=1, keepdim=True)  # logits that leave more than one expert a weight
    got = _run(lambda: type(block).forward(clone, small.reshape(2, -1, HIDDEN)), tuples=True)
    if isinstance(got, str):
        return None
    logits = router_clone(small)
    returned = got if isinstance(got, tuple) else (got,)
    if len(returned) > 2 or (len(returned) == 2 and not _close(returned[1].reshape(logits.shape), logits)):
        return None
    act = _activation(*found)
    for renormalize in (True, False):
        weights, chosen = route(logits, top_k, renormalize)
        ref = _reference(small, w13, w2, b13, b2, chosen, weights.double(), act)
        if returned[0].shape == (2, TOKENS // 2, HIDDEN) and _close(returned[0].reshape(ref.shape), ref):
            sizes = Experts(
                activation=found[0], values=found[1], hidden=hidden, inter=inter, count=len(experts), bias=bias
            )
            return Block(experts=sizes, top_k=top_k, renormalize=renormalize, returns_logits=len(returned) == 2)
    return None


def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Weights, float32, and ids [T, top_k] of a softmax over all experts."""
    weights, ids = logits.float().softmax(-1).topk(top_k, dim=-1)
    return weights / weights.sum(-1, keepdim=True) if renormalize else weights, ids


def _form(expert: nn.Module) -> tuple[tuple[str, ...], int, int, bool] | None:
    """Names, hidden, inter and whether there are biases, of an expert made of linear layers."""
    linears = {name: child for name, child in expert._modules.items() if type(child) is nn.Linear}
    names = next((names for names in FAMILIES if set(names) == set(linears)), None)
    if names is None or _owners(expert, names) or expert._parameters or expert._buffers:
        return None
    hidden, inter = linears[names[-1]].out_features, linears[names[-1]].in_features
    fits = all((linears[name].out_features, linears[name].in_features) == (inter, hidden) for name in names[:-1])
    biases = {linears[name].bias is not None for name in names}
    return (names, hidden, inter, biases.pop()) if fits and len(biases) == 1 else None


def _owners(module: nn.Module, known: tuple[str, ...]) -> list[str]:
    """Children beside the known ones that hold tensors."""
    others = {name: child for name, child in module._modules.items() if child is not None and name not in known}
    return [name for name, child in others.items() if any(True for _ in (*child.parameters(), *child.buffers()))]


def _generator() -> torch.Generator:
    return torch.Generator("cpu").manual_seed(0)


def _tiny(count: int, parts: int, bias: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = _generator()

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64, device="cpu")

    scale = float(bias)
    return (
        values(count, parts * INTER, HIDDEN) / HIDDEN**0.5,
        values(count, HIDDEN, INTER) / INTER**0.5,
        values(count, parts * INTER) * scale,
        values(count, HIDDEN) * scale,
    )


def _calls(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of every magnitude, so that limits show; ids; router weights."""
    g = _generator()
    cpu: Any = {"generator": g, "device": "cpu"}  # whatever the default device is
    magnitudes = torch.logspace(-2, 4, TOKENS, dtype=torch.float64, device="cpu")
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, **cpu) * magnitudes[:, None]
    ids = torch.stack([torch.randperm(count, **cpu)[:2] for _ in range(TOKENS)])
    return x, ids, torch.rand(ids.shape, dtype=torch.float64, **cpu) + 0.1


def _linear(weight: Tensor, bias: Tensor, has_bias: bool) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], has_bias, device="meta", dtype=weight.dtype)
    made._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
    made._parameters["bias"] = nn.Parameter(bias, requires_grad=False) if has_bias else None
    return made


def _clone(module: nn.Module, parameters: Mapping[str, Tensor], children: Mapping[str, nn.Module] | None = None) -> Any:
    """The same module with other tensors; the rest is shared, and the module itself is left as it is."""
    clone = copy.copy(module)
    clone.__dict__["_parameters"] = {n: nn.Parameter(t, requires_grad=False) for n, t in parameters.items()}
    clone.__dict__["_modules"] = {**module._modules, **(children or {})}
    clone.training = False  # no noise on a router
    return clone


def _run(call: Callable[[], Any], *, tuples: bool = False) -> Any:
    """The result in float64, or the error in words: what a model's own code raises cannot be known."""
    try:
        with torch.no_grad():
            got = call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if isinstance(got, Tensor):
        return got.double()
    if tuples and isinstance(got, tuple) and all(isinstance(one, Tensor) for one in got):
        return tuple(one.double() for one in got)
    return f"it returned {type(got).__name__}"


def apart(rows: Tensor) -> Tensor:
    """Gate, then up, of rows [E, N, …] that alternate."""
    return torch.cat((rows[:, 0::2], rows[:, 1::2]), 1)


def _reference(
    x: Tensor, w13: Tensor, w2: Tensor, b13: Tensor, b2: Tensor, ids: Tensor, router: Tensor, act: Callable[..., Tensor]
) -> Tensor:
    a = torch.einsum("th,tjfh->tjf", x, w13[ids]) + b13[ids]
    halves = torch.split(a, INTER, -1)
    y = torch.einsum("tji,tjhi->tjh", act(*halves), w2[ids]) + b2[ids]
    return (y * router[..., None]).sum(1)


def _close(got: Tensor, ref: Tensor) -> bool:
    """Token by token, for they differ in magnitude."""
    return got.shape == ref.shape and bool(((got - ref).norm(dim=1) <= CLOSE * ref.norm(dim=1)).all())


def _activation(name: str, values: Mapping[str, float]) -> Callable[..., Tensor]:
    found = constants(name, **values)
    return lambda g, u=None: activate(name, g, u, found)


def _match(
    module: nn.Module, gated: bool, reference: Callable[[Callable[..., Tensor]], Tensor], got: Tensor
) -> tuple[str, dict[str, float]] | None:
    """The first activation that gives what the module gave."""
    for name, values in _candidates(module, gated):
        if _close(got, reference(_activation(name, values))):
            return name, values
    return None


def _candidates(module: nn.Module, gated: bool) -> Iterator[tuple[str, dict[str, float]]]:
    """Activations with their own constants, then with those that the module has as attributes."""
    for kind in ACTIVATIONS:
        if kind.gated != gated:
            continue
        choices = []
        for constant in kind.defaults:
            held = [getattr(module, attribute, None) for attribute in ATTRIBUTES[constant]]
            choices.append([None, *(float(value) for value in held if isinstance(value, int | float) and value > 0)])
        for chosen in itertools.product(*choices):
            values = zip(kind.defaults, chosen, strict=True)
            yield kind.name, {constant: value for constant, value in values if value is not None}
