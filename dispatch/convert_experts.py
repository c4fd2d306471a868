"""The experts of a model, replaced in place by `nvfp4.nn.FusedMoE`: what `convert_` does before linear layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidInput, message
from ..kernels.weights.codec import GROUP
from ..kernels.weights.layouts import layout as get_layout
from .checkpoint import Checkpoint
from .checkpoint.names import aliases, join
from .checks import DTYPE_NAMES
from .fused_moe import FusedMoE
from .left_experts import Left, has_router
from .moe_probe import FAMILIES, Block, Experts, OtherKind, apart, probe_block, probe_stacked, route

__all__ = ["Converted", "FusedBlock", "convert_experts_"]

Filter = Callable[[nn.Module, str], bool]
ROOT = "it is the whole model, which cannot be replaced in place: convert a module around it"


class FusedBlock(nn.Module):
    """A router, `gate`, in front of a FusedMoE, `experts`: a softmax over all experts, of which the top_k count.

    Router weights stay in float32. It returns what the block that it replaces returned: the result, or the result and
    the router's logits [tokens, experts].
    """

    def __init__(
        self, gate: nn.Module, experts: FusedMoE, *, top_k: int, renormalize: bool, returns_logits: bool
    ) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts
        self.top_k, self.renormalize, self.returns_logits = top_k, renormalize, returns_logits

    def forward(self, hidden_states: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """[..., hidden] to [..., hidden]."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = self.gate(x)
        weights, ids = route(logits, self.top_k, self.renormalize)
        y = self.experts(x, ids, weights).reshape(hidden_states.shape)
        return (y, logits) if self.returns_logits else y

    def extra_repr(self) -> str:
        """For print(model)."""
        return f"top_k={self.top_k}, renormalize={self.renormalize}"


class Converted:
    """What became of experts.

    Attributes
    ----------
    linears, stacks
        Names in the checkpoint of the layers and of the 3-D experts that were used.
    reasons
        Modules of experts that could not be replaced, and why: for errors about layers that nothing uses.
    left
        Modules of experts that were left as they are though their weights are in NVFP4, or are to be; none without
        `fuse_linears`.
    options
        Of every FusedMoE: its layout, and whether it keeps the checkpoint's stacks beside it.
    """

    def __init__(self) -> None:
        self.linears: set[str] = set()
        self.stacks: set[str] = set()
        self.reasons: dict[str, str] = {}
        self.left: dict[str, Left] = {}
        self.options: dict[str, Any] = {}


def convert_experts_(
    model: nn.Module,
    filter_fn: Filter | None,
    source: Checkpoint | None,
    *,
    fuse_linears: bool,
    device: torch.device | str | None,
    layout: str | None,
    keep: bool,
) -> Converted:
    """Replace modules with experts as 3-D parameters, and blocks with experts as linear layers.

    Raises
    ------
    InvalidInput
        The checkpoint's experts are of another size, incomplete or damaged; a filter refuses what has no dense weights.
    """
    done = Converted()
    if layout not in (None, "fragment") and not get_layout(layout).experts:
        layout = "checkpoint"  # of linear layers only
    done.options = {"layout": layout, "keep_checkpoint": keep}
    for name, module in list(model.named_modules()):
        stacked = probe_stacked(module) if source is None or _is_held(source, name) else None
        if isinstance(stacked, Experts) and not name:
            stacked = ROOT
        if isinstance(stacked, str):
            done.reasons[name] = stacked
            if fuse_linears and source is None and _is_wanted(module, name, filter_fn):
                done.left[name] = Left(reason=stacked, stacked=True)
        elif stacked is not None:
            _replace_stacked(model, name, stacked, filter_fn, source, device, done)
        elif fuse_linears and isinstance(module._modules.get("experts"), nn.ModuleList):
            _replace_block(model, name, filter_fn, source, device, done)
    return done


def _replace_stacked(
    model: nn.Module,
    name: str,
    found: Experts,
    filter_fn: Filter | None,
    source: Checkpoint | None,
    device: torch.device | str | None,
    done: Converted,
) -> None:
    module = model.get_submodule(name)
    wanted = filter_fn(module, name) if filter_fn else source is not None or _fits(found)
    held = module._parameters
    gate_up = "gate_up_proj" if "gate_up_proj" in held else "up_proj"
    first, second = held[gate_up], held["down_proj"]
    assert first is not None and second is not None
    if not wanted:
        if source is not None:
            raise InvalidInput(message(f"filter_fn refuses {name}", got=f"only NVFP4 experts in {source.path}"))
        return
    if source is not None:
        made = _read(source, name, found, first, device, done)
    else:

        def rows(tensor: Tensor | None) -> Tensor | None:
            """[E, N, K] or [E, N], gate rows first."""
            if tensor is None:
                return None
            tensor = tensor.transpose(1, 2) if found.transposed and tensor.ndim == 3 else tensor
            return apart(tensor) if found.interleaved else tensor

        w13 = rows(first.detach())
        assert w13 is not None
        bias = rows(held.get(f"{gate_up}_bias"))
        other: Tensor | None = held.get("down_proj_bias")
        if (bias is None) != (other is None):  # one of them: the other is zero
            bias = w13.new_zeros(w13.shape[:2]) if bias is None else bias
            other = second.new_zeros(found.count, found.hidden) if other is None else other
        made = FusedMoE.from_dense(
            w13,
            second.detach().transpose(1, 2) if found.transposed else second.detach(),
            w13_bias=bias,
            w2_bias=other,
            activation=found.activation,
            **found.values,
            **done.options,
        )
    _put(model, module, made.train(module.training))


