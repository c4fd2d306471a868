"""`nvfp4.convert_` on models of transformers with experts."""

from pathlib import Path

import nvfp4
import pytest
import torch
from safetensors.torch import load_file

from .moe_models import EXPERTS, HIDDEN, INTER, QWEN, TOP_K, assert_alike, decoded, fused

DATA = Path(__file__).parent / "checkpoint" / "data"
pytestmark = pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning")


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Qwen3Moe", {"num_experts": EXPERTS, "moe_intermediate_size": INTER}),
        ("Mixtral", {"num_local_experts": EXPERTS}),
        ("GptOss", {"num_local_experts": EXPERTS}),
    ],
)
def test_models_of_transformers(family, options):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        hidden_size=HIDDEN, intermediate_size=INTER, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=64, num_experts_per_tok=TOP_K, **options,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    twin = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    twin.load_state_dict(model.state_dict())
    nvfp4.convert_(model)
    assert len(fused(model)) == 1
    for name, module in model.named_modules():
        if isinstance(module, nvfp4.nn.Linear):
            twin.get_submodule(name).weight.data.copy_(nvfp4.dequantize(module.packed))
    experts = twin.get_submodule(fused(model)[0])
    w13, w2 = decoded(model.get_submodule(fused(model)[0]))
    if family == "GptOss":
        w13, w2 = torch.stack((w13[:, :INTER], w13[:, INTER:]), 2).flatten(1, 2).transpose(1, 2), w2.transpose(1, 2)
    experts.gate_up_proj.data.copy_(w13)
    experts.down_proj.data.copy_(w2)
    with torch.inference_mode():
        tokens = torch.arange(10)[None]
        assert_alike(model(tokens).logits, twin(tokens).logits)


def test_an_exported_checkpoint_fills_a_model_of_transformers():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.AutoConfig.from_pretrained(DATA / "modelopt-moe")
    del config.quantization_config
    model, twin = (transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval() for _ in range(2))
    nvfp4.convert_(model, checkpoint=DATA / "modelopt-moe")
    name = "model.layers.0.mlp.experts"
    assert fused(model) == [name]
    stored, state = load_file(DATA / "modelopt-moe" / "model.safetensors"), model.state_dict()
    assert set(state) == {key for key in stored if not key.endswith("input_scale")}
    assert all(
        torch.equal(t.reshape(-1).view(torch.uint8), stored[key].reshape(-1).view(torch.uint8))
        for key, t in state.items()
    )
    twin.load_state_dict({key: t for key, t in state.items() if "proj" not in key}, strict=False)

    def exact(layer):
        return nvfp4.dequantize(*(stored[f"{layer}.{leaf}"] for leaf in ("weight", "weight_scale", "weight_scale_2")))

    for layer, module in model.named_modules():
        if isinstance(module, nvfp4.nn.Linear):
            twin.get_submodule(layer).weight.data.copy_(exact(layer))
    experts = twin.get_submodule(name)
    for e in range(config.num_experts):
        gate, up, down = (exact(f"{name}.{e}.{role}") for role in QWEN)
        experts.gate_up_proj.data[e].copy_(torch.cat((gate, up)))
        experts.down_proj.data[e].copy_(down)
    with torch.inference_mode():
        tokens = torch.arange(10)[None]
        assert_alike(model(tokens).logits, twin(tokens).logits)
