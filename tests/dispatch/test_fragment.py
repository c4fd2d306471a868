"""Weights in a fragment layout: packed for the device and dtype, and refused where they do not fit."""

import dataclasses

import nvfp4
import pytest
import torch
from nvfp4.dispatch import layout as layout_module
from nvfp4.kernels.device import describe
from nvfp4.kernels.problem import Problem

pytestmark = pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning")
IDS = {torch.bfloat16: "fragment1-bf16", torch.float16: "fragment1-fp16"}
op = torch.ops.nvfp4.gemm


@pytest.fixture
def kernels(install, no_plan, fake):
    """One kernel per layout."""
    made = {name: fake(name, layout=name) for name in ("checkpoint", "fragment1-nib", *IDS.values())}
    install(*made.values())
    return made


@pytest.fixture
def packed(kernels, case):
    """A case of sizes that are padded, with its weight in the layout for bfloat16."""
    c = case(n=48, k=80)
    c.w = nvfp4.pack(c.weight, c.scale, c.gs, layout="fragment")
    return c


@pytest.mark.parametrize("dtype", IDS)
def test_fragment_picks_the_layout_of_the_dtype(kernels, case, dtype):
    c = case(n=48, k=80, dtype=dtype)
    w = nvfp4.pack(c.weight, c.scale, c.gs, layout="fragment", dtype=dtype)
    assert (w.layout, w.data.shape, w.scale) == (IDS[dtype], (1, 2, 2304), None)
    assert repr(w) == f"Weight(48 x 80, layout '{IDS[dtype]}', 1 global scale, cpu)"
    for _ in range(2):  # checked in full, then recognised
        assert torch.equal(nvfp4.gemm(c.x, w), c.ref)
    assert torch.equal(op(c.x, w.data, None, w.global_scale, layout=w.layout, out_features=48), c.ref)
    assert [name for name, *_ in kernels[w.layout].launches] == [w.layout] * 3


def test_fragment_picks_the_layout_of_the_device(kernels, case, monkeypatch):
    c = case()
    blackwell = dataclasses.replace(describe("cpu"), capability=(12, 0))
    monkeypatch.setattr(layout_module, "describe", lambda device: blackwell)
    for dtype in IDS:
        w = nvfp4.pack(c.weight, c.scale, c.gs, layout="fragment", dtype=dtype)
        x = c.x.to(dtype)
        assert w.layout == "fragment1-nib"
        assert torch.equal(nvfp4.gemm(x, w), nvfp4.gemm(x, c.weight, c.scale, c.gs))


def test_one_scale_per_row_and_vectors(kernels, case):
    c = case(n=48, k=80)
    gs = torch.rand(48) + 0.5
    w = nvfp4.pack(c.weight, c.scale, gs, layout="fragment")
    options = {"bias": torch.randn(48), "pre_quant_scale": torch.rand(80).bfloat16()}
    assert torch.equal(nvfp4.gemm(c.x, w, **options), nvfp4.gemm(c.x, c.weight, c.scale, gs, **options))


def test_the_plan_s_fragment_layout_is_taken(kernels, case, set_plan):
    c = case()
    name = "fragment1-bf16"
    set_plan(Problem(n=32, k=64), name, **{name: [(1, None, name, 16)]})
    w = nvfp4.pack(c.weight, c.scale, c.gs)
    assert w.layout == name and torch.equal(nvfp4.gemm(c.x, w), c.ref)


def test_a_marked_layout_for_another_dtype_is_not_taken(kernels, case, set_plan):
    c = case()
    name = "fragment1-fp16"
    set_plan(Problem(n=32, k=64), name, **{name: [(1, None, name, 16)]})
    assert nvfp4.pack(c.weight, c.scale, c.gs).layout == "checkpoint"


def test_x_of_another_dtype(packed):
    match = r'"fragment1-bf16" is not for this x; got x in torch.float16; expected torch.bfloat16; .*pack'
    with pytest.raises(nvfp4.InvalidInput, match=match):
        nvfp4.gemm(packed.x.half(), packed.w)
    with pytest.raises(nvfp4.InvalidInput, match=match):
        nvfp4.warmup(packed.w, dtype=torch.float16)


@pytest.mark.parametrize("k", [64, 96, 128])
def test_x_of_another_k_with_a_weight(packed, k):
    x = torch.zeros(2, k, dtype=torch.bfloat16)
    with pytest.raises(nvfp4.InvalidInput, match=rf"do not fit; got x of shape \(2, {k}\).*48 x 80.*\(\.\.\., 80\)"):
        nvfp4.gemm(x, packed.w)


