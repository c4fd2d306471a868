"""Dense linear layers of a Hugging Face config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ..errors import InvalidInput, message
from ..kernels.problem import DTYPES
from .workload import Linear

__all__ = ["ModelShape", "read_config"]

# Fields that reveal attention or layers whose linears have other shapes than Llama's.
OTHER_KINDS = {
    "kv_lora_rank": "multi-head latent attention",
    "linear_num_value_heads": "linear attention layers",
    "mamba_num_heads": "state space layers",
    "mamba_d_state": "state space layers",
    "global_head_dim": "two kinds of attention heads",
}


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a config.json says about dense linears."""

    linears: tuple[Linear, ...]
    dtype: str
    experts: int  # 0 for a dense model


class _Config(msgspec.Struct, kw_only=True):
    """The fields that are read; others may have any content."""

    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    intermediate_size: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    tie_word_embeddings: bool | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    num_experts: int | None = None
    num_local_experts: int | None = None
    n_routed_experts: int | None = None
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int | None = None
    n_shared_experts: int | None = None
    first_k_dense_replace: int | None = None
    mlp_only_layers: list[int] | None = None


def read_config(path: Path) -> ModelShape:
    """Linears of a Llama- or Qwen-like model, lm_head included unless it is tied to the embedding.

    Raises
    ------
    InvalidInput
        The file cannot be read, lacks a field, or describes attention that is not derived here.
    """
    file = path / "config.json" if path.is_dir() else path
    fix = "name the model (--model) or shapes (--shape N,K) instead"
    try:
        raw: Any = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        inner = raw.get("text_config")  # multimodal models keep the language model's fields inside
        fields = {**raw, **inner} if isinstance(inner, dict) else raw
        other = sorted({kind for field, kind in OTHER_KINDS.items() if fields.get(field) is not None})
        if other:
            raise InvalidInput(message(f"{file} describes {', '.join(other)}", expected="plain attention", do=fix))
        config = msgspec.convert(fields, _Config)
    except OSError as error:
        raise InvalidInput(
            message(f"{file} cannot be read", got=error, do="name a config.json or its folder")
        ) from error
    except msgspec.DecodeError as error:
        raise InvalidInput(message(f"{file} is no model description", got=error, do=fix)) from error
    dtype = (config.dtype or config.torch_dtype or "").removeprefix("torch.")
    return ModelShape(
        linears=tuple(_linears(config)), dtype=dtype if dtype in DTYPES else DTYPES[0], experts=_experts(config)
    )


def _experts(config: _Config) -> int:
    return config.num_experts or config.num_local_experts or config.n_routed_experts or 0


def _linears(config: _Config) -> list[Linear]:
    heads, hidden = config.num_attention_heads, config.hidden_size
    kv_heads = config.num_key_value_heads or heads
    head_dim = config.head_dim or (hidden // heads if heads > 0 else 0)
    if min(hidden, heads, kv_heads, head_dim, config.vocab_size) < 1:
        raise InvalidInput(message("sizes of the model", got=config, expected="positive numbers"))
    rows = (heads + 2 * kv_heads) * head_dim
    linears = [
        Linear(name="qkv_proj", n=rows, k=hidden, shard="column", kv_heads=kv_heads, head_dim=head_dim),
        Linear(name="o_proj", n=hidden, k=heads * head_dim, shard="row"),
    ]
    dense = not _experts(config) or config.first_k_dense_replace or config.mlp_only_layers
    if dense:
        if not config.intermediate_size:
            raise InvalidInput(message("intermediate_size", got=config.intermediate_size, expected="a positive number"))
        linears += _mlp("mlp", hidden, config.intermediate_size)
    shared = config.shared_expert_intermediate_size or (
        (config.n_shared_experts or 0) * (config.moe_intermediate_size or 0)
    )
    if shared:
        linears += _mlp("shared_expert", hidden, shared)
    if not config.tie_word_embeddings:
        linears.append(Linear(name="lm_head", n=config.vocab_size, k=hidden, shard="column"))
    return linears


def _mlp(prefix: str, hidden: int, inter: int) -> list[Linear]:
    return [
        Linear(name=f"{prefix}.gate_up_proj", n=2 * inter, k=hidden, shard="column"),
        Linear(name=f"{prefix}.down_proj", n=hidden, k=inter, shard="row"),
    ]
