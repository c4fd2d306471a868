"""Arguments that do not belong together raise before any launch, and say what was expected."""

import nvfp4
import pytest
import torch


def _half_x(c):
    c.x = c.x[:, : c.k // 2].contiguous()


def _scale_of_twice_the_groups(c):
    c.scale = torch.cat([c.scale, c.scale], 1)


WRONG = {
    "x has K/2": (_half_x, "x and weight do not fit.*two elements"),
    "x is float32": (lambda c: setattr(c, "x", c.x.float()), "wrong dtype of x.*autocast"),
    "x is float64": (lambda c: setattr(c, "x", c.x.double()), "wrong dtype of x"),
    "x has no K": (lambda c: setattr(c, "x", torch.empty(2, 0).bfloat16()), "x and weight do not fit.*two elements"),
    "x has neither": (lambda c: setattr(c, "x", c.x[:0, :0]), "x and weight do not fit"),
    "x is 3-D without K": (lambda c: setattr(c, "x", c.x[None, :, :0]), "x and weight do not fit"),
    "x is a scalar": (lambda c: setattr(c, "x", c.x[0, 0]), "no dimensions"),
    "x is transposed": (lambda c: setattr(c, "x", torch.zeros(c.k, 3).bfloat16().t()), "last dimension of x"),
    "x is 3-D, transposed": (
        lambda c: setattr(c, "x", torch.zeros(2, c.k, 3).bfloat16().transpose(1, 2)),
        "last dimension of x",
    ),
    "twice the groups": (_scale_of_twice_the_groups, "weight_scale does not fit.*one scale per 16"),
    "scale of group size 32": (lambda c: setattr(c, "scale", c.scale[:, ::2].contiguous()), "group size 32"),
    "scale is float": (lambda c: setattr(c, "scale", c.scale.float()), "wrong dtype of weight_scale"),
    "scale is missing": (lambda c: setattr(c, "scale", None), "weight_scale is missing"),
    "scale is a column slice": (
        lambda c: setattr(c, "scale", torch.zeros(c.n, 2 * c.k // 16, dtype=torch.uint8)[:, ::2]),
        "weight_scale is not contiguous",
    ),
    "weight is dense": (lambda c: setattr(c, "weight", torch.zeros(c.n, c.k).bfloat16()), "wrong dtype of weight"),
    "weight is a column slice": (
        lambda c: setattr(c, "weight", torch.zeros(c.n, c.k, dtype=torch.uint8)[:, : c.k // 2]),
        "weight is not contiguous",
    ),
    "weight is 3-D": (lambda c: setattr(c, "weight", c.weight[None]), r"weight must be \[N, K/2\]"),
    "weight is unaligned": (
        lambda c: setattr(c, "weight", torch.zeros(c.n * c.k // 2 + 1, dtype=torch.uint8)[1:].view(c.n, c.k // 2)),
        "weight is not 16-byte aligned.*clone",
    ),
    "scale is unaligned": (
        lambda c: setattr(c, "scale", torch.zeros(c.n * c.k // 16 + 4, dtype=torch.uint8)[4:].view(c.n, c.k // 16)),
        "weight_scale is not 16-byte aligned",
    ),
    "K is no multiple of 16": (
        lambda c: setattr(c, "weight", torch.zeros(c.n, 20, dtype=torch.uint8)),
        "K must be a multiple of 16",
    ),
    "global scale of other rows": (lambda c: setattr(c, "gs", torch.ones(c.n + 1)), "wrong shape of weight_scale_2"),
    "global scale is an integer": (lambda c: setattr(c, "gs", torch.ones(1).int()), "wrong dtype of weight_scale_2"),
    "bias of K": (lambda c: c.options.update(bias=torch.zeros(c.k)), r"wrong bias.*\[N\]"),
    "bias is float64": (lambda c: c.options.update(bias=torch.zeros(c.n).double()), "wrong bias"),
    "bias is strided": (lambda c: c.options.update(bias=torch.zeros(2 * c.n)[::2]), "bias is not contiguous"),
    "pqs of K/2": (
        lambda c: c.options.update(pre_quant_scale=torch.ones(c.k // 2).bfloat16()),
        r"wrong pre_quant_scale.*\[K\]",
    ),
    "pqs is float32": (lambda c: c.options.update(pre_quant_scale=torch.ones(c.k)), "wrong pre_quant_scale"),
    "layout is unknown": (lambda c: c.options.update(layout="no-such"), "unknown weight layout.*checkpoint"),
    "out_features is wrong": (lambda c: c.options.update(out_features=5), "wrong out_features"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(exact, case, name):
    spoil, text = WRONG[name]
    c = case()
    c.options = {}
    spoil(c)
    for _ in range(2):  # a refusal is never cached as a success
        with pytest.raises(nvfp4.InvalidInput, match=f"(?s){text}"):
            nvfp4.gemm(c.x, c.weight, c.scale, c.gs, **c.options)
    assert exact.launches == [] and exact.builds == []


@pytest.mark.parametrize("name", [name for name in WRONG if "unaligned" not in name])
def test_meta_tensors_are_refused_for_the_same_reasons(exact, case, name):
    """A model that is traced, or laid out on the meta device, must not hide what every real call would refuse."""
    spoil, text = WRONG[name]
    c = case()
    c.options = {}
    spoil(c)

    def meta(value):
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    there = [meta(value) for value in (c.x, c.weight, c.scale, c.gs)]
    options = {name: meta(value) for name, value in c.options.items()}
    with pytest.raises(nvfp4.InvalidInput, match=f"(?s){text}"):
        torch.ops.nvfp4.gemm(*there, **options)


def test_meta_tensors_reach_no_kernel(exact, case):
    c = case()
    y = nvfp4.gemm(c.x.to("meta"), c.weight.to("meta"), c.scale.to("meta"), c.gs.to("meta"))
    assert y.is_meta and y.shape == c.ref.shape and exact.launches == []


@pytest.mark.parametrize("real", [True, False])
def test_out_on_another_device(exact, case, real):
    c = case()
    tensors = [t if real else t.to("meta") for t in (c.x, c.weight, c.scale, c.gs)]
    out = torch.empty_like(c.ref, device="meta" if real else "cpu")
    with pytest.raises(nvfp4.InvalidInput, match="out is not where x is"):
        nvfp4.gemm(*tensors, out=out)
    assert exact.launches == []


def test_meta_tensors_with_out(exact, case):
    c = case()
    nvfp4.gemm(*(t.to("meta") for t in (c.x, c.weight, c.scale, c.gs)), out=torch.empty_like(c.ref, device="meta"))
    assert exact.launches == []


def test_a_packed_weight_and_x_without_k(install, fake, case, mirrored):
    install(fake("mirror", layout="mirrored"))
    c = case()
    packed = nvfp4.pack(c.weight, c.scale, c.gs, layout="mirrored")
    with pytest.raises(nvfp4.InvalidInput, match="x and weight do not fit"):
        nvfp4.gemm(c.x[:, :0], packed)


def test_scales_beside_a_weight(exact, case):
    c = case()
    packed = nvfp4.pack(c.weight, c.scale, c.gs)
    for function in (lambda: nvfp4.gemm(c.x, packed, c.scale), lambda: nvfp4.dequantize(packed, c.scale)):
        with pytest.raises(nvfp4.InvalidInput, match="beside a Weight"):
            function()


def test_a_weight_s_own_layout_is_used(exact, case):
    c = case()
    packed = nvfp4.pack(c.weight, c.scale, c.gs)
    with pytest.raises(nvfp4.InvalidInput, match="unknown weight layout"):
        nvfp4.pack(c.weight, c.scale, c.gs, layout="no-such")
    assert packed.layout == "checkpoint"


@pytest.mark.parametrize("name", ["x", "weight", "weight_scale_2"])
@pytest.mark.parametrize("warm", [False, True])
def test_a_forgotten_tensor_is_named(warm, name):
    """Whether or not the weight was seen before, for then its checks are a comparison with what passed."""
    weight, scale, gs = nvfp4.quantize(torch.randn(8, 32))
    given = {"x": torch.randn(2, 32).bfloat16(), "weight": weight, "weight_scale": scale, "weight_scale_2": gs}
    if warm:
        torch.ops.nvfp4.gemm(*given.values())
    given[name] = None
    for device in ("cpu", "meta"):
        with pytest.raises(nvfp4.InvalidInput, match=f"{name} is missing; got None; expected a tensor"):
            torch.ops.nvfp4.gemm(*(None if tensor is None else tensor.to(device) for tensor in given.values()))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_2"])
def test_dequantize_takes_tensors_of_one_device(case, device, name):
    c = case()
    other = "meta" if device == "cpu" else "cpu"
    given = {"weight": c.weight, "weight_scale": c.scale, "weight_scale_2": c.gs}
    given = {key: tensor.to(other if key == name else device) for key, tensor in given.items()}
    with pytest.raises(nvfp4.InvalidInput, match=f"{name} is not where weight is; got {other}; expected {device}"):
        torch.ops.nvfp4.dequantize(*given.values(), torch.float32)
