"""Small models with experts, as 3-D parameters and as linear layers, their dense twins, and checkpoints of them."""

import nvfp4
import torch
from nvfp4.testing import relative_error
from nvfp4.testing.checkpoints import experts
from torch import nn
from torch.nn.functional import linear, silu, softmax

EXPERTS, HIDDEN, INTER, TOP_K = 4, 64, 32, 2
NAME = "model.layers.0.mlp.experts"
QWEN, MIXTRAL = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")


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
    assert y.dtype == ref.dtype, (y.dtype, ref.dtype)
    error = relative_error(y, ref)
    assert error < 0.02, error


def separate(names=QWEN, name=NAME, bias=False):
    return experts(name, EXPERTS, HIDDEN, INTER, roles=names, bias=bias)


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
