"""Every gemm kernel on this machine's GPU: the conformance case, exactness, and what only a device shows."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from nvfp4.kernels import reference, registry
from nvfp4.kernels.device import describe
from nvfp4.kernels.problem import Problem
from nvfp4.kernels.weights.layouts import to_layout
from nvfp4.testing import assert_gemm_close, conformance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# N x K: no alignment, scales by 4-byte and by 16-byte copies, a ragged everything.
SHAPES = ((129, 48), (200, 320), (360, 1056), (512, 1024), (1000, 2048))
MS = (1, 5, 33, 130)
DTYPES = ("bfloat16", "float16")


def _cases():
    if not torch.cuda.is_available():
        return [], []
    device = describe("cuda")
    checks, builds = [], {}
    for kernel in registry.kernels("gemm"):
        for n, k in SHAPES:
            for dtype in DTYPES:
                problem = Problem(n=n, k=k, dtype=dtype)
                if not kernel.supports(device, problem):
                    continue
                for m in MS:
                    for config in conformance.candidates(kernel, device, problem, m, sampled=1, seed=n + m):
                        checks.append((kernel.name, problem, config, m))
                        builds[kernel.name, problem, config.to_json()] = (kernel.name, problem, config)
    return checks, list(builds.values())


CHECKS, BUILDS = _cases()


def in_layout_of(kernel, device, problem, weight, scale):
    """A checkpoint's weight and scale as the kernel takes them: two arguments of its launcher."""
    one = torch.ones(1, device=weight.device)
    packed = to_layout(weight, scale, one, layout_id=kernel.layout(device, problem))
    return packed.data, packed.scale


def _build(case):
    name, problem, config = case
    registry.get(name).build(describe("cuda"), problem, config)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Everything, by all cores, into the compilers' caches."""
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_build, BUILDS))


@pytest.mark.parametrize(("name", "problem", "config", "m"), CHECKS, ids=lambda v: getattr(v, "label", None))
def test_conforms(name, problem, config, m):
    conformance.check(registry.get(name), describe("cuda"), torch.device("cuda"), problem, config, m, seed=m)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kernel", [k for k in registry.kernels("gemm") if "triton" in k.packages], ids=lambda k: k.name
)
def test_every_code_and_scale_is_exact(kernel, dtype):
    conformance.check_exact(kernel, describe("cuda"), torch.device("cuda"), dtype)
    conformance.check_exact(
        kernel, describe("cuda"), torch.device("cuda"), dtype, k=256, global_scales=(1.0, 2.0**-130)
    )


