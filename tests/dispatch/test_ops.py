"""What a call computes and which x it takes."""

import subprocess
import sys
import warnings

import nvfp4
import pytest
import torch
from nvfp4.kernels import reference

op = torch.ops.nvfp4.gemm

pytestmark = pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning")


def test_weight_and_checkpoint_tensors_give_the_same(exact, case):
    c = case()
    packed = nvfp4.pack(c.weight, c.scale, c.gs)
    assert torch.equal(nvfp4.gemm(c.x, packed), c.ref)
    assert torch.equal(nvfp4.gemm(c.x, c.weight, c.scale, c.gs), c.ref)
    assert torch.equal(op(c.x, c.weight, c.scale.view(torch.float8_e4m3fn), c.gs), c.ref)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lead", [(), (1,), (5,), (2, 3), (2, 1, 3)])
def test_any_leading_shape(exact, case, lead, dtype):
    c = case(m=6, dtype=dtype)
    count = torch.Size(lead).numel()
    x = c.x[:count].reshape(*lead, c.k)
    y = nvfp4.gemm(x, c.weight, c.scale, c.gs)
    assert y.shape == (*lead, c.n) and y.dtype == dtype and y.is_contiguous()
    assert torch.equal(y.reshape(count, c.n), c.ref[:count])


@pytest.mark.parametrize("lead", [(0,), (0, 4), (3, 0)])
def test_no_tokens_no_launch(exact, case, lead):
    c = case()
    y = nvfp4.gemm(torch.empty(*lead, c.k, dtype=torch.bfloat16), c.weight, c.scale, c.gs)
    assert y.shape == (*lead, c.n) and y.dtype == torch.bfloat16
    assert exact.launches == [] and exact.builds == []
    assert torch.ones(4).sum() == 4


def test_no_tokens_are_checked_too(exact, case):
    c = case()
    with pytest.raises(nvfp4.InvalidInput, match="x and weight"):
        nvfp4.gemm(torch.empty(0, c.k // 2, dtype=torch.bfloat16), c.weight, c.scale, c.gs)


def test_no_tokens_in_a_process_of_its_own():
    code = (
        "import torch, nvfp4\n"
        "w, s, g = nvfp4.quantize(torch.randn(32, 64))\n"
        "assert nvfp4.gemm(torch.empty(0, 64, dtype=torch.bfloat16), w, s, g).shape == (0, 32)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_strided_rows_pass_through_without_a_copy(exact, case):
    c = case(m=4)
    wide = torch.zeros(4, 3 * c.k, dtype=torch.bfloat16)
    wide[:, c.k : 2 * c.k] = c.x
    x = wide[:, c.k : 2 * c.k]
    assert torch.equal(nvfp4.gemm(x, c.weight, c.scale, c.gs), c.ref)
    seen = exact.arguments[0][0]
    assert seen.data_ptr() == x.data_ptr() and seen.stride() == (3 * c.k, 1)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: torch.empty_strided(x.shape, (x.shape[1] + 4, 1), dtype=x.dtype).copy_(x),  # rows off 16 bytes
        lambda x: torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape),  # unaligned start
        lambda x: x[:1].expand_as(x),  # overlapping rows
    ],
    ids=["row stride", "start", "expanded"],
)
def test_what_kernels_cannot_read_is_copied(exact, case, view):
    c = case(m=4)
    x = view(c.x)
    assert torch.equal(nvfp4.gemm(x, c.weight, c.scale, c.gs), reference.gemm(x.contiguous(), c.weight, c.scale, c.gs))
    seen = exact.arguments[0][0]
    assert seen.data_ptr() % 16 == 0 and seen.stride(1) == 1 and seen.stride(0) % 8 == 0 and seen.stride(0) >= c.k


def test_leading_strides_that_are_no_rows_are_copied(exact, case):
    c = case(m=6)
    x = c.x.view(2, 3, c.k).transpose(0, 1)
    y = nvfp4.gemm(x, c.weight, c.scale, c.gs)
    assert torch.equal(y, c.ref.view(2, 3, c.n).transpose(0, 1))


