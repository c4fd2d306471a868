"""The plug-in for vLLM, against a fake of the parts it touches.

Real: everything of this package, on CPU kernels. Fake: vLLM 0.33.0 (conftest.py says how far it is like that release).
"""

import subprocess
import sys
import tomllib
import warnings
import weakref
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import nvfp4
import pytest
import torch
from nvfp4.dispatch import table
from nvfp4.integrations import vllm as plugin
from nvfp4.integrations.vllm.activations import ACTIVATIONS, call_of
from nvfp4.kernels import registry
from nvfp4.kernels.moe.activations import activate, constants
from nvfp4.kernels.weights.layouts import layout as get_layout
from nvfp4.testing import assert_gemm_close, assert_moe_close
from nvfp4.testing.fake_experts import KERNELS
from torch import nn

ROOT = Path(__file__).parents[2]
SIZES = [64, 32, 32]  # rows of q, k and v
SPREAD = (1.0, 3.0, 0.2)  # of their values, so that their global scales differ


def test_it_is_an_entry_point():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"nvfp4": "nvfp4.integrations.vllm:register"}


def test_finding_it_imports_neither_vllm_nor_the_classes():
    code = "import sys; from nvfp4.integrations.vllm import register; register(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    loaded = done.stdout.split()
    assert "nvfp4.integrations.vllm" in loaded
    assert "vllm" not in loaded and "nvfp4.integrations.vllm.configs" not in loaded


@pytest.mark.parametrize("value", [None, "", "0"])
def test_nothing_happens_unless_it_is_asked_for(fake_vllm, monkeypatch, value):
    monkeypatch.delenv("NVFP4_VLLM")
    if value is not None:
        monkeypatch.setenv("NVFP4_VLLM", value)
    plugin.register()
    assert not fake_vllm.registered and "nvfp4.integrations.vllm.configs" not in sys.modules


@pytest.mark.parametrize("value", ["yes", "true", "on"])
def test_what_may_have_been_meant_is_told_in_a_warning(fake_vllm, monkeypatch, value):
    monkeypatch.setenv("NVFP4_VLLM", value)
    with pytest.warns(RuntimeWarning, match=f"not plugged into vLLM; got NVFP4_VLLM={value}; expected NVFP4_VLLM=1"):
        plugin.register()
    assert not fake_vllm.registered


def test_without_vllm_it_says_so(monkeypatch):
    monkeypatch.setenv("NVFP4_VLLM", "1")
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.warns(RuntimeWarning, match=r"got no vLLM in this environment; expected vLLM 0\.33\.0"):
        plugin.register()


@pytest.mark.parametrize("version", ["0.33.1", "0.32.0", "0.34.0rc1", "dev"])
def test_another_release_is_told_apart_in_one_warning(fake_vllm, version):
    fake_vllm.modules["vllm"].__version__ = version
    with pytest.warns(RuntimeWarning) as caught:
        plugin.register()
    assert [str(warning.message) for warning in caught] == [
        f"nvfp4 is not plugged into vLLM; got vLLM {version}; expected vLLM 0.33.0; "
        "vLLM's own kernels run; unset NVFP4_VLLM to silence this"
    ]
    assert not fake_vllm.registered and "nvfp4.integrations.vllm.configs" not in sys.modules


@pytest.mark.parametrize("version", ["0.33.0", "0.33.0+cu130"])
def test_the_configs_take_the_place_of_vllms(fake_vllm, version):
    fake_vllm.modules["vllm"].__version__ = version
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plugin.register()
        plugin.register()  # vLLM may do so
    names, found = fake_vllm.names, fake_vllm.registered
    assert set(found) == {"modelopt_fp4", "modelopt_mixed", "compressed-tensors"}
    bases = (names.ModelOptNvFp4Config, names.ModelOptMixedPrecisionConfig, names.CompressedTensorsConfig)
    for base, (first, second) in zip(bases, found.values(), strict=True):
        assert issubclass(first, base) and first is second
        assert getattr(import_module(first.__module__), first.__qualname__) is first  # or it could not be pickled


