"""Where the experts of an MoE layer are in a checkpoint, one by one or as 3-D tensors; one way to read both."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from ...errors import InvalidInput, Unsupported, message
from .checkpoint import Checkpoint, check_opened
from .files import listed
from .fused_experts import FusedExperts, StackedInfo, read_stacked
from .modules import MODELOPT, LinearInfo
from .names import aliases, number_of
from .values import global_factor

__all__ = ["ROLES", "Half", "Source", "expert_source", "part_of"]

Role = Literal["gate", "up", "down"]

# What the projections of an expert are called; families without a gate have only up and down.
ROLES: Mapping[str, Role] = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}
INTERLEAVED_MODELS = ("gpt_oss",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """One of gate, up and down of one expert; tensors are views of the mapped file."""

    role: Role
    name: str
    scale_name: str
    packed: Tensor  # [N, K/2]
    scales: Tensor  # [N, K/16]
    factor: float
    bias: Tensor | None
    pre_quant_scale: Tensor | None


class Source(Protocol):
    """The experts of one layer: `inter` is I, `hidden` is H."""

    name: str
    count: int
    hidden: int
    inter: int
    gated: bool

    def check(self, experts: range) -> None:
        """Raise InvalidInput where one of these is not complete, or of another size."""
        ...

    def halves(self, expert: int) -> Iterator[Half]:
        """Gate (if there is one), up and down."""
        ...


def part_of(source: Source, experts: range | None) -> range:
    """The experts that are to be read, None for all. Raises InvalidInput where they are no complete part of these."""
    wanted = range(source.count) if experts is None else experts
    whole = isinstance(wanted, range) and wanted.step == 1 and 0 <= wanted.start < wanted.stop <= source.count
    if not whole:
        raise InvalidInput(
            message(f"{source.name}: wrong experts", got=wanted, expected=f"a part of range({source.count})")
        )
    source.check(wanted)
    return wanted


def expert_source(checkpoint: Checkpoint, name: str, gate_up: str | None) -> Source:
    """The experts in the module `name`, in any of its spellings. Raises as `load_experts` does."""
    check_opened(checkpoint)
    if gate_up not in (None, "halves", "interleaved"):
        raise InvalidInput(message("wrong gate_up", got=repr(gate_up), expected='"halves" or "interleaved"'))
    for spelling in aliases(name):
        if spelling in checkpoint.experts:
            for info in _layers(checkpoint, spelling) if checkpoint.names_variants else ():
                checkpoint.refuse_variant(info.name)
            return Separate(checkpoint, spelling)
        if spelling in checkpoint.fused_experts:
            checkpoint.refuse_variant(spelling)
            interleaved = gate_up == "interleaved" or (
                gate_up is None and checkpoint.config.model.model_type in INTERLEAVED_MODELS
            )
            return Stacked(checkpoint, checkpoint.fused_experts[spelling], interleaved)
        _refuse_unreadable(checkpoint, spelling, "NVFP4")
    known = listed({*checkpoint.experts, *checkpoint.fused_experts}, 3)
    raise InvalidInput(
        message(f"{checkpoint.path} has no NVFP4 experts {name}", expected=f"one like {known}" if known else None)
    )


class Separate:
    """Experts that are stored one by one."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint = checkpoint
        self._experts = checkpoint.experts[name]
        self.name = name
        elsewhere = _numbers(name, (*checkpoint.broken, *checkpoint.foreign))
        self.count = max(1 + max((*self._experts, *elsewhere)), checkpoint.config.model.moe.experts)
        first = self._roles(min(self._experts))
        self.gated = any("gate" in self._roles(expert) for expert in self._experts)
        any_of = first.get("up") or first.get("gate")
        if any_of is None:
            raise InvalidInput(message(f"experts {name} have no up projection", got=listed(first)))
        self.hidden, self.inter = any_of.k, any_of.n

    def _roles(self, expert: int) -> dict[Role, LinearInfo]:
        return {ROLES[leaf]: info for leaf, info in self._experts.get(expert, {}).items() if leaf in ROLES}

    def check(self, experts: range) -> None:
        wanted: tuple[Role, ...] = ("gate", "up", "down") if self.gated else ("up", "down")
        for expert in experts:
            there = self._roles(expert)
            missing = [role for role in wanted if role not in there]
            if missing:
                self._refuse(expert, missing, there)
            unknown = set(self._experts[expert]) - set(ROLES)
            if unknown:
                raise InvalidInput(message(f"{self.name}.{expert} has unknown layers", got=listed(unknown)))
            if len(there) < len(self._experts[expert]):
                names = listed(self._experts[expert], 6)
                raise InvalidInput(
                    message(f"{self.name}.{expert} has a layer twice", got=names, expected=listed(wanted))
                )
            for role, info in there.items():
                expected = (self.hidden, self.inter) if role == "down" else (self.inter, self.hidden)
                if (info.n, info.k) != expected:
                    raise InvalidInput(
                        message(f"{info.name} has another size than its like", got=(info.n, info.k), expected=expected)
                    )
                scale = info.global_scale
                if math.prod(scale.shape) != 1:
                    raise InvalidInput(
                        message(f"{scale.name} of an expert", got=tuple(scale.shape), expected="one element")
                    )
        for product in (wanted[:-1], wanted[-1:]):
            _check_alike([self._roles(expert)[role] for expert in experts for role in product])

    def _refuse(self, expert: int, missing: list[Role], there: Mapping[Role, LinearInfo]) -> None:
        _refuse_unreadable(self._checkpoint, f"{self.name}.{expert}", "NVFP4, like the other experts")
        raise InvalidInput(
            message(
                f"{self.name}.{expert} is incomplete",
                got=f"no {' and no '.join(missing)}" if there else "nothing of it",
                expected="the layers that the other experts have",
            )
        )

    def halves(self, expert: int) -> Iterator[Half]:
        files = self._checkpoint.files
        roles = self._roles(expert)
        for role in ("gate", "up", "down"):
            if role not in roles:
                continue
            info = roles[role]
            tensors = info.tensors
            stored = info.global_scale.name
            bias, vector = tensors.get("bias"), tensors.get("pre_quant_scale")
            yield Half(
                role=role,
                name=info.name,
                scale_name=tensors["weight_scale"].name,
                packed=files.read(info.weight.name),
                scales=files.read(tensors["weight_scale"].name).reshape(info.n, -1),
                factor=float(global_factor(stored, files.read(stored), info.dialect)),
                bias=None if bias is None else files.read(bias.name).reshape(-1),
                pre_quant_scale=None if vector is None else files.read(vector.name).reshape(-1),
            )


