"""`nvfp4.convert_`: put NVFP4 linear layers and experts into a model, quantised here or read from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import InvalidInput, Unsupported, message
from .checkpoint import Checkpoint, open_checkpoint
from .checkpoint.files import listed
from .checkpoint.modules import IGNORED, LinearInfo
from .checkpoint.names import aliases, join, split
from .checks import DTYPE_NAMES
from .convert_experts import Converted, convert_experts_
from .left_experts import warn_left
from .nn import FusedMoE, Linear

__all__ = ["convert_"]

# Heads and routers: their results decide more than their bytes cost.
LEFT_DENSE = ("lm_head", "embed_out", "score", "classifier", "gate", "router", "shared_expert_gate")

Filter = Callable[[nn.Module, str], bool]


def convert_(
    model: nn.Module,
    filter_fn: Filter | None = None,
    *,
    checkpoint: Checkpoint | str | Path | None = None,
    layout: str | None = None,
    keep_checkpoint: bool = False,
    fuse_experts: bool = True,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Replace linear layers of a model, in place, by `nvfp4.nn.Linear`, and experts by `nvfp4.nn.FusedMoE`.

    Without a checkpoint the weights that are there are quantised. With one, the layers that it holds in NVFP4 are
    replaced and read, one at a time, and every other parameter and buffer is read too, so that the model may be on the
    meta device. Activations are never quantised, whatever the checkpoint was made for.

    Experts are replaced where their own code, called with small numbers, computes what `nvfp4.moe` does: modules with
    3-D parameters (transformers 5), called with x, ids and router weights; and blocks of a softmax router `gate` and
    linear `experts`, without anything beside them (Mixtral and Qwen3-MoE of transformers 4). Other experts that are
    linear layers become `nvfp4.nn.Linear` one by one, and one warning names the first such block and the reason, unless
    `nvfp4.moe` does not compute its experts at all.

    Parameters
    ----------
    model
        Any model with `torch.nn.Linear` layers; for a checkpoint, one whose modules are called as the tensors are, as
        in transformers.
    filter_fn
        (module, name) -> whether to replace this linear layer, or this module of 3-D experts. By default all that can
        be, except (without a checkpoint) heads and routers: lm_head, gate, router and the like. With a checkpoint it
        only says which NVFP4 layers are replaced; one that is refused raises, since its dense weight is not there.
    checkpoint
        A folder, or what `open_checkpoint` returned.
    layout
        Weight layout; None takes what `nvfp4.pack` takes: what each problem's plan marks, and on an untuned GPU the
        fragment layout.
    keep_checkpoint
        As for `nvfp4.nn.Linear` and `FusedMoE`: whether to keep the stored tensors beside another layout.
    fuse_experts
        Whether experts that are linear layers become one module where that can be done; False warns of none that are
        left as they are.
    device
        Where what is on the meta device goes; by default the CPU. What has memory stays where it is.

    Returns
    -------
    The model.

    Raises
    ------
    InvalidInput
        A layer cannot be quantised; tensors are missing, left over, misshaped or NaN; the message names them.
    Unsupported
        The checkpoint has layers in other formats, or experts as 3-D tensors and the model no such module for them.
    """
    if not isinstance(model, nn.Module):
        raise InvalidInput(message("convert_ takes a model", got=type(model).__name__, expected="a torch.nn.Module"))
    if isinstance(model, nn.Linear):
        raise InvalidInput(
            message("convert_ replaces layers inside a model", got="a Linear", do="use nvfp4.nn.Linear.from_linear")
        )
    if checkpoint is None:
        experts = convert_experts_(
            model, filter_fn, None, fuse_linears=fuse_experts, device=device, layout=layout, keep=keep_checkpoint
        )
        for module, owners in _linears(model).items():
            first = next(iter(owners))
            if filter_fn(module, first) if filter_fn else all(_worth_it(module, name) for name in owners):
                _replace(owners, _quantised(first, module, layout=layout, keep_checkpoint=keep_checkpoint))
        warn_left(experts.left, "from_dense")
        return model
    source = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    _refuse_unreadable(source)
    experts = convert_experts_(
        model, filter_fn, source, fuse_linears=fuse_experts, device=device, layout=layout, keep=keep_checkpoint
    )
    used = set(experts.linears)
    for module, owners in _linears(model).items():
        found = {name: source.linear(name) for name in owners if source.find(name)}
        if not found:
            continue
        name, info = next(iter(found.items()))
        if filter_fn is not None and not filter_fn(module, name):
            raise InvalidInput(message(f"filter_fn refuses {name}", got=f"only an NVFP4 weight in {source.path}"))
        _check_size(name, module, info)
        made = Linear(
            *(info.k, info.n, "bias" in info.tensors),
            dialect=info.dialect,
            layout=layout,
            keep_checkpoint=keep_checkpoint,
            device=(device or "cpu") if module.weight.is_meta else module.weight.device,
            dtype=module.weight.dtype if module.weight.dtype in DTYPE_NAMES else torch.bfloat16,
        )
        _read_linear(source, info, made)
        _replace(owners, made.train(module.training))
        used.update(info.name for info in found.values())
    _refuse_unused(source, used, experts)
    _read_dense(model, source, device)
    warn_left(experts.left, "from_checkpoint")
    return model


def _linears(model: nn.Module) -> dict[nn.Linear, dict[str, nn.Module]]:
    """Layers that are exactly a Linear, since subclasses may do something else with their weight: name -> owner.

    A layer that is in several places has several names.
    """
    found: dict[nn.Linear, dict[str, nn.Module]] = {}
    for prefix, owner in model.named_modules():
        for leaf, module in owner._modules.items():
            if type(module) is nn.Linear:
                found.setdefault(module, {})[join(prefix, leaf)] = owner
    return found


