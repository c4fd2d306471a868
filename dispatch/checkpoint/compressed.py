"""The answers of compressed-tensors' configs: groups with targets, and an ignore list."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from ...errors import InvalidInput, Unsupported, message
from .names import aliases, fused_parts
from .rules import DENSE, NVFP4, Answer, agreed
from .structs import CtArgs, CtConfig, CtGroup

__all__ = ["CompressedTensorsRules", "describe_args"]

FORMAT = "nvfp4-pack-quantized"
FORMATS = (None, FORMAT, "mixed-precision", "dense")  # "dense": quantised, but saved before it was packed
PRESETS = ("NVFP4", "NVFP4A16")
REGEX = "re:"
CLASS = "Linear"  # a target that covers all linear layers


def describe_args(args: CtArgs | None, form: str | None) -> str:
    """NVFP4, DENSE, or what else these weights are, in words."""
    if args is None:
        return DENSE
    bits, kind, strategy, group = args.num_bits, args.type, args.strategy, args.group_size
    if (bits, kind, strategy, group) == (4, "float", "tensor_group", 16):
        return NVFP4 if form in FORMATS else f"4-bit float in format {form!r}"
    if (bits, kind, strategy, group) == (4, "float", "group", 32):
        return "MXFP4"
    if (bits, kind, strategy, group) == (8, "float", "group", 32):
        return "MXFP8"
    if (bits, kind) == (8, "float"):
        return "FP8"
    return f"{bits}-bit {kind}, strategy {strategy!r}, group size {group}"


@dataclass(frozen=True)
class CompressedTensorsRules:
    """compressed-tensors: the first target that fits decides; names come before patterns, and these before classes.

    Raises
    ------
    InvalidInput
        A pattern is no regular expression.
    Unsupported
        No group is NVFP4; what they are is in the message.
    """

    config: CtConfig
    source: str

    dialect: ClassVar[str] = "compressed-tensors"

    def __post_init__(self) -> None:
        for field in ("transform_config", "sparsity_config"):  # layers would compute something else without them
            value = getattr(self.config, field)
            if value and value.get("format") != "dense":
                raise Unsupported(message(f"{self.source}: unsupported {field}", got=value, expected="none"))
        for target in (*(target for target, _ in self._targets), *(self.config.ignore or ())):
            self._check_pattern(target)
        kinds = {name: kind for name, _, kind in self._groups}
        if NVFP4 not in kinds.values():
            got = ", ".join(f"{name}: {kind or 'no weights'}" for name, kind in kinds.items()) or "no config_groups"
            raise Unsupported(
                message(
                    f"{self.source} has no NVFP4 weights",
                    got=got,
                    expected="num_bits 4, type 'float', strategy 'tensor_group', group_size 16",
                )
            )

    def _check_pattern(self, target: str) -> None:
        try:
            re.compile(target.removeprefix(REGEX) if target.startswith(REGEX) else "")
        except (re.error, RecursionError, OverflowError) as error:
            raise InvalidInput(
                message(
                    f"{self.source}: this is no pattern", got=f"{target!r}: {error}", expected="a regular expression"
                )
            ) from error

    @cached_property
    def _groups(self) -> list[tuple[str, tuple[str, ...], str]]:
        """(name, targets, what its weights are) of every group."""
        groups = []
        for name, group in self.config.config_groups.items():
            if isinstance(group, CtGroup):
                groups.append((name, group.targets, describe_args(group.weights, group.format or self.config.format)))
            else:
                groups.append((name, group, NVFP4 if name.upper() in PRESETS else name))
        return groups

    @cached_property
    def algos(self) -> frozenset[str]:
        """What the weights of its groups are."""
        return frozenset(kind for _, _, kind in self._groups)

    @cached_property
    def _targets(self) -> list[tuple[str, str]]:
        """(target, kind), in the order in which they are tried."""
        found = [(target, kind) for _, targets, kind in self._groups for target in targets]
        return sorted(found, key=lambda entry: (entry[0].startswith(REGEX), entry[0]))

    def answer(self, name: str) -> Answer:
        """By the ignore list, then by targets."""
        ignored = self.config.ignore or ()
        if CLASS in ignored or _first(ignored, name) is not None:
            return Answer(algo=DENSE)
        target = _first((target for target, _ in self._targets), name)
        parts = fused_parts(name)
        if target is None and parts:
            return agreed(name, {part: self.answer(part) for part in parts})
        kinds = dict(reversed(self._targets))  # of a target in two groups the first counts
        kind = kinds.get(CLASS if target is None else target, DENSE)
        return Answer(algo=kind, group_size=16 if kind == NVFP4 else 0)


def _first(targets: Iterable[str], name: str) -> str | None:
    """The first of the names and patterns that fits."""
    spellings = aliases(name)
    for target in targets:
        if target.startswith(REGEX):
            expression = re.compile(target.removeprefix(REGEX))
            if any(expression.match(spelling) for spelling in spellings):
                return target
        elif target in spellings:
            return target
    return None
