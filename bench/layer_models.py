"""The decoder layers of bench/layer.py: one computation, with products in NVFP4, bfloat16 or float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import nvfp4
import torch
import torch.nn.functional as F
from nvfp4.dispatch.checkpoint import ExpertTensors
from nvfp4.kernels.problem import Problem
from nvfp4.kernels.weights.codec import dequantize, quantize
from torch import Tensor

EPS = 1e-6
Routing = tuple[Tensor, Tensor]  # ids int32 [B, top_k], weights float32 [B, top_k]
Quantized = tuple[Tensor, Tensor, Tensor]  # [..., N, K/2], [..., N, K/16], []
Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A layer; without experts its MLP is dense."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inter: int
    experts: int = 0
    top_k: int = 0
    qk_norm: bool = False

    def matrices(self) -> dict[str, tuple[int, ...]]:
        """Sizes [N, K] of the weights in NVFP4, of experts [E, N, K]."""
        front = (self.experts,) if self.experts else ()
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            "o": (self.hidden, self.heads * self.head_dim),
            "gate_up": (*front, 2 * self.inter, self.hidden),
            "down": (*front, self.hidden, self.inter),
        }

    def problems(self) -> list[Problem]:
        """What the products are to the tuner."""
        found = [Problem(n=size[0], k=size[1]) for size in self.matrices().values() if len(size) == 2]
        if self.experts:
            found.append(
                Problem(
                    op="moe",
                    n=self.inter,
                    k=self.hidden,
                    experts=self.experts,
                    top_k=self.top_k,
                    activation="swiglu",
                )
            )
        return found

    def touched_bytes(self, batch: int) -> int:
        """Bytes of NVFP4 weights that a step reads, at most."""
        active = min(self.experts, batch * self.top_k)
        weights = sum(math.prod(size if len(size) == 2 else (active, *size[1:])) for size in self.matrices().values())
        return weights * 9 // 16


MODELS = (
    Shape(
        name="qwen3-30b-a3b",
        hidden=2048,
        heads=32,
        kv_heads=4,
        head_dim=128,
        inter=768,
        experts=128,
        top_k=8,
        qk_norm=True,
    ),
    Shape(name="llama-3.1-8b", hidden=4096, heads=32, kv_heads=8, head_dim=128, inter=14336),
)
TINY = (
    Shape(
        name="tiny-experts", hidden=128, heads=4, kv_heads=2, head_dim=32, inter=64, experts=8, top_k=2, qk_norm=True
    ),
    Shape(name="tiny-dense", hidden=128, heads=4, kv_heads=2, head_dim=32, inter=256),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Weights that all kinds of a layer are made of."""

    matrices: dict[str, Quantized]
    norms: Tensor  # [2, hidden] bfloat16
    router: Tensor | None  # [E, hidden] bfloat16


def quantized(shape: Shape, generator: torch.Generator) -> Source:
    """Random weights that keep x's size, quantised by `nvfp4.quantize`."""
    matrices = {}
    for name, size in shape.matrices().items():
        dense = torch.randn(size, generator=generator, device=generator.device, dtype=torch.bfloat16)
        codes, scale, factor = quantize(dense.flatten(0, -2) / math.sqrt(size[-1]))
        matrices[name] = codes.view(*size[:-1], -1), scale.view(*size[:-1], -1), factor
    router = None
    if shape.experts:
        router = torch.randn(shape.experts, shape.hidden, generator=generator, device=generator.device)
        router = (router / math.sqrt(shape.hidden)).bfloat16()
    norms = torch.rand(2, shape.hidden, generator=generator, device=generator.device) + 0.5
    return Source(matrices=matrices, norms=norms.bfloat16(), router=router)


