"""Layers of a model from its Hugging Face config.json: dense linears, and what it says about experts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..errors import InvalidInput, message
from ..kernels.moe.activations import activation
from ..kernels.moe.model_config import MoeConfig, decode_config, first_size, language_fields, read_moe_config
from ..kernels.problem import DTYPES
from .layer_kinds import layer_kinds
from .workload import Linear

__all__ = ["ModelShape", "read_config"]

# Fields that reveal attention or layers whose linears have other shapes than Llama's.
OTHER_KINDS = {
    "kv_lora_rank": "multi-head latent attention",
    "o_lora_rank": "multi-head latent attention",
    "linear_num_value_heads": "linear attention layers",
    "mamba_num_heads": "state space layers",
    "mamba_d_state": "state space layers",
    **dict.fromkeys(("global_head_dim", "swa_head_dim", "swa_num_key_value_heads"), "two kinds of attention heads"),
    "conv_L_cache": "convolution layers",
    "num_attention_groups": "attention of Step models",
}
# What a layer is called whose attention has Llama's linears; other kinds of layers have others.
LIKE_LLAMA = ("attention", "full_attention", "sliding_attention", "chunked_attention")
# The inner size of dense MLPs, where experts have another.
DENSE_INTER = ("dense_intermediate_size", "intermediate_size_mlp", "intermediate_size")
SHARED_INTER = (
    *("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("shared_intermediate_size", "share_expert_dim"),
)
SHARED_COUNT = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
ONE_SHARED = ("llama4", "llama4_text")  # models whose layers of experts have a shared one, which no field tells
UNGATED = ("apertus", "gpt_neox", "phi", "starcoder2")  # models whose MLPs have no gate, whatever the activation
BESIDE = "enable_moe_block"  # Gemma 4: every layer has a dense MLP beside its experts


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a config.json says about a model's layers.

    Attributes
    ----------
    linears
        Dense ones, shared experts and projections around experts in a latent size included.
    left_out
        Kinds of layers that are not derived, in words; "" where all are.
    moe
        What is said about routed experts.
    expert_layers
        Numbers of the layers that have routed experts; none in a dense model.
    """

    linears: tuple[Linear, ...]
    left_out: str
    dtype: str
    moe: MoeConfig
    expert_layers: tuple[int, ...]


class _Config(msgspec.Struct, kw_only=True):
    """The fields that are read of any model; others may have any content."""

    hidden_size: int
    vocab_size: int
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    tie_word_embeddings: bool | None = None
    dtype: str | None = None
    torch_dtype: str | None = None


def read_config(path: Path) -> ModelShape:
    """Layers of a model, lm_head included unless it is tied to the embedding; attention where it is like Llama's.

    Raises
    ------
    InvalidInput
        The file cannot be read, or lacks a field.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        fields = language_fields(msgspec.convert(decode_config(file.read_bytes()), dict[str, Any]))
        config = msgspec.convert(fields, _Config)
    except OSError as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror or error
        raise InvalidInput(
            message(f"{file} cannot be read: {reason}", do="name a config.json or its folder")
        ) from error
    except (msgspec.ValidationError, ValueError) as error:
        fix = "name the model (--model) or shapes (--shape N,K) instead"
        raise InvalidInput(message(f"{file} is no model description", got=error, do=fix)) from error
    dtype = (config.dtype or config.torch_dtype or "").removeprefix("torch.")
    moe = read_moe_config(fields)
    kinds = layer_kinds(fields) if moe.experts > 1 else ()  # Hunyuan's dense models have one
    other = _other_kinds(fields)
    if min(config.hidden_size, config.vocab_size) < 1:
        raise InvalidInput(message("sizes of the model", got=config, expected="positive numbers"))
    linears = [] if other else _attention(config)
    if not kinds or "dense" in kinds or fields.get(BESIDE):
        linears += _dense(fields, moe, config.hidden_size)
    if "experts" in kinds:
        linears += _around_experts(fields, moe, config.hidden_size)
    if not config.tie_word_embeddings:
        linears.append(Linear(name="lm_head", n=config.vocab_size, k=config.hidden_size, shard="column"))
    return ModelShape(
        linears=tuple(linears),
        left_out=", ".join(other),
        dtype=dtype if dtype in DTYPES else DTYPES[0],
        moe=moe,
        expert_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == "experts"),
    )


def _other_kinds(fields: Mapping[str, object]) -> list[str]:
    """Kinds of attention and of layers, in words, whose linears are not those of Llama's attention."""
    found = {kind for field, kind in OTHER_KINDS.items() if fields.get(field) is not None}
    named, numbered, value_dim = fields.get("layer_types"), fields.get("attn_type_list"), fields.get("v_head_dim")
    if isinstance(numbered, list) and 0 in numbered:  # MiniMax-Text
        found.add("linear attention layers")
    if not found and isinstance(named, list):
        found = {f"layers called {kind}" for kind in named if kind not in LIKE_LLAMA}
    if not found and value_dim not in (None, fields.get("head_dim")):
        found = {"values of another size than keys"}
    return sorted(found)


