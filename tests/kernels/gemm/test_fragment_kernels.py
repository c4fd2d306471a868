"""The fragment kernels beyond what every kernel must do; results by the Triton interpreter."""

from dataclasses import replace

import pytest
import torch
from nvfp4.dispatch.segments import decide
from nvfp4.kernels import reference, registry
from nvfp4.kernels.problem import Problem
from nvfp4.kernels.triton_launch import interpreting
from nvfp4.kernels.weights.codec import quantize
from nvfp4.kernels.weights.fragment import fragment_id
from nvfp4.kernels.weights.layouts import to_layout
from nvfp4.testing import assert_gemm_close, conformance

pytest.importorskip("triton")

from nvfp4.kernels.gemm import triton_fused_fragment, two_pass, two_pass_fragment

CPU = torch.device("cpu")
H200 = conformance.H200
BLACKWELL = replace(H200, name="RTX PRO 6000", capability=(12, 0), smem_bytes=101376)
KERNELS = [triton_fused_fragment.KERNEL, two_pass_fragment.KERNEL]
DTYPES = ("bfloat16", "float16")

interpreted = pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1 here; on a GPU see tests/gpu")


def inputs(n, k, m, layout, dtype="bfloat16"):
    g = torch.Generator().manual_seed(n + k + m)
    weight, scale, gs = quantize(torch.randn(n, k, generator=g))
    packed = to_layout(weight, scale, gs, layout_id=layout)
    x = torch.randn(m, k, generator=g).to(getattr(torch, dtype))
    return x, packed, reference.gemm(x, weight, scale, gs, round_output=False)


def run(launcher, x, packed):
    out = torch.full((x.shape[0], packed.out_features), float("nan"), dtype=x.dtype)
    launcher(x, packed.data, packed.scale, packed.global_scale, None, None, out)
    return out


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_layout_is_the_device_s_and_the_dtype_s(kernel):
    bf16, fp16 = (Problem(n=64, k=64, dtype=dtype) for dtype in DTYPES)
    for capability in ((8, 0), (8, 9), (9, 0)):
        device = replace(H200, capability=capability)
        assert [kernel.layout(device, p) for p in (bf16, fp16)] == ["fragment1-bf16", "fragment1-fp16"]
    for capability in ((10, 0), (12, 0), (12, 1)):
        device = replace(H200, capability=capability)
        assert [kernel.layout(device, p) for p in (bf16, fp16)] == ["fragment1-nib", "fragment1-nib"]


HOPPER_KERNELS = [(1, 16, "marlin"), (17, None, "cutedsl_wgmma")]
OTHER_KERNELS = [
    (1, 64, "marlin"),
    (65, 191, "cutedsl_mma"),
    (192, 192, "triton_fused_fragment"),
    (193, None, "two_pass_fragment"),
]


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((9, 0), HOPPER_KERNELS), ((8, 0), OTHER_KERNELS), ((8, 9), OTHER_KERNELS), ((12, 0), OTHER_KERNELS)],
    ids=str,
)
def test_untuned_fragment_weights_change_kernels_where_they_are_made_to(capability, expected):
    device, problem = replace(H200, capability=capability), Problem(n=4096, k=4096)
    layout = fragment_id(capability, "bfloat16")
    segments = decide(device, problem, layout, None).segments
    chosen = []
    for segment in segments:
        if chosen and chosen[-1][2] == segment.kernel.name:
            chosen[-1] = (chosen[-1][0], segment.m_hi, segment.kernel.name)
        else:
            chosen.append((segment.m_lo, segment.m_hi, segment.kernel.name))
    assert chosen == expected
    assert all(segment.kernel.layout(device, problem) == layout for segment in segments)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_plain_nibbles(kernel, dtype):
    """sm_100 and newer read another encoding than the H200 that the conformance test describes."""
    conformance.check_exact(kernel, BLACKWELL, CPU, dtype, rotations=1, global_scales=(3e-5,))
    problem = Problem(n=70, k=80, dtype=dtype)
    config = kernel.default_config(BLACKWELL, problem, 40)
    conformance.check(kernel, BLACKWELL, CPU, problem, config, 40, seed=11, repeat=False)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("block_rows", "block_k"), [(16, 128), (16, 256), (64, 128)])
