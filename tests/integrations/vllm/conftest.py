"""vLLM's names for the time of a test, and plans that mark a fragment layout."""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
from nvfp4.cache import lookup
from nvfp4.cache.records import Environment, LayoutPlan, Plan
from nvfp4.dispatch import table
from nvfp4.integrations import vllm as plugin
from nvfp4.kernels import registry
from nvfp4.testing.fake_experts import KERNELS
from torch import nn

from .fake import Logger, Platform, make_modules, parents
from .fake_linear import CHOSEN, V2_SUPPORTED, MarlinNvFp4LinearKernel
from .fake_moe import NvFp4MoeBackend


def ask(registered, config, method, scheme=None):
    """What the registered config answers for a layer where vLLM's own would answer `method`; and the layer."""
    plugin.register()
    made = registered[config][-1]()
    made.method, made.scheme = method, scheme
    layer = nn.Module()
    return made.get_quant_method(layer, "model.layers.0.mlp"), layer


@pytest.fixture
def fake_modules():
    return make_modules("0.33.0", {}, Logger(), Platform())


@pytest.fixture
def fake_vllm(monkeypatch):
    """vLLM's names for the time of a test; it says what was registered, logged and chosen, and asks the plug-in."""
    registered, logger, platform = {}, Logger(), Platform()
    modules = make_modules("0.33.0", registered, logger, platform)
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in parents(modules).items():
        monkeypatch.setitem(sys.modules, name, module)
    ours = "nvfp4.integrations.vllm."
    for name in [name for name in sys.modules if name.startswith(ours)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(CHOSEN, "kernel", MarlinNvFp4LinearKernel)
    monkeypatch.setitem(CHOSEN, "backend", NvFp4MoeBackend.MARLIN)
    monkeypatch.setenv("NVFP4_VLLM", "1")
    yield SimpleNamespace(
        modules=modules,
        registered=registered,
        lines=logger.lines,
        platform=platform,
        ask=partial(ask, registered),
        chosen=CHOSEN,
        v2=V2_SUPPORTED,
        names=SimpleNamespace(**{name: value for module in modules.values() for name, value in vars(module).items()}),
    )
    for name in [name for name in sys.modules if name.startswith(ours)]:
        del sys.modules[name]
        vars(sys.modules[ours[:-1]]).pop(
            name.removeprefix(ours), None
        )  # `from package import module` looks there first


@pytest.fixture
def fragments(monkeypatch):
    """Kernels of experts that read fragments, beside those that do not, and plans that mark such a layout."""
    kernels = (*KERNELS, registry.get("cpu_moe"), registry.get("cpu_grouped"))
    monkeypatch.setattr(registry, "_all", lambda: {kernel.name: kernel for kernel in kernels})

    def find_plan(device, problem):
        if problem.op != "moe":
            return None
        layout = "fragment1-bf16" if problem.dtype == "bfloat16" else "fragment1-fp16"
        layouts = (LayoutPlan(layout=layout, intervals=(), traffic_us=1.0),)
        environment = Environment(nvfp4="0", torch="0")
        return Plan(
            device=device, problem=problem, layout=layout, layouts=layouts, traffic="test", environment=environment
        )

    monkeypatch.setattr(lookup, "find_plan", find_plan)
    table.clear()
    yield
    table.clear()
