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

__all__ = ["Block", "Experts", "OtherKind", "apart", "probe_block", "probe_stacked", "route"]

HIDDEN, INTER, TOKENS = 24, 16, 16
FAMILIES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("up_proj", "down_proj"))
STACKED = ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias")
ATTRIBUTES = {"limit": ("limit", "swiglu_limit"), "alpha": ("alpha", "swiglu_alpha"), "beta": ("beta", "swiglu_beta")}
CLOSE = 1e-5  # relative to a token's result; routers work in float32
ROUNDED = 0.008  # a result rounded to bf16 twice is nearer than this; quick GELU is 0.016 from GELU
LONG = 160  # characters of an error that are quoted
TRIAL = f"called with small random weights (hidden {HIDDEN}, inter {INTER})"
SIZES = "sizes must be read from x and its layers, not be constants or attributes of its own"


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


class OtherKind(str):
    """Why experts are none that `nvfp4.moe` computes, however they were written; any other reason is a plain str."""

    __slots__ = ()


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
        return OtherKind(f"it has weights of its own: {', '.join(strange)}")
    parts = 2 if gated else 1
    (count, a, b), (_, c, d) = first.shape, second.shape
    ways = [False] * (b == c and a == parts * d) + [True] * (a == d and b == parts * c)
    bias = any(name.endswith("_bias") for name in held)
    reason = f"shapes {tuple(first.shape)} and {tuple(second.shape)} do not fit"
    others: list[str] = []
    for transposed in ways:
        w13, w2, b13, b2 = weights = _tiny(count, parts, bias)
        turned = (w13.transpose(1, 2), w2.transpose(1, 2)) if transposed else (w13, w2)
        name = "gate_up_proj" if gated else "up_proj"
        tiny = {name: turned[0], "down_proj": turned[1], f"{name}_bias": b13, "down_proj_bias": b2}
        clone = _clone(module, {one: tiny[one].contiguous() for one in held})
        x, ids, router = _calls(count)
        got = _run(lambda: inspect.unwrap(type(module).forward)(clone, x, ids, router))  # noqa: B023  (called at once)
        if isinstance(got, str):
            reason = f"{TRIAL} and x, ids and router weights, its forward failed ({got}); {SIZES}"
            continue
        for interleaved in (False, True) if gated else (False,):
            w13, _, b13, _ = (apart(t) if interleaved and i in (0, 2) else t for i, t in enumerate(weights))
            found = _match(module, gated, lambda act: _reference(x, w13, w2, b13, b2, ids, router, act), got)  # noqa: B023
            if isinstance(found, str):
                others.append(found)
            else:
                hidden, inter = (d, c) if transposed else (c, d)
                return Experts(
                    activation=found[0], values=found[1], hidden=hidden, inter=inter, count=count, bias=bias,
                    transposed=transposed, interleaved=interleaved,
                )  # fmt: skip
    return next((other for other in others if not isinstance(other, OtherKind)), (others or [reason])[0])


