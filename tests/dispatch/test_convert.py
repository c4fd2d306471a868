"""`nvfp4.convert_`: models quantised in place, and models filled from checkpoints."""

from pathlib import Path

import nvfp4
import pytest
import torch
from nvfp4.dispatch.checkpoint import open_checkpoint
from nvfp4.errors import InvalidInput, Unsupported
from nvfp4.testing.checkpoints import HF_QUANT, modelopt, write_checkpoint
from safetensors.torch import load_file
from torch import nn

DATA = Path(__file__).parent / "checkpoint" / "data"
EXPORTED = ("modelopt-nvfp4", "modelopt-w4a16", "compressed-tensors-nvfp4", "compressed-tensors-nvfp4a16")
LINEARS = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]

pytestmark = pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning")


class Attention(nn.Module):
    """Something of the sizes of attention, without attending."""

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(64, 64, bias=False)
        self.k_proj = nn.Linear(64, 32, bias=False)
        self.v_proj = nn.Linear(64, 32, bias=False)
        self.o_proj = nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return self.o_proj(self.q_proj(x) * torch.cat((self.k_proj(x), self.v_proj(x)), -1))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(64, 96, bias=False)
        self.up_proj = nn.Linear(64, 96, bias=False)
        self.down_proj = nn.Linear(96, 64, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(64)
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(64)
        self.mlp = Mlp()

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """Modules called as in transformers' Llama, small enough to write here."""

    def __init__(self, tied=False):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(64, 64)
        self.model.layers = nn.ModuleList([Layer()])
        self.model.norm = nn.RMSNorm(64)
        self.lm_head = nn.Linear(64, 64, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens):
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))


TOKENS = torch.arange(10)


def make(device="cpu", **options):
    torch.manual_seed(0)
    with torch.device(device):
        return Model(**options).to(torch.bfloat16).eval()


def converted(model):
    return sorted(name for name, module in model.named_modules() if isinstance(module, nvfp4.nn.Linear))


def dense_twin(model):
    """The same model with the weights decoded."""
    twin = make()
    twin.load_state_dict(
        {name: tensor for name, tensor in model.state_dict().items() if "proj" not in name}, strict=False
    )
    for name in converted(model):
        packed = model.get_submodule(name).packed
        twin.get_submodule(name).weight.data.copy_(nvfp4.dequantize(packed))
    return twin


def test_linears_that_are_there_are_quantised_heads_and_routers_left():
    model = make()
    model.model.layers[0].mlp.gate = nn.Linear(64, 16)
    model.eval().model.odd = nn.Linear(24, 8).eval()
    assert nvfp4.convert_(model) is model
    assert converted(model) == sorted(f"model.layers.0.{name}" for name in LINEARS)
    assert not any(module.training for module in model.modules())
    with torch.inference_mode():
        y, ref = model(TOKENS), dense_twin(model)(TOKENS)
    assert float((y - ref).norm() / ref.norm()) < 0.02


def test_a_filter_chooses():
    model = make()
    nvfp4.convert_(model, lambda module, name: "mlp" in name and module.out_features == 96)
    assert converted(model) == ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]


def test_what_a_filter_chooses_must_be_quantisable():
    with pytest.raises(InvalidInput, match="in_features=24"):
        nvfp4.convert_(nn.Sequential(nn.Linear(24, 8)), lambda module, name: True)


def test_subclasses_of_linear_are_left_alone():
    attention = nn.MultiheadAttention(64, 4)  # reads the weight of its out_proj by itself
    nvfp4.convert_(attention)
    assert not converted(attention)


def test_a_layer_in_two_places_stays_one():
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)})
    model["c"] = model["a"]
    nvfp4.convert_(model)
    assert converted(model) == ["a", "b"] and model["c"] is model["a"] and model["b"] is not model["a"]


def test_a_head_in_two_places_stays_dense():
    model = nn.ModuleDict({"proj": nn.Linear(64, 64)})
    model["lm_head"] = model["proj"]
    assert not converted(nvfp4.convert_(model))


def test_a_layer_in_two_places_is_filled_from_a_checkpoint(tmp_path):
    model = make("meta")
    model.model.again = model.model.layers[0].mlp
    nvfp4.convert_(model, checkpoint=DATA / "modelopt-nvfp4")
    assert not any(tensor.is_meta for tensor in model.state_dict(keep_vars=True).values())
    assert isinstance(model.model.again.up_proj, nvfp4.nn.Linear)
    model = make("meta")
    model.model.up = model.model.layers[0].mlp.up_proj
    nvfp4.convert_(model, checkpoint=DATA / "modelopt-nvfp4")
    assert model.model.up is model.model.layers[0].mlp.up_proj and model.model.up.packed.out_features == 96


def test_a_layer_that_cannot_be_quantised_is_named():
    model = make()
    model.model.layers[0].mlp.up_proj.weight.data[3, 5] = float("nan")
    with pytest.raises(InvalidInput, match=r"layer model\.layers\.0\.mlp\.up_proj: .*NaN"):
        nvfp4.convert_(model)


