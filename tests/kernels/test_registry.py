"""What NVFP4_KERNELS may name, and what is said when it names something else."""

import sys

import pytest
from nvfp4.errors import InvalidInput
from nvfp4.kernels import registry
from nvfp4.kernels.problem import Device, Problem


@pytest.fixture(autouse=True)
def fresh():
    registry.refresh()
    yield
    registry.refresh()


def test_every_op_has_kernels_for_cpus_and_gpus():
    for op, names in (
        ("gemm", {"cpu_blocked", "triton_fused"}),
        ("grouped_gemm", {"cpu_grouped", "triton_grouped"}),
        ("moe", {"cpu_moe", "triton_moe"}),
    ):
        found = registry.kernels(op)
        assert names <= {kernel.name for kernel in found} and all(kernel.op == op for kernel in found)


HOPPER_ONLY = {"cutedsl_wgmma", "cutedsl_moe", "cutedsl_grouped"}  # wgmma exists on sm_90a and nowhere else
PROBLEMS = (
    Problem(n=4096, k=4096),
    Problem(op="grouped_gemm", n=1536, k=2048, experts=128),
    Problem(op="moe", n=768, k=2048, experts=128, top_k=8, activation="swiglu"),
)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.op)
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)])
def test_kernels_of_one_architecture_run_on_no_other(capability, problem):
    card = Device(kind="cuda", name="card", capability=capability, units=48, smem_bytes=101376, memory_bytes=1 << 36)
    found = {kernel.name for kernel in registry.kernels(problem.op) if kernel.supports(card, problem)}
    every = {kernel.name for kernel in registry.kernels(problem.op)}
    assert found & HOPPER_ONLY == (every & HOPPER_ONLY if capability == (9, 0) else set())
    assert bool(found - HOPPER_ONLY) == (capability >= (8, 0))
    assert not any(name.startswith("cpu") for name in found)


def test_modules_of_nvfp4_kernels_are_added(monkeypatch):
    monkeypatch.setenv("NVFP4_KERNELS", " nvfp4.testing.fakes ,")
    assert registry.get("fake_good") is not None
    monkeypatch.delenv("NVFP4_KERNELS")
    registry.refresh()
    assert registry.get("fake_good") is None


@pytest.mark.parametrize("module", ["no_such_module", "json"])
def test_a_module_without_kernels_is_named(monkeypatch, module):
    monkeypatch.setenv("NVFP4_KERNELS", module)
    with pytest.raises(InvalidInput, match=rf"NVFP4_KERNELS names '{module}'.*KERNELS"):
        registry.kernels("gemm")


def test_a_kernel_that_is_there_twice_is_named(monkeypatch, tmp_path):
    (tmp_path / "twice_as_many.py").write_text(
        "from nvfp4.kernels.gemm.cpu_blocked import KERNEL\nKERNELS = [KERNEL]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("NVFP4_KERNELS", "twice_as_many")
    with pytest.raises(InvalidInput, match="two kernels are named 'cpu_blocked'"):
        registry.kernels("gemm")
    sys.modules.pop("twice_as_many", None)
