"""`nvfp4.nn.Linear`: results, state dicts, moving, copying, reloading, and what it refuses."""

import copy
import io

import nvfp4
import pytest
import torch
from nvfp4.errors import InvalidInput
from nvfp4.testing.checkpoints import as_compressed_tensors, dense, modelopt

N, K = 48, 64
pytestmark = pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning")


def tensors(seed=0, **options):
    return {name.removeprefix("a."): tensor for name, tensor in modelopt("a", N, K, seed, **options).items()}


def named(found):
    return {f"a.{name}": tensor for name, tensor in found.items()}


def linear(found, **options):
    made = nvfp4.nn.Linear(K, N, "bias" in found, **options)
    made.load_state_dict(found)
    return made


@pytest.fixture
def x():
    return torch.randn(5, K, generator=torch.Generator().manual_seed(9)).bfloat16()


def expected(x, found, *, factor=None):
    vector = found.get("pre_quant_scale")
    rows = x if vector is None else x * vector
    y = rows.double() @ dense(named(found), "a", factor=factor).t()
    return y + found["bias"].double() if "bias" in found else y


def assert_right(y, ref):
    torch.testing.assert_close(y.double(), ref, rtol=2.0**-8, atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("pqs", [True, False])
@pytest.mark.parametrize("ct", [True, False])
def test_it_computes_what_the_checkpoint_says(x, bias, pqs, ct):
    found = tensors(bias=bias, pqs=pqs, factor=2.0**-9)
    stored = {name.removeprefix("a."): t for name, t in as_compressed_tensors(named(found)).items()} if ct else found
    made = linear(stored, dialect="compressed-tensors" if ct else "modelopt")
    assert_right(made(x), expected(x, found))
    assert made(x.reshape(5, 1, K)).shape == (5, 1, N)
    assert not made.quantizes_activations


def test_its_state_dict_is_the_checkpoint(x):
    found = tensors(bias=True, pqs=True)
    made = linear(found)
    saved = made.state_dict()
    assert set(saved) == set(found)
    for name, tensor in found.items():
        assert saved[name].dtype == tensor.dtype and saved[name].shape == tensor.shape
        assert torch.equal(saved[name].view(torch.uint8), tensor.view(torch.uint8)) if tensor.ndim else True
    assert torch.equal(saved["weight_scale_2"], found["weight_scale_2"])
    again = linear(saved)
    assert torch.equal(again(x), made(x))


def test_nothing_is_stored_twice_in_the_layout_of_the_checkpoint():
    made = linear(tensors())
    assert made.packed.data.data_ptr() == made.weight.data_ptr()
    assert made.packed.scale.data_ptr() == made.weight_scale.data_ptr()
    assert made.packed.global_scale.data_ptr() == made.weight_scale_2.data_ptr()


def test_before_a_weight_is_loaded_it_refuses(x):
    made = nvfp4.nn.Linear(K, N)
    with pytest.raises(InvalidInput, match="the layer holds no weight"):
        made(x)
    assert "not loaded" in repr(made)


@pytest.mark.parametrize("gone", ["weight", "weight_scale", "weight_scale_2", "bias"])
def test_a_state_dict_without_one_of_its_tensors_is_refused(x, gone):
    found = tensors(bias=True)
    del found[gone]
    made = nvfp4.nn.Linear(K, N)
    with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "{gone}"'):
        made.load_state_dict(found)


def test_a_state_dict_with_nan_is_refused():
    found = tensors()
    found["weight_scale"].view(torch.uint8)[2, 1] = 0x7F
    model = torch.nn.Sequential(nvfp4.nn.Linear(K, N, bias=False))
    with pytest.raises(RuntimeError, match=r"0: weight_scale holds 1 NaN; got byte 0x7F at \[2, 1\]"):
        model.load_state_dict({f"0.{name}": tensor for name, tensor in found.items()})


def test_scales_of_activations_do_not_matter(x):
    found = tensors()
    more = {"input_scale": torch.tensor(float("nan")), "k_scale": torch.tensor(2.0)}
    made = linear(found | more)
    assert torch.equal(made(x), linear(found)(x))
    with pytest.raises(RuntimeError, match=r"Unexpected key.*zero_point"):
        made.load_state_dict(found | {"zero_point": torch.zeros(1)})


def test_scales_may_come_as_bytes_and_global_scales_per_row(x):
    found = tensors()
    found["weight_scale"] = found["weight_scale"].view(torch.uint8)
    found["weight_scale_2"] = torch.linspace(1e-4, 2e-4, N)
    made = linear(found)
    assert made.weight_scale.dtype == torch.float8_e4m3fn and made.packed.global_scale.shape == (N,)
    found["weight_scale"] = found["weight_scale"].view(torch.float8_e4m3fn)
    ref = x.double() @ dense(named(found), "a", factor=1.0).t() * found["weight_scale_2"].double()
    assert_right(made(x), ref)


def test_loading_twice_equals_loading_once_and_keeps_addresses(x):
    first, second = tensors(1, bias=True), tensors(2, bias=True)
    made = linear(first)
    addresses = [made.packed.data.data_ptr(), made.packed.scale.data_ptr(), made.packed.global_scale.data_ptr()]
    for _ in range(2):
        made.load_state_dict(second)
        assert torch.equal(made(x), linear(second)(x))
    assert addresses == [made.packed.data.data_ptr(), made.packed.scale.data_ptr(), made.packed.global_scale.data_ptr()]


def test_a_weight_that_is_changed_in_place_is_used(x):
    first, second = tensors(1), tensors(2)
    made = linear(first)
    with torch.no_grad():
        for name, tensor in second.items():
            made.get_buffer(name).copy_(tensor)
    made.refresh_().refresh_()
    assert torch.equal(made(x), linear(second)(x))


def test_a_divisor_that_is_changed_in_place_is_used_after_refresh(x):
    ct = {name.removeprefix("a."): t for name, t in as_compressed_tensors(named(tensors())).items()}
    made = linear(ct, dialect="compressed-tensors")
    before, address = made(x), made.packed.global_scale.data_ptr()
    made.weight_global_scale.mul_(0.5)
    made.refresh_()
    assert torch.equal(made(x), before * 2) and made.packed.global_scale.data_ptr() == address


def test_another_layout_is_derived_again_in_its_own_memory(x, mirrored):
    first, second = tensors(1), tensors(2)
    made = linear(first, layout="mirrored")
    data = made.packed.data
    assert made.packed.layout == "mirrored" and data.data_ptr() != made.weight.data_ptr()
    assert "_data" not in made.state_dict() and set(made.state_dict()) == set(first)
    made.load_state_dict(second)
    assert made.packed.data.data_ptr() == data.data_ptr()
    assert torch.equal(data, second["weight"].flip(1))
    assert torch.equal(made.to("cpu").packed.data, second["weight"].flip(1))
    assert torch.equal(copy.deepcopy(made).packed.data, data)


def test_another_layout_may_be_all_that_is_kept(x, mirrored):
    first, second = tensors(1, bias=True), tensors(2, bias=True)
    made = linear(first, layout="mirrored", keep_checkpoint=False)
    assert made.weight is None and made.weight_scale is None
    assert torch.equal(made.packed.data, first["weight"].flip(1))
    for name, tensor in made.state_dict().items():
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), first[name].reshape(-1).view(torch.uint8)), name
    address = made.packed.data.data_ptr()
    made.load_state_dict(second)
    assert made.weight is None and made.packed.data.data_ptr() == address
    assert torch.equal(made.packed.data, second["weight"].flip(1))
    made.half()
    assert made.weight is None and torch.equal(made.packed.data, second["weight"].flip(1))
    made.weight_scale_2.mul_(2)
    assert float(made.refresh_().packed.global_scale) == 2 * float(second["weight_scale_2"])
    twin = copy.deepcopy(made)
    assert (
        torch.equal(twin.packed.data, made.packed.data) and twin.packed.data.data_ptr() != made.packed.data.data_ptr()
    )
    plain = linear(first, keep_checkpoint=False)  # the layout of the checkpoint is what is stored
    assert plain.weight is not None and torch.equal(plain(x), linear(first)(x))


