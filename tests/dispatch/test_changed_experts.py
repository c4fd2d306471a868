"""Calls of moe after the first: which are recognised, and that whatever changed in a tensor is seen."""

import gc
import weakref
from dataclasses import replace

import nvfp4
import pytest
import torch
from nvfp4.dispatch import expert_recent, experts, guard, table
from nvfp4.kernels import reference, registry
from nvfp4.kernels.device import describe
from nvfp4.kernels.problem import Problem
from nvfp4.testing import assert_moe_close
from nvfp4.testing.experts import MoeCase

pytestmark = pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning")
op = torch.ops.nvfp4.moe.default
CPU = torch.device("cpu")
# Of w13 [E, 2 * inter, hidden/2] every other view has another shape, even with the last two dimensions exchanged.
PROBLEM = Problem(op="moe", n=32, k=64, experts=4, top_k=2, activation="swiglu")
WEIGHTS = ("w13", "w13_scale", "w13_scale_2", "w2", "w2_scale", "w2_scale_2")

needs_guards = pytest.mark.skipif(
    not hasattr(guard._guards, "TensorGuards"), reason="this torch has no torch._C._dynamo.guards.TensorGuards"
)


@pytest.fixture(autouse=True)
def launches(no_plan):
    """What launchers got: the arguments of every launch. It computes the right result."""
    launched = []
    kernel = registry.get("cpu_moe")
    device = describe(CPU)
    inner = kernel.build(device, PROBLEM, kernel.default_config(device, PROBLEM, 9))

    def launch(arguments, out):
        launched.append(arguments)
        inner(arguments, out)

    table._bound[CPU, PROBLEM, "checkpoint"] = ((), (launch,))
    return launched


@pytest.fixture
def checked(monkeypatch):
    """Numbers of tokens of the calls that were checked in full."""
    seen, in_full = [], experts._moe

    def note(x, *rest):
        seen.append(x.shape[0])
        return in_full(x, *rest)

    monkeypatch.setattr(experts, "_moe", note)
    return seen


def given(seed=0, m=9, **options):
    """A case, and its tensors by the names of the op; block scales are uint8, so that nothing has to be converted."""
    case = MoeCase.random(PROBLEM, m, seed, CPU, nan=False, **options)
    tensors = dict(zip(WEIGHTS, case.weights, strict=True))
    tensors |= {"topk_ids": case.ids, "topk_weights": case.router} | case.options
    return case, {"x": case.x} | tensors


def close(tensors, out):
    options = dict(tensors)
    x, *others = (options.pop(name) for name in ("x", *WEIGHTS, "topk_ids", "topk_weights"))
    right = reference.moe(x, *others, round_output=False, **options)
    assert_moe_close(out, right, hidden=PROBLEM.k, inter=PROBLEM.n, top_k=PROBLEM.top_k, dtype=x.dtype)


def known(tensors):
    for _ in range(2):
        out = op(**tensors)
    close(tensors, out)
    return out


@needs_guards
@pytest.mark.parametrize("seed", [0, 1, 11, 27])  # with vectors and without
def test_only_the_first_call_is_checked_in_full(checked, seed):
    _, tensors = given(seed)
    whole = known(tensors)
    for m in (1, 5, 9):
        part = tensors | {name: tensors[name][:m] for name in ("x", "topk_ids", "topk_weights")}
        assert torch.equal(op(**part), whole[:m])
    assert checked == [9]


@needs_guards
def test_new_tensor_objects_on_the_same_memory_are_recognised(checked):
    _, tensors = given()
    first = known(tensors)
    for _ in range(3):
        assert torch.equal(op(**{name: tensor.data for name, tensor in tensors.items()}), first)
    assert checked == [9]


@needs_guards
def test_other_weights_like_the_first_share_its_guard(checked):
    _, tensors = given()
    for _ in range(4):
        for _ in range(2):
            op(**tensors)
        tensors["w13"] = tensors["w13"].clone()
    assert len(checked) == 4
    assert [len(guards) for *_, guards in experts._calls.values()] == [1]


@needs_guards
def test_inference_mode_has_a_guard_of_its_own(checked):
    _, tensors = given()
    for _ in range(3):
        assert not op(**tensors).is_inference()
        with torch.no_grad():
            assert not op(**tensors).is_inference()
        with torch.inference_mode():
            assert op(**tensors).is_inference()
    assert checked == [9, 9]


