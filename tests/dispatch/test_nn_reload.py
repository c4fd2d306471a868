"""`nvfp4.nn.Linear` that is loaded in parts, over another weight, or moved: never a mixture, always the same memory."""

import nvfp4
import pytest
import torch
from nvfp4.errors import InvalidInput
from nvfp4.testing.checkpoints import modelopt

N, K = 48, 64
LAYOUTS = [("checkpoint", True), ("fragment", True), ("fragment", False)]
each_layout = pytest.mark.parametrize(("layout", "keep"), LAYOUTS)
ZERO, PLUS, MINUS = 0, 0x38, 0xB8  # block scales: what the fragment layout moves into the codes


def tensors(seed, scales=(ZERO, PLUS, MINUS)):
    found = {name.removeprefix("a."): tensor for name, tensor in modelopt("a", N, K, seed).items()}
    draw = torch.randint(0, len(scales), (N, K // 16), generator=torch.Generator().manual_seed(seed))
    found["weight_scale"] = torch.tensor(scales, dtype=torch.uint8)[draw].view(torch.float8_e4m3fn)
    return found


def as_ct(found):
    factor = 1 / found["weight_scale_2"].reshape(-1)
    return {"weight_packed": found["weight"], "weight_scale": found["weight_scale"], "weight_global_scale": factor}


def made(layout, keep, **options):
    return nvfp4.nn.Linear(K, N, False, layout=layout, keep_checkpoint=keep, **options)


def dense(found):
    return nvfp4.dequantize(found["weight"], found["weight_scale"], found["weight_scale_2"], dtype=torch.float64)


def held(layer):
    return nvfp4.dequantize(layer.packed, dtype=torch.float64)


@each_layout
@pytest.mark.parametrize("first", ["weight", "weight_scale", "weight_scale_2"])
@pytest.mark.parametrize("was_loaded", [True, False])
def test_parts_of_one_weight_in_two_state_dicts_are_that_weight(layout, keep, first, was_loaded):
    old, new = tensors(1), tensors(2)
    model = torch.nn.Sequential(made(layout, keep))
    if was_loaded:
        model[0].load_(old)
        address = model[0].packed.data.data_ptr()
    model.load_state_dict({f"0.{first}": new[first]}, strict=False)
    model.load_state_dict({f"0.{name}": tensor for name, tensor in new.items() if name != first}, strict=False)
    assert torch.equal(held(model[0]), dense(new))
    assert (model[0].weight is None) == (not keep)
    if was_loaded:
        assert model[0].packed.data.data_ptr() == address


def test_a_cast_between_two_parts_loses_nothing():
    old, new = tensors(1), tensors(2)
    layer = made("fragment", False).load_(old)
    layer.load_state_dict({"weight": new["weight"]}, strict=False)
    layer.half()
    layer.load_state_dict({name: new[name] for name in ("weight_scale", "weight_scale_2")}, strict=False)
    assert torch.equal(held(layer), dense(new)) and layer.weight is None


@each_layout
def test_a_state_dict_of_other_layers_changes_nothing(layout, keep):
    found = tensors(1)
    model = torch.nn.Sequential(made(layout, keep), made(layout, keep))
    model[0].load_(found)
    loaded = model.load_state_dict({f"1.{name}": tensor for name, tensor in tensors(2).items()}, strict=False)
    assert sorted(loaded.missing_keys) == ["0.weight", "0.weight_scale", "0.weight_scale_2"]
    assert torch.equal(held(model[0]), dense(found)) and (model[0].weight is None) == (not keep)
    with pytest.raises(RuntimeError, match=r"0\.weight_scale"):
        model.load_state_dict({f"1.{name}": tensor for name, tensor in tensors(2).items()})


@each_layout
@pytest.mark.parametrize("ct", [False, True])
def test_one_global_scale_may_follow_one_per_row(layout, keep, ct):
    single, name = tensors(1), "weight_scale_2"
    rows = tensors(2) | {name: torch.rand(N) + 0.1}
    want = [dense(single), dense(rows)]
    layer = made(layout, keep, dialect="compressed-tensors" if ct else "modelopt")
    for found, expected in [(single, want[0]), (rows, want[1]), (single, want[0])]:
        layer.load_(as_ct(found) if ct else found)
        torch.testing.assert_close(held(layer), expected, rtol=1e-6 if ct else 0, atol=0)
    shape = layer.state_dict()["weight_global_scale" if ct else name].shape
    assert shape == ((1,) if ct else ())


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("weight", torch.ones(N, K // 2, dtype=torch.bfloat16)),
        ("weight", torch.ones(N, K // 2, dtype=torch.int8)),
        ("weight_scale", torch.full((N, K // 16), 1.1)),
        ("weight_scale", torch.full((N, K // 16), 0x38, dtype=torch.int8)),
        ("weight_scale", torch.ones(N, K // 16).to(torch.float8_e5m2)),
        ("weight_scale_2", torch.tensor(1)),
        ("weight_scale_2", torch.tensor(1e-5, dtype=torch.float16)),
    ],
)
def test_tensors_of_another_dtype_are_not_cast(name, wrong):
    found = tensors(1)
    layer = made("checkpoint", True).load_(found)
    with pytest.raises(InvalidInput, match=f"wrong dtype of {name}; got {wrong.dtype}"):
        layer.load_(tensors(2) | {name: wrong})
    assert torch.equal(held(layer), dense(found))


@each_layout
@pytest.mark.parametrize("ct", [False, True])
def test_moving_to_where_it_is_keeps_addresses(layout, keep, ct):
    found = tensors(1)
    layer = made(layout, keep, dialect="compressed-tensors" if ct else "modelopt")
    layer.load_(as_ct(found) if ct else found)
    before, values = layer.packed, held(layer)
    layer.to("cpu")
    after = layer.packed
    assert torch.equal(held(layer), values)
    assert (after.data.data_ptr(), after.global_scale.data_ptr()) == (
        before.data.data_ptr(),
        before.global_scale.data_ptr(),
    )


@each_layout
def test_what_was_derived_in_inference_mode_can_be_loaded_again(layout, keep):
    new = tensors(2)
    layer = made(layout, keep)
    for name, tensor in tensors(1).items():
        getattr(layer, name).copy_(tensor)
    with torch.inference_mode():
        assert torch.equal(held(layer), dense(tensors(1)))
    assert torch.equal(held(layer.load_(new)), dense(new))
    with torch.inference_mode():
        made_there = made(layout, keep).load_(tensors(1))
    made_there.refresh_()
    assert torch.equal(held(made_there), dense(tensors(1)))


def test_a_layer_on_the_meta_device_has_no_weight_to_pack():
    layer = made("fragment", False).load_(tensors(1)).to("meta")
    with pytest.raises(InvalidInput, match="the layer has no values"):
        nvfp4.nn.weights(torch.nn.Sequential(layer))