@pytest.mark.parametrize("stride", [1, 3, 1 << 40])
def test_one_row_at_the_end_of_its_storage_with_an_absurd_stride(exact, case, stride):
    c = case(m=2)
    x = torch.as_strided(c.x, (1, c.k), (stride, 1), c.k)
    assert torch.equal(nvfp4.gemm(x, c.weight, c.scale, c.gs), c.ref[1:])
    assert exact.arguments[0][0].stride() == (c.k, 1)
    x = torch.as_strided(c.x, (1, 1, c.k), (stride, 7, 1), c.k)
    assert torch.equal(nvfp4.gemm(x, c.weight, c.scale, c.gs), c.ref[1:].view(1, 1, c.n))
    assert exact.arguments[0][0].stride() == (c.k, 1)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_global_scale_of_one_element_in_any_shape(exact, case, shape, dtype):
    c = case()
    gs = torch.full(shape, 0.0078125, dtype=dtype)
    y = nvfp4.gemm(c.x, c.weight, c.scale, gs)
    assert torch.equal(y, reference.gemm(c.x, c.weight, c.scale, torch.tensor(0.0078125)))
    seen = exact.arguments[0][3]
    assert seen.shape == (1,) and seen.dtype == torch.float32


def test_result_is_linear_in_the_global_scale(exact, case):
    c = case()
    for factor in (1.0, 2.0**-7, 3.85e-5):
        y = nvfp4.gemm(c.x, c.weight, c.scale, torch.tensor(factor))
        assert torch.equal(y, reference.gemm(c.x, c.weight, c.scale, torch.tensor(factor)))
    assert torch.equal(
        nvfp4.gemm(c.x, c.weight, c.scale, torch.tensor(2.0**-7)) * 2.0**7,
        nvfp4.gemm(c.x, c.weight, c.scale, torch.tensor(1.0)),
    )


def test_global_scale_is_required(exact, case):
    c = case()
    with pytest.raises(nvfp4.InvalidInput, match="weight_scale_2 is missing"):
        nvfp4.gemm(c.x, c.weight, c.scale)


def test_global_scale_per_row_equals_separate_shards(exact, case):
    c = case(n=48)
    scales = (1e-3, 2e-3, 5e-4)
    rows = torch.tensor(scales).repeat_interleave(16)
    y = nvfp4.gemm(c.x, c.weight, c.scale, rows)
    for i, scale in enumerate(scales):
        part = slice(16 * i, 16 * i + 16)
        alone = nvfp4.gemm(c.x, c.weight[part], c.scale[part], torch.tensor(scale))
        assert torch.equal(y[:, part], alone)


def test_global_scale_changed_in_place_is_seen(exact, case):
    c = case()
    packed = nvfp4.pack(c.weight, c.scale, c.gs)
    before = nvfp4.gemm(c.x, packed)
    packed.global_scale.mul_(2)
    assert torch.equal(nvfp4.gemm(c.x, packed), before * 2)