@pytest.mark.parametrize("layout", ["fragment1-bf16", "fragment1-nib"])
@pytest.mark.parametrize("keep", [True, False])
def test_fragment_layouts_give_back_what_was_loaded(layout, keep):
    found = tensors(bias=True)
    made = linear(found, layout=layout, keep_checkpoint=keep)
    assert made.packed.layout == layout
    for name, tensor in made.state_dict().items():
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), found[name].reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize("cast", [lambda m: m.half(), lambda m: m.to(torch.float16), lambda m: m.float().half()])
def test_casting_leaves_scales_alone(x, cast):
    found = tensors(bias=True, pqs=True)
    made = cast(linear(found))
    assert made.weight_scale.dtype == torch.float8_e4m3fn and made.weight_scale_2.dtype == torch.float32
    assert torch.equal(made.weight_scale.view(torch.uint8), found["weight_scale"].view(torch.uint8))
    assert made.bias.dtype == made.pre_quant_scale.dtype == made.dtype == torch.float16
    assert_right(made(x.half()), expected(x.half(), {**found, "pre_quant_scale": found["pre_quant_scale"].half()}))


def test_a_bfloat16_global_scale_survives_casting():
    found = tensors() | {"weight_scale_2": torch.tensor(2.0**-9, dtype=torch.bfloat16)}
    made = nvfp4.nn.Linear(K, N, False)
    made.load_state_dict(found, assign=True)
    assert made.half().weight_scale_2.dtype == torch.bfloat16
    assert torch.equal(made.packed.global_scale, torch.tensor([2.0**-9]))


