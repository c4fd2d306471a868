"""Calls after the first whose tensors changed: whatever the memory, the ids and the addresses, they are seen."""

import nvfp4
import pytest
import torch
from nvfp4.kernels import reference

op = torch.ops.nvfp4.gemm

pytestmark = pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning")


def known(c, **options):
    """Call until the call is recognised."""
    for _ in range(2):
        y = nvfp4.gemm(c.x, c.weight, c.scale, c.gs, **options)
    return y


def test_values_changed_in_place_are_seen(exact, case):
    c = case()
    packed = nvfp4.pack(c.weight, c.scale.view(torch.float8_e4m3fn), c.gs.view(()))
    known(c)
    other = case(m=4)
    for tensor, new in ((c.weight, other.weight), (c.scale, other.scale), (c.gs, other.gs * 2)):
        tensor.copy_(new.view(tensor.shape))
        assert torch.equal(nvfp4.gemm(c.x, packed), reference.gemm(c.x, c.weight, c.scale, c.gs))


REFUSED = {
    "int8": lambda w: w.view(torch.int8),
    "transposed": lambda w: w.t(),
    "fewer rows": lambda w: w[:32],
    "other shape": lambda w: w.reshape(128, 32),
    "every other row": lambda w: w[::2],
    "narrower rows": lambda w: w[:, :32],
    "3-D": lambda w: w[None],
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_tensor_at_the_address_of_the_weight_is_refused(exact, square, name):
    c = square
    known(c)
    launches = len(exact.launches)
    wrong = REFUSED[name](c.weight)
    assert wrong.data_ptr() == c.weight.data_ptr()
    for _ in range(2):
        with pytest.raises(nvfp4.InvalidInput, match=r"weight"):
            nvfp4.gemm(c.x, wrong, c.scale, c.gs)
    assert len(exact.launches) == launches
    assert torch.equal(known(c), c.ref)


@pytest.mark.parametrize("name", REFUSED)
def test_data_of_the_weight_exchanged_for_another_view_of_it_is_refused(exact, square, name):
    c = square
    known(c)
    c.weight.data = REFUSED[name](c.weight.data)
    with pytest.raises(nvfp4.InvalidInput, match=r"weight"):
        nvfp4.gemm(c.x, c.weight, c.scale, c.gs)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.t_(),
        lambda w: w.resize_(32, 64),
        lambda w: w.resize_(128, 64),
        lambda w: w.unsqueeze_(0),
        lambda w: w.set_(w.untyped_storage(), 0, (64, 64), (1, 64)),
        lambda w: w.as_strided_((64, 64), (32, 1)),
        lambda w: torch.utils.swap_tensors(w, torch.zeros(64, 64)),
    ],
    ids=["t_", "resize_ smaller", "resize_ larger", "unsqueeze_", "set_", "as_strided_", "swap_tensors"],
)
def test_a_weight_reshaped_in_place_is_refused(exact, square, change):
    c = square
    known(c)
    launches = len(exact.launches)
    change(c.weight)
    with pytest.raises(nvfp4.InvalidInput, match=r"weight"):
        nvfp4.gemm(c.x, c.weight, c.scale, c.gs)
    assert len(exact.launches) == launches


def test_data_of_a_parameter_exchanged_for_other_values_is_seen(exact, case):
    c, other = case(), case(m=4)
    c.weight = torch.nn.Parameter(c.weight, requires_grad=False)
    assert torch.equal(known(c), c.ref)
    c.weight.data = other.weight
    assert torch.equal(nvfp4.gemm(c.x, c.weight, c.scale, c.gs), reference.gemm(c.x, other.weight, c.scale, c.gs))


@pytest.mark.parametrize("offset", [0, 64], ids=["whole", "view"])
@pytest.mark.parametrize("first", [False, True], ids=["known", "first"])
@pytest.mark.parametrize("name", ["x", "weight", "weight_scale", "weight_scale_2", "bias", "pre_quant_scale"])
def test_memory_that_was_freed_is_refused(exact, case, name, first, offset):
    c = case()
    tensors = {"x": c.x, "weight": c.weight, "weight_scale": c.scale, "weight_scale_2": c.gs}
    if name in ("bias", "pre_quant_scale"):
        tensors |= {"bias": torch.zeros(c.n), "pre_quant_scale": torch.ones(c.k).bfloat16()}
    tensors = {key: torch.cat([t.new_zeros(offset), t.flatten()])[offset:].view(t.shape) for key, t in tensors.items()}
    for _ in range(0 if first else 2):
        op(**tensors)
    launches = len(exact.launches)
    lost = tensors[name].untyped_storage()
    size = lost.nbytes()
    lost.resize_(0)
    for _ in range(2):
        with pytest.raises(nvfp4.InvalidInput, match=f"^{name} has no memory"):
            op(**tensors)
    assert len(exact.launches) == launches
    lost.resize_(size)
    tensors[name].zero_()
    assert op(**tensors).shape == (3, c.n)


