"""What a Triton kernel becomes: a program on disk that needs neither Triton's compiler nor a C compiler to launch."""

import os
import struct
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from nvfp4.errors import BuildError
from nvfp4.kernels import triton_compile, triton_launch
from nvfp4.kernels.cuda import program_cache
from nvfp4.kernels.cuda.cubin import parameter_bytes
from nvfp4.kernels.problem import Device
from nvfp4.kernels.triton_launch import TritonLaunch, interpreting

triton = pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(interpreting(), reason="TRITON_INTERPRET=1: kernels are interpreted, not compiled")

H200 = Device(kind="cuda", name="H200", capability=(9, 0), units=132, smem_bytes=232448)
TYPES = {"acc_ptr": "*fp32", "global_scale_ptr": "*fp32", "bias_ptr": "*bf16", "float_bias_ptr": "*fp32"}
TYPES |= {"out_ptr": "*bf16", **dict.fromkeys(("M", "N", "rows_here", "first_row", "scale_stride", "bias_kind"), "i32")}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NVFP4_KERNEL_CACHE", str(tmp_path / "kernels"))
    monkeypatch.setattr(program_cache, "_open", {})
    triton_compile.compile_triton.cache_clear()
    yield tmp_path / "kernels"
    triton_compile.compile_triton.cache_clear()


def finish(device=H200, *, warps=4, pdl=False, **constants):
    from nvfp4.kernels.gemm._triton_dequant_device import finish as kernel

    constants = {"BM": 8, "BN": 64, **constants}
    return TritonLaunch(kernel, device, signature=TYPES, constants=constants, num_warps=warps, after_pdl=pdl)


@pytest.fixture
def compilations(monkeypatch):
    """How often Triton compiles or reads its own cache."""
    seen, compile_ = [], triton.compile
    monkeypatch.setattr(triton, "compile", lambda *args, **more: seen.append(args) or compile_(*args, **more))
    return seen


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
def test_parameters_are_those_of_the_machine_code(capability):
    launch = finish(Device(kind="cuda", name="some", capability=capability, units=100, smem_bytes=99 << 10))
    assert triton_compile.parameter_fields(launch._source) == ("P",) * 5 + ("i",) * 6 + ("P",) * 2
    assert parameter_bytes(launch.program.compiled.cubin) == (8,) * 5 + (4,) * 6 + (8,) * 2
    assert launch.program.compiled.entry == "finish" and launch.program.compiled.stack_bytes == 0
    assert launch.program.compiled.arch == {8: "sm_80", 9: "sm_90a", 12: "sm_120a"}[capability[0]]


def test_the_program_says_how_it_is_launched():
    from nvfp4.kernels.gemm._triton_fused_device import permute_x

    pointers = dict.fromkeys(("x_ptr", "pre_quant_scale_ptr", "out_ptr"), "*fp16")
    launch = TritonLaunch(
        permute_x,
        H200,
        signature=pointers | dict.fromkeys(("M", "K", "x_stride", "has_pqs"), "i32") | {"x_stride": "i64"},
        constants={"WORDS": 16, "TOKENS": 4, "PDL": False},
        num_warps=8,
    )
    fields = ("P", "P", "P", "i", "i", "q", "i", "P", "P")
    assert triton_compile.parameter_fields(launch._source) == fields
    assert parameter_bytes(launch.program.compiled.cubin) == tuple(map(struct.calcsize, fields))
    assert launch.program.threads == 256
    assert launch.program.smem_bytes == launch.compiled.metadata.shared > 0


def test_a_second_time_it_comes_from_disk(compilations):
    first = finish().program
    triton_compile.compile_triton.cache_clear()
    assert finish().program == first
    assert len(compilations) == 1


@pytest.mark.parametrize(
    "change", [{"BN": 32}, {"warps": 2}, {"pdl": True}, {"device": Device(kind="cuda", name="", capability=(8, 0))}]
)
def test_what_decides_the_machine_code(compilations, change):
    finish()
    finish(**change)
    assert len(compilations) == 2