@pytest.mark.parametrize("n", [1, 320])
def test_chunks_of_rows(monkeypatch, n, block_rows, block_k, dtype):
    """Several chunks, the last one ragged, K that ends within a block."""
    monkeypatch.setattr(two_pass, "chunk_rows", lambda problem, chunk_mib: min(problem.n, 128))
    kernel, problem = two_pass_fragment.KERNEL, Problem(n=n, k=336, dtype=dtype)
    config = two_pass_fragment.TwoPassFragmentConfig(chunk_mib=0, block_rows=block_rows, block_k=block_k)
    x, packed, ref = inputs(n, 336, 33, kernel.layout(H200, problem), dtype)
    assert_gemm_close(run(kernel.build(H200, problem, config), x, packed), ref, k=336, dtype=x.dtype)


@interpreted
@pytest.mark.parametrize("block_k", [64, 128, 256])
@pytest.mark.parametrize(("n", "block_n"), [(64, 64), (70, 128), (200, 128)])
def test_tiles_that_reach_beyond_the_weight(n, block_n, block_k):
    """Rows and k beyond it read blocks that are there, and count for nothing."""
    kernel, problem, k = triton_fused_fragment.KERNEL, Problem(n=n, k=848), 848
    config = triton_fused_fragment.TritonFusedFragmentConfig(
        block_m=16, block_n=block_n, block_k=block_k, split=2, stages=2
    )
    assert kernel.is_valid(H200, problem, config, 5)
    x, packed, ref = inputs(n, k, 5, "fragment1-bf16")
    assert_gemm_close(run(kernel.build(H200, problem, config), x, packed), ref, k=k, dtype=x.dtype)


@interpreted
@pytest.mark.parametrize(("block_m", "m"), [(16, 20), (32, 100), (64, 130), (128, 130), (128, 257)])
def test_every_token_tile(block_m, m):
    kernel, problem = triton_fused_fragment.KERNEL, Problem(n=72, k=144, dtype="float16")
    config = triton_fused_fragment.TritonFusedFragmentConfig(block_m=block_m, block_n=64, block_k=64, split=1, stages=2)
    assert kernel.is_valid(H200, problem, config, m)
    conformance.check(kernel, H200, CPU, problem, config, m, seed=m, repeat=False)


@interpreted
@pytest.mark.parametrize("row_stride", [96, 104, 99])
def test_rows_of_x_at_any_stride(row_stride):
    """Multiples of eight elements are read in place, others are not aligned for 16-byte copies."""
    kernel, problem = triton_fused_fragment.KERNEL, Problem(n=40, k=96)
    x, packed, ref = inputs(40, 96, 7, "fragment1-bf16")
    wide = torch.full((7, row_stride), float("nan"), dtype=x.dtype)
    wide[:, :96] = x
    launcher = kernel.build(H200, problem, kernel.default_config(H200, problem, 7))
    assert_gemm_close(run(launcher, wide[:, :96], packed), ref, k=96, dtype=x.dtype)
    single = torch.as_strided(x.flatten().clone(), (1, 96), (10**9, 1))  # the stride of a single row means nothing
    assert_gemm_close(run(launcher, single, packed), ref[:1], k=96, dtype=x.dtype)


def test_blocks_that_would_spill_are_refused():
    problem = Problem(n=4096, k=4096)
    config = two_pass_fragment.TwoPassFragmentConfig(chunk_mib=0, block_rows=64, block_k=256)
    assert "spill" in two_pass_fragment.KERNEL.is_valid(H200, problem, config, 512).reason
    fused = triton_fused_fragment.TritonFusedFragmentConfig(block_m=64, block_n=64, block_k=256, split=1, stages=2)
    assert triton_fused_fragment.KERNEL.is_valid(H200, problem, fused, 64)
    assert "spill" in triton_fused_fragment.KERNEL.is_valid(BLACKWELL, problem, fused, 64).reason


@pytest.mark.parametrize("n", [1, 100, 4096, 151936])
@pytest.mark.parametrize("k", [16, 80, 4096, 28672])
def test_tiles_are_no_larger_than_the_padded_weight(n, k):
    problem = Problem(n=n, k=k)
    for m in (1, 17, 64, 128, 300):
        config = triton_fused_fragment.KERNEL.default_config(H200, problem, m)
        assert config.block_n <= -(-n // 64) * 64 and config.block_k <= -(-k // 64) * 64
        assert triton_fused_fragment.KERNEL.is_valid(H200, problem, config, m)


def test_the_registry_finds_them():
    assert {kernel.name for kernel in KERNELS} <= {kernel.name for kernel in registry.kernels("gemm")}