def test_a_linear_alone_has_no_place_to_be_replaced():
    with pytest.raises(InvalidInput, match=r"use nvfp4\.nn\.Linear\.from_linear"):
        nvfp4.convert_(nn.Linear(64, 64))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", EXPORTED)
def test_a_checkpoint_fills_the_model(name, device):
    model = nvfp4.convert_(make(device), checkpoint=DATA / name)
    assert converted(model) == sorted(f"model.layers.0.{linear}" for linear in LINEARS)
    stored = load_file(DATA / name / "model.safetensors")
    state = model.state_dict()
    ignored = {tensor for tensor in stored if "input" in tensor and "norm" not in tensor}
    assert set(state) == set(stored) - ignored  # the names of the checkpoint
    for tensor, values in state.items():
        assert torch.equal(values.reshape(-1).view(torch.uint8), stored[tensor].reshape(-1).view(torch.uint8)), tensor
    with torch.inference_mode():
        y, ref = model(TOKENS), dense_twin(model)(TOKENS)
    assert y.dtype == torch.bfloat16 and float((y - ref).norm() / ref.norm()) < 0.02


def test_all_kinds_of_one_model_agree():
    with torch.inference_mode():
        results = [nvfp4.convert_(make("meta"), checkpoint=DATA / name)(TOKENS) for name in EXPORTED]
    assert torch.equal(results[0], results[1]) and torch.equal(results[2], results[3])  # W4A4 files run weight-only
    assert float((results[0] - results[2]).norm() / results[0].norm()) < 0.2


def test_other_spellings_of_the_modules_are_found(tmp_path):
    stored = load_file(DATA / "modelopt-nvfp4" / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in stored.items()}
    path = write_checkpoint(tmp_path / "renamed", renamed)
    with torch.inference_mode():
        y = nvfp4.convert_(make("meta"), checkpoint=path)(TOKENS)
        assert torch.equal(y, nvfp4.convert_(make("meta"), checkpoint=DATA / "modelopt-nvfp4")(TOKENS))


def without(tmp_path, *gone, more=None, **options):
    stored = load_file(DATA / "modelopt-nvfp4" / "model.safetensors")
    kept = {name: tensor for name, tensor in stored.items() if not name.startswith(gone)} if gone else stored
    return write_checkpoint(tmp_path / "changed", {**kept, **(more or {})}, **options)