@needs_guards
def test_what_is_kept_keeps_no_tensor_and_is_forgotten_with_the_table(launches):
    tensors = given(27)[1]
    op(**tensors)
    launches.clear()
    kept = [weakref.ref(tensor) for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)]
    assert expert_recent.recent
    del tensors
    gc.collect()
    assert [one() for one in kept] == [None] * len(kept)
    table.clear()
    assert not expert_recent.recent


def test_values_changed_in_place_are_seen():
    _, tensors = given()
    known(tensors)
    _, other = given(2)
    for name in WEIGHTS:
        tensors[name].copy_(other[name])
        close(tensors, op(**tensors))


REFUSED = {
    "int8": lambda w: w.view(torch.int8),
    "transposed": lambda w: w.transpose(1, 2),
    "fewer experts": lambda w: w[:2],
    "fewer rows": lambda w: w[:, :16],
    "other shape": lambda w: w.reshape(w.shape[0], w.shape[2], w.shape[1]) if w.shape[1] != w.shape[2] else w[:, :16],
    "every other row": lambda w: w[:, ::2],
    "4-D": lambda w: w[None],
}


@pytest.mark.parametrize("weight", ["w13", "w2"])
@pytest.mark.parametrize("name", REFUSED)
def test_another_tensor_at_the_address_of_a_weight(launches, name, weight):
    _, tensors = given()
    known(tensors)
    count, wrong = len(launches), REFUSED[name](tensors[weight])
    assert wrong.data_ptr() == tensors[weight].data_ptr()
    for _ in range(2):
        with pytest.raises(nvfp4.InvalidInput, match=r"w13|w2|weight"):
            op(**tensors | {weight: wrong})
    assert len(launches) == count
    known(tensors)


@pytest.mark.parametrize("weight", ["w13", "w2"])
@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.transpose_(1, 2),
        lambda w: w.resize_(2, *w.shape[1:]),
        lambda w: w.unsqueeze_(0),
        lambda w: w.set_(w.untyped_storage(), 0, w.shape, (w.stride(0), 1, w.shape[1])),
        lambda w: torch.utils.swap_tensors(w, torch.zeros(4, 64, 32)),
    ],
    ids=["transpose_", "resize_", "unsqueeze_", "set_", "swap_tensors"],
)
def test_weight_reshaped_in_place(launches, change, weight):
    _, tensors = given()
    known(tensors)
    count = len(launches)
    change(tensors[weight])
    with pytest.raises(nvfp4.InvalidInput, match=r"w13|w2|weight"):
        op(**tensors)
    assert len(launches) == count


@pytest.mark.parametrize("weight", ["w13", "w2"])
def test_data_of_a_parameter_exchanged_for_other_values(weight):
    _, tensors = given()
    tensors[weight] = torch.nn.Parameter(tensors[weight], requires_grad=False)
    known(tensors)
    tensors[weight].data = given(2)[1][weight]
    close(tensors, op(**tensors))


@pytest.mark.parametrize("first", [False, True], ids=["known", "first"])
@pytest.mark.parametrize("offset", [0, 64], ids=["whole", "view"])
@pytest.mark.parametrize("name", sorted(given(27)[1].keys() - {"limit", "alpha", "beta"}))
def test_memory_that_was_freed(launches, name, offset, first):
    _, tensors = given(27)
    for key, t in tensors.items():
        if isinstance(t, torch.Tensor):
            tensors[key] = torch.cat([t.new_zeros(offset), t.flatten()])[offset:].view(t.shape)
    for _ in range(0 if first else 2):
        op(**tensors)
    count, lost = len(launches), tensors[name].untyped_storage()
    size = lost.nbytes()
    lost.resize_(0)
    for _ in range(2):
        with pytest.raises(nvfp4.InvalidInput, match=f"^{name} has no memory"):
            op(**tensors)
    assert len(launches) == count
    lost.resize_(size)
    tensors[name].zero_()
    assert op(**tensors).shape == tensors["x"].shape


def test_ids_and_addresses_are_used_again():
    # Every tensor of a round is freed, and the next round has other ones on the same memory, often under the same ids.
    _, tensors = given()
    right, memory, seen = known(tensors), tensors["w13"].flatten(), set()
    for i in range(40):
        w13 = memory.view(4, 64, 32) if i % 2 else memory.view(torch.int8).view(4, 64, 32)
        w2 = tensors["w2"].clone() if i % 3 else tensors["w2"].clone().transpose(1, 2).contiguous().transpose(1, 2)
        seen.add(id(w13))
        if i % 2 and i % 3:
            assert torch.equal(op(**tensors | {"w13": w13, "w2": w2}), right)
        else:
            with pytest.raises(nvfp4.InvalidInput):
                op(**tensors | {"w13": w13, "w2": w2})
        del w13, w2
    assert len(seen) < 40


