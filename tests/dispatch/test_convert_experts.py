"""`nvfp4.convert_` on models with experts: 3-D parameters, blocks of linear layers, and what is left alone."""

from pathlib import Path

import nvfp4
import pytest
import torch
from nvfp4.dispatch.checkpoint import open_checkpoint
from nvfp4.dispatch.convert_experts import FusedBlock
from nvfp4.dispatch.moe_probe import probe_block, probe_stacked
from nvfp4.errors import InvalidInput, Unsupported
from nvfp4.testing.checkpoints import as_compressed_tensors, modelopt, write_checkpoint
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import gelu, linear, silu, softmax

DATA = Path(__file__).parent / "checkpoint" / "data"
EXPERTS, HIDDEN, INTER, TOP_K = 4, 64, 32, 2
QWEN, MIXTRAL = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
pytestmark = pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning")


class Stacked(nn.Module):
    """Experts as 3-D parameters, as in transformers 5; options change what it computes."""

    def __init__(self, act=silu, limit=None, transposed=False, interleaved=False, bias=False, gated=True, odd=False):
        super().__init__()
        f = INTER * (2 if gated else 1)
        self.act, self.limit, self.transposed, self.interleaved, self.odd = act, limit, transposed, interleaved, odd
        shapes = {"gate_up_proj" if gated else "up_proj": (EXPERTS, f, HIDDEN), "down_proj": (EXPERTS, HIDDEN, INTER)}
        for name, (e, n, k) in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn((e, k, n) if transposed else (e, n, k)) * 0.2))
            if bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(e, n) * 0.2))
        self.first = next(iter(shapes))

    def product(self, x, name, e):
        weight = getattr(self, name)[e]
        bias = getattr(self, f"{name}_bias")[e] if f"{name}_bias" in self._parameters else None
        return linear(x, weight.t() if self.transposed else weight, bias)

    def one(self, x, e):
        a = self.product(x, self.first, e)
        if self.first == "up_proj":
            return self.product(torch.relu(a).square(), "down_proj", e)
        g, u = (a[..., ::2], a[..., 1::2]) if self.interleaved else a.chunk(2, -1)
        if self.limit is not None:
            g, u = g.clamp(max=self.limit), u.clamp(-self.limit, self.limit)
        return self.product(self.act(g) * (u + 0.25 if self.odd else u), "down_proj", e)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        y = torch.zeros_like(hidden_states)
        for e in top_k_index.unique().tolist():
            token, slot = torch.where(top_k_index == e)
            y.index_add_(0, token, (self.one(hidden_states[token], e) * top_k_weights[token, slot, None]).to(y.dtype))
        return y


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN) * 0.3)

    def forward(self, x):
        return softmax(linear(x, self.weight).float(), -1).topk(TOP_K, -1)


