"""Experts of vLLM on the CPU kernels here: what is taken, what they compute, and what stays with vLLM.

Real: everything of this package. Fake: vLLM 0.33.0 (fake.py says how far it is like that release).
"""

import weakref
from importlib import import_module
from types import SimpleNamespace

import nvfp4
import pytest
import torch
from nvfp4.dispatch import table
from nvfp4.integrations.vllm.activations import ACTIVATIONS, call_of
from nvfp4.kernels import registry
from nvfp4.kernels.moe.activations import activate, constants
from nvfp4.kernels.weights.layouts import layout as get_layout
from nvfp4.testing import assert_moe_close
from nvfp4.testing.fake_experts import KERNELS
from torch import nn

E, HIDDEN, INTER, TOP_K = 4, 64, 32, 2


def experts_config(fake, activation="silu", **given):
    return fake.names.FusedMoEConfig(
        activation=fake.names.MoEActivation(activation), num_local_experts=E, experts_per_token=TOP_K,
        hidden_dim=HIDDEN, intermediate_size_per_partition=INTER, **given,
    )  # fmt: skip


def experts(fake, dialect, moe):
    if dialect == "modelopt":
        return fake.ask("modelopt_fp4", fake.names.ModelOptNvFp4FusedMoE("config", moe))[0]
    return fake.ask(dialect, fake.names.CompressedTensorsW4A4Nvfp4MoEMethod(moe, use_a16=True))[0]


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


@pytest.mark.parametrize("packed", [False, True])
def test_experts_elsewhere_are_skipped(fake_vllm, request, packed):
    if packed:
        request.getfixturevalue("fragments")
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