def test_tied_embeddings_stay_tied(tmp_path):
    path = without(tmp_path, "lm_head", config={"tie_word_embeddings": True})
    model = nvfp4.convert_(make("meta", tied=True), checkpoint=path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.lm_head.weight.is_meta


def test_a_quantised_head_is_converted_too(tmp_path):
    more = modelopt("lm_head", 64, 64)
    with pytest.warns(UserWarning, match="lm_head"):
        checkpoint = open_checkpoint(without(tmp_path, "lm_head", more=more))
    assert "lm_head" in converted(nvfp4.convert_(make("meta"), checkpoint=checkpoint))


def test_layers_that_a_dense_checkpoint_keeps_dense_stay_so(tmp_path):
    name = "model.layers.0.self_attn.k_proj"
    path = without(tmp_path, name, more={f"{name}.weight": torch.ones(32, 64).bfloat16()}, hf=HF_QUANT | {
        "exclude_modules": ["lm_head", "*.k_proj"]})  # fmt: skip
    model = nvfp4.convert_(make("meta"), checkpoint=path)
    assert name not in converted(model)
    assert torch.equal(model.get_submodule(name).weight, torch.ones(32, 64).bfloat16())


def test_prediction_layers_and_kv_scales_are_no_hindrance(tmp_path):
    more = modelopt("mtp.layers.0.mlp.up_proj", 32, 64) | modelopt("model.layers.1.mlp.up_proj", 32, 64)
    more |= {"mtp.norm.weight": torch.ones(64), "model.layers.0.self_attn.k_proj.k_scale": torch.ones(())}
    path = without(tmp_path, more=more, config={"num_hidden_layers": 1})
    assert len(converted(nvfp4.convert_(make("meta"), checkpoint=path))) == len(LINEARS)


@pytest.mark.parametrize(
    ("gone", "more", "error", "words"),
    [
        (("model.norm",), {}, InvalidInput, r"lacks tensors of the model; got no model\.norm\.weight"),
        (("model.layers.0.mlp.up_proj",), {}, InvalidInput, r"no model\.layers\.0\.mlp\.up_proj\.weight"),
        (("model.layers.0.mlp.up_proj.weight_scale_2",), {}, InvalidInput, r"missing .*up_proj\.weight_scale_2"),
        ((), {"model.extra.weight": torch.ones(4)}, InvalidInput, r"lacks tensors of the checkpoint; got model\.extra"),
        ((), modelopt("model.layers.0.mlp.more_proj", 32, 64), InvalidInput, r"no Linear for .*mlp\.more_proj"),
        ((), modelopt("model.layers.0.mlp.up_proj", 48, 64), InvalidInput, r"mlp\.up_proj has another size.*48 x 64"),
        ((), {"model.norm.weight": torch.ones(32)}, InvalidInput, r"wrong shape of model\.norm\.weight.*\(32,\)"),
        (
            ("model.layers.0.mlp.up_proj",),
            {
                "model.layers.0.mlp.up_proj.weight": torch.zeros(96, 64).to(torch.float8_e4m3fn),
                "model.layers.0.mlp.up_proj.weight_scale": torch.ones(()),
            },
            Unsupported,
            r"other formats; got FP8: model\.layers\.0\.mlp\.up_proj",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, gone, more, error, words):
    with pytest.raises(error, match=words):
        nvfp4.convert_(make("meta"), checkpoint=without(tmp_path, *gone, more=more))


def test_nan_in_a_layer_is_named(tmp_path):
    name = "model.layers.0.mlp.up_proj"
    stored = load_file(DATA / "modelopt-nvfp4" / "model.safetensors")
    stored[f"{name}.weight_scale"].view(torch.uint8)[1, 1] = 0xFF
    with pytest.raises(InvalidInput, match=r"layer model\.layers\.0\.mlp\.up_proj: weight_scale holds 1 NaN"):
        nvfp4.convert_(make("meta"), checkpoint=write_checkpoint(tmp_path / "nan", stored))


def test_a_filter_cannot_keep_a_weight_dense_that_is_not_there():
    with pytest.raises(InvalidInput, match=r"filter_fn refuses model\.layers\.0\.mlp\.\w+; got only an NVFP4 weight"):
        nvfp4.convert_(make("meta"), lambda module, name: "mlp" not in name, checkpoint=DATA / "modelopt-nvfp4")


def test_experts_that_are_linears_are_converted(tmp_path):
    tensors = {}
    for expert in range(2):
        tensors |= modelopt(f"mlp.experts.{expert}.up_proj", 32, 64, expert)
        tensors |= modelopt(f"mlp.experts.{expert}.down_proj", 64, 32, expert)
    model = nn.Module()
    model.mlp = nn.Module()
    model.mlp.experts = nn.ModuleList()
    for _ in range(2):
        expert = nn.Module()
        expert.up_proj, expert.down_proj = nn.Linear(64, 32, bias=False), nn.Linear(32, 64, bias=False)
        model.mlp.experts.append(expert)
    nvfp4.convert_(model, checkpoint=write_checkpoint(tmp_path / "moe", tensors))
    assert len(converted(model)) == 4
    assert torch.equal(model.mlp.experts[1].up_proj.weight, tensors["mlp.experts.1.up_proj.weight"])


def test_experts_without_linears_of_their_own_are_named():
    path = DATA / "modelopt-moe"
    with pytest.raises(
        InvalidInput, match=r"no Linear for .*mlp\.experts\.0\.down_proj.*experts must be Linear modules"
    ):
        nvfp4.convert_(make("meta"), checkpoint=path)


def test_buffers_that_no_checkpoint_holds_must_be_real():
    model = make("meta")
    model.model.register_buffer("inv_freq", torch.ones(4, device="meta"), persistent=False)
    with pytest.raises(InvalidInput, match=r"got no model\.inv_freq; .*buffers that are computed on a real device"):
        nvfp4.convert_(model, checkpoint=DATA / "modelopt-nvfp4")
    model = make("meta")
    model.model.register_buffer("inv_freq", torch.ones(4), persistent=False)
    nvfp4.convert_(model, checkpoint=DATA / "modelopt-nvfp4")
    assert torch.equal(model.model.inv_freq, torch.ones(4))


def test_a_model_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.AutoConfig.from_pretrained(DATA / "modelopt-nvfp4")
    del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    rotary = {name: buffer.clone() for name, buffer in model.named_buffers()}
    nvfp4.convert_(model, checkpoint=DATA / "modelopt-nvfp4")
    assert len(converted(model)) == len(LINEARS)
    assert all(torch.equal(buffer, model.get_buffer(name)) for name, buffer in rotary.items())
    twin = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    twin.load_state_dict({n: t for n, t in model.state_dict().items() if "proj" not in n}, strict=False)
    for name in converted(model):
        twin.get_submodule(name).weight.data.copy_(nvfp4.dequantize(model.get_submodule(name).packed))
    with torch.inference_mode():
        y, ref = model(TOKENS[None]).logits, twin(TOKENS[None]).logits
    assert float((y - ref).norm() / ref.norm()) < 0.02


@pytest.mark.parametrize("model", [None, 3, {"a": torch.zeros(16, 16)}])
def test_only_models_are_converted(model):
    with pytest.raises(InvalidInput, match=r"convert_ takes a model; got .*; expected a torch\.nn\.Module"):
        nvfp4.convert_(model)


@pytest.mark.parametrize("path", [3, b"folder", ["folder"]])
def test_what_is_no_path_names_no_checkpoint(path):
    with pytest.raises(InvalidInput, match=r"this names no checkpoint; got (int|bytes|list); expected the path of"):
        nvfp4.convert_(nn.Sequential(nn.Linear(16, 16)), checkpoint=path)
