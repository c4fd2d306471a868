"""What is read from a cubin is what ptxas printed when it was made."""

import pytest
from nvfp4.errors import BuildError
from nvfp4.kernels.cuda.compile import compile_cuda
from nvfp4.kernels.cuda.cubin import parameter_bytes, read_cubin


@pytest.fixture
def spilling(tmp_path):
    """Sixty-four values held across a barrier in forty registers, and three parameters."""
    source = tmp_path / "spilling.cu"
    source.write_text(
        """
        struct Three { char c[3]; };
        extern "C" __global__ void __launch_bounds__(1024, 1) spilling(float* y, int n, const Three three) {
            float kept[96];
            #pragma unroll
            for (int i = 0; i < 96; ++i) kept[i] = y[i * n];
            __syncthreads();
            #pragma unroll
            for (int i = 0; i < 96; ++i) y[i * n + 1] = kept[i] * kept[95 - i] + three.c[0];
        }
        """
    )
    return source


def test_registers_and_stack(spilling):
    compiled = compile_cuda(spilling, (9, 0), entry="spilling")
    found = read_cubin(compiled.cubin, "sm_90a")
    assert (found.entry, found.arch, found.cubin) == ("spilling", "sm_90a", compiled.cubin)
    assert (found.registers, found.stack_bytes) == (compiled.registers, compiled.stack_bytes)
    assert found.registers == 64 and found.stack_bytes > 0


def test_two_kernels(source):
    compiled = compile_cuda(source, (9, 0), entry="indexed", defines={"THREADS": 128})
    with pytest.raises(BuildError, match="one kernel"):
        read_cubin(compiled.cubin, "sm_90a")


def test_parameters(spilling):
    compiled = compile_cuda(spilling, (9, 0), entry="spilling")
    assert parameter_bytes(compiled.cubin) == (8, 4, 3)


@pytest.mark.parametrize("cubin", [b"", b"\x7fELF", b"\x7fELF\x02" + bytes(100), b"no cubin at all" * 100])
def test_no_cubin(cubin):
    with pytest.raises(BuildError, match="not a cubin"):
        read_cubin(cubin, "sm_90a")
