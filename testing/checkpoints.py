"""Tiny checkpoints, named as their exporters name things, for tests of what reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..kernels.weights.codec import dequantize, quantize

__all__ = ["HF_QUANT", "as_compressed_tensors", "dense", "experts", "modelopt", "stacked_experts", "write_checkpoint"]

GATED = ("gate_proj", "up_proj", "down_proj")
HF_QUANT: Mapping[str, Any] = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}


def modelopt(
    name: str, n: int, k: int, seed: int = 0, *, factor: float | None = None, bias: bool = False, pqs: bool = False
) -> dict[str, Tensor]:
    """The tensors of one layer as ModelOpt names them; random weights, quantised by `nvfp4.quantize`.

    Parameters
    ----------
    name, n, k
        The module's name, out_features and in_features.
    factor
        Put this in weight_scale_2 instead of the one that suits the weights.
    bias, pqs
        With a bias [N] and a pre_quant_scale [K], bfloat16.
    """
    generator = torch.Generator().manual_seed(seed)
    weight, scale, global_scale = quantize(torch.randn(n, k, generator=generator) * 0.1)
    tensors = {
        f"{name}.weight": weight,
        f"{name}.weight_scale": scale,
        f"{name}.weight_scale_2": global_scale if factor is None else torch.tensor(factor),
    }
    if bias:
        tensors[f"{name}.bias"] = torch.randn(n, generator=generator).bfloat16()
    if pqs:
        tensors[f"{name}.pre_quant_scale"] = torch.rand(k, generator=generator).bfloat16() + 0.5
    return tensors


def experts(
    name: str, count: int, hidden: int, inter: int, *, roles: Sequence[str] = GATED, **options: Any
) -> dict[str, Tensor]:
    """A layer of experts, one by one: `roles` are what its layers are called, that of [hidden, inter] the last.

    `options` as for `modelopt`.
    """
    tensors: dict[str, Tensor] = {}
    for expert in range(count):
        for i, role in enumerate(roles):
            n, k = (hidden, inter) if role == roles[-1] else (inter, hidden)
            tensors |= modelopt(f"{name}.{expert}.{role}", n, k, 10 * expert + i, **options)
    return tensors


def stacked_experts(
    tensors: Mapping[str, Tensor], name: str, *, transposed: bool = True, interleaved: bool = False
) -> dict[str, Tensor]:
    """The same layer of `experts`, with ModelOpt's names, as 3-D tensors: gate_up_proj, or up_proj without a gate.

    Parameters
    ----------
    transposed
        [E, K/2, N] as ModelOpt writes them, instead of [E, N, K/2].
    interleaved
        Rows in the order gate 0, up 0, gate 1, up 1, … instead of gate, then up.
    """
    count = sum(1 for one in tensors if one.startswith(f"{name}.") and one.endswith(".down_proj.weight"))
    gated = f"{name}.0.gate_proj.weight" in tensors
    first = {"gate_up_proj": ("gate_proj", "up_proj")} if gated else {"up_proj": ("up_proj",)}

    def leaves(role: str, leaf: str) -> list[Tensor]:
        return [tensors[f"{name}.{expert}.{role}.{leaf}"] for expert in range(count)]

    def joined(roles: Sequence[str], leaf: str) -> Tensor:
        """[E, rows, columns] of all roles, or its transpose."""
        dtype = leaves(roles[0], leaf)[0].dtype
        parts = [torch.stack([one.view(torch.uint8) for one in leaves(role, leaf)]) for role in roles]
        rows = torch.stack(parts, 2).flatten(1, 2) if interleaved else torch.cat(parts, 1)
        return (rows.transpose(1, 2) if transposed else rows).contiguous().view(dtype)

    found = {}
    for stack, roles in (first | {"down_proj": ("down_proj",)}).items():
        found[f"{name}.{stack}"] = joined(roles, "weight")
        found[f"{name}.{stack}_weight_scale"] = joined(roles, "weight_scale")
        factors = [torch.stack([one.reshape(()) for one in leaves(role, "weight_scale_2")]) for role in roles]
        found[f"{name}.{stack}_weight_scale_2"] = torch.stack(factors, 1)
    return found


def as_compressed_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same layers as compressed-tensors names them, with its divisor."""
    renamed = {}
    for name, tensor in tensors.items():
        module, leaf = name.rsplit(".", 1)
        if leaf == "weight_scale_2":
            renamed[f"{module}.weight_global_scale"] = 1 / tensor.reshape(1)
        else:
            renamed[f"{module}.{'weight_packed' if leaf == 'weight' else leaf}"] = tensor
    return renamed


def dense(tensors: Mapping[str, Tensor], name: str, *, factor: float | None = None) -> Tensor:
    """[N, K] float64 of one of `modelopt`'s layers, by the formula; `factor` replaces its global scale."""
    global_scale = tensors[f"{name}.weight_scale_2"] if factor is None else torch.tensor(factor)
    return dequantize(tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"], global_scale.float(), torch.float64)


def write_checkpoint(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    hf: Mapping[str, Any] | None = HF_QUANT,
    config: Mapping[str, Any] | None = None,
    files: int = 1,
) -> Path:
    """Write a checkpoint's folder and return it.

    Parameters
    ----------
    hf
        `quantization` of hf_quant_config.json; None writes no such file.
    config
        config.json; None writes none.
    files
        More than one spreads the tensors over several, with an index.
    """
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    owned = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    if files == 1:
        save_file(owned, path / "model.safetensors", metadata={"format": "pt"})
    else:
        place = {name: f"model-{i % files + 1:05d}-of-{files:05d}.safetensors" for i, name in enumerate(owned)}
        for file in set(place.values()):
            save_file({name: tensor for name, tensor in owned.items() if place[name] == file}, path / file)
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    if hf is not None:
        (path / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": dict(hf)}))
    if config is not None:
        (path / "config.json").write_text(json.dumps(dict(config)))
    return path
