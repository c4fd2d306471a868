"""`nvfp4.nn.FusedMoE`: results, names in state dicts, ranks, moving, copying, reloading, and what it refuses."""

import copy
import io
import re

import nvfp4
import pytest
import torch
from nvfp4.dispatch.checkpoint import Shard, load_experts, open_checkpoint
from nvfp4.errors import InvalidInput
from nvfp4.kernels import reference
from nvfp4.testing.checkpoints import as_compressed_tensors, modelopt, write_checkpoint
from safetensors.torch import load_file, save_file

EXPERTS, HIDDEN, INTER, TOP_K, TOKENS = 4, 64, 32, 2, 6
FAMILY = ("gate_proj", "up_proj", "down_proj")
NAME = "model.layers.0.mlp.experts"
pytestmark = pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning")


def tensors(seed=0, names=FAMILY, pqs=False, **options):
    found = {}
    for e in range(EXPERTS):
        for i, name in enumerate(names):
            n, k = (HIDDEN, INTER) if name == names[-1] else (INTER, HIDDEN)
            found |= modelopt(f"{e}.{name}", n, k, 100 * seed + 10 * e + i, **options)
            if pqs:
                vector = torch.linspace(0.5, 2, k) * (1 if k == HIDDEN else 1 + e)
                found[f"{e}.{name}.pre_quant_scale"] = vector.bfloat16()
    return found


def made_of(found, names=FAMILY, **options):
    options.setdefault("bias", any(name.endswith(".bias") for name in found))
    made = nvfp4.nn.FusedMoE(EXPERTS, HIDDEN, INTER, names=names, **options)
    made.load_state_dict(found)
    return made


@pytest.fixture
def call():
    g = torch.Generator().manual_seed(5)
    x = torch.randn(TOKENS, HIDDEN, generator=g).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, generator=g)[:TOP_K] for _ in range(TOKENS)])
    return x, ids, torch.rand(TOKENS, TOP_K, generator=g)


def stacked(found, names, leaf):
    return torch.stack([torch.cat([found[f"{e}.{name}.{leaf}"] for name in names]) for e in range(EXPERTS)])


def expected(call, found, names=FAMILY, **options):
    """The reference on stacks that are put together here, from what the state dict holds."""
    first, second = names[:-1], names[-1:]

    def factors(roles):
        return torch.stack([torch.stack([found[f"{e}.{r}.weight_scale_2"] for r in roles]) for e in range(EXPERTS)])

    weights = []
    for roles in (first, second):
        scale = torch.stack(
            [torch.cat([found[f"{e}.{r}.weight_scale"].view(torch.uint8) for r in roles]) for e in range(EXPERTS)]
        )
        weights += [stacked(found, roles, "weight"), scale, factors(roles)]
    if f"0.{first[0]}.bias" in found:
        options |= {"w13_bias": stacked(found, first, "bias"), "w2_bias": stacked(found, second, "bias")}
    if f"0.{first[0]}.pre_quant_scale" in found:
        options["pre_quant_scale"] = found[f"0.{first[0]}.pre_quant_scale"]
        options["w2_pre_quant_scale"] = stacked(found, second, "pre_quant_scale")
    options = {"activation": "swiglu"} | options
    return reference.moe(call[0], *weights, call[1], call[2], round_output=False, **options)


def assert_right(y, ref):
    """One rounding leaves 1.7e-3; in so small a layer, one activation that is rounded the other way shows beside it."""
    assert y.shape == ref.shape and float((y.double() - ref).norm() / ref.norm()) < 2.0**-8


def same_bytes(one, other):
    return one.shape == other.shape and torch.equal(
        one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8)
    )


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


def test_router_weights_may_be_applied_on_the_input(call):
    found = tensors(bias=True)
    made = made_of(found, apply_router_weight_on_input=True)
    one = (call[0], call[1][:, :1].contiguous(), call[2][:, :1].contiguous())
    assert_right(made(*one), expected(one, found, apply_router_weight_on_input=True))


def checkpoint(tmp_path, found, **options):
    stored = {f"{NAME}.{name}": t for name, t in found.items()}
    return open_checkpoint(write_checkpoint(tmp_path / "c", stored, **options))


def test_what_load_experts_read_is_taken_over(call, tmp_path):
    found = tensors(bias=True, pqs=True)
    read = load_experts(checkpoint(tmp_path, found), NAME)
    made = nvfp4.nn.FusedMoE.from_experts(read)
    assert made.w13.data_ptr() == read.w13.data_ptr()
    assert_right(made(*call), expected(call, found))
    assert all(same_bytes(made.state_dict()[name], tensor) for name, tensor in found.items())
    with pytest.raises(InvalidInput, match="relu2 does not suit these experts; got experts with a gate"):
        nvfp4.nn.FusedMoE.from_experts(read, activation="relu2")


