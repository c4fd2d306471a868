"""A small source with headers, and a cache of its own for every test."""

import pytest
from nvfp4.kernels.cuda import program_cache

SOURCE = r"""
#include "outer.cuh"

struct Arguments {
    const float* x;  // [n]
    float* y;        // [n], the blocks of x in reverse
    int n;
    float factor;
};

extern "C" __global__ void __launch_bounds__(THREADS) reverse(const __grid_constant__ Arguments a) {
    __shared__ float block[THREADS];
    int i = blockIdx.x * THREADS + threadIdx.x;
    block[threadIdx.x] = i < a.n ? a.x[i] * a.factor : OUTER;
    __syncthreads();
    if (i < a.n) a.y[i] = block[THREADS - 1 - threadIdx.x];
}

extern "C" __global__ void indexed(float* y, int n) {
    float kept[64] = {};
    for (int i = 0; i < n; ++i) kept[int(y[i]) & 63] += i;
    y[threadIdx.x] = kept[n & 63];
}
"""


@pytest.fixture(autouse=True)
def kernel_cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache" / "cuda"
    monkeypatch.setenv("NVFP4_KERNEL_CACHE", str(folder))
    monkeypatch.setattr(program_cache, "_open", {})
    monkeypatch.setattr(program_cache, "_warned", False)
    return folder


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    (folder / "parts").mkdir(parents=True)
    (folder / "reverse.cu").write_text(SOURCE)
    (folder / "outer.cuh").write_text('#pragma once\n#include "parts/inner.cuh"\n#define OUTER (INNER + 1)\n')
    (folder / "parts" / "inner.cuh").write_text('#pragma once\n#include "outer.cuh"\n#define INNER 2.0f\n')
    return folder / "reverse.cu"
