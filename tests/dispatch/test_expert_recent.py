"""Calls of moe after the first: which are recognised, what is kept for it, and what the function passes on."""

import gc
import weakref
from dataclasses import replace

import nvfp4
import pytest
import torch
from nvfp4.dispatch import expert_recent, experts, guard, table

from .moe_calls import PROBLEM, WEIGHTS, close, given, known, op

pytestmark = [
    pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning"),
    pytest.mark.usefixtures("moe_launches"),
]
needs_guards = pytest.mark.skipif(
    not hasattr(guard._guards, "TensorGuards"), reason="this torch has no torch._C._dynamo.guards.TensorGuards"
)


@pytest.fixture
def checked(monkeypatch):
    """Numbers of tokens of the calls that were checked in full."""
    seen, in_full = [], experts._moe

    def note(x, *rest):
        seen.append(x.shape[0])
        return in_full(x, *rest)

    monkeypatch.setattr(experts, "_moe", note)
    return seen


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
def test_what_is_kept_keeps_no_tensor_and_is_forgotten_with_the_table(moe_launches):
    tensors = given(27)[1]
    op(**tensors)
    moe_launches.clear()
    kept = [weakref.ref(tensor) for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)]
    assert expert_recent.recent
    del tensors
    gc.collect()
    assert [one() for one in kept] == [None] * len(kept)
    table.clear()
    assert not expert_recent.recent


def test_the_function_passes_on_what_it_is_given(moe_launches):
    """`nvfp4.moe` leaves out what is as the op has it by default."""
    for seed in (0, 2, 8, 16, 27):
        case, tensors = given(seed)
        names = ("x", *WEIGHTS, "topk_ids", "topk_weights")
        options = {name: value for name, value in tensors.items() if name not in names}
        got = nvfp4.moe(*(tensors[name] for name in names), **options)
        close(tensors, got)
        for name, value in options.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(getattr(moe_launches[-1], name), value)
    first = replace(case, problem=replace(PROBLEM, top_k=1))
    ids, weights = first.ids[:, :1].contiguous(), first.router[:, :1].contiguous()
    table.clear()
    on_input = nvfp4.moe(first.x, *first.weights, ids, weights, apply_router_weight_on_input=True)
    assert not torch.equal(on_input, nvfp4.moe(first.x, *first.weights, ids, weights))