def test_block_scales_exchanged(launches):
    _, tensors = given()
    known(tensors)
    for name in ("w13_scale", "w2_scale"):
        scale = tensors[name]
        other = given(2)[1][name]
        for fine in (other, other.view(torch.float8_e4m3fn), scale):
            changed = tensors | {name: fine}
            close(changed | {name: fine.view(torch.uint8)}, op(**changed))
            assert getattr(launches[-1], name).dtype == torch.uint8
        shifted = torch.cat([scale.new_zeros(4), scale.flatten()])[4:].view(scale.shape)
        for wrong in (None, scale[:, :16].contiguous(), scale[:2], scale.view(torch.int8), shifted):
            with pytest.raises(nvfp4.InvalidInput, match=r"scale"):
                op(**tensors | {name: wrong})


@pytest.mark.parametrize("weight", ["w13", "w2"])
def test_a_weight_off_its_boundary_is_refused(launches, weight):
    _, tensors = given()
    known(tensors)
    w, count = tensors[weight], len(launches)
    shifted = torch.cat([w.new_zeros(8), w.flatten()])[8:].view(w.shape)
    with pytest.raises(nvfp4.InvalidInput, match=f"{weight} is not 16-byte aligned"):
        op(**tensors | {weight: shifted})
    assert len(launches) == count


def test_global_scales_exchanged(launches):
    _, tensors = given()
    known(tensors)
    rows = torch.rand(9) + 0.5
    halves = torch.rand(4, 2) + 0.5
    forms = (
        rows[:4],
        rows[1:5],
        rows[:4, None],
        rows[1:5, None],
        rows[:8:2],
        rows[:4].double(),
        halves,
        halves.t()[:1].t(),
    )
    for factors in (*forms, *forms):
        changed = tensors | {"w13_scale_2": factors}
        close(changed | {"w13_scale_2": factors.float().reshape(4, -1)}, op(**changed))
        seen = launches[-1].w13_scale_2
        assert seen.dtype == torch.float32 and seen.ndim == 2 and seen.is_contiguous() and seen.data_ptr() % 16 == 0
    with pytest.raises(nvfp4.InvalidInput, match="w2_scale_2"):
        op(**tensors | {"w2_scale_2": halves})


def shifted(tensor):
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


def test_vectors_that_come_and_go(launches):
    _, tensors = given()
    _, full = given(27)
    vectors = {name: full[name] for name in ("w13_bias", "w2_bias", "pre_quant_scale", "w2_pre_quant_scale")}
    expert_map = torch.tensor([3, -1, 0, 1, 2, 7], dtype=torch.int32)
    forms = [
        {},
        vectors,
        {"w13_bias": vectors["w13_bias"]},
        {"w2_bias": shifted(vectors["w2_bias"])},
        {"w2_bias": vectors["w2_bias"].float()},
        {"pre_quant_scale": shifted(vectors["pre_quant_scale"])},
        {"w2_pre_quant_scale": vectors["w2_pre_quant_scale"]},
        {"w2_pre_quant_scale": vectors["w2_pre_quant_scale"][0].contiguous()},
        {"expert_map": expert_map},
        {"expert_map": expert_map.long()},
        {"expert_map": shifted(expert_map)},
        {"expert_map": expert_map[:3].contiguous()},
        {"w13_bias": vectors["w13_bias"], "expert_map": expert_map},
    ]
    for some in forms * 3:
        close(tensors | some, op(**tensors | some))
        for name in (*vectors, "expert_map"):
            found = getattr(launches[-1], name)
            assert (found is None) == (name not in some)
            assert found is None or (found.data_ptr() % 16 == 0 and torch.equal(found, some[name]))
    for wrong in ({"w13_bias": vectors["w2_bias"][:, :1]}, {"pre_quant_scale": vectors["w2_pre_quant_scale"]}):
        with pytest.raises(nvfp4.InvalidInput):
            op(**tensors | wrong)


def test_options_are_compared():
    _, tensors = given()
    table.clear()  # other activations are other problems
    for _ in range(3):
        results = [
            op(**tensors | options)
            for options in ({}, {"limit": 0.01}, {"activation": "geglu"}, {"activation": "swigluoai"}, {"inter": 32})
        ]
        assert torch.equal(results[0], results[4])
        assert not any(torch.equal(results[0], other) for other in results[1:4])
        for wrong, text in (
            ({"inter": 48}, "wrong inter"),
            ({"activation": "relu2"}, "relu2"),
            ({"alpha": 1.0}, "alpha"),
            ({"apply_router_weight_on_input": True}, "top_k"),
            ({"w13_layout": "fragment1-bf16-glu", "w2_layout": "fragment1-bf16", "inter": 32}, "fragment1-bf16"),
        ):
            with pytest.raises(nvfp4.InvalidInput, match=text):
                op(**tensors | wrong)