def test_out_whose_memory_was_freed_is_refused(exact, case):
    c = case()
    out = torch.empty_like(c.ref)
    out.untyped_storage().resize_(0)
    with pytest.raises(nvfp4.InvalidInput, match=r"^out has no memory"):
        nvfp4.gemm(c.x, c.weight, c.scale, c.gs, out=out)


def test_ids_and_addresses_that_are_used_again_do_not_matter(exact, square):
    # Every tensor of a round is freed, and the next round has other ones on the same memory, often under the same ids.
    c = square
    memory = c.weight.clone().flatten()
    ids = set()
    for i in range(40):
        weight = memory.view(64, 64) if i % 2 else memory.view(torch.int8).view(64, 64)
        scale = c.scale.clone() if i % 3 else c.scale.clone().t().contiguous().t()
        good = i % 2 and i % 3
        ids.add(id(weight))
        if good:
            assert torch.equal(nvfp4.gemm(c.x, weight, scale, c.gs), c.ref)
        else:
            with pytest.raises(nvfp4.InvalidInput):
                nvfp4.gemm(c.x, weight, scale, c.gs)
        del weight, scale
    assert len(ids) < 40


def test_an_exchanged_scale_is_seen(exact, square, case):
    c, other = square, case(m=4, n=64, k=128)
    known(c)
    assert torch.equal(nvfp4.gemm(c.x, c.weight, other.scale, c.gs), reference.gemm(c.x, c.weight, other.scale, c.gs))
    shifted = torch.cat([c.scale.new_zeros(4), c.scale.flatten()])[4:].view(c.scale.shape)
    strided = torch.zeros(64, 16, dtype=torch.uint8)[:, ::2]
    for wrong in (None, c.scale[:, :4].contiguous(), c.scale[:32], c.scale.view(torch.int8), shifted, strided):
        with pytest.raises(nvfp4.InvalidInput, match="weight_scale"):
            nvfp4.gemm(c.x, c.weight, wrong, c.gs)


def test_an_exchanged_global_scale_is_seen(exact, case):
    c = case()
    known(c)
    rows = torch.rand(c.n + 1)
    for gs in (rows[: c.n], rows[1:], rows[:1], rows[1:2], rows[0], rows[:1].double(), c.gs):
        y = nvfp4.gemm(c.x, c.weight, c.scale, gs)
        assert torch.equal(y, reference.gemm(c.x, c.weight, c.scale, gs.float().reshape(-1)))
        seen = exact.arguments[0][3]
        assert seen.dtype == torch.float32 and seen.ndim == 1
        assert seen.shape == (1,) or seen.data_ptr() % 16 == 0
    with pytest.raises(nvfp4.InvalidInput, match="weight_scale_2"):
        nvfp4.gemm(c.x, c.weight, c.scale, rows)


def test_bias_and_pre_quant_scale_that_come_and_go_are_seen(exact, case):
    c = case()
    biases = torch.randn(c.n + 1)
    scales = (torch.rand(c.k + 1) + 0.5).bfloat16()
    forms = [
        (None, None),
        (biases[: c.n], None),
        (biases[1:], None),  # unaligned
        (biases[: c.n].bfloat16(), None),
        (None, scales[: c.k]),
        (None, scales[1:]),
        (biases[1:], scales[1:]),
        (biases[: c.n], scales[: c.k]),
    ]
    for bias, pqs in forms * 3:
        y = nvfp4.gemm(c.x, c.weight, c.scale, c.gs, bias=bias, pre_quant_scale=pqs)
        assert torch.equal(y, reference.gemm(c.x, c.weight, c.scale, c.gs, bias, pqs))
        assert all(t.data_ptr() % 16 == 0 for t in exact.arguments[0] if t is not None)
    for wrong in ({"bias": biases}, {"bias": biases[: c.n].double()}, {"pre_quant_scale": scales}):
        with pytest.raises(nvfp4.InvalidInput):
            nvfp4.gemm(c.x, c.weight, c.scale, c.gs, **wrong)


def test_one_tensor_may_be_in_two_places(exact, case):
    c = case(n=32, k=32)
    gs = torch.rand(32)
    for _ in range(3):
        y = nvfp4.gemm(c.x, c.weight, c.scale, gs, bias=gs)
        assert torch.equal(y, reference.gemm(c.x, c.weight, c.scale, gs, gs))


