"""`nvfp4.nn.FusedMoE`: state dicts that are loaded or refused, loading again, casting, copying, and the meta device."""

import copy
import io
import re

import nvfp4
import pytest
import torch
from nvfp4.errors import InvalidInput
from nvfp4.testing.checkpoints import as_compressed_tensors
from safetensors.torch import load_file, save_file

from .fused_experts import EXPERTS, HIDDEN, INTER, TOKENS, assert_right, expected, made_of, same_bytes, tensors

pytestmark = pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning")


def test_before_weights_are_loaded_it_refuses(call):
    made = nvfp4.nn.FusedMoE(EXPERTS, HIDDEN, INTER)
    with pytest.raises(InvalidInput, match="the layer holds no weight"):
        made(*call)
    assert "not loaded" in repr(made)


@pytest.mark.parametrize("lacks", ["weight", "weight_scale", "weight_scale_2"])
def test_a_part_of_the_weights_is_not_run(call, lacks):
    found = tensors()
    rest = found.pop(f"1.up_proj.{lacks}")
    made = nvfp4.nn.FusedMoE(EXPERTS, HIDDEN, INTER)
    made.load_state_dict(found, strict=False)
    with pytest.raises(InvalidInput, match=rf"the layer holds a part of a weight; got no 1\.up_proj\.{lacks};"):
        made(*call)
    made.load_state_dict({f"1.up_proj.{lacks}": rest}, strict=False)
    assert torch.equal(made(*call), made_of(tensors())(*call))


@pytest.mark.parametrize("leaf", ["weight", "weight_scale", "weight_scale_2", "bias", "pre_quant_scale"])
@pytest.mark.parametrize("name", ["1.up_proj", "2.down_proj"])
def test_a_state_dict_without_one_of_its_tensors_is_refused(name, leaf):
    found = tensors(bias=True, pqs=True)
    del found[f"{name}.{leaf}"]
    with pytest.raises(RuntimeError, match=rf"{name}"):
        made_of(found)


def test_a_state_dict_must_have_the_input_vectors_that_the_module_has():
    once = made_of(tensors(bias=True, pqs=True))
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.gate_proj\.pre_quant_scale"):
        once.load_state_dict(tensors(bias=True))


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("1.up_proj.weight", torch.zeros(INTER, HIDDEN // 2), r"moe\.1\.up_proj\.weight: got torch.float32"),
        ("1.up_proj.weight", torch.zeros(INTER, HIDDEN).bfloat16(), r"expected torch.uint8 \(32, 32\)"),
        ("1.up_proj.weight_scale_2", torch.tensor(float("inf")), r"w13_scale_2 is wrong; got inf"),
        ("1.up_proj.zero_point", torch.zeros(1), r"Unexpected key.*moe\.1\.up_proj\.zero_point"),
        ("9.up_proj.weight", torch.zeros(1), r"Unexpected key.*moe\.9\.up_proj\.weight"),
        ("1.up_proj.bias", torch.zeros(INTER), r"Unexpected key.*moe\.1\.up_proj\.bias"),
    ],
)
def test_what_does_not_fit_is_named(name, tensor, words):
    model = torch.nn.Module()
    model.moe = nvfp4.nn.FusedMoE(EXPERTS, HIDDEN, INTER)
    with pytest.raises(RuntimeError, match=words):
        model.load_state_dict({f"moe.{key}": t for key, t in (tensors() | {name: tensor}).items()})


@pytest.mark.parametrize("name", ["1.up_proj.weight", "1.up_proj.weight_scale_2"])
@pytest.mark.parametrize("value", [None, [1.0], torch.ones((), dtype=torch.float16)])
def test_what_is_no_tensor_of_such_a_kind_is_named(name, value):
    got = re.escape(str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__)
    with pytest.raises(RuntimeError, match=rf"{re.escape(name)}: got {got}"):
        made_of(tensors() | {name: value})


@pytest.mark.parametrize(
    "key", ["².up_proj.weight", "٢.up_proj.weight", "02.up_proj.weight", "9" * 5000, "1.w3.weight"]
)
def test_a_second_name_of_an_expert_is_unexpected(key):
    found = tensors()
    with pytest.raises(RuntimeError, match="Unexpected key"):
        made_of(found | {key: found["1.up_proj.weight"]})


