"""The quantisation part of a checkpoint's JSON files, as msgspec checks it. Other fields may be anything."""

from __future__ import annotations

from typing import Any

import msgspec

from ...kernels.moe.model_config import MoeConfig

__all__ = ["CtArgs", "CtConfig", "CtGroup", "HfQuantFile", "LayerQuantization", "ModelConfig", "ModelOptConfig"]


class LayerQuantization(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `quantized_layers`."""

    quant_algo: str | None = None
    group_size: int | None = None


class ModelOptConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`quantization` of hf_quant_config.json, or `quantization_config` of config.json with a method of ModelOpt."""

    quant_algo: str | None = None
    moe_quant_algo: str | None = None
    group_size: int | None = None
    exclude_modules: tuple[str, ...] | None = None
    ignore: tuple[str, ...] | None = None
    quantized_layers: dict[str, LayerQuantization] | None = None

    @property
    def excluded(self) -> tuple[str, ...]:
        """Patterns of what is not quantised, under either name."""
        return (*(self.exclude_modules or ()), *(self.ignore or ()))


class HfQuantFile(msgspec.Struct, frozen=True, kw_only=True):
    """hf_quant_config.json."""

    quantization: ModelOptConfig


class CtArgs(msgspec.Struct, frozen=True, kw_only=True):
    """How the weights of a group are quantised."""

    num_bits: int | None = None
    type: str | None = None
    strategy: str | None = None
    group_size: int | None = None


class CtGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One of the config_groups of compressed-tensors."""

    targets: tuple[str, ...]
    weights: CtArgs | None = None
    format: str | None = None


class CtConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`quantization_config` with quant_method "compressed-tensors"; a group may be a preset's name with its targets."""

    config_groups: dict[str, CtGroup | tuple[str, ...]]
    format: str | None = None
    ignore: tuple[str, ...] | None = None
    transform_config: dict[str, Any] | None = None
    sparsity_config: dict[str, Any] | None = None


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of config.json besides the quantisation; the language model's fields may be in `text_config`."""

    model_type: str | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    tie_word_embeddings: bool | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    quantization_config: dict[str, Any] | None = None
    moe: MoeConfig = MoeConfig()
