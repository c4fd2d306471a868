"""A fake kernel that computes the exact result and notes every launch; weights; plans made by hand."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from nvfp4.cache import lookup
from nvfp4.cache.records import Environment, Interval, LayoutPlan, Plan
from nvfp4.dispatch import call, table
from nvfp4.errors import BuildError
from nvfp4.kernels import reference, registry
from nvfp4.kernels.device import describe
from nvfp4.kernels.kernel import Config, Kernel, Space
from nvfp4.kernels.problem import YES, Problem, Verdict
from nvfp4.kernels.weights import layouts
from nvfp4.kernels.weights.codec import quantize
from nvfp4.kernels.weights.weight import Weight

from .fused_experts import routed
from .moe_calls import noted_launches


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile(Config):
    tile: int = 16


class FakeKernel(Kernel):
    """Right on every input; `limits` say what it refuses, `launches` what it ran as (name, tile, M)."""

    config_type = Tile

    def __init__(
        self,
        name: str,
        *,
        layout: str = "checkpoint",
        made_for: tuple[tuple[int, int | None], ...] = ((1, None),),
        refuses: str = "",
        m_max: int = 1 << 40,
        default_tile: Callable[[int], int] = lambda m: 16,
        build_error: str = "",
    ) -> None:
        self.name = name
        self.made_for = made_for
        self._layout = layout
        self.refuses = refuses
        self.m_max = m_max
        self.default_tile = default_tile
        self.build_error = build_error
        self.launches: list[tuple[str, int, int]] = []
        self.arguments: list[tuple[torch.Tensor | None, ...]] = []
        self.builds: list[Tile] = []

    def layout(self, device, problem):
        return self._layout

    def supports(self, device, problem):
        return Verdict.no(self.refuses) if self.refuses else YES

    def is_valid(self, device, problem, config, m):
        return YES if m <= self.m_max else Verdict.no(f"takes at most {self.m_max} tokens")

    def space(self, device, problem):
        return Space(Tile, {"tile": (16, 32, 64)})

    def default_config(self, device, problem, m):
        return Tile(tile=self.default_tile(m))

    def build(self, device, problem, config):
        if self.build_error:
            raise BuildError(self.build_error)
        self.builds.append(config)

        def launch(x, weight, scale, gs, bias, pqs, out):
            self.launches.append((self.name, config.tile, x.shape[0]))
            self.arguments = [(x, weight, scale, gs, bias, pqs, out)]
            if self._layout != "checkpoint":
                packed = Weight(
                    data=weight,
                    scale=scale,
                    global_scale=gs,
                    layout=self._layout,
                    out_features=problem.n,
                    in_features=problem.k,
                )
                weight, scale, gs = packed.to_checkpoint()
            out.copy_(reference.gemm(x, weight, scale, gs, bias, pqs))

        return launch

    def source_files(self):
        return (Path(__file__),)


@pytest.fixture(autouse=True)
def fresh_table() -> Iterator[None]:
    table.clear()
    table._announced.clear()
    yield
    table.clear()
    table._announced.clear()


@pytest.fixture
def install(monkeypatch):
    """install(FakeKernel, …): these kernels are all there are."""

    def install(*kernels: Kernel) -> None:
        monkeypatch.setattr(registry, "_all", lambda: {kernel.name: kernel for kernel in kernels})
        table.clear()

    return install


@pytest.fixture(scope="session")
def fake():
    return FakeKernel


@pytest.fixture
def exact(install, no_plan):
    """One fake kernel installed, nothing tuned."""
    kernel = FakeKernel("exact")
    install(kernel)
    return kernel


@pytest.fixture
def set_plan(monkeypatch):
    """set_plan(problem, layout=[(m_lo, m_hi, kernel, tile), …], …): what the database holds."""

    def set_plan(problem: Problem, marked: str = "checkpoint", **by_layout) -> Plan:
        plan = Plan(
            device=describe("cpu"),
            problem=problem,
            layout=marked,
            layouts=tuple(
                LayoutPlan(
                    layout=name,
                    intervals=tuple(
                        Interval(
                            m_lo=lo,
                            m_hi=hi,
                            kernel=kernel,
                            config=tile if isinstance(tile, str) else f'{{"tile":{tile}}}',
                            expected_us=1.0,
                        )
                        for lo, hi, kernel, tile in rows
                    ),
                    traffic_us=1.0,
                )
                for name, rows in by_layout.items()
            ),
            traffic="test",
            environment=Environment(nvfp4="0", torch="0"),
        )
        monkeypatch.setattr(lookup, "find_plan", lambda device, wanted: plan if wanted == problem else None)
        table.clear()
        return plan

    return set_plan


@pytest.fixture
def no_plan(monkeypatch):
    monkeypatch.setattr(lookup, "find_plan", lambda device, problem: None)


@pytest.fixture
def mirrored(monkeypatch):
    """A second weight layout: bytes of a row in the opposite order."""
    known = dict(layouts._all())

    def pack(weight, scale, gs):
        return Weight(
            data=weight.flip(1).contiguous(),
            scale=scale,
            global_scale=gs,
            layout="mirrored",
            out_features=weight.shape[0],
            in_features=2 * weight.shape[1],
        )

    def to_checkpoint(weight):
        return weight.data.flip(1), weight.scale.view(torch.float8_e4m3fn), weight.global_scale

    known["mirrored"] = layouts.Layout(
        id="mirrored",
        pack=pack,
        to_checkpoint=to_checkpoint,
        data_shape=lambda n, k: (n, k // 2),
        scale_shape=lambda n, k: (n, k // 16),
    )
    monkeypatch.setattr(layouts, "_all", lambda: known)


@pytest.fixture
def case():
    """case(m, n, k, dtype): x and a checkpoint weight; scales as uint8."""

    def case(m: int = 3, n: int = 32, k: int = 64, dtype: torch.dtype = torch.bfloat16) -> SimpleNamespace:
        generator = torch.Generator().manual_seed(m * 7 + n * 3 + k)
        weight, scale, gs = quantize(torch.randn(n, k, generator=generator))
        x = torch.randn(m, k, generator=generator).to(dtype)
        return SimpleNamespace(
            x=x, weight=weight, scale=scale.view(torch.uint8), gs=gs, ref=reference.gemm(x, weight, scale, gs), n=n, k=k
        )

    return case


@pytest.fixture(name="call")
def call_of_experts():
    """x, topk_ids and topk_weights for a layer of `fused_experts`."""
    return routed()


@pytest.fixture
def moe_launches(no_plan):
    """What launchers of `moe_calls.PROBLEM` got: the arguments of every launch, of which the results are right."""
    return noted_launches()


@pytest.fixture
def checked(monkeypatch):
    """The calls that were checked in full, as a list of x's shapes."""
    seen = []
    in_full = call._gemm

    def note(x, *rest):
        seen.append(tuple(x.shape))
        return in_full(x, *rest)

    monkeypatch.setattr(call, "_gemm", note)
    return seen


@pytest.fixture
def square(case):
    """A case whose weight [64, 64] has the same shape when transposed."""
    return case(n=64, k=128)