class Block:
    """The layer: x [B, hidden] to [B, hidden], one new token of each sequence.

    Parameters
    ----------
    qkv, o
        Products of attention.
    mlp
        Called with the normed x and, if there are experts, with its routing.
    """

    def __init__(
        self, shape: Shape, source: Source, dtype: torch.dtype, qkv: Product, o: Product, mlp: Callable[..., Tensor]
    ) -> None:
        self.shape, self.qkv, self.o, self.mlp = shape, qkv, o, mlp
        self.norms = source.norms.to(dtype, copy=True)
        self.router = None if source.router is None else source.router.to(dtype, copy=True)
        self.unit = torch.ones(shape.head_dim, dtype=dtype, device=self.norms.device)
        self.cache = self.cos = self.sin = self.norms
        self.routing: Routing | None = None
        self.modules: list[nvfp4.nn.Linear | nvfp4.nn.FusedMoE] = []

    def remember(self, cache: Tensor) -> None:
        """Keys and values [2, B, kv_heads, length, head_dim], of which the last are those of this step."""
        self.cache = cache.clone()
        half = torch.arange(0, self.shape.head_dim, 2, device=cache.device) / self.shape.head_dim
        angles = (cache.shape[3] - 1) * 10_000.0**-half
        self.cos, self.sin = angles.cos().to(cache.dtype), angles.sin().to(cache.dtype)

    def weights(self) -> list[nvfp4.Weight]:
        """Those in NVFP4."""
        found: list[nvfp4.Weight] = []
        for module in self.modules:
            found += module.packed if isinstance(module, nvfp4.nn.FusedMoE) else [module.packed]
        return found

    def __call__(self, x: Tensor, routing: Routing | None = None) -> Tensor:
        """A step; `routing` replaces what the router would say."""
        s, batch = self.shape, len(x)
        h = F.rms_norm(x, (s.hidden,), self.norms[0], EPS)
        q, k, v = self.qkv(h).view(batch, -1, s.head_dim).split([s.heads, s.kv_heads, s.kv_heads], dim=1)
        if s.qk_norm:
            q, k = (F.rms_norm(one, (s.head_dim,), self.unit, EPS) for one in (q, k))
        keys, values = self.cache
        keys[:, :, -1], values[:, :, -1] = self._turned(k), v
        # Heads that share keys are rows of one attention: no keys are repeated.
        q = self._turned(q).view(batch, s.kv_heads, -1, s.head_dim)
        x = x + self.o(F.scaled_dot_product_attention(q, keys, values).reshape(batch, -1))
        h = F.rms_norm(x, (s.hidden,), self.norms[1], EPS)
        if self.router is None:
            return x + self.mlp(h)
        self.routing = self._route(h) if routing is None else routing
        return x + self.mlp(h, *self.routing)

    def _turned(self, x: Tensor) -> Tensor:
        """The rotary embedding of this step's position."""
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], dim=-1)

    def _route(self, h: Tensor) -> Routing:
        assert self.router is not None
        weights, ids = F.linear(h, self.router).float().softmax(-1).topk(self.shape.top_k)
        return ids.int(), weights / weights.sum(-1, keepdim=True)


def gated(y: Tensor) -> Tensor:
    """silu(gate) * up of [..., gate and up]."""
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate) * up


def as_nvfp4(shape: Shape, source: Source) -> Block:
    """With the modules of this package; every tensor is its own."""
    linears = {name: _linear(*one) for name, one in source.matrices.items() if one[0].ndim == 2}
    modules: list[nvfp4.nn.Linear | nvfp4.nn.FusedMoE] = [*linears.values()]
    if shape.experts:
        modules.append(experts := _experts(shape, source))
        mlp: Callable[..., Tensor] = experts
    else:
        gate_up, down = linears["gate_up"], linears["down"]

        def mlp(h: Tensor) -> Tensor:
            return down(gated(gate_up(h)))

    made = Block(shape, source, torch.bfloat16, linears["qkv"], linears["o"], mlp)
    made.modules = modules
    return made