def test_an_x_that_changes_is_seen(exact, case, checked):
    c = case(m=4)
    known(c)
    wide = torch.zeros(4, 3 * c.k, dtype=torch.bfloat16)
    wide[:, c.k : 2 * c.k] = c.x
    forms = [
        c.x,
        wide[:, c.k : 2 * c.k],
        torch.empty_strided(c.x.shape, (c.k + 4, 1), dtype=c.x.dtype).copy_(c.x),
        torch.cat([c.x.new_zeros(3), c.x.flatten()])[3:].view(4, c.k),
        c.x[:1].expand_as(c.x),
        torch.as_strided(c.x, (1, c.k), (3, 1), c.k),
        c.x.view(2, 2, c.k).transpose(0, 1),
        torch.cat([c.x.new_zeros(3), c.x.flatten()])[3:].view(2, 2, c.k),
        c.x[:0],
        c.x.view(2, 2, c.k)[:0],
        c.x.half(),
        c.x.view(2, 2, c.k),
    ]
    for x in forms * 2:
        y = nvfp4.gemm(x, c.weight, c.scale, c.gs)
        assert y.dtype == x.dtype and torch.equal(y, reference.gemm(x.contiguous(), c.weight, c.scale, c.gs))
        seen = exact.arguments[0][0]
        assert seen.data_ptr() % 16 == 0 and seen.stride(1) == 1 and seen.stride(0) >= c.k and seen.stride(0) % 8 == 0
    assert all(m for _, _, m in exact.launches)
    for wrong in (c.x.float(), c.x[:, :32], c.x[:, :32].contiguous(), c.x[0, 0], c.x.t(), c.x.view(8, c.k // 2)):
        with pytest.raises(nvfp4.InvalidInput, match="x"):
            nvfp4.gemm(wrong, c.weight, c.scale, c.gs)


@pytest.mark.parametrize("shape", [(4, 64), (2, 2, 64)])
def test_gradients_are_refused_whatever_came_before(exact, case, shape):
    c = case(m=4)
    known(c)
    x = c.x.clone().view(shape).requires_grad_()
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(nvfp4.gemm(x, c.weight, c.scale, c.gs).view(4, -1), c.ref)
        with pytest.raises(nvfp4.InvalidInput, match="no gradient"):
            nvfp4.gemm(x, c.weight, c.scale, c.gs)
        assert torch.equal(nvfp4.gemm(x.detach(), c.weight, c.scale, c.gs).view(4, -1), c.ref)


def test_other_devices_reach_no_kernel(exact, case):
    c = case()
    known(c)
    launches = len(exact.launches)
    for i in range(4):
        tensors = [c.x, c.weight, c.scale, c.gs]
        tensors[i] = tensors[i].to("meta")
        with pytest.raises(nvfp4.InvalidInput, match="not where x is"):
            op(*tensors)
    assert len(exact.launches) == launches


def test_layout_and_out_features_are_compared(exact, install, fake, case, mirrored):
    mirror = fake("mirror", layout="mirrored")
    install(exact, mirror)
    c = case()
    for _ in range(3):
        assert torch.equal(op(c.x, c.weight, c.scale, c.gs, out_features=c.n), c.ref)
        assert torch.equal(op(c.x, c.weight, c.scale, c.gs), c.ref)
        y = op(c.x, c.weight, c.scale, c.gs, layout="mirrored", out_features=c.n)
        assert torch.equal(y, reference.gemm(c.x, c.weight.flip(1), c.scale, c.gs))
        with pytest.raises(nvfp4.InvalidInput, match="out_features"):
            op(c.x, c.weight, c.scale, c.gs, layout="mirrored")
        with pytest.raises(nvfp4.InvalidInput, match="out_features"):
            op(c.x, c.weight, c.scale, c.gs, out_features=c.n + 1)
        with pytest.raises(nvfp4.InvalidInput, match="unknown weight layout"):
            op(c.x, c.weight, c.scale, c.gs, layout="no-such")


def test_out_is_written_by_a_known_call(exact, case):
    c = case()
    known(c)
    out = torch.full((3, c.n), float("nan"), dtype=torch.bfloat16)
    assert nvfp4.gemm(c.x, c.weight, c.scale, c.gs, out=out) is out and torch.equal(out, c.ref)
    with pytest.raises(nvfp4.InvalidInput, match="out"):
        nvfp4.gemm(c.x, c.weight, c.scale, c.gs, out=out[:2])
