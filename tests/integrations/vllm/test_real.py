"""The plug-in on the source of vLLM itself, where it can be imported; on a CPU without its compiled parts too.

Real are the configs, layers, weight loaders, methods and the modular kernel of experts. vLLM has no weight-only kernel
for NVFP4 on a CPU: without CUDA its Marlin kernels say that they are supported, and nothing else is replaced.
"""

import importlib
import importlib.util
import inspect
import pickle

import nvfp4
import pytest
import torch
from nvfp4.integrations import vllm as plugin
from nvfp4.testing import assert_gemm_close, assert_moe_close

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)
vllm = pytest.importorskip("vllm")
if vllm.__version__.partition("+")[0] != plugin.RELEASE:
    pytest.skip(f"needs vLLM {plugin.RELEASE}, found {vllm.__version__}", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODELOPT = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": 16, "ignore": []}
WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "symmetric": True, "group_size": 16}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None, "output_activations": None}
CT = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {"group_0": GROUP},
    "ignore": [],
}
SCALES = {"q": 1.0, "k": 3.0, "v": 0.2}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.v1.worker.workspace import init_workspace_manager, reset_workspace_manager

    monkeypatch = pytest.MonkeyPatch()
    if DEVICE == "cpu":  # vLLM's workspace empties an accelerator's cache
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    meeting = tmp_path_factory.mktemp("dist") / "meeting"
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(DEVICE))):
        backend = "nccl" if DEVICE == "cuda" else "gloo"
        init_distributed_environment(1, 0, f"file://{meeting}", 0, backend)
        initialize_model_parallel(1, 1)
        init_workspace_manager(torch.device(DEVICE))
        yield
        reset_workspace_manager()
    destroy_model_parallel()
    destroy_distributed_environment()
    monkeypatch.undo()


@pytest.fixture
def seam(one_rank, monkeypatch):
    """vLLM with the plug-in; `configs(name)` gives what vLLM would use."""
    from nvfp4.integrations.vllm import experts, linear
    from vllm.model_executor.kernels.linear.nvfp4.marlin import MarlinNvFp4LinearKernel
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
    from vllm.model_executor.layers.quantization import _CUSTOMIZED_METHOD_TO_QUANT_CONFIG, get_quantization_config

    if DEVICE == "cpu":
        yes = classmethod(lambda cls, compute_capability=None: (True, None))
        monkeypatch.setattr(MarlinNvFp4LinearKernel, "is_supported", yes)
        monkeypatch.setattr(MarlinExperts, "_supports_current_device", staticmethod(lambda: True))
        monkeypatch.setattr(linear, "runs_here", lambda: True)
        monkeypatch.setattr(experts, "runs_here", lambda: True)
    monkeypatch.setenv("NVFP4_VLLM", "1")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    plugin.register()
    with torch.device(DEVICE):
        yield get_quantization_config
    torch.set_default_dtype(before)
    _CUSTOMIZED_METHOD_TO_QUANT_CONFIG.clear()


def stored(name, dense):
    """A tensor of NVFP4 as the dialect stores it, by the end of its name; and its values."""
    weight, scale, factor = nvfp4.quantize(dense)
    value = nvfp4.dequantize(weight, scale, factor, dtype=torch.float64)
    if name == "compressed-tensors":
        return {"weight_packed": weight, "weight_scale": scale, "weight_global_scale": 1 / factor}, value
    return {"weight": weight, "weight_scale": scale, "weight_scale_2": factor}, value


@pytest.mark.parametrize(("name", "config"), [("modelopt_fp4", MODELOPT), ("compressed-tensors", CT)])
def test_fused_shards_keep_their_global_scales(seam, name, config):
    from nvfp4.integrations.vllm.linear import PackedLinear
    from vllm.model_executor.layers.linear import QKVParallelLinear

    quantised = seam(name).from_config(config)
    quantised = pickle.loads(pickle.dumps(quantised))  # as it goes to a worker process
    quantised.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    layer = QKVParallelLinear(128, 32, 4, 2, bias=True, quant_config=quantised, prefix="model.layers.0.qkv_proj")
    values = []
    for shard, rows in (("q", 128), ("k", 64), ("v", 64)):
        tensors, value = stored(name, torch.randn(rows, 128, dtype=torch.float32) * SCALES[shard])
        values.append(value)
        for leaf, tensor in tensors.items():
            parameter = getattr(layer, leaf)
            parameter.weight_loader(parameter, tensor, shard)
    layer.bias.data.normal_()
    layer.quant_method.process_weights_after_loading(layer)
    kernel = layer.scheme.kernel if name == "compressed-tensors" else layer.quant_method.kernel
    assert type(kernel) is PackedLinear
    assert layer.weight_global_scale.shape == (256,)
    x = torch.randn(5, 128)
    with torch.inference_mode():
        got, _ = layer(x)
    expected = x.double() @ torch.cat(values).t() + layer.bias.double()
    assert_gemm_close(got, expected, k=128, dtype=torch.bfloat16)