def test_offsets_beyond_32_bits():
    """M * N > 2^31: the last rows equal the same rows computed alone."""
    n, k, m = 65600, 64, 32768
    weight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    scale = torch.randint(0x30, 0x40, (n, k // 16), dtype=torch.uint8, device="cuda")
    global_scale = torch.full((1,), 0.01, device="cuda")
    x = torch.randn(m, k, device="cuda").half()
    problem = Problem(n=n, k=k, dtype="float16")
    device = describe("cuda")
    for kernel in registry.kernels("gemm"):
        config = kernel.default_config(device, problem, m)
        if not kernel.supports(device, problem) or not kernel.is_valid(device, problem, config, m):
            continue
        launcher = kernel.build(device, problem, config)
        packed = in_layout_of(kernel, device, problem, weight, scale)
        out = torch.full((m, n), float("nan"), dtype=torch.float16, device="cuda")
        launcher(x, *packed, global_scale, None, None, out)
        tail = torch.empty((128, n), dtype=torch.float16, device="cuda")
        launcher(x[-128:], *packed, global_scale, None, None, tail)
        assert torch.equal(out[-128:], tail), kernel.name


@pytest.mark.parametrize("m", [1, 64])
def test_weights_beyond_32_bits(m):
    """More than 2^31 bytes of packed weight: the last rows equal the same rows computed alone."""
    n, k, last = (1 << 20) + 256, 4096, 256
    device, problem = describe("cuda"), Problem(n=n, k=k)
    weight = torch.zeros(n, k // 2, dtype=torch.uint8, device="cuda")
    scale = torch.zeros(n, k // 16, dtype=torch.uint8, device="cuda")
    weight[-last:] = torch.randint(0, 256, (last, k // 2), dtype=torch.uint8, device="cuda")
    scale[-last:] = torch.randint(0x30, 0x40, (last, k // 16), dtype=torch.uint8, device="cuda")
    global_scale = torch.full((1,), 0.01, device="cuda")
    x = torch.randn(m, k, device="cuda").bfloat16()
    assert weight.numel() > 1 << 31
    ran = 0
    for kernel in registry.kernels("gemm"):
        config = kernel.default_config(device, problem, m)
        if not kernel.supports(device, problem) or not kernel.is_valid(device, problem, config, m):
            continue
        ran += 1
        out = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device="cuda")
        packed = in_layout_of(kernel, device, problem, weight, scale)
        kernel.build(device, problem, config)(x, *packed, global_scale, None, None, out)
        exact = reference.gemm(x, weight[-last:], scale[-last:], global_scale, round_output=False)
        assert_gemm_close(out[:, -last:], exact, k=k, dtype=x.dtype)
        assert not out[:, :-last].any(), kernel.name
    assert ran >= 2


@pytest.mark.parametrize("kernel", registry.kernels("gemm"), ids=lambda k: k.name)
@pytest.mark.parametrize("bias_dtype", [torch.float16, torch.float32], ids=str)
def test_parameters_are_constants(kernel, bias_dtype):
    n, k = 64, 256
    device, problem = describe("cuda"), Problem(n=n, k=k, dtype="float16")
    m = 8 if kernel.name == "triton_gemv" else 64
    if not kernel.supports(device, problem):
        pytest.skip(f"{kernel.name} does not run on {device.name}")
    launcher = kernel.build(device, problem, kernel.default_config(device, problem, m))
    weight = torch.zeros(n, k // 2, dtype=torch.uint8, device="cuda")
    scale = torch.zeros(n, k // 16, dtype=torch.uint8, device="cuda")
    out = torch.empty(m, n, dtype=torch.float16, device="cuda")
    x, pqs = torch.ones_like(out[:, :1]).repeat(1, k), torch.ones(k, dtype=torch.float16, device="cuda")
    bias = torch.arange(n, dtype=bias_dtype, device="cuda").requires_grad_()
    gs = torch.ones(1, device="cuda").requires_grad_()
    launcher(x, *in_layout_of(kernel, device, problem, weight, scale), gs, bias, pqs.requires_grad_(), out)
    assert not out.requires_grad
    assert torch.equal(out, bias.detach().half().expand(m, n))


@pytest.mark.parametrize("bias_dtype", [None, torch.float32], ids=str)
def test_more_tokens_than_a_grid_has_in_y(bias_dtype):
    """The last blocks of every kernel that serves so many, with one global scale and with one per row."""
    m, n, k = (1 << 18) + 5, 16, 32
    device, problem = describe("cuda"), Problem(n=n, k=k, dtype="float16")
    weight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    scale = torch.full((n, k // 16), 0x38, dtype=torch.uint8, device="cuda")
    x = torch.randn(m, k, device="cuda").half()
    bias = None if bias_dtype is None else torch.ones(n, dtype=bias_dtype, device="cuda")
    for kernel in registry.kernels("gemm"):
        config = kernel.default_config(device, problem, m)
        if not kernel.supports(device, problem) or not kernel.is_valid(device, problem, config, m):
            continue
        launcher = kernel.build(device, problem, config)
        packed = in_layout_of(kernel, device, problem, weight, scale)
        for gs in (torch.ones(1, device="cuda"), torch.ones(n, device="cuda")):
            out = torch.full((m, n), float("nan"), dtype=torch.float16, device="cuda")
            launcher(x, *packed, gs, bias, None, out)
            tail = torch.empty((64, n), dtype=torch.float16, device="cuda")
            launcher(x[-64:], *packed, gs, bias, None, tail)
            torch.testing.assert_close(out[-64:], tail, rtol=2**-9, atol=1e-3)
            assert not out.isnan().any(), kernel.name
