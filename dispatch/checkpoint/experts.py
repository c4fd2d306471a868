"""The experts of one MoE layer from a checkpoint, as stacks over a range of experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import InvalidInput, message
from ...kernels.weights.codec import swap_nibbles as swap
from ...kernels.weights.shard import Shard
from .checkpoint import Checkpoint
from .expert_sources import Half, Source, expert_source, part_of
from .values import check_finite, check_pre_quant_scale, check_scale, same_pre_quant_scale

__all__ = ["ExpertTensors", "load_experts"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertTensors:
    """Experts as stacks. The rows of w13 are gate, then up; without a gate they are up alone (F = 2 I or I).

    Attributes
    ----------
    w13, w2
        [E, F, H/2] and [E, H, I/2] uint8.
    w13_scale, w2_scale
        [E, F, H/16] and [E, H, I/16] float8_e4m3fn.
    w13_scale_2, w2_scale_2
        float32 factors: [E, 2] (gate, up) or [E, 1], and [E, 1].
    w13_bias, w2_bias
        [E, F] and [E, H], or None.
    pre_quant_scale
        [H], for x before w13; or None.
    w2_pre_quant_scale
        [E, I], for each expert's activations before w2; or None.
    experts
        Which experts of the layer these are.
    gated
        Whether there is a gate.
    """

    w13: Tensor
    w13_scale: Tensor
    w13_scale_2: Tensor
    w2: Tensor
    w2_scale: Tensor
    w2_scale_2: Tensor
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    pre_quant_scale: Tensor | None
    w2_pre_quant_scale: Tensor | None
    experts: range
    gated: bool


def load_experts(
    checkpoint: Checkpoint,
    name: str,
    *,
    experts: range | None = None,
    shard: Shard | None = None,
    gate_up: str | None = None,
    device: torch.device | str = "cpu",
    swap_nibbles: bool = False,
    repair_nan: bool = False,
) -> ExpertTensors:
    """Read the experts of one layer, stored one by one or as 3-D tensors, into stacks.

    Global scales of gate and up stay apart, so nothing is rounded. Scales of activations are never read.

    Parameters
    ----------
    name
        The module around them: "model.layers.3.mlp.experts".
    experts
        Those of one rank of expert parallelism, consecutive; None takes all.
    shard
        One rank's part of the inner size I (`how` is "row": what divides w2's columns divides w13's rows); gate and
        up are divided separately.
    gate_up
        How a stored gate_up_proj has its rows: "halves" or "interleaved"; None takes what config.json's model_type
        has (gpt_oss: interleaved).
    swap_nibbles, repair_nan, device
        As for `load_linear`.

    Raises
    ------
    InvalidInput
        Experts or tensors are missing, misshaped or NaN; experts differ in size; pre_quant_scale is not the same for
        all that read x, or missing for some.
    Unsupported
        The layer is quantised in another way.
    """
    source = expert_source(checkpoint, name, gate_up)
    wanted = part_of(source, experts)
    inter = slice(0, source.inter) if shard is None else _inner(shard, source)
    stacks = _Stacks(source, len(wanted), inter.stop - inter.start, torch.device(device))
    for local, expert in enumerate(wanted):
        for half in source.halves(expert):
            stacks.fill(local, half, inter, swapped=swap_nibbles, repair=repair_nan)
    return ExpertTensors(
        w13=stacks.w13,
        w13_scale=stacks.w13_scale.view(torch.float8_e4m3fn),
        w13_scale_2=stacks.w13_scale_2.to(device),
        w2=stacks.w2,
        w2_scale=stacks.w2_scale.view(torch.float8_e4m3fn),
        w2_scale_2=stacks.w2_scale_2.to(device),
        w13_bias=_bias(stacks.first_bias, 2 if source.gated else 1, device),
        w2_bias=None if shard is not None and shard.rank else _bias(stacks.second_bias, 1, device),
        pre_quant_scale=_input_scale(name, source, stacks, device),
        w2_pre_quant_scale=_inner_scale(stacks, device),
        experts=wanted,
        gated=source.gated,
    )


def _inner(shard: Shard, source: Source) -> slice:
    if not isinstance(shard, Shard) or shard.how != "row":
        raise InvalidInput(message("wrong Shard of experts", got=shard, expected='how="row": it divides w2\'s columns'))
    return shard.range(1, source.inter, f"the inner size of {source.name}")[1]


class _Stacks:
    """The results while they are filled."""

    def __init__(self, source: Source, count: int, inter: int, device: torch.device) -> None:
        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.uint8, device=device)

        hidden, rows = source.hidden, (2 if source.gated else 1) * inter
        self.inter, self.gated = inter, source.gated
        self.w13, self.w13_scale = empty(count, rows, hidden // 2), empty(count, rows, hidden // 16)
        self.w2, self.w2_scale = empty(count, hidden, inter // 2), empty(count, hidden, inter // 16)
        self.w13_scale_2 = torch.empty(count, 2 if source.gated else 1)
        self.w2_scale_2 = torch.empty(count, 1)
        self.first_bias: list[tuple[str, Tensor | None]] = []
        self.second_bias: list[tuple[str, Tensor | None]] = []
        self.first_pqs: list[tuple[str, Tensor | None]] = []
        self.second_pqs: list[tuple[str, Tensor | None]] = []

    def fill(self, local: int, half: Half, inter: slice, *, swapped: bool, repair: bool) -> None:
        """Copy gate, up or down of one expert to its place."""
        bytes_, groups = slice(inter.start // 2, inter.stop // 2), slice(inter.start // 16, inter.stop // 16)
        if half.role == "down":
            weight, scale = half.packed[:, bytes_], half.scales[:, groups]
            to_weight, to_scale = self.w2[local], self.w2_scale[local]
            self.w2_scale_2[local, 0] = half.factor
            self.second_bias.append((half.name, half.bias))
            vector = half.pre_quant_scale
            self.second_pqs.append((half.name, None if vector is None else vector[inter]))
        else:
            weight, scale = half.packed[inter], half.scales[inter]
            place = 1 if half.role == "up" and self.gated else 0
            rows = slice(place * self.inter, (place + 1) * self.inter)
            to_weight, to_scale = self.w13[local, rows], self.w13_scale[local, rows]
            self.w13_scale_2[local, place] = half.factor
            self.first_bias.append((half.name, None if half.bias is None else half.bias[inter]))
            self.first_pqs.append((half.name, half.pre_quant_scale))
        to_weight.copy_(swap(weight) if swapped else weight)
        to_scale.copy_(scale.view(torch.uint8))
        check_scale(half.scale_name, to_scale, repair_nan=repair)


def _bias(found: Sequence[tuple[str, Tensor | None]], each: int, device: torch.device | str) -> Tensor | None:
    """[E, rows] of what lies one behind the other, `each` an expert; or None."""
    given = [(name, values) for name, values in found if values is not None]
    if not given:
        return None
    for name, values in given:
        check_finite(f"{name}.bias", values)
    rows = [torch.cat([values for _, values in given[i : i + each]]) for i in range(0, len(given), each)]
    return torch.stack(rows).to(device)


def _input_scale(name: str, source: Source, stacks: _Stacks, device: torch.device | str) -> Tensor | None:
    """The vector for x: every expert's gate and up must have the same, for x is multiplied once."""
    given = stacks.first_pqs
    _check_vectors(given)
    shared = same_pre_quant_scale([part for part, _ in given], [vector for _, vector in given], f"experts {name}")
    if shared is None:
        return None
    if not source.gated:
        raise InvalidInput(
            message(
                f"experts {name}: pre_quant_scale without a gate", expected="gate and up, each with the same vector"
            )
        )
    pair = [vector for _, vector in given[:2] if vector is not None]
    return torch.maximum(*pair).to(device)


def _inner_scale(stacks: _Stacks, device: torch.device | str) -> Tensor | None:
    """[E, I]: every expert has its own, or none has."""
    given = stacks.second_pqs
    _check_vectors(given)
    there = [vector for _, vector in given if vector is not None]
    return torch.stack(there).to(device) if there else None


def _check_vectors(given: Sequence[tuple[str, Tensor | None]]) -> None:
    for part, vector in given:
        if vector is not None:
            check_pre_quant_scale(f"{part}.pre_quant_scale", vector)
