"""CUDA sources compile for every architecture without a GPU, once, and say what they need."""

import errno
import os
import stat
import subprocess
import sys
import warnings

import pytest
from cuda import core
from nvfp4.errors import BuildError
from nvfp4.kernels.cuda import program_cache
from nvfp4.kernels.cuda.compile import compile_cuda, cuda_sources

ARCHITECTURES = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (12, 0): "sm_120a",
    (12, 1): "sm_121a",
    (8, 7): "sm_87",
}


@pytest.fixture
def programs(monkeypatch):
    """What was compiled: the architecture of every program."""
    made = []
    program = core.Program

    def counted(code, code_type, options):
        made.append(options.arch)
        return program(code, code_type, options)

    monkeypatch.setattr(core, "Program", counted)
    return made


def reverse(source, capability=(9, 0), *, entry="reverse", threads=128):
    return compile_cuda(source, capability, entry=entry, defines={"THREADS": threads})


def entries(folder):
    return [path for path in (folder / "entries").rglob("*") if path.is_file()]


@pytest.mark.parametrize(("capability", "arch"), ARCHITECTURES.items(), ids=ARCHITECTURES.values())
def test_architectures(source, capability, arch):
    compiled = reverse(source, capability)
    assert compiled.arch == arch
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.entry == "reverse"
    assert 4 < compiled.registers < 64
    assert compiled.static_smem_bytes - 4 * 128 in (0, 1024)  # some architectures reserve a part for the system
    assert compiled.spill_bytes == compiled.stack_bytes == 0


def test_local_memory_is_that_of_the_entry(source):
    assert reverse(source, entry="indexed").stack_bytes >= 4 * 64


def test_spills_are_counted(tmp_path):
    source = tmp_path / "spill.cu"
    source.write_text(
        'extern "C" __global__ void __launch_bounds__(1024) spill(float* y) {\n'
        "    float kept[128];\n"
        "    #pragma unroll\n"
        "    for (int i = 0; i < 128; ++i) kept[i] = y[i * 1024 + threadIdx.x];\n"
        "    __syncthreads();\n"
        "    #pragma unroll\n"
        "    for (int i = 0; i < 128; ++i) y[i * 1024 + threadIdx.x] = kept[127 - i];\n"
        "}\n"
    )
    compiled = compile_cuda(source, (9, 0), entry="spill")
    assert compiled.registers <= 64
    assert compiled.spill_bytes > 0


def test_a_second_time_nothing_is_compiled(source, programs, monkeypatch):
    first = reverse(source)
    monkeypatch.setattr(program_cache, "_open", {})  # as in another process
    assert reverse(source) == first
    assert programs == ["sm_90a"]


def test_the_key_covers_what_decides_the_code(source, programs):
    reverse(source)
    reverse(source, (8, 0))
    reverse(source, threads=256)
    reverse(source, entry="indexed")
    assert len(programs) == 4
    inner = source.parent / "parts" / "inner.cuh"
    inner.write_text(inner.read_text() + "// more\n")
    reverse(source)
    assert len(programs) == 5
    source.write_text(source.read_text().replace("a.x[i] *", "a.x[i] +"))
    changed = reverse(source)
    assert len(programs) == 6
    assert reverse(source) == changed
    assert len(programs) == 6


def test_another_nvrtc_compiles_again(source, programs, monkeypatch):
    reverse(source)
    monkeypatch.setattr("nvfp4.kernels.cuda.compile._nvrtc", lambda: "13.99")
    reverse(source)
    assert len(programs) == 2


def test_macros_do_not_reach_the_compilers_own_headers(tmp_path):
    source = tmp_path / "letters.cu"
    source.write_text('extern "C" __global__ void letters(int* y) { y[0] = T + N + K; }\n')
    assert compile_cuda(source, (8, 0), entry="letters", defines={"T": 1, "N": -2, "K": 1 << 20}).registers


def test_headers_in_the_current_folder_are_not_taken(source, tmp_path, monkeypatch):
    (tmp_path / "missing.cuh").write_text("")
    monkeypatch.chdir(tmp_path)
    source.write_text('#include "missing.cuh"\n' + source.read_text())
    with pytest.raises(BuildError, match=r"missing\.cuh"):
        reverse(source)


def test_sources(source):
    folder = source.parent
    assert cuda_sources(source) == (source, folder / "outer.cuh", folder / "parts" / "inner.cuh")
    source.write_text('#include <cuda_fp16.h>\n#include "absent.cuh"\n  #  include "outer.cuh"\n// "outer.cuh"\n')
    assert cuda_sources(source) == (source, folder / "outer.cuh", folder / "parts" / "inner.cuh")


