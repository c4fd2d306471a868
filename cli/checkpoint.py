"""The dense layers of a checkpoint as problems, from its headers; shared by tune, warmup and inspect."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

from ..cache.words import tune_options
from ..dispatch.checkpoint import Checkpoint, open_checkpoint
from ..dispatch.checkpoint.expert_sources import expert_source
from ..dispatch.checkpoint.names import FUSED, split
from ..errors import InvalidInput, Nvfp4Error, message
from ..kernels.problem import DTYPES, Problem
from ..tuner.workload import Linear, problems_of_linears

__all__ = ["dtype_of", "layers_of", "open_for_tuning", "problem_of", "problems_of_checkpoint"]

# Layers whose input is divided over ranks, and small ones that every rank has whole; all others divide their output.
ROW = ("o_proj", "down_proj", "w2", "out_proj", "fc2", "wo")
REPLICATED = ("q_a_proj", "kv_a_proj_with_mqa", "fused_qkv_a_proj")
KEY_VALUE = ("k_proj", "v_proj")
GROUP = 16  # weights per block scale: a rank's share of an expert's inner size is a multiple
GATED, UNGATED = "swiglu", "relu2"  # the activations that most experts with and without a gate have


def open_for_tuning(path: Path, *, tp: int = 1, dtype: str | None = None) -> Checkpoint:
    """A checkpoint with at least one dense NVFP4 layer, all of whose tensors are there.

    Parameters
    ----------
    tp, dtype
        As for `problems_of_checkpoint`: what the message about one with experts alone says of them.

    Raises
    ------
    InvalidInput
        There is none, or tensors are missing or misshaped; they are named.
    """
    checkpoint = open_checkpoint(path)
    checkpoint.check()
    if not checkpoint.linears:
        experts = _experts(checkpoint)
        kinds = ", ".join(sorted({*checkpoint.foreign.values(), *(["NVFP4 experts"] if experts else [])}))
        raise InvalidInput(
            message(
                f"{path} has no dense NVFP4 layers",
                got=kinds or "dense tensors",
                do=_name_experts(checkpoint, tp=tp, dtype=dtype) if experts else "",
            )
        )
    return checkpoint


def problems_of_checkpoint(path: Path, *, tp: int = 1, dtype: str | None = None, fused: bool = False) -> list[Problem]:
    """The problems of all dense NVFP4 layers on one rank, each once. Reads headers only.

    Parameters
    ----------
    path
        The checkpoint's folder.
    dtype
        Of the activations; None takes that of config.json, or bfloat16.
    fused
        Take q, k and v, or gate and up, as one layer, as serving engines run them.

    Raises
    ------
    InvalidInput
        As `open_for_tuning`; or a layer cannot be divided `tp` ways.
    """
    checkpoint = open_for_tuning(path, tp=tp, dtype=dtype)
    if _experts(checkpoint):
        do = _name_experts(checkpoint, tp=tp, dtype=dtype)
        warnings.warn(
            f"{path}: its expert layers are left out, only dense linears are taken; {do}", UserWarning, stacklevel=2
        )
    found = problems_of_linears(layers_of(checkpoint, fused=fused), tp=tp, dtype=dtype_of(checkpoint, dtype))
    return list(dict.fromkeys(found))


def problem_of(layer: Linear, *, tp: int, dtype: str) -> Problem:
    """One layer's problem on one rank."""
    (problem,) = problems_of_linears([layer], tp=tp, dtype=dtype)
    return problem


def dtype_of(checkpoint: Checkpoint, wanted: str | None) -> str:
    """The dtype of the activations."""
    model = checkpoint.config.model
    own = (model.dtype or model.torch_dtype or "").removeprefix("torch.")
    return wanted or (own if own in DTYPES else DTYPES[0])


def layers_of(checkpoint: Checkpoint, *, fused: bool) -> list[Linear]:
    """Its dense NVFP4 layers, whole, with how they are divided over ranks; by name, layer 2 before layer 10."""
    sizes = {
        name: (checkpoint.linears[name].n, checkpoint.linears[name].k)
        for name in sorted(checkpoint.linears, key=_order)
    }
    if fused:
        sizes = dict(_fused(sizes))
    return [_layer(checkpoint, name, n, k) for name, (n, k) in sizes.items()]


def _order(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _fused(sizes: dict[str, tuple[int, int]]) -> Iterator[tuple[str, tuple[int, int]]]:
    """The same layers, with those that read one x put together."""
    done: set[str] = set()
    for name, size in sizes.items():
        if name in done:
            continue
        module, leaf = split(name)
        for whole, parts in FUSED.items():
            names = [f"{module}.{part}" if module else part for part in parts]
            if leaf in parts and all(sizes.get(part, (0, 0))[1] == size[1] for part in names):
                done.update(names)
                yield f"{module}.{whole}" if module else whole, (sum(sizes[part][0] for part in names), size[1])
                break
        else:
            yield name, size


def _layer(checkpoint: Checkpoint, name: str, n: int, k: int) -> Linear:
    leaf = split(name)[1]
    if leaf in ROW:
        return Linear(name=name, n=n, k=k, shard="row")
    if leaf in REPLICATED:
        return Linear(name=name, n=n, k=k, shard="replicated")
    kv_heads = checkpoint.config.model.num_key_value_heads
    heads = checkpoint.config.model.num_attention_heads or 0
    if kv_heads and leaf in KEY_VALUE and n % kv_heads == 0:
        return Linear(name=name, n=n, k=k, shard="column", kv_heads=kv_heads, head_dim=n // kv_heads)
    if kv_heads and leaf == "qkv_proj" and n % (heads + 2 * kv_heads) == 0:
        return Linear(name=name, n=n, k=k, shard="column", kv_heads=kv_heads, head_dim=n // (heads + 2 * kv_heads))
    return Linear(name=name, n=n, k=k, shard="column")


def _experts(checkpoint: Checkpoint) -> tuple[str, ...]:
    return (*checkpoint.experts, *checkpoint.fused_experts)


def _name_experts(checkpoint: Checkpoint, *, tp: int, dtype: str | None) -> str:
    """How to name the experts on the command line; with their sizes where headers and config.json say all of them."""
    top_k = checkpoint.config.model.num_experts_per_tok or 0
    try:
        sources = [expert_source(checkpoint, name, None) for name in _experts(checkpoint)]
    except Nvfp4Error:  # what is wrong with them is said where they are read
        sources = []
    sizes = sorted({(source.count, source.hidden, source.inter, source.gated) for source in sources})
    if top_k < 1 or not sizes or any(inter % (tp * GROUP) for _, _, inter, _ in sizes):
        return "name them with --moe"
    problems = [
        Problem(
            op="moe",
            n=inter // tp,
            k=hidden,
            dtype=dtype_of(checkpoint, dtype),
            experts=count,
            top_k=top_k,
            activation=GATED if gated else UNGATED,
        )
        for count, hidden, inter, gated in sizes
    ]
    return f"name them with {' '.join(map(tune_options, problems))} (or the activation that the model has)"