def _linear(codes: Tensor, scale: Tensor, factor: Tensor) -> nvfp4.nn.Linear:
    n, k = codes.shape[0], 2 * codes.shape[1]
    made = nvfp4.nn.Linear(k, n, bias=False, keep_checkpoint=False, device=codes.device)
    return made.load_({"weight": codes.clone(), "weight_scale": scale.clone(), "weight_scale_2": factor.clone()})


def _experts(shape: Shape, source: Source) -> nvfp4.nn.FusedMoE:
    w13, w13_scale, w13_factor = (one.clone() for one in source.matrices["gate_up"])
    w2, w2_scale, w2_factor = (one.clone() for one in source.matrices["down"])
    return nvfp4.nn.FusedMoE.from_experts(
        ExpertTensors(
            w13=w13,
            w13_scale=w13_scale,
            w13_scale_2=w13_factor.expand(shape.experts, 2).contiguous(),
            w2=w2,
            w2_scale=w2_scale,
            w2_scale_2=w2_factor.expand(shape.experts, 1).contiguous(),
            w13_bias=None,
            w2_bias=None,
            pre_quant_scale=None,
            w2_pre_quant_scale=None,
            experts=range(shape.experts),
            gated=True,
        ),
        top_k=shape.top_k,
        keep_checkpoint=False,
    )


def as_bf16(shape: Shape, source: Source) -> Block:
    """With torch's products on dequantised weights."""
    dense = {name: _dense(one, torch.bfloat16) for name, one in source.matrices.items()}

    def qkv(h: Tensor) -> Tensor:
        return F.linear(h, dense["qkv"])

    def o(y: Tensor) -> Tensor:
        return F.linear(y, dense["o"])

    if not shape.experts:

        def mlp(h: Tensor) -> Tensor:
            return F.linear(gated(F.linear(h, dense["gate_up"])), dense["down"])

        return Block(shape, source, torch.bfloat16, qkv, o, mlp)

    experts = torch.arange(shape.experts, device=dense["qkv"].device)
    multiply: Any = torch._grouped_mm

    def grouped(h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        ordered, order = ids.long().view(-1).sort(stable=True)
        ends = torch.searchsorted(ordered, experts, right=True, out_int32=True)
        y = multiply(h[order // shape.top_k], dense["gate_up"].transpose(1, 2), offs=ends)
        y = multiply(gated(y), dense["down"].transpose(1, 2), offs=ends)
        pairs = torch.empty_like(y)
        pairs[order] = y
        return (pairs.view(len(h), shape.top_k, -1).float() * weights.unsqueeze(-1)).sum(1).to(h.dtype)

    return Block(shape, source, torch.bfloat16, qkv, o, grouped)


def as_float32(shape: Shape, source: Source) -> Block:
    """With float32 products on dequantised weights: what the others are compared with."""
    dense = {name: _dense(one, torch.float32) for name, one in source.matrices.items()}

    def mlp(h: Tensor) -> Tensor:
        return F.linear(gated(F.linear(h, dense["gate_up"])), dense["down"])

    def experts(h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        rows = []
        for one, of, by in zip(h, ids.long(), weights, strict=True):
            y = torch.einsum("enk,k->en", dense["gate_up"][of], one)
            rows.append((torch.einsum("enk,ek->en", dense["down"][of], gated(y)) * by.unsqueeze(-1)).sum(0))
        return torch.stack(rows)

    def qkv(h: Tensor) -> Tensor:
        return F.linear(h, dense["qkv"])

    def o(y: Tensor) -> Tensor:
        return F.linear(y, dense["o"])

    return Block(shape, source, torch.float32, qkv, o, experts if shape.experts else mlp)


def _dense(one: Quantized, dtype: torch.dtype) -> Tensor:
    codes, scale, factor = one
    flat = dequantize(codes.flatten(0, -2), scale.flatten(0, -2), factor, dtype)
    return flat.view(*codes.shape[:-1], -1)
