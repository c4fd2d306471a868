"""pack asks the plan for the layout, and converts once."""

import copy
import pickle

import nvfp4
import pytest
import torch
from nvfp4.errors import InvalidInput
from nvfp4.kernels.problem import Problem
from nvfp4.kernels.weights.swizzle import swizzle

PROBLEM = Problem(n=32, k=64)


def test_without_a_plan_it_is_the_checkpoint_layout(exact, case):
    c = case()
    packed = nvfp4.pack(c.weight, c.scale.view(torch.float8_e4m3fn), c.gs)
    assert (packed.layout, packed.out_features, packed.in_features) == ("checkpoint", 32, 64)
    assert packed.data.data_ptr() == c.weight.data_ptr()
    assert packed.scale.dtype == torch.uint8 and packed.global_scale.shape == (1,)


def test_the_marked_layout_is_taken(install, fake, set_plan, case, mirrored):
    install(fake("a"), fake("m", layout="mirrored"))
    set_plan(PROBLEM, "mirrored", checkpoint=[(1, None, "a", 16)], mirrored=[(1, None, "m", 16)])
    c = case()
    packed = nvfp4.pack(c.weight, c.scale, c.gs)
    assert packed.layout == "mirrored" and torch.equal(nvfp4.gemm(c.x, packed), c.ref)
    # An explicit layout wins; and the plan is that of the dtype.
    assert nvfp4.pack(c.weight, c.scale, c.gs, layout="checkpoint").layout == "checkpoint"
    assert nvfp4.pack(c.weight, c.scale, c.gs, dtype=torch.float16).layout == "checkpoint"


def test_a_marked_layout_that_is_unknown_here_is_not_taken(install, fake, set_plan, case):
    install(fake("a"))
    set_plan(PROBLEM, "from-the-future", checkpoint=[(1, None, "a", 16)])
    c = case()
    assert nvfp4.pack(c.weight, c.scale, c.gs).layout == "checkpoint"


def test_views_at_odd_offsets_are_cloned(exact, case):
    c = case()
    data = torch.zeros(c.weight.numel() + 3, dtype=torch.uint8)[3:].view(c.weight.shape).copy_(c.weight)
    scale = torch.zeros(c.scale.numel() + 5, dtype=torch.uint8)[5:].view(c.scale.shape).copy_(c.scale)
    packed = nvfp4.pack(data, scale, c.gs)
    assert packed.data.data_ptr() % 16 == 0 and packed.scale.data_ptr() % 16 == 0
    with pytest.warns(nvfp4.UntunedWarning):
        assert torch.equal(nvfp4.gemm(c.x, packed), c.ref)


def test_swizzled_scales_and_nan_repair(exact, case):
    c = case(n=48, k=96)
    packed = nvfp4.pack(c.weight, swizzle(c.scale), c.gs, scale_layout="swizzled")
    assert torch.equal(packed.scale, c.scale)
    broken = c.scale.clone()
    broken[3, 2] = 0x7F
    with pytest.raises(nvfp4.InvalidInput, match="row 3, group 2"):
        nvfp4.pack(c.weight, broken, c.gs)
    assert nvfp4.pack(c.weight, broken, c.gs, repair_nan=True).scale[3, 2] == 0x7E


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dtype": torch.float32}, "wrong dtype"),
        ({"layout": "no-such"}, "unknown weight layout.*fragment, fragment-glu or one of checkpoint, "),
        ({"scale_layout": "zigzag"}, "unknown scale_layout"),
    ],
)
def test_wrong_options(exact, case, options, text):
    c = case()
    with pytest.raises(nvfp4.InvalidInput, match=text):
        nvfp4.pack(c.weight, c.scale, c.gs, **options)


def test_wrong_tensors(exact, case):
    c = case()
    with pytest.raises(nvfp4.InvalidInput, match="weight must be"):
        nvfp4.pack(c.weight[None, None], c.scale, c.gs)
    with pytest.raises(nvfp4.InvalidInput, match="wrong weight_scale_2 of experts"):
        nvfp4.pack(c.weight[None], c.scale, c.gs)
    with pytest.raises(nvfp4.InvalidInput, match="weight must be"):
        nvfp4.pack(c.weight[0, 0], c.scale, c.gs, scale_layout="swizzled")
    with pytest.raises(nvfp4.InvalidInput, match="wrong global scale"):
        nvfp4.pack(c.weight, c.scale, torch.zeros(()))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))])
def test_a_packed_weight_can_be_copied_and_pickled(exact, case, copied):
    c = case(n=48, k=96)
    other = copied(nvfp4.pack(c.weight, c.scale, c.gs))
    with pytest.warns(nvfp4.UntunedWarning):
        assert torch.equal(nvfp4.gemm(c.x, other), c.ref)


@pytest.mark.parametrize("layout", [None, "checkpoint", "fragment"])
@pytest.mark.parametrize("missing", ["weight", "scale", "gs"])
def test_what_is_missing_is_named(case, layout, missing):
    c = case()
    given = {name: getattr(c, name) for name in ("weight", "scale", "gs")} | {missing: None}
    with pytest.raises(InvalidInput, match="is missing; got None; expected a tensor"):
        nvfp4.pack(*given.values(), layout=layout)