def test_nan_is_refused_with_its_place(call):
    found = tensors()
    found["2.up_proj.weight_scale"].view(torch.uint8)[3, 1] = 0xFF
    made = nvfp4.nn.FusedMoE(EXPERTS, HIDDEN, INTER)
    with pytest.raises(InvalidInput, match=rf"w13_scale holds 1 NaN; got byte 0xFF at \[2, {INTER + 3}, 1\]"):
        made.load_(found)


def test_scales_of_activations_do_not_matter(call):
    found = tensors()
    more = {"1.up_proj.input_scale": torch.tensor(float("nan"))}
    assert torch.equal(made_of(found | more)(*call), made_of(found)(*call))


@pytest.mark.parametrize("ct", [False, True])
def test_loading_again_and_refreshing_keep_addresses(call, ct):
    turned = as_compressed_tensors if ct else dict
    options = {"dialect": "compressed-tensors" if ct else "modelopt"}
    made, second = made_of(turned(tensors(1, pqs=True)), **options), turned(tensors(2, pqs=True))

    def addresses():
        held = [t for weight in made.packed for t in (weight.data, weight.scale, weight.global_scale)]
        return [t.data_ptr() for t in (*held, made.pre_quant_scale, made.w2_pre_quant_scale)]

    before = addresses()
    made.load_state_dict(second)
    assert torch.equal(made(*call), made_of(second, **options)(*call))
    y = made(*call)
    made._get(made._global_name("w2")).mul_(0.5 if ct else 2)
    made.refresh_()
    assert torch.equal(made(*call), y * 2)
    assert addresses() == before


def test_views_of_the_state_dict_change_the_weights(call):
    made, second = made_of(tensors(1)), tensors(2)
    state = made.state_dict()
    for name, tensor in second.items():
        state[name].copy_(tensor)
    made.refresh_()
    assert torch.equal(made(*call), made_of(second)(*call))


@pytest.mark.parametrize("cast", [lambda m: m.half(), lambda m: m.to(torch.float16), lambda m: m.float().half()])
@pytest.mark.parametrize("ct", [False, True])
def test_casting_leaves_weights_alone(call, cast, ct):
    found = tensors(bias=True, pqs=True)
    stored = as_compressed_tensors(found) if ct else found
    made = cast(made_of(stored, dialect="compressed-tensors" if ct else "modelopt"))
    assert made.w13_bias.dtype == made.pre_quant_scale.dtype == made.dtype == torch.float16
    state = made.state_dict()
    for name, tensor in stored.items():
        assert name.endswith(("bias", "pre_quant_scale")) or same_bytes(state[name], tensor), name
    halved = {n: t.half() if n.endswith(("bias", "pre_quant_scale")) else t for n, t in found.items()}
    half = (call[0].half(), *call[1:])
    assert_right(made(*half), expected(half, halved))


def test_copies_are_independent_and_files_hold_it(call, tmp_path):
    made = made_of(tensors(1, bias=True, pqs=True))
    before = made(*call)
    twin = copy.deepcopy(made)
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    save_file(made.state_dict(), tmp_path / "experts.safetensors")
    made.load_state_dict(tensors(2, bias=True, pqs=True))
    assert not torch.equal(made(*call), before)
    assert torch.equal(twin(*call), before)
    assert torch.equal(torch.load(file, weights_only=False)(*call), before)
    assert torch.equal(made_of(load_file(tmp_path / "experts.safetensors"))(*call), before)


def test_on_the_meta_device_it_has_shapes_only(call):
    made = nvfp4.nn.FusedMoE(EXPERTS, HIDDEN, INTER, device="meta")
    assert made(*(t.to("meta") for t in call)).shape == (TOKENS, HIDDEN)
    found = tensors(pqs=True)
    y = made_of(found)(*call)
    filled = copy.deepcopy(made).to_empty(device="cpu")
    filled.load_state_dict(found)
    assert torch.equal(filled(*call), y)
    with pytest.warns(UserWarning, match="assign=True"):
        made.load_state_dict(found)
    assert made.w13.is_meta
    incomplete = copy.deepcopy(made)
    assert incomplete.load_state_dict({"0.up_proj.weight": found["0.up_proj.weight"]}, strict=False, assign=True)
    with pytest.raises(InvalidInput, match="the layer holds a part of a weight"):
        incomplete(*call)
    made.load_state_dict(found, assign=True)
    assert torch.equal(made(*call), y)