def ask(fake, config, method, layer=None, scheme=None):
    """What the registered config answers where vLLM's own would answer `method`."""
    plugin.register()
    made = fake.registered[config][-1]()
    made.method, made.scheme = method, scheme
    layer = nn.Module() if layer is None else layer
    return made.get_quant_method(layer, "model.layers.0.mlp"), layer


def linear(fake, dialect, config=None, **spec):
    names = fake.names
    if dialect == "compressed-tensors":
        scheme = names.CompressedTensorsW4A4Fp4(use_a16=True)
        return ask(fake, dialect, names.CompressedTensorsLinearMethod(None), scheme=scheme)
    method = names.ModelOptLinearMethod(SimpleNamespace(weight=spec.get("weight", "nvfp4 static")), "ctx", "fmt")
    return ask(fake, config or "modelopt_fp4", method)


def create(method, layer, dtype=torch.bfloat16):
    method.create_weights(
        layer, 64, SIZES, input_size=64, output_size=sum(SIZES), params_dtype=dtype, weight_loader=None
    )


def fill(layer, dialect, spread=SPREAD):
    """Load three shards as the dialect stores them; returns their values."""
    values, start = [], 0
    for shard, (rows, size) in enumerate(zip(SIZES, spread, strict=True)):
        weight, scale, factor = nvfp4.quantize(torch.randn(rows, 64) * size)
        values.append(nvfp4.dequantize(weight, scale, factor, dtype=torch.float64))
        stored, glob = (layer.weight, layer.weight_scale_2) if dialect == "modelopt" else (
            layer.weight_packed,
            layer.weight_global_scale,
        )  # fmt: skip
        stored.data[start : start + rows] = weight
        layer.weight_scale.data[start : start + rows] = scale
        glob.data[shard] = factor if dialect == "modelopt" else 1 / factor
        start += rows
    return torch.cat(values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_a_fused_layer_is_exact_row_by_row(fake_vllm, dialect, dtype):
    method, layer = linear(fake_vllm, dialect)
    create(method, layer, dtype)
    values = fill(layer, dialect)
    method.process_weights_after_loading(layer)
    assert layer.weight_global_scale.shape == (sum(SIZES),)  # vLLM alone would have left the largest
    x, bias = torch.randn(2, 3, 64).to(dtype), nn.Parameter(torch.randn(sum(SIZES)).to(dtype), requires_grad=False)
    with torch.inference_mode():
        got = method.apply(layer, x, bias)
    assert_gemm_close(got.reshape(6, -1), (x.double() @ values.t() + bias.double()).reshape(6, -1), k=64, dtype=dtype)
    assert not hasattr(layer, "nvfp4_factors")


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_equal_global_scales_stay_one(fake_vllm, dialect):
    method, layer = linear(fake_vllm, dialect)
    create(method, layer)
    values = fill(layer, dialect)
    glob = layer.weight_scale_2 if dialect == "modelopt" else layer.weight_global_scale
    factors = glob.data.clone() if dialect == "modelopt" else 1 / glob.data
    glob.data.fill_(0.5)
    method.process_weights_after_loading(layer)
    assert layer.weight_global_scale.tolist() == [0.5 if dialect == "modelopt" else 2.0]  # turned over once, or never
    rows = torch.tensor(SIZES)
    exact = values / factors.double().repeat_interleave(rows)[:, None] * float(layer.weight_global_scale)
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    assert_gemm_close(method.apply(layer, x), x.double() @ exact.t(), k=64, dtype=torch.bfloat16)


def test_a_packed_weight_is_run_as_such(fake_vllm, monkeypatch):
    method, layer = linear(fake_vllm, "modelopt")
    create(method, layer)
    values = fill(layer, "modelopt")
    module = import_module("nvfp4.integrations.vllm.linear")
    monkeypatch.setattr(module, "warmup", lambda packed, dtype: None)  # no kernel of a CPU reads this layout
    pack = module.pack
    monkeypatch.setattr(module, "pack", lambda *tensors, dtype: pack(*tensors, dtype=dtype, layout="fragment"))
    method.process_weights_after_loading(layer)
    assert layer.nvfp4_layout == "fragment1-bf16" and layer.weight_scale is None
    weight = torch.ops.nvfp4.dequantize(
        layer.weight, None, layer.weight_global_scale, torch.float64, layout="fragment1-bf16", out_features=128,
        in_features=64,
    )  # fmt: skip
    assert torch.equal(weight, values)
    meta = [None if t is None else t.to("meta") for t in (layer.weight, layer.weight_scale, layer.weight_global_scale)]
    layer.weight, layer.weight_scale, layer.weight_global_scale = None, None, None
    del layer.weight, layer.weight_scale, layer.weight_global_scale
    layer.weight, layer.weight_scale, layer.weight_global_scale = meta
    assert method.apply(layer, torch.empty(3, 64, dtype=torch.bfloat16, device="meta")).shape == (3, 128)


def test_a_layer_compiles_into_one_graph(fake_vllm):
    method, layer = linear(fake_vllm, "modelopt")
    create(method, layer)
    fill(layer, "modelopt")
    method.process_weights_after_loading(layer)
    compiled = torch.compile(lambda x: method.apply(layer, x), fullgraph=True, dynamic=True, backend="eager")
    for m in (3, 5):
        x = torch.randn(m, 64, dtype=torch.bfloat16)
        with torch.no_grad():
            assert torch.equal(compiled(x), method.apply(layer, x))


def test_humming_is_replaced_too(fake_vllm):
    fake_vllm.chosen["kernel"] = fake_vllm.names.HummingNvFp4LinearKernel
    method, layer = linear(fake_vllm, "modelopt", config="modelopt_mixed")
    create(method, layer)
    assert type(method.kernel).__name__ == "PackedLinear"
    assert ("info", "Using nvfp4 for NVFP4 GEMM, not HummingNvFp4LinearKernel") in fake_vllm.lines


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_a_kernel_that_is_not_weight_only_stays(fake_vllm, dialect):
    fake_vllm.chosen["kernel"] = fake_vllm.names.CutlassNvFp4LinearKernel
    method, layer = linear(fake_vllm, dialect)
    create(method, layer)
    fill(layer, dialect)
    method.process_weights_after_loading(layer)
    assert layer.processed_by == "CutlassNvFp4LinearKernel" and layer.weight_global_scale.ndim == 0
    assert [line for line in fake_vllm.lines if line[0] == "debug"] == [
        (
            "debug",
            "NVFP4 linear 128x64: CutlassNvFp4LinearKernel stays, it is not one of MarlinNvFp4LinearKernel, "
            "HummingNvFp4LinearKernel",
        )
    ]


def test_a_layer_that_no_kernel_runs_stays(fake_vllm, monkeypatch):
    method, layer = linear(fake_vllm, "modelopt")
    choice = import_module("nvfp4.integrations.vllm.choice")
    monkeypatch.setattr(choice.registry, "kernels", lambda op: ())
    create(method, layer)
    assert type(method.kernel) is fake_vllm.names.MarlinNvFp4LinearKernel and method.supports_pre_processed_weights
    assert fake_vllm.lines[-1][1].endswith("MarlinNvFp4LinearKernel stays, there are no kernels")


def test_float32_layers_stay(fake_vllm):
    method, layer = linear(fake_vllm, "modelopt")
    create(method, layer, torch.float32)
    assert type(method.kernel) is fake_vllm.names.MarlinNvFp4LinearKernel


def test_other_methods_are_passed_on(fake_vllm):
    fp8, _ = linear(fake_vllm, "modelopt", weight="fp8 static")
    assert type(fp8) is fake_vllm.names.ModelOptLinearMethod
    assert ask(fake_vllm, "modelopt_mixed", None)[0] is None
    other = SimpleNamespace(scheme="int4")
    method = fake_vllm.names.CompressedTensorsLinearMethod(None)
    got, layer = ask(fake_vllm, "compressed-tensors", method, scheme=other)
    assert got is method and layer.scheme is other


def test_what_vllm_looks_for_by_name_is_there(fake_vllm):
    method, layer = linear(fake_vllm, "modelopt")
    assert type(method).__name__ in fake_vllm.v2  # its loader is chosen by the name of the class
    assert (method.spec.weight, method.ctx, method.fmt) == ("nvfp4 static", "ctx", "fmt")
    create(method, layer)
    assert not method.supports_pre_processed_weights


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_wrong_global_scale_is_refused(fake_vllm, value):
    method, layer = linear(fake_vllm, "modelopt")
    create(method, layer)
    fill(layer, "modelopt")
    layer.weight_scale_2.data[1] = value
    with pytest.raises(nvfp4.InvalidInput, match="weight_scale_2 is wrong"):
        method.process_weights_after_loading(layer)


E, HIDDEN, INTER, TOP_K = 4, 64, 32, 2


def experts_config(fake, activation="silu", **given):
    return fake.names.FusedMoEConfig(
        activation=fake.names.MoEActivation(activation), num_local_experts=E, experts_per_token=TOP_K,
        hidden_dim=HIDDEN, intermediate_size_per_partition=INTER, **given,
    )  # fmt: skip


def experts(fake, dialect, moe):
    if dialect == "modelopt":
        return ask(fake, "modelopt_fp4", fake.names.ModelOptNvFp4FusedMoE("config", moe))[0]
    return ask(fake, dialect, fake.names.CompressedTensorsW4A4Nvfp4MoEMethod(moe, use_a16=True))[0]


def load_experts(dialect, moe, gated=True):
    """A layer with what its loader leaves there, and the values of w13 and w2."""
    layer = nn.Module()
    parts = 2 if gated else 1
    ends = ("weight", "weight_scale_2") if dialect == "modelopt" else ("weight_packed", "weight_global_scale")
    values = {}
    for stack, rows, columns, shards in (("w13", parts * INTER, HIDDEN, parts), ("w2", HIDDEN, INTER, 1)):
        weights, scales, globs, dense = [], [], [], []
        for _ in range(E):
            for shard in range(shards):
                weight, scale, factor = nvfp4.quantize(torch.randn(rows // shards, columns) * (1 + 3 * shard))
                weights.append(weight)
                scales.append(scale)
                globs.append(factor if dialect == "modelopt" else 1 / factor)
                dense.append(nvfp4.dequantize(weight, scale, factor, dtype=torch.float64))
        values[stack] = torch.cat(dense).reshape(E, rows, columns)
        tensors = {
            ends[0]: torch.cat(weights).reshape(E, rows, columns // 2),
            "weight_scale": torch.cat(scales).reshape(E, rows, columns // 16),
            ends[1]: torch.stack(globs).reshape((E, shards) if stack == "w13" else (E,)),
            "input_scale" if dialect == "modelopt" else "input_global_scale": torch.zeros(E),  # nobody reads it
        }
        for end, tensor in tensors.items():
            setattr(layer, f"{stack}_{end}", nn.Parameter(tensor, requires_grad=False))
    layer.activation, layer.expert_map, layer.apply_router_weight_on_input = moe.activation, None, False
    layer._expert_routing_tables = lambda: None
    return layer, values["w13"], values["w2"]


def expected_moe(x, w13, w2, ids, weights, name, values, expert_map=None):
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, slot in ((t, s) for t in range(x.shape[0]) for s in range(ids.shape[1])):
        expert = int(ids[token, slot])
        expert = expert if expert_map is None else int(expert_map[expert])
        if expert < 0:
            continue
        a = w13[expert] @ x[token].double()
        g, u = (a, None) if name == "relu2" else a.split(INTER)
        middle = activate(name, g, u, values).to(x.dtype).double()
        out[token] += weights[token, slot].double() * (w2[expert] @ middle)
    return out


def routed(tokens=5, top_k=TOP_K, experts=E):
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int()
    return torch.randn(tokens, HIDDEN).bfloat16(), ids, torch.rand(tokens, top_k)


CASES = [
    ("silu", {}, "swiglu", {}),
    ("silu", {"swiglu_limit": 0.5}, "swiglu", {"limit": 0.5}),
    ("gelu_tanh", {}, "geglu_tanh", {}),
    ("swigluoai_uninterleave", {"swiglu_limit": 0.7, "swiglu_alpha": 1.702, "swiglu_beta": 1.0}, "swigluoai",
     {"limit": 0.7, "alpha": 1.702, "beta": 1.0}),
    ("swigluoai_uninterleave", {"swiglu_limit": 0.7}, "swigluoai", {"limit": 0.7, "alpha": 1.0, "beta": 0.0}),
    ("situ", {"activation_situ_beta": 2.0}, "situ", {"beta": 2.0, "limit": 0.0}),
    ("situ", {"activation_situ_beta": 2.0, "activation_situ_linear_beta": 3.0}, "situ", {"beta": 2.0, "limit": 3.0}),
    ("relu2_no_mul", {}, "relu2", {}),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize(("activation", "given", "name", "values"), CASES)
def test_experts_are_run_in_the_planned_layout(fake_vllm, fragments, dialect, activation, given, name, values, dtype):
    moe = experts_config(fake_vllm, activation, in_dtype=dtype, **given)
    method = experts(fake_vllm, dialect, moe)
    gated = name != "relu2"
    layer, w13, w2 = load_experts(dialect, moe, gated=gated)
    method.process_weights_after_loading(layer)
    second = "fragment1-bf16" if dtype == torch.bfloat16 else "fragment1-fp16"
    first = second + "-glu" if gated else second
    assert method.moe_kernel.fused_experts.layouts == (first, second)
    rows = 2 * INTER if gated else INTER
    assert tuple(layer.w13_weight.shape) == (E, *get_layout(first).data_shape(rows, HIDDEN))
    assert tuple(layer.w2_weight.shape) == (E, *get_layout(second).data_shape(HIDDEN, INTER))
    assert layer.w13_weight_scale is None and layer.w2_weight_scale is None
    assert tuple(layer.w13_weight_scale_2.shape) == (E, 2 if gated else 1)
    x, ids, weights = routed()
    x = x.to(dtype)
    got = method.apply(layer, x, weights, ids, None, None)
    expected = expected_moe(x, w13, w2, ids, weights, name, constants(name, **values))
    assert_moe_close(got, expected, hidden=HIDDEN, inter=INTER, top_k=TOP_K, dtype=dtype)


def test_packed_experts_that_are_elsewhere_are_skipped(fake_vllm, fragments):
    moe = experts_config(fake_vllm)
    method = experts(fake_vllm, "modelopt", moe)
    layer, w13, w2 = load_experts("modelopt", moe)
    method.process_weights_after_loading(layer)
    layer.expert_map = torch.tensor([-1, 2, -1, 0, 1, 3, -1, -1], dtype=torch.int32)
    x, ids, weights = routed(experts=8)
    got = method.apply(layer, x, weights, ids, None, None)
    expected = expected_moe(x, w13, w2, ids, weights, "swiglu", constants("swiglu"), layer.expert_map)
    assert_moe_close(got, expected, hidden=HIDDEN, inter=INTER, top_k=TOP_K, dtype=torch.bfloat16)


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_no_more_than_one_stack_is_held_twice(fake_vllm, fragments, monkeypatch, dialect):
    moe = experts_config(fake_vllm)
    method = experts(fake_vllm, dialect, moe)
    layer, _, _ = load_experts(dialect, moe)
    name = "weight" if dialect == "modelopt" else "weight_packed"
    loaded = {
        f"{stack} {end}": weakref.ref(getattr(layer, f"{stack}_{end}").untyped_storage())
        for stack in ("w13", "w2")
        for end in (name, "weight_scale")
    }
    module, held = import_module("nvfp4.integrations.vllm.experts"), []

    def note(function):
        def noting(*args, **options):
            held.append([name for name, storage in loaded.items() if storage() is not None])
            return function(*args, **options)

        return noting

    monkeypatch.setattr(module, "pack", note(module.pack))
    monkeypatch.setattr(module, "warmup", note(module.warmup))
    method.process_weights_after_loading(layer)
    w2 = [f"w2 {name}", "w2 weight_scale"]
    assert held == [[f"w13 {name}", "w13 weight_scale", *w2], w2, []]


def test_kernels_of_the_planned_layout_are_bound_when_weights_are_loaded(fake_vllm, fragments, monkeypatch):
    moe = experts_config(fake_vllm)
    method = experts(fake_vllm, "modelopt", moe)
    layer, _, _ = load_experts("modelopt", moe)
    method.process_weights_after_loading(layer)
    monkeypatch.setattr(table, "_build", lambda *args: pytest.fail("built at the first call"))
    x, ids, weights = routed()
    assert torch.isfinite(method.apply(layer, x, weights, ids, None, None)).all()


def test_a_planned_layout_that_nothing_reads_here_is_not_taken(fake_vllm, fragments, monkeypatch):
    kernels = {"cpu_moe": registry.get("cpu_moe")}
    monkeypatch.setattr(registry, "_all", lambda: kernels)
    table.clear()
    moe = experts_config(fake_vllm)
    method = experts(fake_vllm, "modelopt", moe)
    layer, w13, w2 = load_experts("modelopt", moe)
    stored = layer.w13_weight.data.clone()
    method.process_weights_after_loading(layer)
    assert method.moe_kernel.fused_experts.layouts == ("checkpoint", "checkpoint")
    assert torch.equal(layer.w13_weight, stored) and layer.w2_weight_scale is not None
    x, ids, weights = routed()
    expected = expected_moe(x, w13, w2, ids, weights, "swiglu", constants("swiglu"))
    got = method.apply(layer, x, weights, ids, None, None)
    assert_moe_close(got, expected, hidden=HIDDEN, inter=INTER, top_k=TOP_K, dtype=torch.bfloat16)


def test_experts_that_only_a_fragment_kernel_runs_are_taken(fake_vllm, fragments, monkeypatch):
    monkeypatch.setattr(registry, "_all", lambda: {kernel.name: kernel for kernel in KERNELS})
    table.clear()
    assert type(experts(fake_vllm, "modelopt", experts_config(fake_vllm))).__name__ == "ModelOptExperts"


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize(("activation", "given", "name", "values"), CASES)
def test_experts_are_run(fake_vllm, dialect, activation, given, name, values):
    moe = experts_config(fake_vllm, activation, **given)
    method = experts(fake_vllm, dialect, moe)
    layer, w13, w2 = load_experts(dialect, moe, gated=name != "relu2")
    method.process_weights_after_loading(layer)
    assert ("info", "Using nvfp4 for NVFP4 experts, not MARLIN") in fake_vllm.lines
    x, ids, weights = routed()
    got = method.apply(layer, x, weights, ids, None, None)
    expected = expected_moe(x, w13, w2, ids, weights, name, constants(name, **values))
    assert_moe_close(got, expected, hidden=HIDDEN, inter=INTER, top_k=TOP_K, dtype=torch.bfloat16)


def test_experts_elsewhere_are_skipped(fake_vllm):
    moe = experts_config(fake_vllm)
    method = experts(fake_vllm, "modelopt", moe)
    layer, w13, w2 = load_experts("modelopt", moe)
    method.process_weights_after_loading(layer)
    layer.expert_map = torch.tensor([-1, 2, -1, 0, 1, 3, -1, -1], dtype=torch.int32)
    x, ids, weights = routed(experts=8)
    got = method.apply(layer, x, weights, ids, None, None)
    expected = expected_moe(x, w13, w2, ids, weights, "swiglu", constants("swiglu"), layer.expert_map)
    assert_moe_close(got, expected, hidden=HIDDEN, inter=INTER, top_k=TOP_K, dtype=torch.bfloat16)


def test_router_weights_are_applied_once(fake_vllm):
    moe = experts_config(fake_vllm)
    moe.experts_per_token = 1
    method = experts(fake_vllm, "modelopt", moe)
    layer, w13, w2 = load_experts("modelopt", moe)
    method.process_weights_after_loading(layer)
    layer.apply_router_weight_on_input = True
    x, ids, weights = routed(top_k=1)
    got = method.apply(layer, x, weights, ids, None, None)
    scaled = x * weights.bfloat16()
    expected = expected_moe(scaled, w13, w2, ids, torch.ones_like(weights), "swiglu", constants("swiglu"))
    assert_moe_close(got, expected, hidden=HIDDEN, inter=INTER, top_k=1, dtype=torch.bfloat16)


def test_halves_keep_their_global_scales(fake_vllm):
    moe = experts_config(fake_vllm)
    method = experts(fake_vllm, "compressed-tensors", moe)
    layer, _, _ = load_experts("compressed-tensors", moe)
    stored = layer.w13_weight_global_scale.data.clone()
    method.process_weights_after_loading(layer)
    assert torch.equal(layer.w13_weight_scale_2, 1 / stored)
    assert not hasattr(layer, "w13_weight_packed")
    assert not method.supports_eplb


def left(fake, moe):
    method = experts(fake, "modelopt", moe)
    assert type(method) is fake.names.ModelOptNvFp4FusedMoE
    level, line = fake.lines[-1]
    assert level == "debug"
    return line


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"activation": "swigluoai"}, "activation"),  # gate and up rows are interleaved
        ({"activation": "swigluoai_uninterleave"}, "swigluoai_uninterleave without a limit"),
        ({"activation": "situ"}, "a beta of None"),
        ({"swiglu_limit": 0.0}, "a limit of 0.0"),
        ({"has_bias": True}, "biases"),
        ({"is_lora_enabled": True}, "LoRA"),
        ({"in_dtype": torch.float32}, "no kernels for torch.float32"),
        ({"hidden_dim": 72}, "hidden dim"),
        ({"intermediate_size_per_partition": 24}, "24 is no multiple of 16"),
        ({"parallel": {"use_all2all_kernels": True}}, "parallel config"),
        ({"parallel": {"use_passthrough_all2all": True}}, "parallel config"),
        ({"parallel": {"enable_eplb": True}}, "parallel config"),
        ({"parallel": {"use_batched_activation_format": True}}, "activation format"),
    ],
)
def test_what_the_op_cannot_run_stays(fake_vllm, given, reason):
    moe = experts_config(fake_vllm, given.pop("activation", "silu"))
    moe.moe_parallel_config = fake_vllm.names.FusedMoEParallelConfig(**given.pop("parallel", {}))
    vars(moe).update(given)
    line = left(fake_vllm, moe)
    assert line.startswith("NVFP4 experts: MARLIN stays, ") and reason in line


def test_a_backend_that_is_not_weight_only_stays(fake_vllm):
    fake_vllm.chosen["backend"] = fake_vllm.names.NvFp4MoeBackend.VLLM_CUTLASS
    assert "VLLM_CUTLASS stays, it is not one of MARLIN, HUMMING" in left(fake_vllm, experts_config(fake_vllm))


def test_experts_that_only_other_layouts_have_kernels_for_stay(fake_vllm, monkeypatch):
    choice = import_module("nvfp4.integrations.vllm.choice")
    (kernel,) = [kernel for kernel in choice.registry.kernels("moe") if kernel.name == "cpu_moe"]
    monkeypatch.setattr(type(kernel), "layout", lambda self, device, problem: "fragment1-bf16")
    assert "cpu_moe: reads no weights in layout 'checkpoint'" in left(fake_vllm, experts_config(fake_vllm))


def test_an_older_gpu_keeps_vllms_kernels(fake_vllm):
    fake_vllm.platform.capability = 75
    assert "current device" in left(fake_vllm, experts_config(fake_vllm))


def test_every_activation_is_one_of_the_op():
    for theirs, ours in ACTIVATIONS.items():
        config = SimpleNamespace(
            clamp_limit=2.0, alpha=1.5, beta=0.5, activation_situ_beta=4.0, activation_situ_linear_beta=25.0
        )
        name, values = call_of(theirs, config)
        assert name == ours and constants(name, **values)
