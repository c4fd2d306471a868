"""Checkpoints in NVFP4, in both dialects: written here, or by the exporters of nvidia-modelopt and compressed-tensors.

The third-party ones take a model of transformers on a CPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nvfp4
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

__all__ = ["by_compressed_tensors", "by_modelopt", "decoded", "write"]

CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
ACTIVATION_SCALES = (".input_scale", ".input_global_scale")
WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "symmetric": True, "group_size": 16}


def write(model: nn.Module, config: dict[str, Any], dialect: str, folder: Path) -> None:
    """Quantise the linear layers of a model by `nvfp4.quantize`; write them as `dialect` names them.

    Parameters
    ----------
    model
        Its parameters are written under their names.
    config
        What config.json will hold, beside the quantisation.
    dialect
        "modelopt" or "compressed-tensors".
    folder
        Is made.
    """
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        weight, scale, factor = nvfp4.quantize(tensors.pop(f"{name}.weight"))
        tensors[f"{name}.weight_scale"] = scale
        if dialect == "modelopt":  # its global scale multiplies
            tensors |= {f"{name}.weight": weight, f"{name}.weight_scale_2": factor}
        else:  # and this one divides
            tensors |= {f"{name}.weight_packed": weight, f"{name}.weight_global_scale": 1 / factor.reshape(1)}
    if dialect == "modelopt":
        quantization: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": 16}
    else:
        groups = {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}}
        quantization = {"quant_method": dialect, "format": "nvfp4-pack-quantized", "config_groups": groups}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(config | {"quantization_config": quantization | {"ignore": []}}, indent=1)
    (folder / "config.json").write_text(text)


def by_modelopt(model: Any, recipe: str, calibrate: Callable[[Any], object], folder: Path) -> None:
    """Quantise by a recipe of nvidia-modelopt, such as "W4A16_NVFP4_CFG", and have its exporter write."""
    from modelopt.torch import quantization  # type: ignore[import-not-found]
    from modelopt.torch.export import export_hf_checkpoint  # type: ignore[import-not-found]

    quantised = quantization.quantize(model, getattr(quantization, recipe), calibrate)
    with torch.inference_mode():
        export_hf_checkpoint(quantised, export_dir=str(folder))


def by_compressed_tensors(model: Any, preset: str, folder: Path) -> None:
    """Quantise by a preset of compressed-tensors, such as "NVFP4A16", and have it compress and write.

    Input scales of a preset with 4-bit activations are NaN: nobody calibrated them, and nobody may read them.
    """
    from compressed_tensors.compressors import ModelCompressor  # type: ignore[import-not-found]
    from compressed_tensors.quantization import (  # type: ignore[import-not-found]
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import (  # type: ignore[import-not-found]
        calculate_qparams,
        generate_gparam,
    )

    scheme = preset_name_to_scheme(preset, ["Linear"])
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        weight = module.weight.data.float()
        blocks = weight.reshape(weight.shape[0], -1, 16)
        divisor = generate_gparam(weight.min().reshape(1), weight.max().reshape(1))
        arguments = module.quantization_scheme.weights
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), arguments, global_scale=divisor)
        module.weight_global_scale.data.copy_(divisor)
        module.weight_scale.data.copy_(scale)
        if hasattr(module, "input_global_scale"):
            module.input_global_scale.data.fill_(float("nan"))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


def decoded(folder: Path) -> dict[str, Tensor]:
    """A checkpoint's tensors with the NVFP4 weights dense in float32, by the formula alone: code * scale * factor.

    Scales of activations are left out: they belong to kernels with 4-bit activations.
    """
    stored = load_file(folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in stored.items() if not name.endswith(ACTIVATION_SCALES)}
    for name in [name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")]:
        scale = tensors.pop(f"{name}.weight_scale").float().repeat_interleave(16, dim=-1)
        if f"{name}.weight_packed" in tensors:
            packed, factor = tensors.pop(f"{name}.weight_packed"), 1 / tensors.pop(f"{name}.weight_global_scale")
        else:
            packed, factor = tensors.pop(f"{name}.weight"), tensors.pop(f"{name}.weight_scale_2")
        nibbles = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).int()  # the low one is the even column
        values = torch.tensor([*CODES, *(-code for code in CODES)])[nibbles]
        tensors[f"{name}.weight"] = values * scale * factor
    return tensors