WRONG = {
    "K of another padding": (
        {"x": torch.zeros(2, 64).bfloat16()},
        r'not one in layout "fragment1-bf16" with N = 48, K = 64; got torch.uint8 \(1, 2, 2304\).*\(1, 1, 2304\).*pack',
    ),
    "K is no multiple of 16": ({"x": torch.zeros(2, 72).bfloat16()}, "K = 72; expected K a multiple of 16"),
    "N of another padding": ({"out_features": 65}, r"N = 65, K = 80.*expected contiguous torch.uint8 \(2, 2, 2304\)"),
    "N is missing": ({"out_features": None}, "wrong out_features; got None; expected N of the weight"),
    "N is zero": ({"out_features": 0}, "wrong out_features; got 0"),
    "a checkpoint's weight": ({"weight": torch.zeros(48, 40, dtype=torch.uint8)}, r"got torch.uint8 \(48, 40\)"),
    "a flat blob": ({"weight": torch.zeros(2 * 2304, dtype=torch.uint8)}, r"got torch.uint8 \(4608,\)"),
    "a blob of words": ({"weight": torch.zeros(1, 2, 2304, dtype=torch.int32)}, "got torch.int32"),
    "a strided blob": (
        {"weight": torch.zeros(1, 2304, 2, dtype=torch.uint8).transpose(1, 2)},
        r"strides \(4608, 1, 2\); expected contiguous",
    ),
    "a blob at an odd address": (
        {"weight": torch.zeros(4609, dtype=torch.uint8)[1:].view(1, 2, 2304)},
        "weight is not 16-byte aligned",
    ),
    "scales beside the blob": (
        {"weight_scale": torch.zeros(48, 5, dtype=torch.uint8)},
        r"weight_scale was given beside.*\(48, 5\); expected None: the weight contains",
    ),
    "global scales of other rows": ({"weight_scale_2": torch.ones(64)}, r"wrong weight_scale_2; got.*\(64,\).*\[48\]"),
    "global scale in bfloat16": ({"weight_scale_2": torch.ones(1).bfloat16()}, "wrong weight_scale_2"),
    "unknown id": ({"layout": "fragment2-bf16"}, "unknown weight layout; got 'fragment2-bf16'.*fragment1-bf16"),
    "the name that only pack knows": ({"layout": "fragment"}, "unknown weight layout; got 'fragment'"),
    "the other encoding": ({"layout": "fragment1-fp16"}, '"fragment1-fp16" is not for this x'),
    "named as a checkpoint's": ({"layout": "checkpoint"}, "weight_scale is missing"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(packed, kernels, name):
    spoilt, text = WRONG[name]
    given = {
        "x": packed.x,
        "weight": packed.w.data,
        "weight_scale": None,
        "weight_scale_2": packed.w.global_scale,
        "layout": packed.w.layout,
        "out_features": 48,
    }
    for _ in range(2):
        with pytest.raises(nvfp4.InvalidInput, match=f"(?s){text}"):
            op(**(given | spoilt))
    assert all(not kernel.launches for kernel in kernels.values())
    assert torch.equal(op(**given), packed.ref)


def test_without_a_kernel_that_reads_it(install, fake, no_plan, case):
    install(fake("plain"))
    c = case()
    w = nvfp4.pack(c.weight, c.scale, c.gs, layout="fragment")
    with pytest.raises(nvfp4.Unsupported, match=r"layout 'fragment1-bf16'.*plain: reads weight layout 'checkpoint'"):
        nvfp4.gemm(c.x, w)


@pytest.mark.parametrize("layout", ["fragment1-bf16", "fragment1-fp16", "fragment1-nib"])
def test_dequantize(packed, layout):
    w = nvfp4.pack(packed.weight, packed.scale, packed.gs, layout=layout)
    right = nvfp4.dequantize(packed.weight, packed.scale, packed.gs, dtype=torch.float64)
    assert torch.equal(nvfp4.dequantize(w, dtype=torch.float64), right)
    dequantize = torch.ops.nvfp4.dequantize
    sizes = {"out_features": 48, "in_features": 80}
    for given, text in (
        ((w.data, None, {"out_features": 48}), "size of the weight is missing"),
        ((w.data, None, sizes | {"out_features": 70}), r"N = 70, K = 80.*\(2, 2, 2304\)"),
        ((w.data, None, sizes | {"in_features": 64}), r"N = 48, K = 64.*\(1, 1, 2304\)"),
        ((w.data, packed.scale, sizes), "expected None"),
        ((packed.weight, None, sizes), r"got torch.uint8 \(48, 40\)"),
    ):
        data, scale, options = given
        with pytest.raises(nvfp4.InvalidInput, match=text):
            dequantize(data, scale, w.global_scale, torch.float16, layout=layout, **options)


def test_fake_tensors_are_checked_too(packed):
    data, gs = packed.w.data.to("meta"), packed.w.global_scale.to("meta")
    x = packed.x.to("meta")
    assert op(x, data, None, gs, layout=packed.w.layout, out_features=48).shape == (3, 48)
    with pytest.raises(nvfp4.InvalidInput, match="wrong out_features"):
        op(x, data, None, gs, layout=packed.w.layout)
    with pytest.raises(nvfp4.InvalidInput, match="N = 65"):
        op(x, data, None, gs, layout=packed.w.layout, out_features=65)
    for other, text in ((torch.float16, "is not for this x"), (torch.float32, "wrong dtype of x")):
        with pytest.raises(nvfp4.InvalidInput, match=text):
            op(x.to(other), data, None, gs, layout=packed.w.layout, out_features=48)


def test_compiled(packed):
    compiled = torch.compile(lambda x: nvfp4.gemm(x, packed.w), backend="eager", fullgraph=True, dynamic=True)
    assert torch.equal(compiled(packed.x), packed.ref)
    assert compiled(packed.x[:2]).shape == (2, 48)
