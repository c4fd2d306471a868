"""What a Hugging Face config.json says about experts: top_k and the activation, which no tensor tells, and sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from ...errors import InvalidInput, message
from .activations import activation

__all__ = ["MoeConfig", "decode_config", "first_size", "language_fields", "read_moe_config"]

T = TypeVar("T")

# Of several names the first that is there counts.
TOP_K = (
    *("num_experts_per_tok", "num_experts_per_token", "experts_per_token"),
    *("moe_top_k", "moe_topk", "moe_k", "top_k_experts"),
)
ACTIVATION = ("mlp_hidden_act", "hidden_act", "hidden_activation")
LIMITS = "swiglu_limits"  # Step: a layer with a limit has swiglustep, the others silu
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
HIDDEN = ("moe_latent_size", "routed_expert_hidden_size", "hidden_size")
INTER = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")

# Models whose experts compute something else than the config's activation.
MODELS = {"gpt_oss": "swigluoai"}
# Names of activations in configs that are none of `kernels.moe.activations`.
NAMES = {
    "swish": "swiglu",
    "swigluoai_uninterleave": "swigluoai",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
    "gelu_fast": "geglu_tanh",
    "relu_squared": "relu2",
    "squared_relu": "relu2",
}


class MoeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a config.json says about experts; empty or 0 where it says nothing.

    Attributes
    ----------
    top_k
        Experts per token: one number for all layers, or one a layer; 0 where a layer has none.
    activation
        As the config spells it, but for models whose experts compute another.
    limits
        One a layer: of the activation, None or 0 for no limit.
    experts
        Of one layer.
    hidden, inter
        Sizes of an expert, which its tensors may contradict.
    """

    top_k: tuple[int, ...] = ()
    activation: str = ""
    limits: tuple[float | None, ...] = ()
    experts: int = 0
    hidden: int = 0
    inter: int = 0

    def top_k_of(self, layer: int | None) -> int:
        """Experts per token in a layer; None stands for a layer without a number.

        Raises
        ------
        InvalidInput
            The config does not say.
        """
        found = _of_layer(self.top_k, layer)
        if found is None or found < 1:
            got = f"{self.top_k} for layer {layer}" if self.top_k else None
            raise InvalidInput(
                message("config.json does not say how many experts a token has", got=got,
                        expected=f"one of {', '.join(TOP_K)}")
            )  # fmt: skip
        return found

    def activation_of(self, layer: int | None, *, gated: bool | None) -> str:
        """The activation of the experts of a layer, as `nvfp4.moe` calls it; gated=None takes one with or without.

        Raises
        ------
        InvalidInput
            The config does not say; or it names one that `nvfp4.moe` does not have, or not for experts with (or
            without) a gate.
        """
        name = self._from_limits(layer) or self.activation
        if not name:
            raise InvalidInput(
                message("config.json does not say what activation the experts have",
                        expected=f"one of {', '.join(ACTIVATION)}")
            )  # fmt: skip
        kind = activation(NAMES.get(name, name))
        if gated is not None and kind.gated != gated:
            raise InvalidInput(
                message(
                    f"the activation of config.json, {name}, does not suit its experts",
                    got=f"experts {'with' if gated else 'without'} a gate",
                    expected=f"{'with' if kind.gated else 'without'} one",
                )
            )
        return kind.name

    def _from_limits(self, layer: int | None) -> str:
        if not self.limits:
            return ""
        return "swiglustep" if _of_layer(self.limits, layer) else "swiglu"


def decode_config(data: bytes) -> object:
    """What a JSON file of a model's folder holds: Python writes them, with Infinity and NaN, which JSON does not have.

    Raises
    ------
    ValueError
        It is no such text, or nested too deeply.
    """
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def language_fields(raw: Mapping[str, object]) -> dict[str, object]:
    """The fields of a config.json; where those of the language model are inside, in text_config, they count."""
    text = raw.get("text_config")
    inner = {str(key): value for key, value in text.items() if value is not None} if isinstance(text, dict) else {}
    return {**raw, **inner}


def read_moe_config(fields: Mapping[str, object]) -> MoeConfig:
    """From the fields of the language model; what is of another type than expected is not known."""
    top_k, limits = _first(fields, TOP_K), fields.get(LIMITS)
    name = MODELS.get(str(fields.get("model_type"))) or _first(fields, ACTIVATION)
    return MoeConfig(
        top_k=_top_k(top_k),
        activation=name if isinstance(name, str) else "",
        limits=tuple(one if isinstance(one, int | float) else None for one in limits)
        if isinstance(limits, list)
        else (),
        experts=first_size(fields, EXPERTS),
        hidden=first_size(fields, HIDDEN),
        inter=first_size(fields, INTER),
    )


def _top_k(found: object) -> tuple[int, ...]:
    """One for all layers or one a layer, 0 for a layer of which it is not known; empty where none is."""
    values = found if isinstance(found, list) else [found]
    known = tuple(one if type(one) is int else 0 for one in values)
    return known if any(known) else ()


def first_size(fields: Mapping[str, object], names: Sequence[str]) -> int:
    """The first of these fields that is there and not 0: a number, or one a layer where all are alike; else 0.

    Numbers that no tensor has, below 1 or from 2**31 on, are 0.
    """
    found = next((fields[name] for name in names if fields.get(name)), 0)
    values = found if isinstance(found, list) else [found]
    size = values[0]
    return size if type(size) is int and 0 < size < 1 << 31 and values.count(size) == len(values) else 0


def _first(fields: Mapping[str, object], names: Sequence[str]) -> object:
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def _of_layer(values: Sequence[T], layer: int | None) -> T | None:
    """The value of a layer, where there is one for all or one a layer; else None."""
    if len(set(values)) == 1:
        return values[0]
    return values[layer] if layer is not None and layer < len(values) else None