def test_a_copy_is_independent(x):
    made = linear(tensors(1, bias=True))
    twin = copy.deepcopy(made)
    assert twin.packed.data.data_ptr() == twin.weight.data_ptr() != made.weight.data_ptr()
    before = twin(x)
    made.load_state_dict(tensors(2, bias=True))
    assert torch.equal(twin(x), before) and not torch.equal(made(x), before)


def test_it_can_be_pickled(x):
    made = linear(tensors(bias=True))
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), made(x))


def test_on_the_meta_device_it_has_shapes_only(x):
    made = nvfp4.nn.Linear(K, N, device="meta")
    assert made(torch.empty(3, K, dtype=torch.bfloat16, device="meta")).shape == (3, N)
    found = tensors(bias=True)
    filled = copy.deepcopy(made).to_empty(device="cpu")
    filled.load_state_dict(found)
    assert torch.equal(filled(x), linear(found)(x))
    made.load_state_dict(found, assign=True)
    assert torch.equal(made(x), linear(found)(x))


def test_emptied_it_holds_no_weight(x):
    made = linear(tensors())
    made.to_empty(device="cpu")
    made.weight_scale_2.fill_(float("nan"))
    made._forget()
    with pytest.raises(InvalidInput, match="the layer holds no weight"):
        made(x)


def test_it_compiles_into_one_graph(x):
    made = linear(tensors(bias=True))
    with torch.inference_mode():
        assert torch.equal(torch.compile(made, fullgraph=True, backend="eager")(x), made(x))


def test_a_dense_layer_is_quantised(x):
    torch.manual_seed(0)
    source = torch.nn.Linear(K, N).bfloat16()
    made = nvfp4.nn.Linear.from_linear(source)
    weight, scale, factor = nvfp4.quantize(source.weight)
    assert torch.equal(made.weight, weight) and torch.equal(made.weight_scale_2, factor)
    found = {"weight": weight, "weight_scale": scale, "weight_scale_2": factor, "bias": source.bias.detach()}
    assert_right(made(x), expected(x, found))
    assert made.training and not nvfp4.nn.Linear.from_linear(source.eval()).training


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((24, N), {}, "in_features=24"),
        ((0, N), {}, "in_features=0"),
        ((K, 0), {}, "out_features=0"),
        ((K, N), {"dialect": "gptq"}, "wrong dialect; got 'gptq'"),
        ((float(K), N), {}, f"in_features={float(K)}, out_features={N}; expected"),
        ((K, N), {"layout": "fragment2"}, "unknown weight layout; got 'fragment2'"),
        ((K, N), {"layout": "fragment1-bf16-glu"}, "wrong layout of a Linear; got 'fragment1-bf16-glu'; expected 'fr"),
        ((K, N), {"dtype": torch.float32}, "wrong dtype; got torch.float32"),
    ],
)
def test_what_no_layer_can_be_is_refused(arguments, options, words):
    with pytest.raises(InvalidInput, match=words):
        nvfp4.nn.Linear(*arguments, **options)


def test_a_model_gives_its_weights_for_warmup():
    model = torch.nn.Sequential(linear(tensors(1)), torch.nn.ReLU(), linear(tensors(2)))
    found = nvfp4.nn.weights(model)
    assert [(one.out_features, one.in_features) for one in found] == [(N, K)] * 2
    assert nvfp4.warmup(found) == 1


@pytest.mark.parametrize("lacks", ["weight", "weight_scale", "weight_scale_2"])
def test_a_part_of_a_weight_is_not_run(x, lacks):
    found = tensors()
    made = nvfp4.nn.Linear(K, N, False)
    made.load_state_dict({name: tensor for name, tensor in found.items() if name != lacks}, strict=False)
    with pytest.raises(InvalidInput, match=f"the layer holds a part of a weight; got no {lacks};"):
        made(x)
    made.load_state_dict({lacks: found[lacks]}, strict=False)
    assert torch.equal(made(x), linear(found)(x))


@pytest.mark.parametrize("name", ["weight", "weight_scale", "weight_scale_2", "pre_quant_scale"])
@pytest.mark.parametrize("value", [None, [1.0]])
def test_what_is_no_tensor_is_named(x, name, value):
    found = tensors()
    made = linear(found)
    with pytest.raises(RuntimeError, match=f"{name} is no tensor; got {type(value).__name__}"):
        made.load_state_dict(found | {name: value})
    assert torch.equal(made(x), linear(found)(x))