def probe_block(block: nn.Module) -> Block | str | None:
    """What a block of a linear `gate` and `experts` made of linear layers computes; else why that is unknown, in words.

    None for modules without a list of `experts`.
    """
    experts, gate = block._modules.get("experts"), block._modules.get("gate")
    if not isinstance(experts, nn.ModuleList) or not len(experts):
        return None
    count = len(experts)
    forms = {_form(expert) for expert in experts}
    form = forms.pop()
    if forms:
        return OtherKind("its experts are not all alike")
    if isinstance(form, str):
        return form
    names, hidden, inter, bias = form
    w13, w2, b13, b2 = _tiny(count, len(names) - 1, bias)
    linears = []
    for e in range(count):
        halves = torch.split(w13[e], INTER), torch.split(b13[e], INTER)
        linears.append(
            {n: _linear(w, b, bias) for n, w, b in zip(names, (*halves[0], w2[e]), (*halves[1], b2[e]), strict=True)}
        )
    clones = [_clone(expert, {}, own) for expert, own in zip(experts, linears, strict=True)]
    x, ids, router = _calls(count)
    one, whole = torch.zeros_like(ids[:, :1]), torch.ones_like(router[:, :1])
    alone = _run(lambda: type(experts[0]).forward(clones[0], x))
    if isinstance(alone, str):
        return f"{TRIAL} and x [{TOKENS}, {HIDDEN}], the forward of an expert failed ({alone}); {SIZES}"
    found = _match(experts[0], len(names) == 3, lambda act: _reference(x, w13, w2, b13, b2, one, whole, act), alone)
    if isinstance(found, str):
        return type(found)(f"an expert alone: {found}")
    if type(gate) is not nn.Linear:
        return "it has no router called gate that is a torch.nn.Linear"
    if gate.out_features != count:
        return f"its gate has {gate.out_features} outputs, and there are {count} experts"
    top_k = next((k for k in (getattr(block, a, None) for a in ("top_k", "num_experts_per_tok")) if type(k) is int), 0)
    if not 1 <= top_k <= count:
        return f"it has no int attribute top_k or num_experts_per_tok from 1 to {count}"
    others = [*_owners(block, ("experts", "gate")), *block._parameters, *block._buffers]
    if others:
        return f"it has weights beside its gate and its experts: {', '.join(others)}"
    logits_weight = torch.randn(count, HIDDEN, generator=_generator(), dtype=torch.float64, device="cpu")
    logits_bias = torch.linspace(-1, 1, count, dtype=torch.float64, device="cpu")
    router_clone = _linear(logits_weight, logits_bias, gate.bias is not None)
    its = _clone(experts, {}, dict(zip(experts._modules, clones, strict=True)))
    clone = _clone(block, {}, {"gate": router_clone, "experts": its})
    small = x / x.norm(dim=1, keepdim=True)  # logits that leave more than one expert a weight
    shape = (2, TOKENS // 2, HIDDEN)
    got = _run(lambda: type(block).forward(clone, small.reshape(shape)), tuples=True)
    if isinstance(got, str):
        return f"{TRIAL} and x {[*shape]}, its forward failed ({got}); {SIZES}"
    logits = router_clone(small)
    returned = got if isinstance(got, tuple) else (got,)
    if len(returned) not in (1, 2) or (len(returned) == 2 and not _is_logits(returned[1], logits)):
        return "it returns other things than its result, or its result and the logits of its gate"
    if returned[0].shape != shape:
        return f"{TRIAL} and x {[*shape]}, it returned {[*returned[0].shape]}; {SIZES}"
    act = _activation(*found)
    off = []
    for renormalize in (True, False):
        weights, chosen = route(logits, top_k, renormalize)
        ref = _reference(small, w13, w2, b13, b2, chosen, weights.double(), act)
        off.append(float(_off(returned[0].reshape(ref.shape), ref).max()))
        if off[-1] <= CLOSE:
            sizes = Experts(activation=found[0], values=found[1], hidden=hidden, inter=inter, count=count, bias=bias)
            return Block(experts=sizes, top_k=top_k, renormalize=renormalize, returns_logits=len(returned) == 2)
    return (
        f"{TRIAL}, its result differs from that of nvfp4.moe behind a softmax over all experts, of which {top_k} "
        f"count, by {_percent(min(off))}"
    )


def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Weights, float32, and ids [T, top_k] of a softmax over all experts."""
    weights, ids = logits.float().softmax(-1).topk(top_k, dim=-1)
    return weights / weights.sum(-1, keepdim=True) if renormalize else weights, ids


def _form(expert: nn.Module) -> tuple[tuple[str, ...], int, int, bool] | str:
    """Names, hidden, inter and whether there are biases, of an expert made of linear layers; or why it has none."""
    linears = {name: child for name, child in expert._modules.items() if type(child) is nn.Linear}
    names = next((names for names in FAMILIES if set(names) == set(linears)), None)
    if names is None:
        known = ", or ".join(" ".join(names) for names in FAMILIES)
        return f"the layers of an expert are called {' '.join(linears) or 'otherwise'}, not {known}"
    others = [*_owners(expert, names), *expert._parameters, *expert._buffers]
    if others:
        return OtherKind(f"an expert has weights beside its linear layers: {', '.join(others)}")
    hidden, inter = linears[names[-1]].out_features, linears[names[-1]].in_features
    if any((linears[name].out_features, linears[name].in_features) != (inter, hidden) for name in names[:-1]):
        return OtherKind("the layers of an expert are not of one hidden and one inner size")
    biases = {linears[name].bias is not None for name in names}
    return (names, hidden, inter, biases.pop()) if len(biases) == 1 else "only some layers of an expert have a bias"


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
        words = " ".join(str(error).split())
        return f"{type(error).__name__}: {words if len(words) <= LONG else words[:LONG] + '…'}"
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


def _off(got: Tensor, ref: Tensor) -> Tensor:
    """Differences [T], each relative to its token, for they differ in magnitude; infinite instead of NaN."""
    off: Tensor = (got - ref).norm(dim=1) / ref.norm(dim=1).clamp_min(torch.finfo(ref.dtype).tiny)
    return off.nan_to_num(nan=float("inf"), posinf=float("inf"))


def _is_logits(got: Tensor, logits: Tensor) -> bool:
    return got.numel() == logits.numel() and bool((_off(got.reshape(logits.shape), logits) <= CLOSE).all())


def _percent(off: float) -> str:
    return f"{100 * off:.3g} %"


def _activation(name: str, values: Mapping[str, float]) -> Callable[..., Tensor]:
    found = constants(name, **values)
    return lambda g, u=None: activate(name, g, u, found)


def _match(
    module: nn.Module, gated: bool, reference: Callable[[Callable[..., Tensor]], Tensor], got: Tensor
) -> tuple[str, dict[str, float]] | str:
    """The first activation that gives what the module gave, or in words how near they come."""
    nearest, least, small = "", float("inf"), ""
    for name, values in _candidates(module, gated):
        ref = reference(_activation(name, values))
        if got.shape != ref.shape:
            return f"{TRIAL} and x {[*ref.shape]}, it returned {[*got.shape]}; {SIZES}"
        off = _off(got, ref)
        worst = float(off.max())
        if worst <= CLOSE:
            return name, values
        if worst < least:
            nearest, least = name, worst
        if off[0] <= CLOSE:
            small = small or name
    if least <= ROUNDED:
        return f"its result differs from that of nvfp4.moe with {nearest} by {_percent(least)}, as if rounded"
    if small:
        known = ", ".join(itertools.chain.from_iterable(ATTRIBUTES.values()))
        return f"it is {small} for small values only: constants must be attributes of the experts, called {known}"
    return OtherKind("it computes something else than the activations that nvfp4.moe has")


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