def _attention(config: _Config) -> list[Linear]:
    heads, hidden = config.num_attention_heads or 0, config.hidden_size
    kv_heads = config.num_key_value_heads or heads
    head_dim = config.head_dim or (hidden // heads if heads > 0 else 0)
    if min(heads, kv_heads, head_dim) < 1:
        raise InvalidInput(message("sizes of the model", got=config, expected="positive numbers"))
    rows = (heads + 2 * kv_heads) * head_dim
    return [
        Linear(name="qkv_proj", n=rows, k=hidden, shard="column", kv_heads=kv_heads, head_dim=head_dim),
        Linear(name="o_proj", n=hidden, k=heads * head_dim, shard="row"),
    ]


def _dense(fields: Mapping[str, object], moe: MoeConfig, hidden: int) -> list[Linear]:
    inter = first_size(fields, DENSE_INTER)
    if not inter:
        raise InvalidInput(
            message("intermediate_size", got=fields.get("intermediate_size"), expected="a positive number")
        )
    return _mlp("mlp", hidden, inter, _gated(fields, moe))


def _around_experts(fields: Mapping[str, object], moe: MoeConfig, hidden: int) -> list[Linear]:
    """Dense linears of layers with experts: the shared ones, and projections to and from a latent size."""
    size, count = first_size(fields, SHARED_INTER), first_size(fields, SHARED_COUNT)
    one = bool(size) or fields.get("model_type") in ONE_SHARED
    inter = (size or moe.inter) * (count or one)
    linears = _mlp("shared_expert", hidden, inter, _gated(fields, moe)) if inter else []
    if moe.hidden not in (0, hidden):
        linears.append(Linear(name="latent_down_proj", n=moe.hidden, k=hidden, shard="replicated"))
        kimi = fields.get("routed_expert_hidden_size")
        linears.append(Linear(name="latent_up_proj", n=hidden, k=moe.hidden, shard="column" if kimi else "replicated"))
    return linears


def _gated(fields: Mapping[str, object], moe: MoeConfig) -> bool:
    """Whether MLPs and experts have a gate."""
    try:
        gated = activation(moe.activation_of(None, gated=None)).gated
    except InvalidInput:
        gated = True  # an activation that experts cannot have, or none
    return gated and fields.get("model_type") not in UNGATED


def _mlp(prefix: str, hidden: int, inter: int, gated: bool) -> list[Linear]:
    first, rows = ("gate_up_proj", 2 * inter) if gated else ("up_proj", inter)
    return [
        Linear(name=f"{prefix}.{first}", n=rows, k=hidden, shard="column"),
        Linear(name=f"{prefix}.down_proj", n=hidden, k=inter, shard="row"),
    ]
