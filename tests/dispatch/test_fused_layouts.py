"""`nvfp4.nn.FusedMoE` in a fragment layout: chosen by the plan, derived in its own memory, given back as stored."""

import copy
import io

import nvfp4
import pytest
import torch
from nvfp4.dispatch import layout as layout_module
from nvfp4.errors import InvalidInput
from nvfp4.kernels import registry
from nvfp4.kernels.problem import Device, Problem
from nvfp4.testing.checkpoints import as_compressed_tensors, modelopt
from nvfp4.testing.fake_experts import KERNELS

from .fused_experts import routed

EXPERTS, HIDDEN, INTER, TOP_K, TOKENS = 4, 80, 48, 2, 6
FRAGMENT = "fragment1-bf16"
GPU = Device(kind="cuda", name="Fake 9000", capability=(9, 0), units=8)
pytestmark = pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning")
keeps = pytest.mark.parametrize("keep", [True, False])


@pytest.fixture(autouse=True)
def kernels(install, no_plan):
    install(*KERNELS, registry.get("cpu_moe"), registry.get("cpu_grouped"))


def tensors(seed=0, ct=False, gated=True, signs=False):
    found = {}
    for e in range(EXPERTS):
        for i, name in enumerate(("gate_proj", "up_proj", "down_proj")[0 if gated else 1 :]):
            n, k = (HIDDEN, INTER) if name == "down_proj" else (INTER, HIDDEN)
            found |= modelopt(f"{e}.{name}", n, k, 100 * seed + 10 * e + i)
            if signs:
                scale = found[f"{e}.{name}.weight_scale"].view(torch.uint8)
                scale[::3] |= 0x80
                scale[1::3] = 0
    return as_compressed_tensors(found) if ct else found


def module(layout="fragment", keep=True, **options):
    options = {"layout": layout, "keep_checkpoint": keep} | options
    return nvfp4.nn.FusedMoE(EXPERTS, HIDDEN, INTER, **options)


@pytest.fixture
def call():
    return routed(HIDDEN)


def plain(found, call, **options):
    """What the layer in the checkpoint's layout gives; the fakes compute the same."""
    return module("checkpoint", **options).load_(found)(*call)


