"""CUDA C++ on this machine's GPU: arguments, streams, graphs, clusters, large shared memory, dependent launches."""

import threading
import time

import pytest
import torch
from nvfp4.errors import LaunchError
from nvfp4.kernels.cuda.compile import compile_cuda
from nvfp4.kernels.cuda.launch import CudaLaunch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
hopper = pytest.mark.skipif(CAPABILITY < (9, 0), reason="needs sm_90 or newer")

SOURCE = r"""
struct Add { const float* a; const float* b; float* c; int n; float factor; };

extern "C" __global__ void add(const __grid_constant__ Add p) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.n) p.c[i] = p.a[i] + p.factor * p.b[i];
}

struct Out { int* y; int n; };

extern "C" __global__ void place(const __grid_constant__ Out p) {  // rank + 100 * size of the cluster
#if __CUDA_ARCH__ >= 900
    unsigned rank, size;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    if (threadIdx.x == 0) p.y[blockIdx.x] = rank + 100 * size;
#endif
}

extern "C" __global__ void reverse(const __grid_constant__ Out p) {  // 0..n-1, through shared memory
    extern __shared__ int s[];
    for (int i = threadIdx.x; i < p.n; i += blockDim.x) s[i] = i;
    __syncthreads();
    for (int i = threadIdx.x; i < p.n; i += blockDim.x) p.y[i] = s[p.n - 1 - i];
}

extern "C" __global__ void increment(const __grid_constant__ Out p) {  // every launch reads what the one before wrote
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.n) p.y[i] += 1;
}
"""

N = 1000


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    source = tmp_path_factory.mktemp("cuda") / "kernels.cu"
    source.write_text(SOURCE)
    return lambda entry: compile_cuda(source, CAPABILITY, entry=entry)


@pytest.fixture
def add(compiled):
    return CudaLaunch(compiled("add"), fields="PPPif", block=128, smem_bytes=0)


def stream():
    return torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())


def run_add(add, a, b, c, factor):
    add.launch(-(-a.numel() // 128), 1, 1, stream(), a.data_ptr(), b.data_ptr(), c.data_ptr(), a.numel(), factor)


def vectors(count=3):
    return [torch.randint(-8, 8, (N,), device="cuda").float() for _ in range(count)]


def test_vector_add(add):
    a, b, c = vectors()
    for factor in (2.0, -0.5):
        run_add(add, a, b, c, factor)
        torch.testing.assert_close(c, a + factor * b, rtol=0, atol=0)


def test_two_threads_on_two_streams(add):
    a, b, _ = vectors()
    results = torch.empty(2, 500, N, device="cuda")
    add.load(torch.cuda.current_device())
    torch.cuda.synchronize()
    barrier = threading.Barrier(2)
    errors = []

    def work(number):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                barrier.wait()
                for i in range(500):
                    run_add(add, a, b, results[number, i], float(1000 * number + i))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not errors
    factors = torch.arange(500, device="cuda") + 1000 * torch.arange(2, device="cuda")[:, None]
    torch.testing.assert_close(results, a + factors[..., None] * b, rtol=0, atol=0)


def test_first_launch_inside_a_capture(compiled):
    # other fields of the launch than elsewhere in this file, so that nothing loaded it before
    fresh = CudaLaunch(compiled("add"), fields="PPPif", block=128, smem_bytes=16)
    fresh.load(torch.cuda.current_device())
    a, b, c = vectors()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_add(fresh, a, b, c, 3.0)
    for _ in range(2):
        a.copy_(torch.randint(-8, 8, (N,), device="cuda"))
        graph.replay()
        torch.testing.assert_close(c, a + 3 * b, rtol=0, atol=0)


@hopper
@pytest.mark.parametrize("size", [1, 2, 8, 16])
def test_clusters(compiled, size):
    launch = CudaLaunch(compiled("place"), fields="Pi", block=32, smem_bytes=0, cluster=size)
    y = torch.full((32,), -1, dtype=torch.int32, device="cuda")
    try:
        launch.launch(32, 1, 1, stream(), y.data_ptr(), 32)
    except LaunchError as error:
        if size > 8:
            pytest.skip(f"this device has no clusters of {size}: {error}")
        raise
    assert y.tolist() == [rank % size + 100 * size for rank in range(32)]


def test_more_shared_memory_than_48_kb(compiled):
    count = 60 << 8  # 60 KiB
    launch = CudaLaunch(compiled("reverse"), fields="Pi", block=256, smem_bytes=4 * count)
    y = torch.empty(count, dtype=torch.int32, device="cuda")
    launch.launch(1, 1, 1, stream(), y.data_ptr(), count)
    assert torch.equal(y, torch.arange(count - 1, -1, -1, dtype=torch.int32, device="cuda"))


@hopper
@pytest.mark.parametrize("captured", [False, True])
def test_dependent_launches(compiled, captured):
    launch = CudaLaunch(compiled("increment"), fields="Pi", block=128, smem_bytes=0, pdl=True)
    launch.load(torch.cuda.current_device())
    y = torch.zeros(1 << 20, dtype=torch.int32, device="cuda")

    def steps():
        for _ in range(100):
            launch.launch((1 << 20) // 128, 1, 1, stream(), y.data_ptr(), 1 << 20)

    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            steps()
        graph.replay()
    else:
        steps()
    assert y.unique().tolist() == [100]


class TestErrors:
    def test_grid(self, add):
        a, b, c = vectors()
        with pytest.raises(LaunchError, match=r"grid \(1, 70000, 1\); got CUDA_ERROR_INVALID_VALUE"):
            add.launch(1, 70000, 1, stream(), a.data_ptr(), b.data_ptr(), c.data_ptr(), N, 1.0)
        run_add(add, a, b, c, 1.0)
        torch.testing.assert_close(c, a + b, rtol=0, atol=0)

    def test_fields_that_are_not_the_struct(self, compiled):
        with pytest.raises(LaunchError, match="'PPi' are not its struct; got 20 bytes; expected 32"):
            CudaLaunch(compiled("add"), fields="PPi", block=128, smem_bytes=0).load(torch.cuda.current_device())

    def test_more_shared_memory_than_there_is(self, compiled):
        launch = CudaLaunch(compiled("reverse"), fields="Pi", block=256, smem_bytes=1 << 20)
        with pytest.raises(LaunchError, match="1048576 bytes of dynamic shared memory"):
            launch.load(torch.cuda.current_device())

    def test_another_architecture(self, tmp_path):
        source = tmp_path / "kernels.cu"
        source.write_text(SOURCE)
        other = (9, 0) if CAPABILITY[0] != 9 else (12, 0)
        launch = CudaLaunch(compile_cuda(source, other, entry="add"), fields="PPPif", block=128, smem_bytes=0)
        # The driver may notice when it loads the library, or only when it looks for the kernel.
        with pytest.raises(LaunchError, match=r"(cannot be loaded|is not in its code); got CUDA_ERROR_"):
            launch.load(torch.cuda.current_device())


def test_host_cost(add):
    """A launch with its arguments costs the host about what torch.add(a, b, out=c) does."""
    a, b, c = vectors()

    def host_us(call):
        best = float("inf")
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(200):  # fewer than fill the queue of the stream
                call()
            best = min(best, time.perf_counter() - start)
        return best / 200 * 1e6

    ours = host_us(lambda: run_add(add, a, b, c, 1.0))
    theirs = host_us(lambda: torch.add(a, b, out=c))
    print(f"launch {ours:.2f} us, torch.add {theirs:.2f} us")
    assert ours < 1.5 * theirs
