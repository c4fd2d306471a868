"""Which layers of a model have experts and which a dense MLP, as its config.json says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from ..errors import InvalidInput, message
from ..kernels.moe.model_config import first_size

__all__ = ["Kind", "layer_kinds"]

Kind: TypeAlias = Literal["experts", "dense", "neither"]

# What config.json calls one layer, in a list or (Nemotron-H) in a string with a letter for each.
DENSE = ("dense", "mlp", "-", 0)
NEITHER = ("mamba", "attention", "M", "*")
BY_LAYER = ("mlp_layer_types", "is_moe_layer", "layers_block_type", "hybrid_override_pattern", "moe_layer_freq")

MOST_LAYERS = 10_000
FIRST_DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")  # DeepSeek, LFM2, ERNIE
STEP = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")  # Qwen, Llama 4, ERNIE


def layer_kinds(fields: Mapping[str, object]) -> tuple[Kind, ...]:
    """One a layer, of a model that has experts: where nothing is said, all layers have them.

    Raises
    ------
    InvalidInput
        The number of layers is not there.
    """
    for name in BY_LAYER:
        said = fields.get(name)
        if not said or not isinstance(said, list | str):
            continue
        kinds: tuple[Kind, ...] = tuple(
            "dense" if one in DENSE else "neither" if one in NEITHER else "experts" for one in said
        )
        if set(kinds) != {"neither"}:  # else it tells kinds of attention (Jamba)
            return kinds
    count = fields.get("num_hidden_layers")
    if type(count) is not int or not 1 <= count <= MOST_LAYERS:
        raise InvalidInput(
            message("num_hidden_layers", got=count, expected=f"a number of layers, {MOST_LAYERS} at most")
        )
    listed = _listed(fields)
    if listed is not None:
        return tuple("experts" if layer in listed else "dense" for layer in range(count))
    first, end = first_size(fields, FIRST_DENSE), first_size(fields, ("moe_layer_end_index",)) or count - 1
    step, every = first_size(fields, STEP) or 1, first_size(fields, ("moe_layer_freq",)) or 1
    period, offset = first_size(fields, ("expert_layer_period",)) or 1, first_size(fields, ("expert_layer_offset",))
    dense = fields.get("mlp_only_layers")
    return tuple(
        "experts"
        if first <= layer <= end
        and (layer + 1) % step == 0
        and layer % every == 0
        and layer % period == offset
        and not (isinstance(dense, list) and layer in dense)
        else "dense"
        for layer in range(count)
    )


def _listed(fields: Mapping[str, object]) -> list[object] | None:
    """The layers with experts, where there is a list of them: Llama 4 has numbers, Step a text with commas."""
    found, text = fields.get("moe_layers"), fields.get("moe_layers_enum")
    if isinstance(found, list):
        return found
    return [int(part) for part in text.split(",") if part.strip().isdecimal()] if isinstance(text, str) else None