def same_bytes(state, found):
    assert set(state) == set(found)
    for name, tensor in found.items():
        assert torch.equal(state[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def addresses(made):
    return [t.data_ptr() for w in made.packed for t in (w.data, w.global_scale)]


@keeps
@pytest.mark.parametrize("ct", [False, True])
def test_it_computes_the_same_and_gives_back_what_was_loaded(call, keep, ct):
    found, dialect = tensors(ct=ct), "compressed-tensors" if ct else "modelopt"
    made = module(keep=keep, dialect=dialect).load_(found)
    assert [w.layout for w in made.packed] == [f"{FRAGMENT}-glu", FRAGMENT] and made.layout == FRAGMENT
    assert [w.scale for w in made.packed] == [None, None]
    assert torch.equal(made(*call), plain(found, call, dialect=dialect))
    same_bytes(made.state_dict(), found)
    assert all((getattr(made, name) is None) == (not keep) for name in ("w13", "w13_scale", "w2", "w2_scale"))
    assert made.problem(TOP_K) == Problem(
        op="moe", n=INTER, k=HIDDEN, experts=EXPERTS, top_k=TOP_K, activation="swiglu"
    )
    assert f"layout={FRAGMENT}" in repr(made)


@keeps
def test_signs_and_zeros_of_scales_move_into_the_codes(call, keep):
    found = tensors(signs=True)
    made = module(keep=keep).load_(found)
    assert torch.equal(made(*call), plain(found, call))
    again = module("checkpoint").load_(made.state_dict())
    assert torch.equal(again(*call), plain(found, call))


def test_without_a_gate_both_are_in_the_plain_layout(call):
    found = tensors(gated=False)
    made = module(activation="relu2").load_(found)
    assert [w.layout for w in made.packed] == [FRAGMENT, FRAGMENT]
    assert torch.equal(made(*call), plain(found, call, activation="relu2"))


@keeps
@pytest.mark.parametrize("ct", [False, True])
def test_loading_again_refreshing_and_moving_keep_addresses(call, keep, ct):
    dialect = "compressed-tensors" if ct else "modelopt"
    made, second = module(keep=keep, dialect=dialect).load_(tensors(1, ct)), tensors(2, ct)
    before = addresses(made)
    made.load_state_dict(second)
    expected = plain(second, call, dialect=dialect)
    assert torch.equal(made(*call), expected) and addresses(made) == before
    for change in (made.refresh_, made.refresh_, lambda: made.to("cpu"), made.eval):
        change()
        assert torch.equal(made(*call), expected) and addresses(made) == before
    made._get(made._global_name("w2")).mul_(0.5 if ct else 2)
    made.refresh_()
    assert torch.equal(made(*call), expected * 2) and addresses(made) == before
    assert (made.w13 is None) == (not keep)


def test_weights_that_are_changed_in_place_are_used_after_refresh(call):
    made, second = module().load_(tensors(1)), tensors(2)
    before, state = addresses(made), made.state_dict()
    for name, tensor in second.items():
        state[name].copy_(tensor)
    made.refresh_()
    assert torch.equal(made(*call), plain(second, call)) and addresses(made) == before


@keeps
def test_what_was_derived_in_inference_mode_can_be_loaded_again(call, keep):
    with torch.inference_mode():
        made = module(keep=keep).load_(tensors(1))
        made(*call)
    before = addresses(made)
    made.load_state_dict(tensors(2))
    assert torch.equal(made(*call), plain(tensors(2), call)) and addresses(made) == before


@keeps
def test_a_state_dict_of_other_layers_changes_nothing(call, keep):
    model = torch.nn.ModuleList([module(keep=keep).load_(tensors(1)), module(keep=keep)])
    before = addresses(model[0])
    second = {f"1.{name}": tensor for name, tensor in tensors(2).items()}
    missing = model.load_state_dict(second, strict=False).missing_keys
    assert len(missing) == len(tensors()) and all(name.startswith("0.") for name in missing)
    assert torch.equal(model[0](*call), plain(tensors(1), call))
    assert keep or addresses(model[0]) == before
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.0\.gate_proj\.weight"):
        model.load_state_dict(second)


@keeps
def test_copies_are_independent_and_files_hold_it(call, keep):
    made = module(keep=keep).load_(tensors(1))
    before, twin, file = made(*call), copy.deepcopy(made), io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    made.load_state_dict(tensors(2))
    assert not torch.equal(made(*call), before) and torch.equal(twin(*call), before)
    assert twin.layout == FRAGMENT and (twin.w13 is None) == (not keep)
    assert torch.equal(torch.load(file, weights_only=False)(*call), before)


@keeps
def test_another_dtype_of_x_gets_its_own_layout(call, keep):
    found = tensors()
    made = module(keep=keep).load_(found).half()
    assert made.layout == "fragment1-fp16" and made.dtype == torch.float16
    half = (call[0].half(), *call[1:])
    assert torch.equal(made(*half), module("checkpoint").load_(found)(*half))
    with pytest.raises(InvalidInput, match=r"is not for this x; got x in torch\.bfloat16"):
        made(*call)
    same_bytes(made.state_dict(), found)


@keeps
def test_on_the_meta_device_it_has_shapes_only(call, keep):
    meta = [t.to("meta") for t in call]
    found = tensors()
    for empty in (module(keep=keep, device="meta"), module(keep=keep).load_(found).to("meta")):
        assert empty(*meta).shape == (TOKENS, HIDDEN)
        filled = copy.deepcopy(empty).to_empty(device="cpu")
        filled.load_state_dict(found)
        assert torch.equal(filled(*call), plain(found, call)) and filled.layout == FRAGMENT
        assert (filled.w13 is None) == (not keep)
        empty.load_state_dict(found, assign=True)
        assert torch.equal(empty(*call), plain(found, call))
        with pytest.raises(InvalidInput, match="no values"):
            empty.to("meta").refresh_()


@keeps
def test_a_part_of_a_state_dict_is_no_weight(call, keep):
    made = module(keep=keep)
    found = tensors()
    made.load_state_dict({"0.up_proj.weight": found["0.up_proj.weight"]}, strict=False)
    with pytest.raises(InvalidInput, match=r"a part of a weight; got no 0\.down_proj\.weight"):
        made(*call)
    made.load_state_dict(found)
    assert torch.equal(made(*call), plain(found, call))


@pytest.mark.parametrize("known", [True, False])
def test_the_plan_chooses(call, set_plan, known):
    problem = module().problem(TOP_K)
    config = registry.get("fake_fragment_moe").config_type(block_rows=16, threads=0).to_json()
    set_plan(problem, FRAGMENT, **{FRAGMENT: [(1, None, "fake_fragment_moe", config)]})
    made = module(None, top_k=TOP_K if known else None).load_(tensors())
    assert made.layout == FRAGMENT and torch.equal(made(*call), plain(tensors(), call))
    assert module(None, top_k=3).load_(tensors()).layout == "checkpoint"


def test_without_a_plan_a_gpu_takes_the_fragment_layout(monkeypatch):
    assert module(None).load_(tensors()).layout == "checkpoint"  # of a CPU

    class Anywhere(type(KERNELS[1])):
        def supports(self, device, problem):
            return super().supports(nvfp4.kernels.device.describe("cpu"), problem)

    monkeypatch.setattr(registry, "_all", lambda: {"fake": Anywhere()})
    layout_module._choose.cache_clear()
    monkeypatch.setattr(layout_module, "describe", lambda device: GPU)
    assert module(None).load_(tensors()).layout == FRAGMENT
    assert module("checkpoint").load_(tensors()).layout == "checkpoint"


def test_warmup_takes_its_problem_and_layout(call, monkeypatch):
    made = module().load_(tensors())
    assert nvfp4.warmup(made.problem(TOP_K), device="cpu", layout=made.layout) == 1
    monkeypatch.setattr(nvfp4.dispatch.table, "_is_capturing", lambda device: True)
    assert made(*call).shape == (TOKENS, HIDDEN)


def test_it_compiles_into_one_graph(call):
    made = module(experts=range(1, 3)).load_({n: t for n, t in tensors().items() if n[0] in "12"})
    torch._dynamo.reset()
    with torch.inference_mode():
        assert torch.equal(torch.compile(made, fullgraph=True, backend="eager")(*call), made(*call))


class Experts(torch.nn.Module):
    """As in transformers 5."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(EXPERTS, 2 * INTER, HIDDEN).bfloat16() * 0.2)
        self.down_proj = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, INTER).bfloat16() * 0.2)

    def forward(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in ids.unique().tolist():
            token, slot = torch.where(ids == e)
            gate, up = (x[token] @ self.gate_up_proj[e].t()).chunk(2, -1)
            one = (torch.nn.functional.silu(gate) * up) @ self.down_proj[e].t()
            y.index_add_(0, token, (one * weights[token, slot, None]).to(y.dtype))
        return y


@pytest.mark.parametrize(
    ("layout", "keep", "stored"),
    [("fragment", False, False), ("fragment", True, True), ("checkpoint", False, True), ("mirrored", False, True)],
)
def test_convert_passes_layout_and_keep_checkpoint_on(call, mirrored, layout, keep, stored):
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"experts": Experts()})
    expected = nvfp4.nn.FusedMoE.from_dense(*model["experts"].parameters())(*call)
    made = nvfp4.convert_(model, layout=layout, keep_checkpoint=keep)["experts"]
    assert type(made) is nvfp4.nn.FusedMoE and torch.equal(made(*call), expected)
    assert made.layout == (FRAGMENT if layout == "fragment" else "checkpoint")
    assert (made.w13 is not None) == stored
    assert len(model.state_dict()) == len(tensors())


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("fragment2", "unknown weight layout"),
        (f"{FRAGMENT}-glu", "wrong layout of experts"),
        ("fragment-glu", "unknown"),
    ],
)
def test_layouts_that_it_cannot_have(layout, words):
    with pytest.raises(InvalidInput, match=words):
        module(layout)


@keeps
@pytest.mark.parametrize("ct", [False, True])
def test_what_was_loaded_in_part_or_in_vain_keeps_addresses(call, keep, ct):
    """A captured graph still reads them."""
    dialect, second = "compressed-tensors" if ct else "modelopt", tensors(2, ct)
    made = module(keep=keep, dialect=dialect).load_(tensors(1, ct))
    before = addresses(made)
    first = {name: tensor for name, tensor in second.items() if name.startswith("0.")}
    made.load_state_dict(first, strict=False)
    assert torch.equal(made(*call), plain(tensors(1, ct) | first, call, dialect=dialect))
    assert addresses(made) == before
    spoilt = second["3.up_proj.weight_scale"].clone()
    spoilt.view(torch.uint8)[0, 0] = 0x7F
    with pytest.raises(RuntimeError, match="NaN"):
        made.load_state_dict(second | {"3.up_proj.weight_scale": spoilt})
    with pytest.raises(InvalidInput, match="NaN"):
        made(*call)
    made.load_state_dict(second)
    assert torch.equal(made(*call), plain(second, call, dialect=dialect)) and addresses(made) == before


@keeps
def test_the_memory_format_of_images_leaves_blobs_alone(call, keep):
    made = module(keep=keep).load_(tensors())
    before = addresses(made)
    made.to(memory_format=torch.channels_last)
    assert torch.equal(made(*call), plain(tensors(), call)) and addresses(made) == before