KERNELS = """
import triton
import triton.language as tl
from helper_of_test import one

N = tl.constexpr(2)

@triton.jit
def kernel(x_ptr):
    tl.store(x_ptr, one(N))

@triton.jit
def other(x_ptr):
    tl.store(x_ptr, one(N) + 1)
"""
HELPER = """
import triton
import triton.language as tl

M = tl.constexpr(1)

@triton.jit
def one(x):
    return x + M
"""
# Every job is a process of its own, forked before any kernel was made: importing torch and Triton takes seconds.
PRINT_KEYS = """
import os, sys
from nvfp4.kernels.triton_compile import _key
import triton.compiler, triton.language
for job in sys.argv[1:]:
    folder, *names = job.split(",")
    if os.fork() == 0:
        sys.path.insert(0, folder)
        import kernels_of_test
        for name in names:
            key = _key((getattr(kernels_of_test, name), (9, 0), (("x_ptr", "*i32"),), (), ()), ())
        print(key, flush=True)
        os._exit(0)
    os.wait()
"""


def test_sources_decide_and_what_was_asked_for_before_does_not(tmp_path):
    before, moved, after = (tmp_path / name for name in ("before", "moved", "after"))
    for folder, helper in ((before, HELPER), (moved, HELPER), (after, HELPER.replace("constexpr(1)", "constexpr(3)"))):
        folder.mkdir()
        (folder / "kernels_of_test.py").write_text(KERNELS)
        (folder / "helper_of_test.py").write_text(helper)
    jobs = [f"{before},kernel", f"{before},other", f"{before},other,kernel", f"{moved},kernel", f"{after},kernel"]
    command = [sys.executable, "-c", PRINT_KEYS, *jobs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    first, other, later, elsewhere, changed = done.stdout.split()
    assert first == later == elsewhere and len({first, other, changed}) == 3


def test_settings_of_triton_that_change_the_machine_code(compilations, monkeypatch):
    finish()
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    triton_compile.compile_triton.cache_clear()
    finish()
    assert len(compilations) == 2


def test_looking_into_a_compilation_passes_the_cache_by(compilations, folder, monkeypatch):
    finish()
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    triton_compile.compile_triton.cache_clear()
    finish()
    assert len(compilations) == 2
    assert len([path for path in folder.rglob("*") if path.is_file()]) == 1


def test_code_of_another_calling_convention_is_refused(monkeypatch):
    monkeypatch.setattr(triton_compile, "parameter_bytes", lambda cubin: (8,) * 12)
    with pytest.raises(BuildError, match="finish: this version of Triton makes code that is launched in another way"):
        finish()


@pytest.mark.parametrize("pdl", [False, True])
def test_what_a_launch_is_given(monkeypatch, pdl):
    seen = []
    monkeypatch.setattr(
        triton_launch.CudaLaunch, "launch", lambda self, *values: seen.append((self.block, self.pdl, values))
    )
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    tensors = [
        SimpleNamespace(device=SimpleNamespace(index=0), data_ptr=lambda address=address: address)
        for address in range(16, 96, 16)
    ]
    finish(pdl=pdl).launch((5, 1, 1), *tensors, 1, 2, 3, 4, 5, 6)
    assert seen == [(128, pdl, (5, 1, 1, 77, 16, 32, 48, 64, 80, 1, 2, 3, 4, 5, 6, 0, 0))]


def test_a_process_that_finds_it_on_disk_compiles_nothing(folder):
    expected = finish().program.compiled.cubin
    code = f"""
import sys, triton
sys.path.insert(0, {os.path.dirname(__file__)!r})
triton.compile = None
from test_triton_launch import finish
sys.stdout.buffer.write(finish().program.compiled.cubin)
"""
    environment = os.environ | {"TRITON_CACHE_DIR": str(folder / "none")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == expected
    assert not (folder / "none").exists()