class Stacked:
    """Experts that are stored as 3-D tensors."""

    def __init__(self, checkpoint: Checkpoint, found: FusedExperts, interleaved: bool) -> None:
        self._files = checkpoint.files
        self._found = found
        self._interleaved = interleaved
        self.name, self.count, self.gated = found.name, found.count, found.gated
        self.hidden, self.inter = found.first.k, found.second.k

    def check(self, experts: range) -> None:
        """Their shapes were compared when the checkpoint was opened."""

    def halves(self, expert: int) -> Iterator[Half]:
        first = f"{self.name}.{'gate_up_proj' if self.gated else 'up_proj'}"
        if not self.gated:
            yield self._half("up", first, self._found.first, expert, slice(None), 0)
        elif self._interleaved:
            yield self._half("gate", first, self._found.first, expert, slice(0, None, 2), 0)
            yield self._half("up", first, self._found.first, expert, slice(1, None, 2), 1)
        else:
            yield self._half("gate", first, self._found.first, expert, slice(0, self.inter), 0)
            yield self._half("up", first, self._found.first, expert, slice(self.inter, None), 1)
        yield self._half("down", f"{self.name}.down_proj", self._found.second, expert, slice(None), 0)

    def _half(self, role: Role, name: str, info: StackedInfo, expert: int, rows: slice, place: int) -> Half:
        tensors = read_stacked(self._files, info, expert)
        factor = global_factor(f"{name}_weight_scale_2", tensors["weight_scale_2"], MODELOPT)
        bias = tensors.get("bias")
        return Half(
            role=role,
            name=f"{self.name}.{expert}.{role}",
            scale_name=f"{name}_weight_scale of expert {expert}",
            packed=tensors["weight"][rows],
            scales=tensors["weight_scale"][rows],
            factor=float(factor[place if factor.numel() > 1 else 0]),
            bias=None if bias is None else bias[rows],
            pre_quant_scale=tensors.get("pre_quant_scale"),
        )


def _refuse_unreadable(checkpoint: Checkpoint, name: str, expected: str) -> None:
    """Raise where the module or one inside it is broken, or quantised in another way."""
    for module, problem in checkpoint.broken.items():
        if module == name or module.startswith(f"{name}."):
            raise InvalidInput(problem)
    for module, algo in checkpoint.foreign.items():
        if module == name or module.startswith(f"{name}."):
            raise Unsupported(message(f"{module} is quantised as {algo}", expected=expected))


def _layers(checkpoint: Checkpoint, name: str) -> Iterator[LinearInfo]:
    for roles in checkpoint.experts[name].values():
        yield from roles.values()


def _check_alike(layers: list[LinearInfo]) -> None:
    """Refuse layers of one product of which some have a bias or pre_quant_scale, and some have none."""
    for leaf in ("bias", "pre_quant_scale"):
        having = [info for info in layers if leaf in info.tensors]
        if having and len(having) < len(layers):
            without = next(info for info in layers if leaf not in info.tensors)
            raise InvalidInput(
                message(f"a {leaf} is missing", got=f"none for {without.name}", expected=f"as for {having[0].name}")
            )


def _numbers(name: str, modules: tuple[str, ...]) -> Iterator[int]:
    """Numbers of experts of `name` among modules."""
    prefix = f"{name}."
    for module in modules:
        if module.startswith(prefix):
            number = number_of(module.removeprefix(prefix).partition(".")[0])
            if number is not None:
                yield number