@pytest.mark.parametrize("ct", [False, True])
def test_experts_are_read_from_a_checkpoint_with_their_bytes(call, tmp_path, ct):
    found = tensors(names=("w1", "w3", "w2"), bias=True, pqs=True)
    stored = as_compressed_tensors(found) if ct else found
    source = checkpoint(tmp_path, stored)
    made = nvfp4.nn.FusedMoE.from_checkpoint(source, NAME)
    assert made.names == ("w1", "w3", "w2") and made.num_experts == EXPERTS
    state = made.state_dict()
    assert set(state) == set(stored) and all(same_bytes(state[name], tensor) for name, tensor in stored.items())
    assert_right(made(*call), expected(call, found, ("w1", "w3", "w2")))
    rank = nvfp4.nn.FusedMoE.from_checkpoint(source, NAME, experts=range(1, 3))
    assert rank.num_experts == EXPERTS and torch.equal(rank.w13, made.w13[1:3])
    shards = [nvfp4.nn.FusedMoE.from_checkpoint(source, NAME, shard=Shard(rank=r, size=2, how="row")) for r in range(2)]
    assert [part.inter for part in shards] == [INTER // 2] * 2


def test_shards_of_the_inner_size_add_up(call, tmp_path):
    found = tensors()
    source = checkpoint(tmp_path, found)
    shards = [nvfp4.nn.FusedMoE.from_checkpoint(source, NAME, shard=Shard(rank=r, size=2, how="row")) for r in range(2)]
    assert_right(sum(part(*call).double() for part in shards), expected(call, found))


def test_what_a_checkpoint_lacks_is_named(tmp_path):
    found = tensors()
    del found["2.up_proj.weight"], found["2.up_proj.weight_scale"], found["2.up_proj.weight_scale_2"]
    with pytest.raises(InvalidInput, match=rf"{NAME}\.2 is incomplete; got no up"):
        nvfp4.nn.FusedMoE.from_checkpoint(checkpoint(tmp_path, found), NAME)


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_dense_experts_are_quantised_with_gate_and_up_apart(call, dialect):
    g = torch.Generator().manual_seed(3)
    w13 = torch.randn(EXPERTS, 2 * INTER, HIDDEN, generator=g).bfloat16()
    w13[:, INTER:] *= 8
    w2 = torch.randn(EXPERTS, HIDDEN, INTER, generator=g).bfloat16()
    biases = {
        "w13_bias": torch.randn(EXPERTS, 2 * INTER).bfloat16(),
        "w2_bias": torch.randn(EXPERTS, HIDDEN).bfloat16(),
    }
    made = nvfp4.nn.FusedMoE.from_dense(w13, w2, dialect=dialect, **biases)
    weight, scale, factor = nvfp4.quantize(w13[1, INTER:])
    assert torch.equal(made.w13[1, INTER:], weight)
    assert torch.equal(made.w13_scale[1, INTER:].view(torch.uint8), scale.view(torch.uint8))
    torch.testing.assert_close(made.packed[0].global_scale[1, 1], factor, rtol=1e-6, atol=0)
    ref = reference.moe(
        call[0], made.w13, made.w13_scale, made.packed[0].global_scale, made.w2, made.w2_scale,
        made.packed[1].global_scale, *call[1:], activation="swiglu", round_output=False, **biases,
    )  # fmt: skip
    assert_right(made(*call), ref)
    shapes = nvfp4.nn.FusedMoE.from_dense(w13.to("meta"), w2.to("meta"))
    assert shapes.w13.is_meta and shapes.w13.shape == made.w13.shape
    with pytest.raises(InvalidInput, match="wrong shapes of dense experts for activation relu2"):
        nvfp4.nn.FusedMoE.from_dense(w13, w2, activation="relu2")


def test_before_weights_are_loaded_it_refuses(call):
    made = nvfp4.nn.FusedMoE(EXPERTS, HIDDEN, INTER)
    with pytest.raises(InvalidInput, match="the layer holds no weight"):
        made(*call)
    assert "not loaded" in repr(made)


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


@pytest.mark.parametrize(
    "key", ["².up_proj.weight", "٢.up_proj.weight", "02.up_proj.weight", "9" * 5000, "1.w3.weight"]
)
def test_a_second_name_of_an_expert_is_unexpected(key):
    found = tensors()
    with pytest.raises(RuntimeError, match="Unexpected key"):
        made_of(found | {key: found["1.up_proj.weight"]})


@pytest.mark.parametrize("name", ["1.up_proj.weight", "1.up_proj.weight_scale_2"])
@pytest.mark.parametrize("value", [None, [1.0], torch.ones((), dtype=torch.float16)])
def test_what_is_no_tensor_of_such_a_kind_is_named(name, value):
    got = re.escape(str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__)
    with pytest.raises(RuntimeError, match=rf"{re.escape(name)}: got {got}"):
        made_of(tensors() | {name: value})


def test_experts_that_a_config_only_counts_need_no_memory(tmp_path):
    found = checkpoint(tmp_path, tensors(), config={"num_experts": 2**40})
    with pytest.raises(InvalidInput, match=rf"{NAME}\.{EXPERTS} is incomplete; got nothing of it"):
        nvfp4.nn.FusedMoE.from_checkpoint(found, NAME)
