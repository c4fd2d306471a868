"""Writes the checkpoints of this folder: python make.py FOLDER.

They were made on a CPU with nvidia-modelopt 0.47.0, compressed-tensors 0.20.1, transformers 5.24.0 and torch 2.13.0,
by those packages' own quantisers and exporters, from random tiny models. `decoded.safetensors` holds two layers as the
same packages decode them. The tests read the committed files, so they need none of these packages.
"""

import sys
from pathlib import Path

import torch
from compressed_tensors.compressors import (  # type: ignore[import-not-found]
    ModelCompressor,
    unpack_fp4_from_uint8,
)
from compressed_tensors.quantization import (  # type: ignore[import-not-found]
    QuantizationConfig,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize  # type: ignore[import-not-found]
from compressed_tensors.quantization.utils import (  # type: ignore[import-not-found]
    calculate_qparams,
    generate_gparam,
)
from modelopt.torch import quantization as mtq  # type: ignore[import-not-found]
from modelopt.torch.export import export_hf_checkpoint  # type: ignore[import-not-found]
from modelopt.torch.quantization.qtensor import NVFP4QTensor  # type: ignore[import-not-found]
from safetensors.torch import load_file, save_file
from transformers import (  # type: ignore[import-not-found]
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "tie_word_embeddings": False,
}


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"])
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def moe():
    torch.manual_seed(0)
    experts = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(**SIZES, **experts, architectures=["Qwen3MoeForCausalLM"])
    return Qwen3MoeForCausalLM(config).to(torch.bfloat16).eval()


def by_modelopt(model, recipe, path):
    def calibrate(model):
        for _ in range(2):
            model(torch.randint(0, 64, (8, 64)))

    model = mtq.quantize(model, getattr(mtq, recipe), calibrate)
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=str(path))
    tensors = load_file(path / "model.safetensors")
    decoded = {}
    for name in layers(tensors):
        weight = tensors[f"{name}.weight"]
        stored = NVFP4QTensor((weight.shape[0], 2 * weight.shape[1]), torch.float32, weight)
        decoded[name] = stored.dequantize(
            dtype=torch.float32,
            scale=tensors[f"{name}.weight_scale"],
            double_scale=tensors[f"{name}.weight_scale_2"],
            block_sizes={-1: 16},
        )
    save_file(decoded, path / "decoded.safetensors")


def by_compressed_tensors(model, preset, path):
    scheme = preset_name_to_scheme(preset, ["Linear"])
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    apply_quantization_config(model, config)
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
            module.input_global_scale.data.fill_(float("nan"))  # nobody may read it
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(path)
    compressor.update_config(path)
    tensors = load_file(path / "model.safetensors")
    decoded = {}
    for name in layers(tensors):
        packed = tensors[f"{name}.weight_packed"]
        decoded[name] = dequantize(
            x_q=unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1], dtype=torch.float32),
            scale=tensors[f"{name}.weight_scale"].float(),
            args=scheme.weights,
            global_scale=tensors[f"{name}.weight_global_scale"],
            dtype=torch.float32,
        )
    save_file(decoded, path / "decoded.safetensors")


def layers(tensors):
    """Two layers, of those that are there."""
    names = (
        "model.layers.0.self_attn.k_proj",
        "model.layers.0.mlp.down_proj",
        "model.layers.0.mlp.experts.3.down_proj",
    )
    return [name for name in names if f"{name}.weight_scale" in tensors]


def main(folder):
    by_modelopt(llama(), "NVFP4_DEFAULT_CFG", folder / "modelopt-nvfp4")
    by_modelopt(llama(), "W4A16_NVFP4_CFG", folder / "modelopt-w4a16")
    by_modelopt(moe(), "NVFP4_DEFAULT_CFG", folder / "modelopt-moe")
    by_compressed_tensors(llama(), "NVFP4A16", folder / "compressed-tensors-nvfp4a16")
    by_compressed_tensors(llama(), "NVFP4", folder / "compressed-tensors-nvfp4")
    for file in folder.glob("*/generation_config.json"):
        file.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
