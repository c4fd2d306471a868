"""Which candidates are built for a GPU that is not here, and what happens when one of them cannot be built."""

import pytest
from nvfp4.cache.records import Environment, Interval, LayoutPlan, Plan
from nvfp4.dispatch.offline import TYPICAL, Wanted, build_all, capability_of
from nvfp4.errors import InvalidInput
from nvfp4.kernels.build import Built
from nvfp4.kernels.problem import Device, Problem

H200 = TYPICAL[9, 0][0]
PROBLEM = Problem(n=64, k=128)


@pytest.fixture
def compiled(fake, install):
    """compiled(name, …): a fake kernel that a compiler makes."""

    def make(name, **options):
        kernel = fake(name, **options)
        kernel.packages = ("a-compiler",)
        return kernel

    return make


class Pool:
    """Builds in this process; notes the order."""

    def __init__(self, breaks=()):
        self.submitted, self.breaks = [], list(breaks)

    def submit(self, device, problem, kernel, config):
        self.submitted.append((kernel.name, config.tile))

    def outcome(self, device, problem, kernel, config):
        if self.breaks and self.breaks[0] == kernel.name:
            self.breaks.pop(0)
            return Built(known=False)
        return Built(error=kernel.build_error)


def run(*wanted, breaks=()):
    pool, seen, warnings = Pool(breaks), [], []
    build_all(
        wanted,
        pool=pool,
        built=lambda c, outcome, left: seen.append((c.device.name, c.kernel.name, c.config.tile, outcome.error, left)),
        warn=warnings.append,
    )
    assert [(name, tile) for _, name, tile, *_ in seen] == pool.submitted
    return seen, warnings


def plan(device=H200, **by_layout):
    rows = {
        layout: tuple(
            Interval(m_lo=lo, m_hi=hi, kernel=kernel, config=f'{{"tile":{tile}}}', expected_us=1.0)
            for lo, hi, kernel, tile in intervals
        )
        for layout, intervals in by_layout.items()
    }
    return Plan(
        device=device,
        problem=PROBLEM,
        layout=next(iter(rows)),
        layouts=tuple(LayoutPlan(layout=name, intervals=found, traffic_us=1.0) for name, found in rows.items()),
        traffic="decode-heavy",
        environment=Environment(nvfp4="0", torch="0"),
    )


def test_a_plan_names_its_candidates_and_every_other_layout_has_defaults(compiled, install):
    install(compiled("a"), compiled("b"), compiled("m", layout="mirrored", default_tile=lambda m: 32 if m > 64 else 16))
    tuned = plan(checkpoint=[(1, 8, "a", 32), (9, 16, "b", 64), (17, None, "a", 32)])
    seen, warnings = run(Wanted(device=H200, problem=PROBLEM, plan=tuned))
    assert seen == [
        ("NVIDIA H200", "a", 32, "", 3),
        ("NVIDIA H200", "b", 64, "", 2),
        ("NVIDIA H200", "m", 16, "", 1),
        ("NVIDIA H200", "m", 32, "", 0),
    ]
    assert warnings == []


def test_without_a_plan_defaults_are_built(compiled, install):
    install(compiled("a", default_tile=lambda m: 64 if m > 1024 else 16))
    seen, _ = run(Wanted(device=H200, problem=PROBLEM))
    assert [tile for *_, tile, _, _ in seen] == [16, 64]


def test_what_is_not_compiled_is_left_out(fake, install):
    install(fake("a"))
    assert run(Wanted(device=H200, problem=PROBLEM)) == ([], [])


def test_what_takes_the_place_of_a_broken_kernel_is_built_too(compiled, install):
    install(compiled("a", build_error="ptxas: no"), compiled("b", m_max=64), compiled("c"))
    tuned = plan(checkpoint=[(1, 64, "a", 32), (65, None, "c", 64)])
    seen, warnings = run(Wanted(device=H200, problem=PROBLEM, plan=tuned))
    assert [(name, tile, error) for _, name, tile, error, _ in seen] == [
        ("a", 32, "ptxas: no"),
        ("c", 64, ""),
        ("b", 16, ""),
    ]
    assert warnings == []


def test_where_every_kernel_is_broken_it_says_why(compiled, install):
    install(compiled("a", build_error="ptxas: no"))
    seen, (warning,) = run(Wanted(device=H200, problem=PROBLEM))
    assert [error for *_, error, _ in seen] == ["ptxas: no"]
    assert "a: cannot be built: ptxas: no" in warning


def test_entries_of_a_plan_that_cannot_be_used_are_named(compiled, install):
    install(compiled("a"))
    seen, (warning,) = run(Wanted(device=H200, problem=PROBLEM, plan=plan(checkpoint=[(1, None, "gone", 16)])))
    assert [name for _, name, *_ in seen] == ["a"]
    assert "gemm 64x128 bfloat16" in warning and "gone is not installed" in warning


def test_a_pool_that_broke_is_asked_again(compiled, install):
    install(compiled("a"))
    seen, _ = run(Wanted(device=H200, problem=PROBLEM), breaks=["a"])
    assert [error for *_, error, _ in seen] == [""]


def test_every_device_has_its_own(compiled, install):
    install(compiled("a"))
    seen, _ = run(*(Wanted(device=device, problem=PROBLEM) for device in TYPICAL[12, 0]))
    assert [name for name, *_ in seen] == ["NVIDIA RTX PRO 6000", "NVIDIA GeForce RTX 5090"]


@pytest.mark.parametrize(
    ("arch", "expected"),
    [("sm_90a", (9, 0)), ("sm_90", (9, 0)), (" sm_120a ", (12, 0)), ("sm_80", (8, 0)), ("sm_130", (13, 0))],
)
def test_names_of_architectures(arch, expected):
    assert capability_of(arch, [*TYPICAL, (13, 0)]) == expected


@pytest.mark.parametrize(
    "arch", ["", "sm_80a", "sm_75", "sm_9", "90", "sm_90b", "H200", "sm_90a sm_80", "sm_\u0669\u0660"]
)
def test_unknown_architectures(arch):
    with pytest.raises(
        InvalidInput, match=r"unknown architecture; got .*; expected sm_80, sm_89, sm_90a, sm_100a, sm_120a"
    ):
        capability_of(arch, TYPICAL)


def test_typical_devices_are_what_their_architecture_says():
    for capability, devices in TYPICAL.items():
        for device in devices:
            assert isinstance(device, Device) and device.kind == "cuda" and device.capability == capability
            assert 99 << 10 <= device.smem_bytes <= 227 << 10 and device.memory_bytes > 1 << 34 > device.l2_bytes
