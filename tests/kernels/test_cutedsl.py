"""Compiling CuTe DSL kernels: what is kept on disk, what decides the machine code, and what a failure says."""

import importlib
import sys

import pytest
from nvfp4.errors import BuildError
from nvfp4.kernels import cutedsl
from nvfp4.kernels.cuda import program_cache

pytest.importorskip("cutlass")

KERNEL = """
import cutlass
from cutlass import Int32, Int64, cute

class Fill:
    def __init__(self, value):
        self.value = value

    @cute.jit
    def __call__(self, count: Int32):
        self.fill(Int64(0), count).launch(grid=[1, 1, 1], block=[32, 1, 1], smem=0)

    @cute.kernel
    def fill(self, address: Int64, count: Int32):
        thread, _, _ = cute.arch.thread_idx()
        pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem)
        if thread < count:
            cute.make_tensor(pointer, cute.make_layout(32))[thread] = self.value
"""


@pytest.fixture
def compile_fill(tmp_path, monkeypatch):
    """Compile the kernel with a constant; counts how often that was really done."""
    monkeypatch.setenv("NVFP4_KERNEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(program_cache, "_open", {})
    source = tmp_path / "fill_of_test.py"
    source.write_text(KERNEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "fill_of_test", raising=False)
    made = []

    def make(value):
        from cutlass import Int32

        made.append(value)
        return importlib.import_module("fill_of_test").Fill(value), (Int32(1),)

    def run(value, arch=(9, 0), text=None):
        if text is not None:
            source.write_text(text)
        return cutedsl.compile_cutedsl(lambda: make(value), arch, key=f"fill {value}", sources=(source,))

    return run, made


def test_a_second_time_it_comes_from_the_cache(compile_fill):
    run, made = compile_fill
    first = run(3)
    assert "fill" in first.entry and first.arch == "sm_90a" and 0 < first.registers <= 32 and first.stack_bytes == 0
    assert run(3) == first
    assert made == [3]


def test_key_architecture_and_source_decide(compile_fill):
    run, made = compile_fill
    first = run(3)
    assert run(4).cubin != first.cubin
    assert run(3, arch=(10, 0)).arch == "sm_100a"
    run(3, text=KERNEL + "# changed\n")
    assert made == [3, 4, 3, 3]


def test_what_does_not_compile(compile_fill):
    run, _ = compile_fill
    with pytest.raises(BuildError, match="CuTe DSL did not compile fill x for sm_90a") as caught:
        run("x")
    assert "\x1b" not in str(caught.value)


def test_the_dsl_is_not_there(compile_fill, monkeypatch):
    run, _ = compile_fill
    monkeypatch.setitem(sys.modules, "cutlass", None)
    with pytest.raises(BuildError, match="install nvidia-cutlass-dsl"):
        run(5)