def _replace_block(
    model: nn.Module,
    name: str,
    filter_fn: Filter | None,
    source: Checkpoint | None,
    device: torch.device | str | None,
    done: Converted,
) -> None:
    module = model.get_submodule(name)
    experts, inside = module.get_submodule("experts"), join(name, "experts")
    linears = [(one, child) for one, child in experts.named_modules(prefix=inside) if type(child) is nn.Linear]
    if filter_fn is not None and not all(filter_fn(child, one) for one, child in linears):
        return  # one by one: those that it wants, and an error where only NVFP4 weights are there
    names = [one for one, _ in linears]
    complete = source is None or _is_complete(source, inside, names)
    if source is None:
        touched = any(child.in_features % GROUP == 0 for _, child in linears)
    else:
        touched = bool(linears) and (complete or any(source.find(one) for one in names))
    if not touched:
        return  # nothing in it is or becomes NVFP4
    found: Block | str | None
    if complete or (source is not None and all(source.find(one) for one in names)):
        found = probe_block(module)
    else:
        found = OtherKind("the checkpoint has only some of its layers in NVFP4")
    if isinstance(found, Block) and source is None and not _fits(found.experts):
        found = f"hidden {found.experts.hidden} and inter {found.experts.inter} are not both multiples of {GROUP}"
    if isinstance(found, Block) and not name:
        found = ROOT
    if not isinstance(found, Block):
        count = len(experts._modules)
        if found and count > 1 and has_router(model, name, count):
            done.left[name] = Left(reason=found)
        if found and source is not None and any(one in source.fused_experts for one in aliases(inside)):
            done.reasons[name] = found
        return
    if source is not None:
        made = _read(source, inside, found.experts, linears[0][1].weight, device, done, top_k=found.top_k)
    else:
        made = _quantized(experts, found, done)
    block = FusedBlock(
        module.get_submodule("gate"),
        made.train(module.training),
        top_k=found.top_k,
        renormalize=found.renormalize,
        returns_logits=found.returns_logits,
    )
    _put(model, module, block.train(module.training))


def _quantized(experts: nn.Module, found: Block, done: Converted) -> FusedMoE:
    each: list[Any] = list(experts.children())
    names = next(names for names in FAMILIES if all(hasattr(each[0], one) for one in names))

    def rows(parts: tuple[str, ...], leaf: str) -> Tensor:
        return torch.stack([torch.cat([getattr(getattr(e, part), leaf).detach() for part in parts]) for e in each])

    options: dict[str, Any] = dict(found.experts.values)
    if found.experts.bias:
        options |= {"w13_bias": rows(names[:-1], "bias"), "w2_bias": rows(names[-1:], "bias")}
    return FusedMoE.from_dense(
        rows(names[:-1], "weight"),
        rows(names[-1:], "weight"),
        names=names,
        activation=found.experts.activation,
        top_k=found.top_k,
        **options,
        **done.options,
    )


def _read(
    source: Checkpoint,
    name: str,
    found: Experts,
    like: Tensor,
    device: torch.device | str | None,
    done: Converted,
    *,
    top_k: int | None = None,
) -> FusedMoE:
    spelling = next(one for one in aliases(name) if one in source.experts or one in source.fused_experts)
    values: dict[str, Any] = dict(found.values)
    made = FusedMoE.from_checkpoint(
        source,
        spelling,
        gate_up="interleaved" if found.interleaved else None,
        device=(device or "cpu") if like.is_meta else like.device,
        activation=found.activation,
        dtype=like.dtype if like.dtype in DTYPE_NAMES else torch.bfloat16,
        top_k=top_k,
        **values,
        **done.options,
    )
    got = (made.num_experts, made.hidden, made.inter)
    expected = (found.count, found.hidden, found.inter)
    if got != expected:
        raise InvalidInput(
            message(
                f"experts {name} have another size than their weights",
                got="{} experts, hidden {}, inter {} in the checkpoint".format(*got),
                expected="{} experts, hidden {}, inter {}".format(*expected),
            )
        )
    has_bias = made.w13_bias is not None or made.w2_bias is not None
    if has_bias != found.bias:
        raise InvalidInput(
            message(f"biases of experts {name} do not fit", got=f"{has_bias} in the checkpoint", expected=found.bias)
        )
    done.stacks.add(spelling)
    for roles in source.experts.get(spelling, {}).values():
        done.linears |= {info.name for info in roles.values()}
    return made


def _is_wanted(module: nn.Module, name: str, filter_fn: Filter | None) -> bool:
    """Whether 3-D experts that cannot be replaced would be, as far as their sizes and the filter say."""
    if filter_fn is not None:
        return filter_fn(module, name)
    sizes = {size for tensor in module.parameters(recurse=False) if tensor.ndim == 3 for size in tensor.shape[1:]}
    return all(size % GROUP == 0 for size in sizes)


def _is_held(source: Checkpoint, name: str) -> bool:
    return any(one in source.experts or one in source.fused_experts for one in aliases(name))


def _is_complete(source: Checkpoint, name: str, linears: list[str]) -> bool:
    """Whether all of these are NVFP4: experts of which some are dense stay linear layers."""
    for one in aliases(name):
        if one in source.fused_experts:
            return True
        if one in source.experts:
            there = {f"{name}.{e}.{leaf}" for e, roles in source.experts[one].items() for leaf in roles}
            return there >= set(linears)
    return False


def _fits(found: Experts) -> bool:
    return found.hidden % GROUP == 0 and found.inter % GROUP == 0


def _put(model: nn.Module, module: nn.Module, made: nn.Module) -> None:
    """Replace a module wherever it is."""
    for owner in list(model.modules()):
        for leaf, child in list(owner._modules.items()):
            if child is module:
                setattr(owner, leaf, made)
