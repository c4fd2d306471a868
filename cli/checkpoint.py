"""The layers of a checkpoint as problems, from its headers; shared by tune, warmup and inspect."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..dispatch.checkpoint import Checkpoint, open_checkpoint
from ..dispatch.checkpoint.names import fused_around, fused_parts, in_layer_order, split
from ..errors import InvalidInput, message
from ..kernels.problem import DTYPES, Problem
from ..tuner.workload import Linear, problems_of_linears
from .checkpoint_experts import experts_of, has_experts, left_out_words

__all__ = ["dtype_of", "layers_of", "open_for_tuning", "problems_of_checkpoint"]

# Layers whose input is divided over ranks, and small ones that every rank has whole; all others divide their output.
ROW = ("o_proj", "down_proj", "w2", "out_proj", "fc2", "wo", "wo_b", "dense", "dense_4h_to_h", "c_proj")
REPLICATED = (
    *("q_a_proj", "kv_a_proj_with_mqa", "fused_qkv_a_proj", "wq_a", "wkv"),
    *("fc1_latent_proj", "fc2_latent_proj", "routed_expert_down_proj"),
)
INDEXER = "indexer"  # of sparse attention: a module all of whose layers every rank has whole
KEY_VALUE = ("k_proj", "v_proj")


def open_for_tuning(path: Path) -> Checkpoint:
    """A checkpoint with at least one NVFP4 layer, dense or of experts, all of whose tensors are there.

    Raises
    ------
    InvalidInput
        There is none, or tensors are missing or misshaped; they are named.
    """
    checkpoint = open_checkpoint(path)
    checkpoint.check()
    if not checkpoint.linears and not has_experts(checkpoint):
        kinds = ", ".join(sorted(set(checkpoint.foreign.values())))
        raise InvalidInput(message(f"{path} has no NVFP4 layers", got=kinds or "dense tensors"))
    return checkpoint


def problems_of_checkpoint(
    path: Path, *, tp: int = 1, ep: int = 1, dtype: str | None = None, fused: bool = False
) -> list[Problem]:
    """The problems of all NVFP4 layers on one rank, each once, those of experts last. Reads headers only.

    A warning names the expert layers that are left out and says why: config.json does not tell their top_k or
    activation, they are incomplete or partly in another format, or they cannot be divided.

    Parameters
    ----------
    path
        The checkpoint's folder.
    tp, ep
        Tensor and expert parallel size; with an `ep` above 1, experts are whole, and a rank has some of them.
    dtype
        Of the activations; None takes that of config.json, or bfloat16.
    fused
        Take q, k and v, or gate and up, as one layer, as serving engines run them.

    Raises
    ------
    InvalidInput
        As `open_for_tuning`; a dense layer cannot be divided `tp` ways; there are fewer experts than `ep`; or nothing
        but expert layers is there, and all are left out.
    """
    checkpoint = open_for_tuning(path)
    x_dtype = dtype_of(checkpoint, dtype)
    dense = problems_of_linears(layers_of(checkpoint, fused=fused), tp=tp, dtype=x_dtype)
    experts = experts_of(checkpoint, tp=tp, ep=ep, dtype=x_dtype)
    if experts.left_out:
        words = f"{path}: {left_out_words(experts.left_out)}"
        if not dense and not experts.problems:
            raise InvalidInput(words)
        warnings.warn(words, UserWarning, stacklevel=2)
    return list(dict.fromkeys([*dense, *(one for problems in experts.problems.values() for one in problems)]))


def dtype_of(checkpoint: Checkpoint, wanted: str | None) -> str:
    """The dtype of the activations."""
    model = checkpoint.config.model
    own = (model.dtype or model.torch_dtype or "").removeprefix("torch.")
    return wanted or (own if own in DTYPES else DTYPES[0])


def layers_of(checkpoint: Checkpoint, *, fused: bool) -> list[Linear]:
    """Its dense NVFP4 layers, whole, with how they are divided over ranks; by name, layer 2 before layer 10."""
    linears = checkpoint.linears
    layers = {name: _layer(checkpoint, name, linears[name].n, linears[name].k) for name in in_layer_order(linears)}
    return list(_fused(layers) if fused else layers.values())


def _fused(layers: Mapping[str, Linear]) -> Iterator[Linear]:
    """The same layers, with those that read one x put together."""
    done: set[str] = set()
    for name, layer in layers.items():
        if name in done:
            continue
        for whole in fused_around(name):
            parts = [layers[part] for part in fused_parts(whole) if part in layers]
            if len(parts) == len(fused_parts(whole)) and all(part.k == layer.k for part in parts):
                done.update(part.name for part in parts)
                yield _together(whole, parts)
                break
        else:
            yield layer


def _together(name: str, parts: Sequence[Linear]) -> Linear:
    """One layer of several; the size of a head of qkv_proj is the mean of keys' and values', where they differ."""
    n, k, shard = sum(part.n for part in parts), parts[0].k, parts[0].shard
    key_value = [part.head_dim for part in parts if part.head_dim]
    if not key_value:
        return Linear(name=name, n=n, k=k, shard=shard)
    head_dim = sum(key_value) // len(key_value)
    return Linear(name=name, n=n, k=k, shard=shard, kv_heads=parts[-1].kv_heads, head_dim=head_dim)


def _layer(checkpoint: Checkpoint, name: str, n: int, k: int) -> Linear:
    leaf = split(name)[1]
    if leaf in REPLICATED or INDEXER in name.split("."):
        return Linear(name=name, n=n, k=k, shard="replicated")
    if leaf in ROW:
        return Linear(name=name, n=n, k=k, shard="row")
    kv_heads = checkpoint.config.model.num_key_value_heads
    heads = checkpoint.config.model.num_attention_heads or 0
    if kv_heads and leaf in KEY_VALUE and n % kv_heads == 0:
        return Linear(name=name, n=n, k=k, shard="column", kv_heads=kv_heads, head_dim=n // kv_heads)
    if kv_heads and leaf == "qkv_proj" and n % (heads + 2 * kv_heads) == 0:
        return Linear(name=name, n=n, k=k, shard="column", kv_heads=kv_heads, head_dim=n // (heads + 2 * kv_heads))
    return Linear(name=name, n=n, k=k, shard="column")
