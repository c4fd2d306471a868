"""The ops on a GPU, eagerly: the real kernels behind them, streams, threads and memory that is not clean."""

import threading

import nvfp4
import pytest
import torch
from nvfp4.kernels.weights.fragment import fragment_id

from .gemm_case import Case, poison

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("untuned"),
    pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
op = torch.ops.nvfp4.gemm
SHAPES = [(128, 128), (256, 4096), (4096, 1024), (80, 48), (1056, 352)]  # N, K


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_results_are_close_to_the_reference(n, k, dtype):
    for m in (1, 2, 5, 16, 31, 33, 64, 100, 257):
        c = Case(m, n, k, dtype)
        poison()
        c.check(nvfp4.gemm(c.x, c.packed))
        c.check(nvfp4.gemm(c.x, c.weight, c.scale, c.gs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_untuned_weights_are_packed_for_tensor_cores_and_may_stay_as_they_are(dtype):
    c = Case(48, 256, 512, dtype)
    name = fragment_id(torch.cuda.get_device_capability(), str(dtype).removeprefix("torch."))
    assert c.packed.layout == name
    stored = nvfp4.pack(c.weight, c.scale, c.gs, dtype=dtype, layout="checkpoint")
    for m in (1, 16, 48):
        for packed in (stored, c.packed):
            y = nvfp4.gemm(c.x[:m], packed)
            c.check(y, x=c.x[:m])


def test_bias_pre_quant_scale_and_scale_per_row_are_applied():
    for m in (1, 16, 300):
        c = Case(m, 256, 512)
        bias = torch.randn(c.n, device="cuda")
        pqs = (torch.rand(c.k, device="cuda") + 0.5).bfloat16()
        gs = torch.rand(c.n, device="cuda") * 1e-2 + 1e-3
        for b in (bias, bias.bfloat16()):
            y = nvfp4.gemm(c.x, c.weight, c.scale, gs, bias=b, pre_quant_scale=pqs)
            c.check(y, gs=gs, bias=b, pqs=pqs)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_global_scales_of_one_element_have_any_shape(shape):
    c = Case(4, 128, 256)
    c.check(nvfp4.gemm(c.x, c.weight, c.scale, c.gs.reshape(shape)))


def test_float16_applies_the_global_scale_before_rounding():
    k = 4096
    weight = torch.full((128, k // 2), 0x77, dtype=torch.uint8, device="cuda")
    scale = torch.full((128, k // 16), 0x7E, dtype=torch.uint8, device="cuda")
    gs = torch.tensor(1e-5, device="cuda")
    for m in (1, 16, 64, 512):
        y = nvfp4.gemm(torch.ones(m, k, dtype=torch.float16, device="cuda"), weight, scale, gs)
        torch.testing.assert_close(y, torch.full_like(y, 110.1), rtol=2**-10, atol=0)


def test_x_may_be_a_view():
    c = Case(6, 256, 512)
    y = nvfp4.gemm(c.x.view(2, 1, 3, c.k), c.packed)
    assert y.shape == (2, 1, 3, c.n)
    c.check(y)
    wide = torch.full((6, 3 * c.k), float("nan"), dtype=torch.bfloat16, device="cuda")
    wide[:, c.k : 2 * c.k] = c.x
    c.check(nvfp4.gemm(wide[:, c.k : 2 * c.k], c.packed))
    odd = torch.empty_strided((6, c.k), (c.k + 4, 1), dtype=torch.bfloat16, device="cuda").copy_(c.x)
    c.check(nvfp4.gemm(odd, c.packed))
    unaligned = torch.cat([c.x.new_zeros(3), c.x.flatten()])[3:].view(6, c.k)
    c.check(nvfp4.gemm(unaligned, c.packed))


@pytest.mark.parametrize("stride", [1, 3, 1 << 40])
def test_nothing_is_read_beyond_one_row_at_the_end_of_an_allocation(stride):
    c = Case(1, 256, 4096)
    block = torch.zeros(1 << 20, dtype=torch.bfloat16, device="cuda")  # 2 MiB: a whole segment
    offset = block.numel() - c.k
    block[offset:] = c.x[0]
    c.check(nvfp4.gemm(torch.as_strided(block, (1, c.k), (stride, 1), offset), c.packed))
    torch.cuda.synchronize()


def test_no_tokens_leave_no_error_behind():
    c = Case(1, 128, 256)
    y = nvfp4.gemm(c.x[:0], c.packed)
    torch.cuda.synchronize()
    assert y.shape == (0, c.n) and y.is_cuda
    assert torch.ones(4, device="cuda").sum() == 4


def test_nan_rows_stay_in_their_rows():
    for m, row in ((5, 2), (31, 30), (33, 32), (300, 7)):
        c = Case(m, 256, 512)
        c.x[row] = float("nan")
        y = nvfp4.gemm(c.x, c.packed)
        keep = [i for i in range(m) if i != row]
        assert y[row].isnan().all()
        c.check(y[keep], x=c.x[keep])


def test_rows_do_not_depend_on_m():
    c = Case(257, 256, 2048)
    full = nvfp4.gemm(c.x, c.packed)
    c.check(full)
    for m in (1, 2, 7, 16, 17, 64, 128, 200, 256):
        y = nvfp4.gemm(c.x[:m], c.packed)
        c.check(y, x=c.x[:m])
        assert (y != 0).any(1).all()


def test_runs_are_bitwise_equal():
    for m in (1, 8, 48, 300):
        c = Case(m, 256, 8192)
        first = nvfp4.gemm(c.x, c.packed)
        assert all(torch.equal(nvfp4.gemm(c.x, c.packed), first) for _ in range(20))


def test_tensors_in_wrong_places_are_refused():
    c = Case(2, 128, 256)
    for spoilt in (
        (c.x.cpu(), c.weight, c.scale, c.gs),
        (c.x, c.weight.cpu(), c.scale, c.gs),
        (c.x, c.weight, c.scale.cpu(), c.gs),
        (c.x, c.weight, c.scale, c.gs.cpu()),
    ):
        with pytest.raises(nvfp4.InvalidInput, match=r"different devices|not where x is"):
            nvfp4.gemm(*spoilt)
    with pytest.raises(nvfp4.InvalidInput, match="bias is not where x is"):
        nvfp4.gemm(c.x, c.packed, bias=torch.zeros(c.n))
    with pytest.raises(nvfp4.InvalidInput, match="x and weight do not fit"):
        nvfp4.gemm(c.x[:, : c.k // 2].contiguous(), c.packed)


@pytest.mark.parametrize("m", [0, 1, 5])
def test_opcheck(m):
    c = Case(m, 128, 256)
    scale = c.scale.view(torch.uint8)
    torch.library.opcheck(op.default, (c.x, c.weight, scale, c.gs))
    torch.library.opcheck(op.out, (c.x, c.weight, scale, c.gs), {"out": c.x.new_zeros(m, c.n)})
    torch.library.opcheck(torch.ops.nvfp4.dequantize.default, (c.weight, scale, c.gs, torch.bfloat16))


def test_autocast_makes_x_16_bits():
    c = Case(4, 128, 256)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = nvfp4.gemm(c.x.float(), c.packed)
    assert y.dtype == torch.bfloat16
    c.check(y)
    with pytest.raises(nvfp4.InvalidInput, match=r"torch\.autocast"):
        nvfp4.gemm(c.x.float(), c.packed)


def test_dequantize_gives_the_values_of_a_cpu():
    c = Case(1, 80, 96)
    exact = nvfp4.dequantize(c.weight.cpu(), c.scale.cpu(), c.gs.cpu())
    assert torch.equal(nvfp4.dequantize(c.packed).cpu(), exact)


def test_threads_that_call_first_together_get_the_same_bits():
    c = Case(4, 192, 320)  # no other test has this problem
    start = threading.Barrier(8)
    results, errors = [], []

    def work():
        try:
            start.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                y = nvfp4.gemm(c.x, c.packed)
                torch.cuda.current_stream().synchronize()
            results.append(y)
        except Exception as error:
            errors.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert all(torch.equal(result, results[0]) for result in results) and len(results) == 8
    c.check(results[0])


def test_streams_at_once_give_the_same_bits():
    cases = [Case(m, 256, 8192) for m in (1, 2, 4, 16)]
    for c in cases:
        nvfp4.gemm(c.x, c.packed)
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    results = [[] for _ in cases]
    for _ in range(50):
        for c, stream, kept in zip(cases, streams, results, strict=True):
            with torch.cuda.stream(stream):
                kept.append(nvfp4.gemm(c.x, c.packed))
    torch.cuda.synchronize()
    for c, kept in zip(cases, results, strict=True):
        assert all(torch.equal(y, kept[0]) for y in kept)
        c.check(kept[0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_may_be_of_another_gpu_than_the_current():
    assert torch.cuda.current_device() == 0
    for m in (1, 64):
        c = Case(m, 256, 4096, device="cuda:1")
        y = nvfp4.gemm(c.x, c.packed)
        assert y.device == torch.device("cuda:1")
        c.check(y)
    assert torch.cuda.current_device() == 0