def test_float16_applies_the_global_scale_before_rounding(exact):
    # The unscaled sum, 1.1e7, is far above the largest float16.
    k = 4096
    weight = torch.full((16, k // 2), 0x77, dtype=torch.uint8)
    scale = torch.full((16, k // 16), 0x7E, dtype=torch.uint8)
    for m in (1, 16, 64):
        y = nvfp4.gemm(torch.ones(m, k, dtype=torch.float16), weight, scale, torch.tensor(1e-5))
        assert torch.equal(y, torch.full((m, 16), 110.1, dtype=torch.float16))


def test_bias_and_pre_quant_scale(exact, case):
    c = case()
    bias, pqs = torch.randn(c.n), (torch.rand(c.k) + 0.5).bfloat16()
    for b in (bias, bias.bfloat16()):
        y = nvfp4.gemm(c.x, c.weight, c.scale, c.gs, bias=b, pre_quant_scale=pqs)
        assert torch.equal(y, reference.gemm(c.x, c.weight, c.scale, c.gs, b, pqs))


def test_unaligned_vectors_reach_kernels_aligned(exact, case):
    c = case()
    rows = torch.rand(c.n + 1)[1:]
    bias = torch.randn(c.n + 1)[1:]
    pqs = torch.rand(c.k + 1).bfloat16()[1:]
    y = nvfp4.gemm(c.x, c.weight, c.scale, rows, bias=bias, pre_quant_scale=pqs)
    assert torch.equal(y, reference.gemm(c.x, c.weight, c.scale, rows, bias, pqs))
    assert all(t.data_ptr() % 16 == 0 for t in exact.arguments[0])


def test_out_is_written(exact, case):
    c = case(m=6)
    out = torch.full((2, 3, c.n), float("nan"), dtype=torch.bfloat16)
    version = out._version
    y = nvfp4.gemm(c.x.view(2, 3, c.k), c.weight, c.scale, c.gs, out=out)
    assert y is out and torch.equal(out.view(6, c.n), c.ref) and out._version > version
    with torch.inference_mode():
        again = torch.empty(6, c.n, dtype=torch.bfloat16)
        op.out(c.x, c.weight, c.scale, c.gs, out=again)
    assert torch.equal(again, c.ref)


@pytest.mark.parametrize(
    "out",
    [
        lambda n: torch.empty(3, n),
        lambda n: torch.empty(4, n, dtype=torch.bfloat16),
        lambda n: torch.empty(n, 3, dtype=torch.bfloat16).t(),
        lambda n: torch.empty(3 * n + 1, dtype=torch.bfloat16)[1:].view(3, n),
    ],
    ids=["dtype", "shape", "strides", "alignment"],
)
def test_out_that_does_not_fit(exact, case, out):
    c = case()
    with pytest.raises(nvfp4.InvalidInput, match=r"^out "):
        nvfp4.gemm(c.x, c.weight, c.scale, c.gs, out=out(c.n))
    assert exact.launches == []


@pytest.mark.parametrize("name", ["x", "weight", "weight_scale", "weight_scale_2", "bias", "pre_quant_scale"])
def test_out_in_memory_that_is_read(exact, case, name):
    c = case(m=4, n=64, k=64)
    tensors = {"x": c.x, "weight": c.weight, "weight_scale": c.scale, "weight_scale_2": c.gs.repeat(c.n)}
    tensors |= {"bias": torch.zeros(c.n), "pre_quant_scale": torch.ones(c.k).bfloat16()}
    # In one storage: out, and 16 bytes before its end the tensor.
    memory = torch.zeros(1 << 14, dtype=torch.uint8)
    out = memory[: 4 * 64 * 2].view(torch.bfloat16).view(4, 64)
    read = tensors[name]

    def at(start):
        tensors[name] = memory[start : start + read.nbytes].view(read.dtype).view(read.shape).copy_(read)
        return tensors

    for start in (out.nbytes - 16, 0):
        with pytest.raises(nvfp4.InvalidInput, match=f"^out overlaps {name};"):
            op.out(**at(start), out=out)
    assert exact.launches == []
    op.out(**at(out.nbytes), out=out)  # right behind it
    after = memory[out.nbytes + read.nbytes :][: out.nbytes].view(torch.bfloat16).view(4, 64)
    op.out(**tensors, out=after)
    assert torch.equal(out, c.ref) and torch.equal(after, c.ref)


def test_out_overlaps_strided_x_in_another_storage(exact, case):
    c = case(m=4, n=64, k=64)
    wide = torch.zeros(8, 128, dtype=torch.bfloat16)
    x = wide[:4, :64].copy_(c.x)
    out = torch.from_dlpack(wide.flatten()[3 * 128 :][: 4 * 64].view(4, 64))  # begins with the last row of x
    assert out.untyped_storage()._cdata != x.untyped_storage()._cdata
    with pytest.raises(nvfp4.InvalidInput, match="out overlaps x"):
        nvfp4.gemm(x, c.weight, c.scale, c.gs, out=out)
    behind = wide.flatten()[3 * 128 + 64 :][: 4 * 64].view(4, 64)
    assert torch.equal(nvfp4.gemm(x, c.weight, c.scale, c.gs, out=behind), c.ref)


def test_rows_do_not_depend_on_m(exact, case):
    c = case(m=257)
    for m in (1, 2, 3, 16, 17, 64, 100, 256):
        assert torch.equal(nvfp4.gemm(c.x[:m], c.weight, c.scale, c.gs), c.ref[:m])


def test_nan_rows_stay_in_their_rows(exact, case):
    c = case(m=33)
    c.x[7] = float("nan")
    y = nvfp4.gemm(c.x, c.weight, c.scale, c.gs)
    assert y[7].isnan().all()
    keep = [i for i in range(33) if i != 7]
    assert torch.equal(y[keep], c.ref[keep])


def test_no_gradient(exact, case):
    c = case()
    c.x.requires_grad_()
    with pytest.raises(nvfp4.InvalidInput, match="no gradient"):
        nvfp4.gemm(c.x, c.weight, c.scale, c.gs)
    with torch.no_grad():
        y = nvfp4.gemm(c.x, c.weight, c.scale, c.gs)
    assert not y.requires_grad and torch.equal(y, c.ref)
    with torch.inference_mode():
        assert torch.equal(nvfp4.gemm(c.x, c.weight, c.scale, c.gs), c.ref)


def test_parameters_count_as_constants(exact, case):
    c = case()
    bias = torch.nn.Parameter(torch.zeros(c.n))
    assert not nvfp4.gemm(c.x, c.weight, c.scale, c.gs, bias=bias).requires_grad


def test_a_freed_tensor_s_place_is_checked_again(exact, case):
    # Same address, other meaning: nothing that was cached for the first tensors may be used for the second.
    storage = torch.zeros(1 << 14, dtype=torch.uint8)
    scales = torch.zeros(1 << 12, dtype=torch.uint8)
    gs = torch.ones(1)
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    assert nvfp4.gemm(x, storage[: 64 * 32].view(64, 32), scales[: 64 * 4].view(64, 4), gs).shape == (2, 64)
    assert nvfp4.gemm(x, storage[: 16 * 32].view(16, 32), scales[: 16 * 4].view(16, 4), gs).shape == (2, 16)
    square = storage[: 32 * 32].view(32, 32)
    assert nvfp4.gemm(x, square, scales[: 32 * 4].view(32, 4), gs).shape == (2, 32)
    with pytest.raises(nvfp4.InvalidInput, match="weight is not contiguous"):
        nvfp4.gemm(x, square.t(), scales[: 32 * 4].view(32, 4), gs)
    with pytest.raises(nvfp4.InvalidInput, match="weight_scale does not fit"):
        nvfp4.gemm(x, square, scales[: 16 * 4].view(16, 4), gs)
    with pytest.raises(nvfp4.InvalidInput, match="wrong dtype of weight"):
        nvfp4.gemm(x, square.view(torch.int8), scales[: 32 * 4].view(32, 4), gs)


def test_dequantize(case):
    c = case()
    packed = nvfp4.pack(c.weight, c.scale, c.gs)
    expected = nvfp4.dequantize(c.weight, c.scale, c.gs, dtype=torch.float64)
    assert expected.dtype == torch.float64 and expected.shape == (c.n, c.k)
    assert torch.equal(nvfp4.dequantize(packed), expected.bfloat16())
    assert torch.equal(
        torch.ops.nvfp4.dequantize(c.weight, c.scale.view(torch.float8_e4m3fn), c.gs, torch.float16), expected.half()
    )
    with pytest.raises(nvfp4.InvalidInput, match="wrong out_features"):
        torch.ops.nvfp4.dequantize(c.weight, c.scale, c.gs, torch.float16, out_features=5)
    with pytest.raises(nvfp4.InvalidInput, match="unknown weight layout"):
        torch.ops.nvfp4.dequantize(
            c.weight, c.scale, c.gs, torch.float16, layout="no-such", out_features=c.n, in_features=c.k
        )


def test_second_layout(exact, case, install, fake, mirrored):
    kernel = fake("mirror", layout="mirrored")
    install(exact, kernel)
    c = case()
    packed = nvfp4.pack(c.weight, c.scale, c.gs, layout="mirrored")
    assert torch.equal(nvfp4.gemm(c.x, packed), c.ref)
    assert torch.equal(nvfp4.gemm(c.x, c.weight, c.scale, c.gs), c.ref)
    assert [entry[0] for entry in kernel.launches + exact.launches] == ["mirror", "exact"]
    assert torch.equal(nvfp4.dequantize(packed), nvfp4.dequantize(c.weight, c.scale, c.gs))
    with pytest.raises(nvfp4.InvalidInput, match="out_features"):
        op(c.x, packed.data, packed.scale, packed.global_scale, layout="mirrored")


def test_no_warning_after_the_first_call(exact, case):
    c = case()
    nvfp4.gemm(c.x, c.weight, c.scale, c.gs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nvfp4.gemm(c.x, c.weight, c.scale, c.gs)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, lambda f: lambda x: torch.func.vjp(f, x)])
def test_a_transform_that_asks_for_a_gradient_is_refused(exact, case, transform):
    c = case()

    def product(x):
        return nvfp4.gemm(x, c.weight, c.scale, c.gs).sum()

    with pytest.raises(nvfp4.InvalidInput, match="nvfp4 ops have no gradient"):
        transform(product)(c.x)
    scaled = torch.func.grad(lambda x: (x * product(x.detach())).sum())(c.x)
    assert torch.equal(scaled, product(c.x).expand_as(c.x))


@pytest.mark.parametrize("transform", [lambda f: lambda x: torch.func.jvp(f, (x,), (x,)), torch.func.jacfwd])
def test_a_transform_that_asks_for_a_tangent_is_refused(exact, case, transform):
    c = case()

    def product(x):
        return nvfp4.gemm(x, c.weight, c.scale, c.gs).sum()

    with pytest.raises(nvfp4.InvalidInput, match="no gradient; got x with a tangent"):
        transform(product)(c.x)
    _, tangent = torch.func.jvp(lambda x: x.sum() * product(c.x), (c.x,), (torch.ones_like(c.x),))
    assert torch.equal(tangent, c.x.numel() * product(c.x))


def test_dual_numbers_are_refused(exact, case):
    c = case()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(c.x, torch.ones_like(c.x))
        with pytest.raises(nvfp4.InvalidInput, match="x with a tangent"):
            nvfp4.gemm(dual, c.weight, c.scale, c.gs)
        assert torch.equal(nvfp4.gemm(c.x, c.weight, c.scale, c.gs), c.ref)
