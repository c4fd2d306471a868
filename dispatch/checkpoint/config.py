"""One answer per module from hf_quant_config.json and config.json."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ...errors import InvalidInput, Unsupported, message
from ...kernels.moe.model_config import decode_config, language_fields, read_moe_config
from .compressed import CompressedTensorsRules
from .rules import Answer, ModelOptRules, NoRules, Rules
from .structs import CtConfig, HfQuantFile, ModelConfig, ModelOptConfig

__all__ = ["QuantConfig", "read_quant_config"]

T = TypeVar("T")

QUANT_FILE = "hf_quant_config.json"
MODEL_FILE = "config.json"
MODELOPT_METHODS = ("modelopt", "modelopt_fp4", "modelopt_mixed", "nvfp4")
FIELD_TYPES: dict[str, type] = {
    **dict.fromkeys(("model_type", "dtype", "torch_dtype"), str),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), int),
    "tie_word_embeddings": bool,
    "quantization_config": dict,
}
IMPLIED = {"modelopt_fp4": "NVFP4", "nvfp4": "NVFP4"}  # the algorithm of a method that says no quant_algo


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantConfig:
    """How a checkpoint says that it is quantised.

    Attributes
    ----------
    source
        The file that the answers come from; "" when there is none.
    model
        The rest of config.json, as far as it is used.
    """

    source: str
    model: ModelConfig
    rules: Rules

    def answer(self, name: str) -> Answer:
        """Whether the linear layer is quantised, and its group size.

        Parameters
        ----------
        name
            Full name, in any of its spellings; fused names (qkv_proj, gate_up_proj) answer for their parts.

        Raises
        ------
        InvalidInput
            The parts of a fused linear are quantised differently.
        """
        return self.rules.answer(name)

    @property
    def dialect(self) -> str:
        """ "modelopt" or "compressed-tensors", whose config this is; "" without one."""
        return self.rules.dialect

    @property
    def is_there(self) -> bool:
        """Whether any file says something about quantisation."""
        return bool(self.source)


def read_quant_config(folder: Path) -> QuantConfig:
    """Read both files of a checkpoint's folder; either may be missing.

    When both are there and differ, a warning says so, and the one with `quantized_layers` counts, else
    hf_quant_config.json.

    Raises
    ------
    InvalidInput
        A file cannot be read, or a field has the wrong type.
    Unsupported
        The algorithm or the method is none that holds NVFP4 weights; it is named.
    """
    model = _read_model(folder / MODEL_FILE)
    found = _from_quant_file(folder / QUANT_FILE)
    inner = model.quantization_config
    if inner is None:
        return QuantConfig(source=QUANT_FILE if found else "", model=model, rules=found or NoRules())
    if found is not None and _is_modelopt(inner):
        other = _modelopt(inner, MODEL_FILE)
        if list(found.signature()) != list(other.signature()):
            chosen = other if other.layers and not found.layers else found
            warnings.warn(
                f"{QUANT_FILE} and {MODEL_FILE} of {folder} differ about what is quantised; {chosen.source} counts",
                UserWarning,
                stacklevel=3,
            )
            return QuantConfig(source=chosen.source, model=model, rules=chosen)
    if found is not None:
        return QuantConfig(source=QUANT_FILE, model=model, rules=found)
    return QuantConfig(source=MODEL_FILE, model=model, rules=_rules(inner))


def _from_quant_file(file: Path) -> ModelOptRules | None:
    if not file.exists():
        return None
    return ModelOptRules(_decode(file, HfQuantFile).quantization, QUANT_FILE)


def _read_model(file: Path) -> ModelConfig:
    if not file.exists():
        return ModelConfig()
    raw = _decode(file, dict[str, Any])
    fields = language_fields(raw)  # what quantises the model may be in either place
    # Some models have one value per layer where others have one: what is of another type is not known.
    known = {name: fields[name] for name, kind in FIELD_TYPES.items() if type(fields.get(name)) is kind}
    return msgspec.structs.replace(_convert(known, ModelConfig, file), moe=read_moe_config(fields))


def _rules(inner: dict[str, Any]) -> Rules:
    method = str(inner.get("quant_method", "")).lower()
    if method == "compressed-tensors":
        return CompressedTensorsRules(_convert(inner, CtConfig, MODEL_FILE), MODEL_FILE)
    if _is_modelopt(inner):
        return _modelopt(inner, MODEL_FILE)
    raise Unsupported(
        message(
            f"{MODEL_FILE}: unsupported quant_method",
            got=repr(inner.get("quant_method")),
            expected=f"one of {', '.join((*MODELOPT_METHODS, 'compressed-tensors'))}",
        )
    )


def _is_modelopt(inner: dict[str, Any]) -> bool:
    method = str(inner.get("quant_method", "")).lower()
    return method in MODELOPT_METHODS or "moe_quant_algo" in inner or (not method and "quantization" in inner)


def _modelopt(inner: dict[str, Any], source: str) -> ModelOptRules:
    nested = inner.get("quantization")
    fields = {**inner, **nested} if isinstance(nested, dict) else inner
    config = _convert(fields, ModelOptConfig, source)
    implied = IMPLIED.get(str(inner.get("quant_method", "")).lower())
    if config.quant_algo is None and implied and not config.quantized_layers:
        config = msgspec.structs.replace(config, quant_algo=implied)
    return ModelOptRules(config, source)


def _decode(file: Path, kind: type[T]) -> T:
    try:
        return msgspec.convert(decode_config(file.read_bytes()), kind)
    except OSError as error:
        raise InvalidInput(message(f"{file} cannot be read", got=error)) from error
    except (msgspec.ValidationError, ValueError) as error:
        raise InvalidInput(message(f"{file} is not what a checkpoint has there", got=error)) from error


def _convert(fields: dict[str, Any], kind: type[T], source: Path | str) -> T:
    try:
        return msgspec.convert(fields, kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # the latter: half a surrogate pair
        raise InvalidInput(message(f"{source} is not what a checkpoint has there", got=error)) from error