class StackedBlock(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.gate, self.experts = Router(), Stacked(**options)

    def forward(self, x):
        rows = x.reshape(-1, HIDDEN)
        weights, ids = self.gate(rows)
        return self.experts(rows, ids, weights).reshape(x.shape)


class Expert(nn.Module):
    def __init__(self, names, bias=False):
        super().__init__()
        self.names, self.act_fn = names, nn.SiLU()
        for name in names:
            sizes = (INTER, HIDDEN) if name == names[-1] else (HIDDEN, INTER)
            self.add_module(name, nn.Linear(*sizes, bias=bias))

    def forward(self, x):
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(self.act_fn(gate(x)) * up(x))


class ListBlock(nn.Module):
    """A router and experts as linear layers, as in transformers 4."""

    def __init__(self, names=QWEN, renormalize=True, logits=True, bias=False, scoring=softmax, factor=1.0):
        super().__init__()
        self.top_k, self.renormalize, self.logits, self.scoring, self.factor = (
            TOP_K,
            renormalize,
            logits,
            scoring,
            factor,
        )
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList([Expert(names, bias) for _ in range(EXPERTS)])

    def forward(self, hidden_states):
        x = hidden_states.view(-1, hidden_states.shape[-1])
        logits = self.gate(x)
        weights, ids = self.scoring(logits.float(), -1).topk(self.top_k, -1)
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            y.index_add_(0, token, expert(x[token]) * self.factor * weights[token, slot, None].to(x.dtype))
        return (y.reshape(hidden_states.shape), logits) if self.logits else y.reshape(hidden_states.shape)


def model_of(block, name="mlp", device=None):
    model = nn.Module()
    model.model = nn.Module()
    model.model.layers = nn.ModuleList([nn.Module()])
    model.model.layers[0].add_module(name, block)
    model = model.to(torch.bfloat16).eval()
    return model.to_empty(device=device) if device else model


def stacked_model(device=None, **options):
    torch.manual_seed(0)
    return model_of(StackedBlock(**options), device=device)


def list_model(name="mlp", device=None, **options):
    torch.manual_seed(0)
    return model_of(ListBlock(**options), name, device)


def block_of(model):
    return next(iter(model.model.layers[0].children()))


def fused(model):
    return [name for name, module in model.named_modules() if isinstance(module, nvfp4.nn.FusedMoE)]


def decoded(made):
    """w13 [E, F, H] and w2 of a FusedMoE, dense."""
    state, first, second = made.state_dict(), [], []
    for e in range(made.num_experts):
        parts = [
            nvfp4.dequantize(*(state[f"{e}.{name}.{leaf}"] for leaf in ("weight", "weight_scale", "weight_scale_2")))
            for name in made.names
        ]
        first.append(torch.cat(parts[:-1]))
        second.append(parts[-1])
    return torch.stack(first), torch.stack(second)


def with_weights(twin, w13, w2):
    """A dense model with the decoded weights of a converted one."""
    experts = block_of(twin).experts
    if isinstance(experts, nn.ModuleList):
        for e, expert in enumerate(experts):
            parts = (*w13[e].split(INTER), w2[e])
            for name, part in zip(expert.names, parts, strict=True):
                getattr(expert, name).weight.data.copy_(part)
        return twin
    if experts.interleaved:
        w13 = torch.stack((w13[:, :INTER], w13[:, INTER:]), 2).flatten(1, 2)
    turn = (lambda t: t.transpose(1, 2)) if experts.transposed else (lambda t: t)
    getattr(experts, experts.first).data.copy_(turn(w13))
    experts.down_proj.data.copy_(turn(w2))
    return twin


X = torch.randn(2, 3, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()


def assert_alike(y, ref):
    assert y.dtype == ref.dtype and float((y - ref).float().norm() / ref.float().norm()) < 0.02


OPTIONS = [
    {},
    {"act": gelu},
    {"limit": 0.5},
    {"transposed": True, "interleaved": True, "bias": True},
    {"transposed": True},
    {"bias": True},
    {"gated": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_3d_experts_that_are_there_are_quantised(options):
    model, twin = stacked_model(**options), stacked_model(**options)
    assert nvfp4.convert_(model) is model
    assert fused(model) == ["model.layers.0.mlp.experts"]
    made = block_of(model).experts
    assert not made.training and made.dtype == torch.bfloat16
    with torch.inference_mode():
        assert_alike(block_of(model)(X), block_of(with_weights(twin, *decoded(made)))(X))


def test_the_activation_is_what_the_code_computes():
    found = probe_stacked(Stacked(limit=7.0))
    assert (found.activation, found.values) == ("swiglu", {"limit": 7.0})
    assert probe_stacked(Stacked(act=lambda g: gelu(g, approximate="tanh"))).activation == "geglu_tanh"
    assert probe_stacked(Stacked(act=lambda g: gelu(g))).activation == "geglu"
    assert probe_stacked(Stacked(gated=False)).activation == "relu2"
    module = Stacked(act=lambda g: g * torch.sigmoid(1.702 * g))
    assert "something else than the activations" in probe_stacked(module)
    before = {name: tensor.clone() for name, tensor in module.named_parameters()}
    assert all(torch.equal(before[name], tensor) for name, tensor in module.named_parameters()) and module.training


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: setattr(m, "odd", True), "something else than the activations"),
        (lambda m: setattr(m, "norm", nn.RMSNorm(8)), "weights of its own: norm"),
        (lambda m: m.register_parameter("scale", nn.Parameter(torch.ones(1))), "weights of its own: scale"),
        (lambda m: setattr(m, "down_proj", nn.Parameter(torch.ones(EXPERTS, 7, 9))), "do not fit"),
        (lambda m: setattr(m, "act", None), "its forward failed"),
    ],
)
def test_experts_that_compute_something_else_stay_and_a_checkpoint_for_them_is_refused(tmp_path, change, words):
    model = stacked_model()
    change(block_of(model).experts)
    nvfp4.convert_(model)
    assert not fused(model)
    path = write_checkpoint(tmp_path / "c", separate() | router())
    with pytest.raises(
        InvalidInput, match=rf"no Linear for .*experts\.0\.down_proj.*{words}.*FusedMoE.from_checkpoint"
    ):
        nvfp4.convert_(model, checkpoint=path)


def separate(names=QWEN, name="model.layers.0.mlp.experts", bias=False):
    found = {}
    for e in range(EXPERTS):
        for i, role in enumerate(names):
            n, k = (HIDDEN, INTER) if role == names[-1] else (INTER, HIDDEN)
            found |= modelopt(f"{name}.{e}.{role}", n, k, 10 * e + i, bias=bias)
    return found


def router(name="model.layers.0.mlp"):
    g = torch.Generator().manual_seed(2)
    return {f"{name}.gate.weight": (torch.randn(EXPERTS, HIDDEN, generator=g) * 0.3).bfloat16()}


def check_against_dense(model, twin, path):
    nvfp4.convert_(model, checkpoint=path)
    made = block_of(model).experts
    twin = with_weights(twin, *decoded(made))
    block_of(twin).gate.weight.data.copy_(block_of(model).gate.weight)
    with torch.inference_mode():
        y, ref = block_of(model)(X), block_of(twin)(X)
    for one, other in zip(*((t if isinstance(t, tuple) else (t,)) for t in (y, ref)), strict=True):
        assert_alike(one, other)


@pytest.mark.filterwarnings("ignore:.*has no quantisation config")
@pytest.mark.parametrize("device", [None, "meta"])
@pytest.mark.parametrize("ct", [False, True])
def test_3d_modules_are_filled_from_experts_that_are_stored_one_by_one(tmp_path, device, ct):
    stored = separate()
    path = write_checkpoint(tmp_path / "c", (as_compressed_tensors(stored) if ct else stored) | router(), hf=None)
    model = stacked_model(device)
    nvfp4.convert_(model, checkpoint=path)
    state = {name.removeprefix("model.layers.0.mlp."): t for name, t in model.state_dict().items()}
    assert set(model.state_dict()) == set((as_compressed_tensors(stored) if ct else stored) | router())
    assert torch.equal(
        state[f"experts.3.up_proj.{'weight_packed' if ct else 'weight'}"],
        stored["model.layers.0.mlp.experts.3.up_proj.weight"],
    )
    if not ct:
        check_against_dense(stacked_model(device), stacked_model(), path)


def test_names_of_blocks_may_differ_between_model_and_checkpoint(tmp_path):
    name = "model.layers.0.block_sparse_moe"
    path = write_checkpoint(tmp_path / "c", separate(MIXTRAL, f"{name}.experts") | router(name))
    model = stacked_model("meta")
    check_against_dense(model, stacked_model(), path)
    assert block_of(model).experts.names == MIXTRAL


def stacked_files(transposed=True, interleaved=True):
    tensors, name = separate(bias=True), "model.layers.0.mlp.experts"

    def stack(roles, leaf):
        parts = [torch.stack([tensors[f"{name}.{e}.{r}.{leaf}"] for e in range(EXPERTS)]) for r in roles]
        parts = [part.view(torch.uint8) if leaf == "weight_scale" else part for part in parts]
        rows = torch.stack(parts, 2).flatten(1, 2) if interleaved and len(parts) == 2 else torch.cat(parts, 1)
        rows = rows.transpose(1, 2).contiguous() if transposed and rows.ndim == 3 else rows
        return rows.view(torch.float8_e4m3fn) if leaf == "weight_scale" else rows

    found = {}
    for leaf, roles in (("gate_up_proj", QWEN[:2]), ("down_proj", QWEN[2:])):
        found[f"{name}.{leaf}"] = stack(roles, "weight")
        found[f"{name}.{leaf}_weight_scale"] = stack(roles, "weight_scale")
        found[f"{name}.{leaf}_bias"] = stack(roles, "bias")
        found[f"{name}.{leaf}_weight_scale_2"] = torch.tensor(2.0**-9)
    return found


def test_3d_modules_are_filled_from_3d_files_in_the_order_of_their_rows(tmp_path):
    path = write_checkpoint(tmp_path / "c", stacked_files() | router())
    options = {"transposed": True, "interleaved": True, "bias": True}
    model, twin = stacked_model("meta", **options), stacked_model(**options)
    stored = stacked_files()
    for leaf in ("gate_up_proj_bias", "down_proj_bias"):
        getattr(block_of(twin).experts, leaf).data.copy_(stored[f"model.layers.0.mlp.experts.{leaf}"])
    check_against_dense(model, twin, path)


def test_3d_files_need_a_module_that_can_be_replaced(tmp_path):
    path = write_checkpoint(tmp_path / "c", stacked_files() | router())
    model = nn.Module()
    with pytest.raises(
        Unsupported, match=r"experts as 3-D tensors.*got model\.layers\.0\.mlp\.experts;.*from_checkpoint"
    ):
        nvfp4.convert_(model, checkpoint=path)


@pytest.mark.parametrize("names", [QWEN, MIXTRAL])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("logits", [False, True])
def test_blocks_of_linear_experts_are_fused(tmp_path, names, renormalize, logits):
    options = {"names": names, "renormalize": renormalize, "logits": logits}
    path = write_checkpoint(tmp_path / "c", separate(names) | router())
    model = list_model(device="meta", **options)
    check_against_dense(model, list_model(**options), path)
    block = block_of(model)
    assert isinstance(block, FusedBlock) and block.renormalize is renormalize and not block.training
    assert set(model.state_dict()) == set(separate(names) | router())
    here = list_model(**options)
    nvfp4.convert_(here)
    twin = with_weights(list_model(**options), *decoded(block_of(here).experts))
    with torch.inference_mode():
        y, ref = block_of(here)(X), block_of(twin)(X)
    assert type(y) is type(ref)
    assert_alike(y[0] if logits else y, ref[0] if logits else ref)


def test_biases_of_linear_experts_come_along():
    model = list_model(bias=True)
    dense = torch.stack([expert.down_proj.bias.detach().clone() for expert in block_of(model).experts])
    nvfp4.convert_(model)
    assert torch.equal(block_of(model).experts.w2_bias, dense)


BLOCKS = {
    "another scoring": lambda: ListBlock(scoring=lambda logits, dim: torch.sigmoid(logits)),
    "a factor": lambda: ListBlock(factor=2.5),
}


@pytest.mark.parametrize("kind", [*BLOCKS, "shared expert", "experts differ", "refused", "not wanted"])
def test_other_blocks_keep_their_code_and_their_experts_become_linears(kind):
    torch.manual_seed(0)
    block = BLOCKS.get(kind, ListBlock)()
    options = {"fuse_experts": False} if kind == "not wanted" else {}
    if kind == "shared expert":
        block.shared_expert = Expert(QWEN)
    if kind == "experts differ":
        block.experts[1].up_proj = nn.Linear(HIDDEN, INTER, bias=True)
    if kind == "refused":
        options["filter_fn"] = lambda module, name: "up_proj" in name
    model = model_of(block)
    nvfp4.convert_(model, **options)
    assert type(block_of(model)) is ListBlock and not fused(model)
    assert isinstance(block_of(model).experts[2].up_proj, nvfp4.nn.Linear)
    assert isinstance(block_of(model).experts[2].down_proj, nn.Linear) is (kind == "refused")


def test_experts_of_which_some_are_dense_stay_linears(tmp_path):
    stored = separate() | router()
    name = "model.layers.0.mlp.experts.1.up_proj"
    stored = {key: t for key, t in stored.items() if not key.startswith(name)}
    stored[f"{name}.weight"] = torch.ones(INTER, HIDDEN).bfloat16()
    path = write_checkpoint(tmp_path / "c", stored, hf={"quant_algo": "NVFP4", "exclude_modules": [name]})
    model = nvfp4.convert_(list_model(device="meta"), checkpoint=path)
    assert not fused(model) and type(model.get_submodule(name)) is nn.Linear
    assert isinstance(model.get_submodule(name.replace("up", "down")), nvfp4.nn.Linear)


def test_a_block_in_two_places_stays_one():
    model = list_model()
    model.model.layers.append(model.model.layers[0])
    model.again = block_of(model)
    nvfp4.convert_(model)
    assert model.again is block_of(model) and isinstance(model.again, FusedBlock)


def test_experts_of_another_size_are_named(tmp_path):
    stored = {name: t for name, t in separate().items() if ".3." not in name} | router()
    with pytest.raises(InvalidInput, match=r"experts model\.layers\.0\.mlp\.experts have another size.*got 3 experts"):
        nvfp4.convert_(stacked_model("meta"), checkpoint=write_checkpoint(tmp_path / "c", stored))


def test_a_missing_layer_of_an_expert_is_named(tmp_path):
    stored = {name: t for name, t in separate().items() if ".2.up_proj" not in name} | router()
    with pytest.raises(InvalidInput, match=r"model\.layers\.0\.mlp\.experts\.2 is incomplete; got no up"):
        nvfp4.convert_(stacked_model("meta"), checkpoint=write_checkpoint(tmp_path / "c", stored))


def test_a_filter_sees_modules_of_3d_experts(tmp_path):
    model, seen = stacked_model(), []
    nvfp4.convert_(model, lambda module, name: seen.append((type(module), name)))
    assert seen == [(Stacked, "model.layers.0.mlp.experts")] and not fused(model)
    path = write_checkpoint(tmp_path / "c", separate() | router())
    with pytest.raises(InvalidInput, match=r"filter_fn refuses model\.layers\.0\.mlp\.experts"):
        nvfp4.convert_(model, lambda module, name: False, checkpoint=open_checkpoint(path))


def test_the_default_device_does_not_matter():
    with torch.device("meta"):
        stacked, block = Stacked(), ListBlock()
        assert probe_stacked(stacked).activation == "swiglu"
        assert probe_block(block).top_k == TOP_K


def test_probing_leaves_a_block_as_it_is():
    block = ListBlock()
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    experts, gate = list(block.experts), block.gate
    assert probe_block(block).top_k == TOP_K
    assert list(block.experts) == experts and block.gate is gate and block.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in block.state_dict().items())


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
