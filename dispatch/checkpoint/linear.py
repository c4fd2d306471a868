"""One dense layer from a checkpoint: whole or one rank's part, alone or fused from several, in owned memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import InvalidInput, message
from ...kernels.weights.codec import swap_nibbles
from ...kernels.weights.shard import Shard
from .checkpoint import Checkpoint, check_opened
from .files import TensorFiles
from .modules import LinearInfo
from .names import fused_parts
from .values import check_finite, check_pre_quant_scale, check_scale, global_factor, same_pre_quant_scale

__all__ = ["LinearTensors", "load_linear"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearTensors:
    """A layer as `nvfp4.pack` and `nvfp4.gemm` take it; every tensor owns its memory.

    Attributes
    ----------
    weight
        [N, K/2] uint8.
    weight_scale
        [N, K/16] float8_e4m3fn.
    weight_scale_2
        float32, a factor: [1], or [N] where parts with different global scales were put together.
    bias
        [N] or None.
    pre_quant_scale
        [K] or None.
    """

    weight: Tensor
    weight_scale: Tensor
    weight_scale_2: Tensor
    bias: Tensor | None = None
    pre_quant_scale: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows and columns of one stored layer that go to consecutive rows of the result."""

    info: LinearInfo
    rows: slice
    columns: slice
    part: int = 0  # which part of a layer that is stored fused

    @property
    def n(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @property
    def k(self) -> int:
        return int(self.columns.stop - self.columns.start)


def load_linear(
    checkpoint: Checkpoint,
    names: str | Sequence[str],
    *,
    shard: Shard | Sequence[Shard] | None = None,
    parts: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
    swap_nibbles: bool = False,
    repair_nan: bool = False,
) -> LinearTensors:
    """Read a layer, or several that read the same x, one after the other in one weight.

    Global scales stay exact: where they differ, the result has one per row. Scales of activations are never read.

    Parameters
    ----------
    names
        Module names, in any of their spellings: "….mlp.down_proj", or the parts of a fused layer in the order of its
        rows. A name may be repeated (where keys serve as values).
    shard
        One rank's part; for several names one for all, or one each (key and value heads may be fewer than ranks).
    parts
        Rows of each part of a layer that is stored fused, such as (q, k, v): needed to shard its rows, each part by
        itself, and where it has a global scale per part. gate_up_proj is two halves by itself. Other layers may have
        parts too ("query_key_value"); of several layers each has these.
    device
        Where the result is.
    swap_nibbles
        For checkpoints that keep the even k in the high nibble: nothing in the files tells.
    repair_nan
        Take 448 for NaN block scales instead of raising.

    Raises
    ------
    InvalidInput
        A layer is not there, not quantised, incomplete, misshaped, holds NaN, cannot be divided, or the layers do not
        belong together. Nothing was read then, unless values are the reason.
    Unsupported
        A layer is quantised in another way.
    """
    check_opened(checkpoint)
    wanted = [names] if isinstance(names, str) else list(names)
    if not wanted:
        raise InvalidInput(message("no layer is named", expected="at least one"))
    infos = [checkpoint.linear(name) for name in wanted]
    what = " + ".join(info.name for info in infos)
    shards = list(shard) if isinstance(shard, Sequence) else [shard] * len(infos)
    if not all(one is None or isinstance(one, Shard) for one in shards):
        raise InvalidInput(message(f"{what}: wrong shard", got=repr(shard), expected="a Shard, or one for each layer"))
    if len(shards) != len(infos):
        raise InvalidInput(message(f"{what}: wrong number of shards", got=len(shards), expected=len(infos)))
    if len({info.k for info in infos}) > 1:
        got = ", ".join(f"{info.name}: {info.k}" for info in infos)
        raise InvalidInput(message(f"{what} do not read the same x", got=got, expected="one in_features"))
    pieces = [piece for info, one in zip(infos, shards, strict=True) for piece in _pieces(info, one, parts)]
    if len({(piece.columns.start, piece.columns.stop) for piece in pieces}) > 1:
        raise InvalidInput(message(f"{what}: shards do not fit", got=shards, expected="the same columns of each"))
    return _read(
        checkpoint.files,
        pieces,
        what,
        torch.device(device),
        swap=swap_nibbles,
        repair=repair_nan,
        no_bias=any(one is not None and one.how == "row" and one.rank > 0 for one in shards),
    )


def _pieces(info: LinearInfo, shard: Shard | None, parts: Sequence[int] | None) -> list[_Piece]:
    sizes = _part_sizes(info, shard, parts)
    pieces, start = [], 0
    for number, size in enumerate(sizes):
        if shard is None:
            rows, columns = slice(0, size), slice(0, info.k)
        else:
            rows, columns = shard.range(size, info.k, f"layer {info.name}" + (f", part {number}," if number else ""))
        pieces.append(_Piece(info, slice(start + rows.start, start + rows.stop), columns, number))
        start += size
    return pieces


def _part_sizes(info: LinearInfo, shard: Shard | None, parts: Sequence[int] | None) -> Sequence[int]:
    """Rows of each part that a layer is stored as; all rows for one that is not fused, or need not be divided."""
    names = fused_parts(info.name)
    scales = math.prod(info.global_scale.shape)
    scaled_apart = scales not in (1, info.n)
    if parts is not None:
        whole = isinstance(parts, Sequence) and all(type(part) is int and part >= 1 for part in parts)
        if not whole or sum(parts) != info.n or (scaled_apart and len(parts) != scales):
            expected = f"{info.n} rows" + (f" in {scales} parts, one per global scale" if scaled_apart else "")
            raise InvalidInput(message(f"layer {info.name}: wrong parts", got=parts, expected=expected))
        return parts
    if not names:
        return (info.n,)
    if info.name.endswith("gate_up_proj") and info.n % 2 == 0:
        return (info.n // 2, info.n // 2)
    if (shard is not None and shard.how == "column" and shard.size > 1) or scaled_apart:
        raise InvalidInput(
            message(
                f"layer {info.name} is stored fused, and its rows must be told apart",
                got="no parts",
                expected=f"the rows of {', '.join(names)}",
                do=f"pass parts=, {len(names)} numbers of {info.n} rows together",
            )
        )
    return (info.n,)


def _read(
    files: TensorFiles,
    pieces: list[_Piece],
    what: str,
    device: torch.device,
    *,
    swap: bool,
    repair: bool,
    no_bias: bool,
) -> LinearTensors:
    n, k = sum(piece.n for piece in pieces), pieces[0].k
    weight = torch.empty((n, k // 2), dtype=torch.uint8, device=device)
    scale = torch.empty((n, k // 16), dtype=torch.uint8, device=device)
    factors = []
    start = 0
    for piece in pieces:
        rows = slice(start, start + piece.n)
        columns = piece.columns
        packed = files.part(
            piece.info.weight.name,
            piece.rows,
            slice(columns.start // 2, columns.stop // 2),
        )
        weight[rows].copy_(swap_nibbles(packed) if swap else packed)
        info = piece.info.tensors["weight_scale"]
        groups = slice(columns.start // 16, columns.stop // 16)
        whole = (slice(None),) * (len(info.shape) - 2)  # a few files have [1, N, K/16]
        part = (
            files.part(info.name, *whole, piece.rows, groups).squeeze(0)
            if whole
            else files.part(info.name, piece.rows, groups)
        )
        scale[rows].copy_(part.view(torch.uint8))
        check_scale(info.name, scale[rows], repair_nan=repair)
        factors.append(_factor(files, piece))
        start += piece.n
    return LinearTensors(
        weight=weight,
        weight_scale=scale.view(torch.float8_e4m3fn),
        weight_scale_2=_together(factors, pieces).to(device),
        bias=None if no_bias else _bias(files, pieces, what, device),
        pre_quant_scale=_pre_quant_scale(files, pieces, what, device),
    )


def _factor(files: TensorFiles, piece: _Piece) -> Tensor:
    """The piece's global scale: [1], or one per row of the piece. Never cut like a weight when it is per part."""
    name = piece.info.global_scale.name
    factor = global_factor(name, files.read(name), piece.info.dialect)
    if factor.numel() == 1:
        return factor
    if factor.numel() == piece.info.n:
        return factor[piece.rows]
    return factor[piece.part : piece.part + 1]


def _together(factors: list[Tensor], pieces: list[_Piece]) -> Tensor:
    if all(factor.numel() == 1 and torch.equal(factor, factors[0]) for factor in factors):
        return factors[0].clone()
    rows = [factor.expand(piece.n) for factor, piece in zip(factors, pieces, strict=True)]
    return torch.cat(rows)


def _bias(files: TensorFiles, pieces: list[_Piece], what: str, device: torch.device) -> Tensor | None:
    infos = [piece.info.tensors.get("bias") for piece in pieces]
    if all(info is None for info in infos):
        return None
    dtypes = {info.dtype for info in infos if info is not None}
    if len(dtypes) > 1:
        raise InvalidInput(message(f"{what}: biases of different dtypes", got=", ".join(sorted(dtypes))))
    found: list[Tensor | None] = []
    for piece, info in zip(pieces, infos, strict=True):
        if info is None:  # a part without a bias has one of zeros
            found.append(None)
            continue
        values = files.read(info.name).reshape(-1)[piece.rows]
        check_finite(info.name, values)
        found.append(values)
    dtype = next(values.dtype for values in found if values is not None)
    return torch.cat(
        [
            torch.zeros(piece.n, dtype=dtype) if values is None else values
            for piece, values in zip(pieces, found, strict=True)
        ]
    ).to(device)


def _pre_quant_scale(files: TensorFiles, pieces: list[_Piece], what: str, device: torch.device) -> Tensor | None:
    names: list[str] = []
    vectors: list[Tensor | None] = []
    for piece in pieces:
        info = piece.info.tensors.get("pre_quant_scale")
        names.append(piece.info.name if info is None else info.name)
        if info is None:
            vectors.append(None)
            continue
        values = files.read(info.name).reshape(-1)[piece.columns]
        check_pre_quant_scale(info.name, values)
        vectors.append(values)
    shared = same_pre_quant_scale(names, vectors, what)
    return None if shared is None else shared.clone().to(device)