def _quantised(name: str, module: nn.Linear, *, layout: str | None, keep_checkpoint: bool) -> Linear:
    try:
        return Linear.from_linear(module, layout=layout, keep_checkpoint=keep_checkpoint)
    except InvalidInput as error:
        raise InvalidInput(f"layer {name}: {error}") from error


def _worth_it(module: nn.Linear, name: str) -> bool:
    return module.in_features % 16 == 0 and split(name)[1] not in LEFT_DENSE


def _replace(owners: Mapping[str, nn.Module], made: nn.Module) -> None:
    for name, owner in owners.items():
        setattr(owner, split(name)[1], made)


def _check_size(name: str, module: nn.Linear, info: LinearInfo) -> None:
    if (info.n, info.k) != (module.out_features, module.in_features):
        raise InvalidInput(
            message(
                f"layer {name} has another size than its weight",
                got=f"{info.n} x {info.k} in the checkpoint",
                expected=f"{module.out_features} x {module.in_features}",
            )
        )


def _read_linear(source: Checkpoint, info: LinearInfo, made: Linear) -> None:
    try:
        made.load_({role: source.files.read(found.name) for role, found in info.tensors.items()})
    except InvalidInput as error:
        raise InvalidInput(f"layer {info.name}: {error}") from error


def _refuse_unreadable(source: Checkpoint) -> None:
    broken = {name: problem for name, problem in source.broken.items() if not source.is_extra(name)}
    if broken:
        raise InvalidInput(f"{source.path}: " + " | ".join(list(broken.values())[:3]))
    foreign = {name: algo for name, algo in source.foreign.items() if not source.is_extra(name)}
    if foreign:
        algos = ", ".join(sorted(set(foreign.values())))
        raise Unsupported(
            message(f"{source.path} has layers in other formats", got=f"{algos}: {listed(foreign)}", expected="NVFP4")
        )


def _refuse_unused(source: Checkpoint, used: set[str], experts: Converted) -> None:
    why = "".join(f"; {name}: {reason}" for name, reason in list(experts.reasons.items())[:1])
    load = "replace its experts yourself: nvfp4.nn.FusedMoE.from_checkpoint reads them"
    stacked = [name for name in source.fused_experts if name not in experts.stacks and not source.is_extra(name)]
    if stacked:
        raise Unsupported(
            message(
                f"{source.path} has experts as 3-D tensors, for which the model has no module that can be replaced",
                got=listed(stacked) + why,
                expected="modules called so, with 3-D parameters",
                do=load,
            )
        )
    names = {*source.linears} | {
        info.name for by_number in source.experts.values() for roles in by_number.values() for info in roles.values()
    }
    unused = [name for name in names - used if not source.is_extra(name)]
    if unused:
        raise InvalidInput(
            message(
                "the model has no Linear for some NVFP4 layers of the checkpoint",
                got=listed(unused) + why,
                expected="one called as each of them",
                do=f"build the model that the checkpoint is of, or {load}"
                if why
                else "build the model that the checkpoint is of; experts must be Linear modules, or 3-D parameters",
            )
        )


def _read_dense(model: nn.Module, source: Checkpoint, device: torch.device | str | None) -> None:
    """Read all parameters and buffers that are not of an `nvfp4.nn.Linear` or `FusedMoE`."""
    wanted = dict(_tensors(model))
    stored = {name: name for name in source.dense if split(name)[1] not in IGNORED}
    done: dict[int, Tensor] = {}  # by identity of the old tensor: tied ones stay tied
    found: set[str] = set()
    for name, tensor in wanted.items():
        there = next((spelling for spelling in _spellings(name) if spelling in stored), None)
        if there is None:
            continue
        found.add(there)
        if id(tensor) not in done:
            done[id(tensor)] = _filled(name, tensor, source.files.read(there), device)
    missing = []
    persistent = {*model.state_dict()}
    for name, tensor in wanted.items():
        if id(tensor) in done:
            _set(model, name, done[id(tensor)])
        elif tensor.is_meta or name in persistent:
            missing.append(name)
    if missing:
        raise InvalidInput(
            message(
                f"{source.path} lacks tensors of the model",
                got=f"no {listed(missing)}",
                do="build the model that the checkpoint is of, and buffers that are computed on a real device",
            )
        )
    extra = [name for name in set(stored) - found if not source.is_extra(split(name)[0])]
    if extra:
        raise InvalidInput(message("the model lacks tensors of the checkpoint", got=listed(extra)))


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    inside = tuple(
        f"{name}."
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, Linear | FusedMoE)
    )
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        if not name.startswith(inside):
            yield name, tensor


def _spellings(name: str) -> Iterator[str]:
    module, leaf = split(name)
    for spelling in aliases(module):
        yield join(spelling, leaf)


def _filled(name: str, tensor: Tensor, values: Tensor, device: torch.device | str | None) -> Tensor:
    if values.shape != tensor.shape:
        raise InvalidInput(
            message(f"wrong shape of {name} in the checkpoint", got=tuple(values.shape), expected=tuple(tensor.shape))
        )
    if not tensor.is_meta:
        with torch.no_grad():
            return tensor.copy_(values)
    filled = torch.empty(tensor.shape, dtype=tensor.dtype, device=device or "cpu").copy_(values)
    return nn.Parameter(filled, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else filled


def _set(model: nn.Module, name: str, tensor: Tensor) -> None:
    module, leaf = split(name)
    owner = model.get_submodule(module)
    held: Mapping[str, Tensor | None] = owner._parameters if leaf in owner._parameters else owner._buffers
    if held[leaf] is not tensor:
        held[leaf] = tensor  # type: ignore[index]