def test_tokens_that_do_not_fit(launches):
    _, tensors = given()
    known(tensors)
    count = len(launches)
    ids, weights, x = tensors["topk_ids"], tensors["topk_weights"], tensors["x"]
    for wrong in (
        {"topk_ids": ids[:8]},
        {"topk_weights": weights[:8]},
        {"x": x[:8]},
        {"x": x[:8], "topk_ids": ids[:8]},
        {"topk_ids": ids[:, :1]},
        {"topk_ids": ids.float()},
        {"topk_weights": weights.double()},
        {"topk_weights": weights[:, 0]},
    ):
        with pytest.raises(nvfp4.InvalidInput, match=r"topk_ids|topk_weights"):
            op(**tensors | wrong)
    assert len(launches) == count
    empty = op(**tensors | {"x": x[:0], "topk_ids": ids[:0], "topk_weights": weights[:0]})
    assert empty.shape == (0, 64) and len(launches) == count


def test_x_and_its_routing_in_other_forms(launches):
    _, tensors = given(m=4)
    right = known(tensors)
    x, ids, weights = tensors["x"], tensors["topk_ids"], tensors["topk_weights"]
    wide = torch.zeros(4, 192, dtype=torch.bfloat16)
    wide[:, 64:128] = x
    forms = [
        {},
        {"x": wide[:, 64:128]},
        {"x": shifted(x)},
        {"topk_ids": ids.int()},
        {"topk_ids": shifted(ids), "topk_weights": shifted(weights)},
        {"topk_ids": ids.t().contiguous().t(), "topk_weights": weights.t().contiguous().t()},
        {"x": x.view(2, 2, 64), "topk_ids": ids.view(2, 2, 2), "topk_weights": weights.view(2, 2, 2)},
    ]
    for form in forms * 2:
        out = op(**tensors | form)
        assert torch.equal(out.view(4, 64), right) and out.shape == form.get("x", x).shape and out.is_contiguous()
        seen = launches[-1]
        for one in (seen.x, seen.topk_ids, seen.topk_weights):
            assert one.ndim == 2 and one.data_ptr() % 16 == 0 and one.stride(1) == 1
    for wrong in (x.float(), x[:, :32].contiguous(), x.t()):
        with pytest.raises(nvfp4.InvalidInput, match="x"):
            op(**tensors | {"x": wrong})


def test_gradients_are_refused_whatever_came_before():
    _, tensors = given()
    right = known(tensors)
    x = tensors["x"].clone().requires_grad_()
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(op(**tensors | {"x": x}), right)
        with pytest.raises(nvfp4.InvalidInput, match="no gradient"):
            op(**tensors | {"x": x})
        assert torch.equal(op(**tensors | {"x": x.detach()}), right)


def test_other_devices_reach_no_kernel(launches):
    _, tensors = given(27)
    known(tensors)
    count = len(launches)
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            with pytest.raises(nvfp4.InvalidInput, match="not where x is"):
                op(**tensors | {name: tensor.to("meta")})
    assert len(launches) == count


def test_one_tensor_in_two_places():
    _, tensors = given()
    factors = torch.rand(4, 1) + 0.5
    tensors |= {"w13_scale_2": factors, "w2_scale_2": factors}
    for _ in range(3):
        close(tensors, op(**tensors))


def test_the_function_passes_on_what_it_is_given(launches):
    """`nvfp4.moe` leaves out what is as the op has it by default."""
    for seed in (0, 2, 8, 16, 27):
        case, tensors = given(seed)
        names = ("x", *WEIGHTS, "topk_ids", "topk_weights")
        options = {name: value for name, value in tensors.items() if name not in names}
        got = nvfp4.moe(*(tensors[name] for name in names), **options)
        close(tensors, got)
        for name, value in options.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(getattr(launches[-1], name), value)
    first = replace(case, problem=replace(PROBLEM, top_k=1))
    ids, weights = first.ids[:, :1].contiguous(), first.router[:, :1].contiguous()
    table.clear()
    on_input = nvfp4.moe(first.x, *first.weights, ids, weights, apply_router_weight_on_input=True)
    assert not torch.equal(on_input, nvfp4.moe(first.x, *first.weights, ids, weights))
