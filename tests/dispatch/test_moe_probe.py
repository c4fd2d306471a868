"""What experts and blocks compute is found by running them, which leaves them as they were."""

import torch
from nvfp4.dispatch.moe_probe import probe_block, probe_stacked
from torch.nn.functional import gelu

from .moe_models import TOP_K, ListBlock, Stacked


def test_the_activation_is_what_the_code_computes():
    found = probe_stacked(Stacked(limit=7.0))
    assert (found.activation, found.values) == ("swiglu", {"limit": 7.0})
    assert probe_stacked(Stacked(act=lambda g: gelu(g, approximate="tanh"))).activation == "geglu_tanh"
    assert probe_stacked(Stacked(act=lambda g: gelu(g))).activation == "geglu"
    assert probe_stacked(Stacked(gated=False)).activation == "relu2"
    assert "something else than the activations" in probe_stacked(Stacked(act=lambda g: g * torch.sigmoid(1.702 * g)))


def test_the_default_device_does_not_matter():
    with torch.device("meta"):
        stacked, block = Stacked(), ListBlock()
        assert probe_stacked(stacked).activation == "swiglu"
        assert probe_block(block).top_k == TOP_K


def test_probing_leaves_experts_as_they_are():
    module = Stacked()
    before = {name: tensor.clone() for name, tensor in module.named_parameters()}
    assert probe_stacked(module).activation == "swiglu"
    assert all(torch.equal(before[name], tensor) for name, tensor in module.named_parameters()) and module.training


def test_probing_leaves_a_block_as_it_is():
    block = ListBlock()
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    experts, gate = list(block.experts), block.gate
    assert probe_block(block).top_k == TOP_K
    assert list(block.experts) == experts and block.gate is gate and block.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in block.state_dict().items())