def test_headers_beside_the_source_come_before_shared_ones(source, tmp_path, monkeypatch, programs):
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr("nvfp4.kernels.cuda.compile.HERE", shared)
    (shared / "outer.cuh").write_text("#error not this one\n")
    (shared / "common.cuh").write_text("#define COMMON 1\n")
    source.write_text('#include "common.cuh"\n' + source.read_text())
    assert cuda_sources(source)[1:3] == (shared / "common.cuh", source.parent / "outer.cuh")
    reverse(source)
    (shared / "common.cuh").write_text("#define COMMON 2\n")
    reverse(source)
    assert len(programs) == 2


class TestErrors:
    def test_the_compilers_words(self, source, kernel_cache):
        source.write_text(source.read_text().replace("a.factor", "a.faktor"))
        with pytest.raises(BuildError) as caught:
            reverse(source)
        assert "reverse.cu did not compile for sm_90a with {'THREADS': 128}" in str(caught.value)
        assert 'reverse.cu(14): error: class "Arguments" has no member "faktor"' in str(caught.value)
        assert not entries(kernel_cache)

    def test_only_the_first_lines(self, source):
        source.write_text("\n".join(f"x{i};" for i in range(90)))
        with pytest.raises(BuildError) as caught:
            reverse(source)
        assert len(str(caught.value).splitlines()) <= 12

    def test_ptxas(self, source):
        with pytest.raises(BuildError, match=r"ptxas error.*too much shared data"):
            reverse(source, threads=1 << 20)

    def test_no_such_kernel(self, source):
        with pytest.raises(BuildError, match=r"no extern .C. kernel; got \['.*', '.*'\]; expected other"):
            reverse(source, entry="other")

    def test_an_architecture_that_nvrtc_does_not_know(self, source):
        with pytest.raises(BuildError, match="does not compile for sm_70"):
            reverse(source, (7, 0))

    def test_no_nvrtc(self, source, monkeypatch):
        from nvfp4.kernels.cuda import compile as module

        module._known.cache_clear()
        monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
        with pytest.raises(BuildError, match="install nvidia-cuda-nvrtc"):
            reverse(source)


class TestCacheFolder:
    def test_is_private(self, source, kernel_cache, monkeypatch, tmp_path):
        monkeypatch.delenv("NVFP4_KERNEL_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        old = os.umask(0o022)
        try:
            reverse(source)
        finally:
            os.umask(old)
        assert len(entries(tmp_path / "nvfp4" / "cuda")) == 1
        for folder in (tmp_path / "nvfp4", tmp_path / "nvfp4" / "cuda"):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700

    @pytest.mark.parametrize("damage", ["empty", "cut", "bit", "folder"])
    def test_damage(self, source, kernel_cache, programs, damage):
        good = reverse(source)
        (entry,) = entries(kernel_cache)
        stored = entry.read_bytes()
        if damage == "folder":
            entry.unlink()
            entry.mkdir()
        else:
            flipped = stored[:100] + bytes([stored[100] ^ 1]) + stored[101:]
            entry.write_bytes({"empty": b"", "cut": stored[:-1], "bit": flipped}[damage])
        with pytest.warns(RuntimeWarning, match="kernel cache") as caught:
            assert reverse(source) == good
        assert len(caught) == 1
        assert len(programs) == 2
        if damage != "folder":
            assert reverse(source) == good
            assert len(programs) == 2  # it was mended

    def test_it_cannot_be_made(self, source, kernel_cache, programs):
        kernel_cache.parent.mkdir(parents=True)
        kernel_cache.write_text("a file")
        with pytest.warns(RuntimeWarning, match="NVFP4_KERNEL_CACHE") as caught:
            assert reverse(source) == reverse(source)
        assert len(caught) == 1
        assert len(programs) == 2

    def test_a_full_disk(self, source, programs, monkeypatch):
        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("cuda.core.utils.FileStreamProgramCache.__setitem__", full)
        with pytest.warns(RuntimeWarning, match="No space left on device") as caught:
            assert reverse(source) == reverse(source)
        assert len(caught) == 1
        assert len(programs) == 2

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_read_only(self, source, kernel_cache, programs):
        reverse(source)
        for folder in (kernel_cache, *(path for path in kernel_cache.rglob("*") if path.is_dir())):
            folder.chmod(0o500)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            reverse(source)
        assert len(programs) == 1
        with pytest.warns(RuntimeWarning, match="kernel cache"):
            reverse(source, threads=64)


CHILD = """
import sys
from hashlib import sha256
from pathlib import Path
from nvfp4.kernels.cuda.compile import compile_cuda
for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
    for threads in (64, 128):
        compiled = compile_cuda(Path(sys.argv[1]), capability, entry="reverse", defines={"THREADS": threads})
        print(compiled.arch, compiled.registers, sha256(compiled.cubin).hexdigest())
"""


def test_two_processes_at_once(source, kernel_cache):
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", CHILD, source],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    first, second = (child.communicate(timeout=120) for child in children)
    assert [child.returncode for child in children] == [0, 0], (first, second)
    assert first[0] == second[0]
    assert len(first[0].splitlines()) == 10
    assert len(entries(kernel_cache)) == 10
    assert not list((kernel_cache / "tmp").iterdir())
