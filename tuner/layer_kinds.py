"""Which layers of a model have experts and which a dense MLP, as its config.json says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from ..errors import InvalidInput, message

__all__ = ["Kind", "layer_kinds"]

Kind: TypeAlias = Literal["experts", "dense", "neither"]

# What config.json calls one layer, in a list or (Nemotron-H) in a string with a letter for each.
DENSE = ("dense", "mlp", "-", 0)
NEITHER = ("mamba", "attention", "M", "*")
BY_LAYER = ("mlp_layer_types", "layers_block_type", "hybrid_override_pattern", "moe_layer_freq")

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
        if said and isinstance(said, list | str):
            return tuple("dense" if one in DENSE else "neither" if one in NEITHER else "experts" for one in said)
    count = fields.get("num_hidden_layers")
    if type(count) is not int or count < 1:
        raise InvalidInput(message("num_hidden_layers", got=count, expected="a number of layers"))
    listed = _listed(fields)
    if listed is not None:
        return tuple("experts" if layer in listed else "dense" for layer in range(count))
    first, end = _number(fields, FIRST_DENSE, 0), _number(fields, ("moe_layer_end_index",), count - 1)
    step, every = _number(fields, STEP, 1), _number(fields, ("moe_layer_freq",), 1)
    period, offset = _number(fields, ("expert_layer_period",), 1), _number(fields, ("expert_layer_offset",), 0)
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


def _number(fields: Mapping[str, object], names: Sequence[str], default: int) -> int:
    """The first of these fields that is a number above 0."""
    return next((one for name in names if type(one := fields.get(name)) is int and one > 0), default)
