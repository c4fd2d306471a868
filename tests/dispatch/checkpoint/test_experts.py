"""Experts read into stacks: every family's names, global scales apart, input vectors, ranges, and what is refused."""

import re

import nvfp4
import pytest
import torch
from nvfp4.dispatch.checkpoint import Shard, expert_range, load_experts, open_checkpoint
from nvfp4.errors import InvalidInput, Unsupported
from nvfp4.kernels.weights.codec import swap_nibbles
from nvfp4.testing.checkpoints import as_compressed_tensors, modelopt

from .expert_files import EXPERTS, HIDDEN, INTER, MLP, expected, first, second, separate, stacked

FAMILIES = {
    "model.layers.0.mlp.experts": ("gate_proj", "up_proj", "down_proj"),
    "model.layers.0.block_sparse_moe.experts": ("w1", "w3", "w2"),
    "layers.0.ffn.experts": ("w1", "w3", "w2"),
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("ct", [False, True])
def test_every_family_is_gate_then_up(write, name, ct):
    gate, up, down = FAMILIES[name]
    tensors = separate(name, (gate, up, down), factor=2.0**-8)
    got = load_experts(open_checkpoint(write(as_compressed_tensors(tensors) if ct else tensors)), name)
    assert got.gated and got.experts == range(EXPERTS)
    assert got.w13.shape == (EXPERTS, 2 * INTER, HIDDEN // 2) and got.w2.shape == (EXPERTS, HIDDEN, INTER // 2)
    assert torch.equal(first(got), expected(tensors, (gate, up), name))
    assert torch.equal(second(got), expected(tensors, (down,), name))


@pytest.mark.parametrize("ratio", [1.0, 1.25, 10.0, 0.1, 4.83e-05 / 3.85e-05])
def test_gate_and_up_keep_their_global_scales(write, ratio):
    tensors = separate()
    for expert in range(EXPERTS):
        tensors[f"{MLP}.{expert}.gate_proj.weight_scale_2"] = torch.tensor(3.85e-05)
        tensors[f"{MLP}.{expert}.up_proj.weight_scale_2"] = torch.tensor(3.85e-05 * ratio)
    got = load_experts(open_checkpoint(write(tensors)), MLP)
    assert torch.equal(got.w13_scale_2, torch.tensor([[3.85e-05, 3.85e-05 * ratio]] * EXPERTS))
    assert torch.equal(first(got), expected(tensors, ("gate_proj", "up_proj")))


def test_without_a_gate_there_is_up_alone(write):
    name = "backbone.layers.1.mixer.experts"
    tensors = separate(name, ("up_proj", "down_proj"), inter=48, bias=True)
    got = load_experts(open_checkpoint(write(tensors)), name)
    assert not got.gated and got.w13.shape == (EXPERTS, 48, HIDDEN // 2) and got.w13_scale_2.shape == (EXPERTS, 1)
    assert torch.equal(first(got), expected(tensors, ("up_proj",), name))
    assert torch.equal(second(got), expected(tensors, ("down_proj",), name))
    for bias, role in ((got.w13_bias, "up_proj"), (got.w2_bias, "down_proj")):
        assert torch.equal(bias, torch.stack([tensors[f"{name}.{e}.{role}.bias"] for e in range(EXPERTS)]))


def test_one_rank_has_its_range_of_experts(write):
    tensors = separate(experts=5)
    checkpoint = open_checkpoint(write(tensors, files=3))
    ranges = [expert_range(5, rank, 2) for rank in range(2)]
    assert ranges == [range(3), range(3, 5)]
    got = [load_experts(checkpoint, MLP, experts=part) for part in ranges]
    assert torch.equal(torch.cat([second(part) for part in got]), expected(tensors, ("down_proj",), experts=range(5)))


@pytest.mark.parametrize(
    "experts", [5, [0, 1], range(0, 4), range(3, 5), range(2, 2), range(2, 1), range(0, 3, 2), range(-1, 2)]
)
def test_what_is_no_range_of_the_experts_is_refused(write, experts):
    got = re.escape(str(experts))
    with pytest.raises(InvalidInput, match=rf"wrong experts; got {got}; expected a part of range\(3\)"):
        load_experts(open_checkpoint(write(separate())), MLP, experts=experts)


def test_the_inner_size_is_divided_with_gate_and_up_apart(write):
    tensors = separate(inter=80)
    checkpoint = open_checkpoint(write(tensors))
    with pytest.raises(InvalidInput, match=r"inner size of model\.layers\.0\.mlp\.experts cannot be divided over 2"):
        load_experts(checkpoint, MLP, shard=Shard(rank=0, size=2, how="row"))
    for wrong in (Shard(rank=0, size=2, how="column"), "row"):
        with pytest.raises(InvalidInput, match=r'wrong Shard of experts; got .*how="row"'):
            load_experts(checkpoint, MLP, shard=wrong)
    parts = [load_experts(checkpoint, MLP, shard=Shard(rank=r, size=2, how="row", uneven=True)) for r in range(2)]
    assert [part.w2.shape[2] * 2 for part in parts] == [48, 32]
    both = expected(tensors, ("gate_proj", "up_proj"))
    assert torch.equal(torch.cat([first(part)[:, : part.w13.shape[1] // 2] for part in parts], 1), both[:, :80])
    assert torch.equal(torch.cat([first(part)[:, part.w13.shape[1] // 2 :] for part in parts], 1), both[:, 80:])
    assert torch.equal(torch.cat([second(part) for part in parts], 2), expected(tensors, ("down_proj",)))


def test_an_input_vector_is_that_of_all_experts(write):
    tensors = separate(bias=True)
    vector = torch.rand(HIDDEN).bfloat16() + 0.5
    for expert in range(EXPERTS):
        for role in ("gate_proj", "up_proj"):
            tensors[f"{MLP}.{expert}.{role}.pre_quant_scale"] = vector.reshape(1, -1)
        tensors[f"{MLP}.{expert}.down_proj.pre_quant_scale"] = torch.full((INTER,), 1.0 + expert).bfloat16()
    name = f"{MLP}.0.up_proj.pre_quant_scale"  # float32 that one rounding changed; the larger of the pair is taken
    tensors[name] = tensors[name].float() * (1 + 7e-6)
    got = load_experts(open_checkpoint(write(tensors, files=4)), MLP)  # the pair may be in another file than the weight
    assert torch.equal(got.pre_quant_scale, tensors[name].flatten())
    assert torch.equal(got.w2_pre_quant_scale, torch.tensor([[1.0], [2.0], [3.0]]).bfloat16().expand(3, INTER))
    biases = [torch.cat([tensors[f"{MLP}.{e}.{r}.bias"] for r in ("gate_proj", "up_proj")]) for e in range(EXPERTS)]
    assert torch.equal(got.w13_bias, torch.stack(biases))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"1.up_proj": None}, r"none for .*experts\.1\.up_proj"),
        (
            {"2.gate_proj": None, "2.up_proj": None},
            r"missing; got none for .*2\.gate_proj; expected as for .*0\.gate_proj",
        ),
        ({"1.up_proj": 1.000015}, r"differs; got other values in .*experts\.1\.up_proj"),
        ({f"{e}.up_proj": 2.0 for e in range(EXPERTS)}, r"differs; got other values in .*0\.up_proj"),
        ({"1.up_proj": float("nan")}, r"experts\.1\.up_proj\.pre_quant_scale is wrong; got nan"),
        ({"1.down_proj": 1.0}, r"missing; got none for .*0\.down_proj; expected as for .*1\.down_proj"),
    ],
)
def test_input_vectors_that_are_not_one_are_refused(write, changes, words):
    tensors = separate()
    for expert in range(EXPERTS):
        for role in ("gate_proj", "up_proj"):
            tensors[f"{MLP}.{expert}.{role}.pre_quant_scale"] = torch.ones(HIDDEN)
    for part, value in changes.items():
        name = f"{MLP}.{part}.pre_quant_scale"
        if value is None:
            del tensors[name]
        else:
            tensors[name] = torch.full((INTER if "down" in part else HIDDEN,), value)
    with pytest.raises(InvalidInput, match=words):
        load_experts(open_checkpoint(write(tensors)), MLP)


def test_only_local_experts_must_have_it(write):
    tensors = separate()
    for role in ("gate_proj", "up_proj"):
        tensors[f"{MLP}.0.{role}.pre_quant_scale"] = torch.full((HIDDEN,), 2.0)
    checkpoint = open_checkpoint(write(tensors))
    assert torch.equal(load_experts(checkpoint, MLP, experts=range(1)).pre_quant_scale, torch.full((HIDDEN,), 2.0))
    assert load_experts(checkpoint, MLP, experts=range(1, 3)).pre_quant_scale is None


def test_an_input_vector_without_a_gate_is_refused(write):
    tensors = separate(roles=("up_proj", "down_proj"))
    for expert in range(EXPERTS):
        tensors[f"{MLP}.{expert}.up_proj.pre_quant_scale"] = torch.ones(HIDDEN)
    with pytest.raises(InvalidInput, match="pre_quant_scale without a gate"):
        load_experts(open_checkpoint(write(tensors)), MLP)


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        ("1.up_proj.weight_scale", r"missing .*experts\.1\.up_proj\.weight_scale"),
        ("1.", r"experts\.1 is incomplete; got nothing of it"),
        ("1.up_proj.", r"experts\.1 is incomplete; got no up"),
        ("1.gate_proj.", r"experts\.1 is incomplete; got no gate"),
        ("0.down_proj.", r"experts\.0 is incomplete; got no down"),
    ],
)
def test_what_is_missing_is_named(write, gone, words):
    tensors = {name: tensor for name, tensor in separate().items() if not name.startswith(f"{MLP}.{gone}")}
    checkpoint = open_checkpoint(write(tensors))
    with pytest.raises(InvalidInput, match=words):
        load_experts(checkpoint, MLP)
    assert load_experts(checkpoint, MLP, experts=range(2, 3)).w2.shape[0] == 1  # a rank without it loads


def test_the_last_expert_is_missed_too(write):
    with pytest.raises(InvalidInput, match=r"experts\.3 is incomplete; got nothing of it"):
        load_experts(open_checkpoint(write(separate(), config={"num_experts": 4})), MLP)


def test_experts_that_hold_something_else_are_named(write):
    tensors = separate()
    fp8 = {f"{MLP}.3.up_proj.weight": torch.zeros(32, 64).to(torch.float8_e4m3fn)}
    fp8[f"{MLP}.3.up_proj.weight_scale"] = torch.ones(())
    for number, (more, kind, words) in enumerate(
        (
            (fp8, Unsupported, r"experts\.3\.up_proj is quantised as FP8; expected NVFP4, like the other experts"),
            (modelopt(f"{MLP}.1.side_proj", 32, 64), InvalidInput, r"experts\.1 has unknown layers; got side_proj"),
            (
                {f"{MLP}.1.up_proj.weight_scale_2": torch.ones(INTER)},
                InvalidInput,
                r"experts\.1\.up_proj\.weight_scale_2 of an expert; got \(32,\); expected one element",
            ),
        )
    ):
        with pytest.raises(kind, match=words):
            load_experts(open_checkpoint(write(tensors | more, folder=str(number))), MLP)


def test_experts_of_different_sizes_are_named(write):
    tensors = separate() | modelopt(f"{MLP}.2.up_proj", 48, HIDDEN)
    with pytest.raises(InvalidInput, match=r"2\.up_proj has another size.*got \(48, 64\); expected \(32, 64\)"):
        load_experts(open_checkpoint(write(tensors)), MLP)


def test_nan_scales_are_named_with_their_expert(write):
    tensors = separate()
    tensors[f"{MLP}.1.up_proj.weight_scale"].view(torch.uint8)[4, 2] = 0x7F
    checkpoint = open_checkpoint(write(tensors))
    with pytest.raises(InvalidInput, match=r"experts\.1\.up_proj\.weight_scale holds 1 NaN; got byte 0x7F at \[4, 2\]"):
        load_experts(checkpoint, MLP)
    assert float(load_experts(checkpoint, MLP, repair_nan=True).w13_scale[1, INTER + 4, 2]) == 448


@pytest.mark.parametrize("files", [separate, lambda: stacked(separate())])
def test_nibbles_are_swapped_only_when_asked(write, files):
    tensors = files()
    right = load_experts(open_checkpoint(write(tensors)), MLP)
    other = {name: swap_nibbles(one) if one.dtype == torch.uint8 else one for name, one in tensors.items()}
    checkpoint = open_checkpoint(write(other, folder="swapped"))
    got, wrong = load_experts(checkpoint, MLP, swap_nibbles=True), load_experts(checkpoint, MLP)
    assert torch.equal(got.w13, right.w13) and torch.equal(got.w2, right.w2)
    assert not torch.equal(wrong.w13, right.w13) and not torch.equal(wrong.w2, right.w2)


@pytest.mark.parametrize("role", ["gate_proj", "up_proj", "down_proj"])
def test_biases_are_finite_and_every_expert_has_them_or_none(write, role):
    tensors = separate(bias=True)
    name = f"{MLP}.1.{role}.bias"
    tensors[name][3] = float("nan")
    with pytest.raises(InvalidInput, match=rf"experts\.1\.{role}\.bias is not finite; got nan at \[3\]"):
        load_experts(open_checkpoint(write(tensors)), MLP)
    del tensors[name]
    with pytest.raises(InvalidInput, match=rf"a bias is missing; got none for .*experts\.1\.{role}; expected as for"):
        load_experts(open_checkpoint(write(tensors, folder="missing")), MLP)


def test_missing_and_foreign_layers_are_named(write):
    tensors = separate()
    other = "model.layers.1.mlp.experts.0.up_proj"
    tensors |= {f"{other}.weight": torch.zeros(32, 64).to(torch.float8_e4m3fn), f"{other}.weight_scale": torch.ones(())}
    checkpoint = open_checkpoint(write(tensors))
    with pytest.raises(Unsupported, match=r"layers\.1\.mlp\.experts\.0\.up_proj is quantised as FP8"):
        load_experts(checkpoint, "model.layers.1.mlp.experts")
    with pytest.raises(InvalidInput, match=r"no NVFP4 experts model\.layers\.2\.mlp\.experts.*layers\.0\.mlp\.experts"):
        load_experts(checkpoint, "model.layers.2.mlp.experts")
    assert not checkpoint.linears  # experts are no dense layers


def test_stacks_own_their_memory(write):
    got = load_experts(open_checkpoint(write(separate())), MLP)
    for tensor in (got.w13, got.w13_scale, got.w2, got.w2_scale, got.w13_scale_2, got.w2_scale_2):
        assert tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.filterwarnings("ignore:.*does not call these layers NVFP4")
@pytest.mark.parametrize("files", [separate, lambda: stacked(separate())])
@pytest.mark.parametrize(
    "hf",
    [
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {MLP: {"quant_algo": "W4A8_NVFP4_FP8"}}},
        {"quant_algo": "NVFP4", "moe_quant_algo": "w4a8_nvfp4_fp8"},
    ],
)
def test_experts_whose_tensors_only_look_like_nvfp4_are_refused(write, files, hf):
    checkpoint = open_checkpoint(write(files(), hf=hf))
    with pytest.raises(Unsupported, match=r"mlp\.experts.* is quantised as W4A8_NVFP4_FP8; expected NVFP4"):
        load_experts(checkpoint, MLP)
    with pytest.raises(Unsupported, match="W4A8_NVFP4_FP8"):
        nvfp4.nn.FusedMoE.from_checkpoint(checkpoint, MLP)


def test_the_config_is_not_asked_about_every_expert(write, monkeypatch):
    checkpoint = open_checkpoint(write(separate()))
    monkeypatch.setattr(type(checkpoint.config.rules), "answer", lambda *_: pytest.fail("asked"))
    assert load_experts(checkpoint, MLP).experts == range(EXPERTS)


@pytest.mark.parametrize("number", ["02", "²", "٢", "1000000000", "9" * 5000])
def test_what_is_no_number_of_an_expert_is_a_name(write, number):
    tensors = separate()
    found = open_checkpoint(write(tensors | modelopt(f"{MLP}.{number}.up_proj", INTER, HIDDEN, 99)))
    assert f"{MLP}.{number}.up_proj" in found.linears and sorted(found.experts[MLP]) == list(range(EXPERTS))
    assert torch.equal(second(load_experts(found, MLP)), expected(tensors, ["down_proj"]))


def test_a_layer_under_two_names_is_refused(write):
    tensors = separate() | modelopt(f"{MLP}.1.w3", INTER, HIDDEN, 99)
    with pytest.raises(InvalidInput, match=rf"{MLP}\.1 has a layer twice; got .*up_proj, w3"):
        load_experts(open_checkpoint(write(tensors)), MLP)
