"""What experts and blocks compute is found by running them, which leaves them as they were."""

import re

import pytest
import torch
from nvfp4.dispatch.moe_probe import OtherKind, probe_block, probe_stacked
from torch import nn
from torch.nn.functional import gelu, sigmoid, silu

from .moe_models import EXPERTS, HIDDEN, INTER, QWEN, TOP_K, Expert, ListBlock, Stacked


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


def odd(act=silu, up=lambda u: u, out=lambda y: y):
    """A class of experts that compute out(down(act(gate) * up(up)))."""

    class Odd(Expert):
        def forward(self, x):
            return out(self.down_proj(act(self.gate_proj(x)) * up(self.up_proj(x))))

    return Odd


class ConstantSize(ListBlock):
    def forward(self, hidden_states):
        return super().forward(hidden_states.reshape(-1, HIDDEN))[0].reshape(hidden_states.shape)


class SizeAttribute(ListBlock):
    def forward(self, hidden_states):
        x = hidden_states.reshape(-1, self.hidden_size)
        return super().forward(x)[0].reshape(hidden_states.shape)


class SizeOfLayer(ListBlock):
    def forward(self, hidden_states):
        x = hidden_states.reshape(-1, self.gate.in_features)
        return super().forward(x)[0].reshape(hidden_states.shape)


class Auxiliary(ListBlock):
    def forward(self, hidden_states):
        return super().forward(hidden_states)[0], torch.zeros(())


class FixedTopK(ListBlock):
    """Two experts count, whatever its attribute says."""

    def forward(self, hidden_states):
        self.top_k, said = TOP_K, self.top_k
        try:
            return super().forward(hidden_states)
        finally:
            self.top_k = said


def block_with(experts=None, kind=ListBlock, **attributes):
    torch.manual_seed(0)
    block = kind()
    if experts is not None:
        block.experts = nn.ModuleList(experts(QWEN) for _ in range(EXPERTS))
    for name, value in attributes.items():
        setattr(block, name, value)
    return block


class Renamed(nn.Module):
    def __init__(self, names):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(HIDDEN, INTER), nn.Linear(INTER, HIDDEN)


class Normed(Expert):
    def __init__(self, names):
        super().__init__(names)
        self.norm = nn.RMSNorm(INTER)


REASONS = {
    r"^called with small random weights \(hidden 24, inter 16\) and x \[2, 8, 24\], its forward failed \(RuntimeError: "
    r"mat1 and mat2 shapes .* \(6x64 and 24x4\)\); sizes must be read from x and its layers": lambda: block_with(
        kind=ConstantSize
    ),
    r"its forward failed \(RuntimeError: mat1 .*, not be constants or attributes of its own": lambda: block_with(
        kind=SizeAttribute, hidden_size=HIDDEN
    ),
    r"x \[16, 24\], the forward of an expert failed \(RuntimeError: .*size of tensor.*\); sizes must": lambda: (
        block_with(odd(out=lambda y: y + y.new_zeros(HIDDEN)))
    ),
    r"an expert alone: .* x \[16, 24\], it returned \[6, 64\]; sizes must": lambda: block_with(
        odd(out=lambda y: y.reshape(-1, HIDDEN))
    ),
    r"its result differs from that of nvfp4\.moe behind a softmax .* of which 3 count, by \d": lambda: block_with(
        kind=FixedTopK, top_k=3
    ),
    r"its result differs .*, by 150 %$": lambda: block_with(factor=2.5),
    r"an expert alone: its result differs from that of nvfp4\.moe with swiglu by 0\.\d+ %, as if rounded": (
        lambda: block_with(odd(out=lambda y: y.bfloat16().to(y.dtype)))
    ),
    r"an expert alone: it is swiglu.* for small values only: constants must be attributes .*limit": (
        lambda: block_with(odd(act=lambda g: silu(g.clamp(max=5.0)), up=lambda u: u.clamp(-5.0, 5.0)))
    ),
    r"no int attribute top_k or num_experts_per_tok from 1 to 4": lambda: block_with(top_k=None),
    r"weights beside its gate and its experts: shared_expert": lambda: block_with(shared_expert=Expert(QWEN)),
    r"its gate has 6 outputs, and there are 4 experts": lambda: block_with(gate=nn.Linear(HIDDEN, 6)),
    r"no router called gate that is a torch.nn.Linear": lambda: block_with(gate=nn.Sequential(nn.Linear(HIDDEN, 4))),
    r"called fc1 fc2, not gate_proj up_proj down_proj, or w1 w3 w2": lambda: block_with(Renamed),
    r"returns other things": lambda: block_with(kind=Auxiliary),
}


@pytest.mark.parametrize("words", REASONS)
def test_the_reason_says_what_was_tried_and_what_came_of_it(words):
    reason = probe_block(REASONS[words]())
    assert type(reason) is str
    assert re.search(words, reason), reason


OTHER_KINDS = {
    "something else than the activations": lambda: block_with(odd(act=lambda g: g * sigmoid(1.702 * g))),
    "weights beside its linear layers: norm": lambda: block_with(Normed),
    "not all alike": lambda: block_with(
        experts=lambda names, seen=[]: (seen.append(1), Expert(names, len(seen) == 2))[1]
    ),
}


@pytest.mark.parametrize("words", OTHER_KINDS)
def test_experts_that_moe_does_not_compute_are_another_kind(words):
    reason = probe_block(OTHER_KINDS[words]())
    assert isinstance(reason, OtherKind) and words in reason


def test_stacked_experts_of_another_kind_are_told_from_those_that_could_not_be_tried():
    assert isinstance(probe_stacked(Stacked(act=torch.tanh)), OtherKind)
    assert type(probe_stacked(Stacked(act=None))) is str
    assert type(probe_stacked(Stacked(act=lambda g: silu(g.clamp(max=7.0))))) is str


def test_long_errors_are_cut_and_stay_on_one_line():
    def fail(y):
        raise RuntimeError("first\nsecond " + "x" * 1000)

    reason = probe_block(block_with(odd(out=fail)))
    assert "RuntimeError: first second xxx" in reason and "…" in reason and len(reason) < 400


class Called(nn.ModuleList):
    """Experts with a forward of their own, called as 3-D ones are."""

    def forward(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e, expert in enumerate(self):
            token, slot = torch.where(ids == e)
            y.index_add_(0, token, expert(x[token]) * weights[token, slot, None].to(x.dtype))
        return y


class CallingBlock(ListBlock):
    def forward(self, hidden_states):
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, ids = self.gate(x).float().softmax(-1).topk(self.top_k)
        return self.experts(x, ids, weights).reshape(hidden_states.shape)


def test_a_list_of_experts_may_have_a_forward():
    block = CallingBlock()
    block.experts = Called(Expert(QWEN) for _ in range(EXPERTS))
    found = probe_block(block)
    assert (found.experts.activation, found.renormalize, found.returns_logits) == ("swiglu", False, False)


def test_sizes_of_layers_are_those_of_the_trial():
    assert probe_block(SizeOfLayer()).top_k == TOP_K
