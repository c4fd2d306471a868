"""What NVFP4_KERNELS may name, and what is said when it names something else."""

import sys

import pytest
from nvfp4.errors import InvalidInput
from nvfp4.kernels import registry


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
