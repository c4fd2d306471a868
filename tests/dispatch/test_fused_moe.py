"""`nvfp4.nn.FusedMoE`: what it computes, on one rank and on several, and what it cannot be."""

import copy

import nvfp4
import pytest
import torch
from nvfp4.errors import InvalidInput
from nvfp4.testing.checkpoints import as_compressed_tensors

from .fused_experts import EXPERTS, FAMILY, HIDDEN, INTER, TOP_K, assert_right, expected, made_of, same_bytes, tensors

pytestmark = pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning")


@pytest.mark.parametrize("names", [FAMILY, ("w1", "w3", "w2")])
@pytest.mark.parametrize("ct", [False, True])
@pytest.mark.parametrize("extras", [False, True])
def test_it_computes_what_the_checkpoint_says_and_gives_it_back(call, names, ct, extras):
    found = tensors(names=names, bias=extras, pqs=extras)
    stored = as_compressed_tensors(found) if ct else found
    made = made_of(stored, names, dialect="compressed-tensors" if ct else "modelopt")
    assert_right(made(*call), expected(call, found, names))
    assert made.quantizes_activations is False
    state = made.state_dict()
    assert set(state) == set(stored)
    assert all(same_bytes(state[name], tensor) for name, tensor in stored.items())


def test_the_other_family_of_names_may_be_loaded(call):
    found = tensors()
    mixtral = {
        name.replace("gate_proj", "w1").replace("up_proj", "w3").replace("down_proj", "w2"): tensor
        for name, tensor in found.items()
    }
    made = made_of(mixtral)
    assert set(made.state_dict()) == set(found)
    assert torch.equal(made(*call), made_of(found)(*call))


@pytest.mark.parametrize(
    ("activation", "options"),
    [("swigluoai", {"limit": 2.0, "alpha": 1.5, "beta": 0.5}), ("geglu_tanh", {}), ("swiglustep", {"limit": 1.0})],
)
def test_activations_keep_their_constants(call, activation, options):
    found = tensors()
    made = made_of(found, activation=activation, **options)
    assert_right(made(*call), expected(call, found, activation=activation, **options))
    assert_right(copy.deepcopy(made)(*call), expected(call, found, activation=activation, **options))


def test_without_a_gate_there_is_up_alone(call):
    names = ("up_proj", "down_proj")
    found = tensors(names=names)
    made = made_of(found, names, activation="relu2")
    assert set(made.state_dict()) == set(found) and made.w13.shape == (EXPERTS, INTER, HIDDEN // 2)
    assert_right(made(*call), expected(call, found, names, activation="relu2"))
    vector = {f"{e}.up_proj.pre_quant_scale": torch.ones(HIDDEN) for e in range(EXPERTS)}
    with pytest.raises(RuntimeError, match="pre_quant_scale without a gate"):
        made.load_state_dict(found | vector)


def test_router_weights_of_16_bits_are_widened(call):
    made = made_of(tensors())
    x, ids, weights = call
    assert torch.equal(made(x, ids, weights.bfloat16()), made(x, ids, weights.bfloat16().float()))


def test_router_weights_may_be_applied_on_the_input(call):
    found = tensors(bias=True)
    made = made_of(found, apply_router_weight_on_input=True)
    one = (call[0], call[1][:, :1].contiguous(), call[2][:, :1].contiguous())
    assert_right(made(*one), expected(one, found, apply_router_weight_on_input=True))


def test_ranks_add_up_and_skip_the_experts_of_others(call):
    found = tensors(bias=True)
    whole = made_of(found)
    assert whole.expert_map is None
    parts = [made_of(found, experts=part) for part in (range(3), range(3, 4))]  # each is given all of the state dict
    assert parts[1].expert_map.tolist() == [-1, -1, -1, 0] and parts[1].w2.shape[0] == 1
    assert all(name.startswith("3.") for name in parts[1].state_dict())
    assert_right(sum(part(*call).double() for part in parts), expected(call, found))
    only = torch.full_like(call[1], 3)
    assert not parts[0](call[0], only, call[2]).any()
    moved = parts[1].to_empty(device="cpu")
    assert moved.expert_map.tolist() == [-1, -1, -1, 0]
    moved.load_state_dict(found)
    assert torch.equal(moved(call[0], only, call[2]), whole(call[0], only, call[2]))


def test_it_compiles_into_one_graph(call):
    made = made_of(tensors(bias=True), experts=range(1, 3))
    with torch.inference_mode():
        assert torch.equal(torch.compile(made, fullgraph=True, backend="eager")(*call), made(*call))


def test_warmup_takes_its_problem():
    made = made_of(tensors(), experts=range(1, 3))
    problem = made.problem(TOP_K)
    assert (problem.n, problem.k, problem.experts, problem.top_k) == (INTER, HIDDEN, 2, TOP_K)
    assert nvfp4.warmup(problem, device="cpu") == 1


@pytest.mark.parametrize(
    ("sizes", "options", "words"),
    [
        ((0, 64, 32), {}, "num_experts=0"),
        ((4, 24, 32), {}, "hidden=24"),
        ((4, 64, 0), {}, "inter=0"),
        ((4, 64.0, 32), {}, r"hidden=64\.0"),
        (("4", 64, 32), {}, "num_experts='4'"),
        ((4, 64, 32), {"experts": [0, 1]}, r"wrong experts; got \[0, 1\]; expected a part of range\(4\)"),
        ((4, 64, 32), {"activation": "mish"}, "unknown activation"),
        ((4, 64, 32), {"alpha": 1.0}, "swiglu has no alpha"),
        ((4, 64, 32), {"experts": range(2, 5)}, "wrong experts"),
        ((4, 64, 32), {"names": ("up_proj", "down_proj")}, "wrong names of an expert's layers"),
        ((4, 64, 32), {"dialect": "gptq"}, "wrong dialect"),
        ((4, 64, 32), {"dtype": torch.float32}, "wrong dtype"),
        ((4, 64, 32), {"activation": "relu2", "pre_quant_scale": True}, "pre_quant_scale without a gate"),
    ],
)
def test_what_no_layer_can_be_is_refused(sizes, options, words):
    with pytest.raises(InvalidInput, match=words):
        nvfp4.nn.FusedMoE(*sizes, **options)