@pytest.mark.parametrize(("name", "config"), [("modelopt_fp4", MODELOPT), ("compressed-tensors", CT)])
@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_experts(seam, request, name, config, expert_parallel, packed):
    from nvfp4.integrations.vllm.experts import PackedExperts
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
    )
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    if DEVICE == "cuda" and not packed:
        pytest.skip("on a GPU the plan marks a fragment layout")
    if DEVICE == "cpu" and packed:
        request.getfixturevalue("fragments")
    experts, hidden, inter, top_k = 4, 64, 32, 2
    parallel = FusedMoEParallelConfig.make_no_parallel()
    if expert_parallel:  # the second of two ranks
        parallel.use_ep, parallel.ep_size, parallel.ep_rank = True, 2, 1
    manager = ExpertMapManager(64, top_k, experts, 0, None, parallel, "linear", False)
    moe = FusedMoEConfig(
        num_experts=experts,
        experts_per_token=top_k,
        hidden_dim=hidden,
        intermediate_size=inter,
        num_local_experts=manager.local_num_experts,
        num_logical_experts=experts,
        activation=MoEActivation.SILU,
        device=DEVICE,
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
        swiglu_limit=0.5,
    )
    layer = RoutedExperts(
        "model.layers.0.mlp.experts",
        torch.bfloat16,
        moe,
        seam(name).from_config(config),
        manager,
        swiglu_limit=0.5,
    )
    assert layer.quant_method.experts_cls is PackedExperts
    local = range(2, 4) if expert_parallel else range(4)
    w13, w2 = torch.zeros(4, 2 * inter, hidden).double(), torch.zeros(4, hidden, inter).double()
    for expert in range(experts):
        for shard, rows, columns, size in (
            ("w1", inter, hidden, 1.0),
            ("w3", inter, hidden, 4.0),
            ("w2", hidden, inter, 1),
        ):
            tensors, value = stored(name, torch.randn(rows, columns, dtype=torch.float32) * size)
            place = w2[expert] if shard == "w2" else w13[expert, inter * (shard == "w3") :][:inter]
            place.copy_(value)
            for leaf, tensor in tensors.items():
                stack = f"{'w2' if shard == 'w2' else 'w13'}_{leaf}"
                layer.weight_loader(getattr(layer, stack), tensor, f"experts.{expert}.{leaf}", shard, expert)
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.randn(7, hidden)
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(7)]).int()
    weights = torch.rand(7, top_k, dtype=torch.float32)
    with torch.inference_mode():
        got = layer.quant_method.apply(layer, x, weights, ids, None, None)
    expected = torch.zeros(7, hidden, dtype=torch.float64)
    for token in range(7):
        for slot in range(top_k):
            expert = int(ids[token, slot])
            if expert in local:
                a = w13[expert] @ x[token].double()
                gate, up = a[:inter].clamp(max=0.5), a[inter:].clamp(-0.5, 0.5)
                middle = (torch.nn.functional.silu(gate) * up).bfloat16().double()
                expected[token] += weights[token, slot].double() * (w2[expert] @ middle)
    assert_moe_close(got, expected, hidden=hidden, inter=inter, top_k=top_k, dtype=torch.bfloat16)
    assert tuple(layer.w13_weight_scale_2.shape) == (len(local), 2)
    assert layer.w13_weight.ndim == (4 if packed else 3) and (layer.w13_weight_scale is None) == packed


def test_the_fakes_are_like_the_release(fake_modules):
    """Every name that the fakes give the plug-in is there, and every method takes what the fake's takes."""
    checked = 0
    for module_name, fake in fake_modules.items():
        real = importlib.import_module(module_name)
        for name, fake_value in vars(fake).items():
            if name.startswith("__") or (module_name == "vllm" and name == "__version__"):
                continue
            real_value = getattr(real, name)
            if not inspect.isclass(fake_value):
                continue
            for method, function in vars(fake_value).items():
                if not inspect.isfunction(function) or method in ("__init__", "__getattr__"):
                    continue
                wanted = {p for p in inspect.signature(function).parameters if p not in ("args", "kwargs")}
                assert wanted <= set(inspect.signature(getattr(real_value, method)).parameters), (name, method)
                checked += 1
    assert checked > 15
