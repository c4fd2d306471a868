"""What bench/moe.py times: three layers of experts, their two products alone, and bf16 `torch._grouped_mm`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from nvfp4.kernels.moe.activations import activation
from nvfp4.kernels.problem import Device, Problem
from nvfp4.tuner.experts_trial import ExpertsTrial
from nvfp4.tuner.inputs import COLD, MAX_COPIES
from nvfp4.tuner.routing import relabel, relabelings, routed_ids
from torch import Tensor

Launches = list[Callable[[], None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The routed experts of one layer."""

    name: str
    hidden: int
    inter: int
    experts: int
    top_k: int
    activation: str = "swiglu"

    @property
    def first_rows(self) -> int:
        """Rows of w13."""
        return self.inter * (2 if activation(self.activation).gated else 1)

    def problem(self, part: str) -> Problem:
        """Of "op", the whole layer, or of "up" or "down", one product."""
        if part == "op":
            return Problem(
                op="moe",
                n=self.inter,
                k=self.hidden,
                experts=self.experts,
                top_k=self.top_k,
                activation=self.activation,
            )
        n, k = (self.first_rows, self.hidden) if part == "up" else (self.hidden, self.inter)
        return Problem(op="grouped_gemm", n=n, k=k, experts=self.experts)

    def work(self, part: str, tokens: int, active: int) -> tuple[float, float]:
        """Bytes that have to be moved once, and operations: 4.5 bits per weight of an active expert.

        Of a product: its input, which for "up" is that of the tokens, and its output. Of the layer: x, the result, and
        what lies between the products, written and read.
        """
        pairs = tokens * self.top_k
        up, down = (active * self.first_rows * self.hidden, active * self.hidden * self.inter)
        flops_up, flops_down = (
            2.0 * pairs * rows for rows in (self.first_rows * self.hidden, self.hidden * self.inter)
        )
        if part == "up":
            return up * 9 / 16 + 2.0 * (tokens * self.hidden + pairs * self.first_rows), flops_up
        if part == "down":
            return down * 9 / 16 + 2.0 * pairs * (self.inter + self.hidden), flops_down
        between = 2.0 * (2 * tokens * self.hidden + 2 * pairs * self.inter)
        return (up + down) * 9 / 16 + between, flops_up + flops_down


MODELS = (
    Model(name="qwen3-30b-a3b", hidden=2048, inter=768, experts=128, top_k=8),
    Model(name="deepseek-v3", hidden=7168, inter=2048, experts=256, top_k=8),
    Model(name="nemotron3-super-like", hidden=1024, inter=2688, experts=512, top_k=22, activation="relu2"),
)
TINY = (
    Model(name="tiny", hidden=64, inter=48, experts=8, top_k=2),
    Model(name="tiny-relu2", hidden=32, inter=64, experts=5, top_k=3, activation="relu2"),
)


def rows_of(part: str, model: Model, tokens: int) -> int:
    """Of x: a token each for the layer, and for a product a pair of token and slot."""
    return tokens if part == "op" else tokens * model.top_k


class Part:
    """One part of one layer on one device; its tokens go where `routing` sends them, the same in every part.

    Parameters
    ----------
    name
        "op", "up" or "down".
    sync
        Waits for the device.
    """

    def __init__(
        self,
        name: str,
        model: Model,
        tokens: tuple[int, ...],
        routing: str,
        place: torch.device,
        device: Device,
        sync: Callable[[], None],
    ) -> None:
        self.name, self.model, self.device, self.place, self.routing = name, model, device, place, routing
        self.problem = model.problem(name)
        ids = routed_ids(routing, model.experts, max(tokens), model.top_k).to(place)
        self.ids = ids if name == "op" else ids.view(-1, 1)  # a product has a row for every pair
        self.trial = ExpertsTrial(device, place, self.problem, tuple(self.m(t) for t in tokens), sync)
        self.trial.ids[routing] = self.ids
        self._dense: Tensor | None = None

    def m(self, tokens: int) -> int:
        """Rows of x."""
        return rows_of(self.name, self.model, tokens)

    def active(self, tokens: int) -> int:
        """Experts with at least one token."""
        return int(self.ids[: self.m(tokens)].unique().numel())

    def bf16_launches(self, tokens: int) -> Launches:
        """`torch._grouped_mm` on 16-bit experts, each call with the experts in another order."""
        p, m = self.problem, self.m(tokens)
        dense = self._dense_weight()
        x, ids = self.trial.x[:m], self.ids[:m]
        touched = dense.nbytes * self.active(tokens) / p.experts
        count = max(2, min(math.ceil(COLD * self.device.l2_bytes / touched), MAX_COPIES[self.device.kind]))
        multiply: Any = torch._grouped_mm
        found: Launches = []
        for order in relabelings(p.experts, count).to(self.place):
            counts = torch.bincount(relabel(ids, order).flatten().long(), minlength=p.experts)
            found.append(partial(multiply, x, dense.transpose(-2, -1), offs=counts.cumsum(0).int()))
        return found

    def close(self) -> None:
        """Give the memory back."""
        self._dense = None
        self.trial.close()

    def _dense_weight(self) -> Tensor:
        """[E, N, K] bfloat16, random: about as large as dequantised weights, one expert at a time."""
        if self._dense is None:
            p = self.problem
            self._dense = torch.empty(p.experts, p.n, p.k, dtype=torch.bfloat16, device=self.place)
            for expert in self._dense:
                expert.normal_(std=1 / math.sqrt(p.k))
        return self._dense
