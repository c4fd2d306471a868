"""Experts in the fragment layouts: packed, run by kernels that read them, and refused where they do not fit."""

from dataclasses import replace

import nvfp4
import pytest
import torch
from nvfp4.dispatch import experts, table
from nvfp4.kernels import registry
from nvfp4.kernels.problem import Problem
from nvfp4.kernels.weights.layouts import first_layout
from nvfp4.testing.experts import GroupedCase, MoeCase
from nvfp4.testing.fake_experts import KERNELS
from torch.library import opcheck

pytestmark = [
    pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
CPU = torch.device("cpu")
MOE = Problem(op="moe", n=48, k=80, experts=4, top_k=2, activation="swiglu")
RELU = replace(MOE, activation="relu2", dtype="float16")
GROUPED = Problem(op="grouped_gemm", n=40, k=80, experts=4)
IDS = {"bfloat16": "fragment1-bf16", "float16": "fragment1-fp16"}
moe, grouped = torch.ops.nvfp4.moe.default, torch.ops.nvfp4.grouped_gemm.default


@pytest.fixture(autouse=True)
def kernels(install, no_plan):
    install(*KERNELS, registry.get("cpu_moe"), registry.get("cpu_grouped"))


def packed_moe(case, dtype=torch.bfloat16):
    glu = "fragment-glu" if case.problem.gated else "fragment"
    return (
        nvfp4.pack(*case.weights[:3], layout=glu, dtype=dtype),
        nvfp4.pack(*case.weights[3:], layout="fragment", dtype=dtype),
    )


def moe_case(seed=0, m=9, problem=MOE):
    return MoeCase.random(problem, m, seed, CPU, nan=False)


def grouped_case(seed=0, problem=GROUPED):
    return GroupedCase.random(problem, 9, seed, CPU)


@pytest.mark.parametrize("seed", [0, 27, 63])
@pytest.mark.parametrize("problem", [MOE, RELU, replace(MOE, activation="geglu", top_k=1)], ids=lambda p: p.activation)
def test_moe(problem, seed):
    case = moe_case(seed, problem=problem)
    w13, w2 = packed_moe(case, case.x.dtype)
    first = first_layout(IDS[problem.dtype], problem)
    assert (w13.layout, w2.layout, w13.scale, w2.scale) == (first, IDS[problem.dtype], None, None)
    assert w13.layout.endswith("-glu") == problem.gated
    assert (w13.out_features, w13.in_features, w2.in_features) == (case.weights[0].shape[1], 80, 48)
    given = {"topk_ids": case.ids, "topk_weights": case.router, "activation": problem.activation, **case.options}
    right = nvfp4.moe(case.x, *case.weights, **given)  # the same kernel on the checkpoint's bytes
    for _ in range(2):  # checked in full, then recognised
        assert torch.equal(nvfp4.moe(case.x, w13, w2=w2, **given), right)
    tensors = (case.x, w13.data, None, w13.global_scale, w2.data, None, w2.global_scale)
    layouts = {"w13_layout": w13.layout, "w2_layout": w2.layout}
    assert torch.equal(nvfp4.moe(*tensors, **given, **layouts, inter=48), right)
    case.compare(right)


@pytest.mark.parametrize("dtype", IDS)
@pytest.mark.parametrize("seed", [0, 1])
def test_grouped_gemm(dtype, seed):
    case = grouped_case(seed, replace(GROUPED, dtype=dtype))
    w = nvfp4.pack(case.weight, case.scale, case.global_scale, layout="fragment", dtype=case.x.dtype)
    right = nvfp4.grouped_gemm(case.x, case.weight, case.scale, case.global_scale, case.offsets).nan_to_num()
    assert torch.equal(nvfp4.grouped_gemm(case.x, w, expert_offsets=case.offsets).nan_to_num(), right)
    out = nvfp4.grouped_gemm(
        case.x, w.data, None, w.global_scale, case.offsets, layout=IDS[dtype], out_features=case.problem.n
    )
    case.compare(out)


def test_only_kernels_of_that_layout_run(install, monkeypatch):
    install(registry.get("cpu_moe"))
    case = moe_case()
    w13, w2 = packed_moe(case)
    with pytest.raises(nvfp4.Unsupported, match=r"'fragment1-bf16'.*cpu_moe: reads weight layout 'checkpoint'"):
        nvfp4.moe(case.x, w13, w2=w2, topk_ids=case.ids, topk_weights=case.router)


@pytest.mark.parametrize("problem", [MOE, RELU, GROUPED], ids=lambda p: p.label)
def test_a_kernel_is_loaded_on_blobs_of_zeros(problem):
    layout = IDS[problem.dtype]
    experts.warm(replace(problem, experts=1), CPU, layout, (1, 5))
    assert (CPU, replace(problem, experts=1), layout) in table._bound


@pytest.mark.parametrize("problem", [MOE, GROUPED], ids=lambda p: p.op)
def test_warmup_takes_the_planned_layout(problem, set_plan, monkeypatch):
    name = "fake_fragment_moe" if problem.op == "moe" else "fake_fragment_grouped"
    problem = replace(problem, experts=1, top_k=min(problem.top_k, 1))
    config = registry.get(name).config_type(block_rows=16, threads=0)
    set_plan(problem, IDS["bfloat16"], **{IDS["bfloat16"]: [(1, None, name, config.to_json())]})
    assert nvfp4.warmup(problem, device="cpu") == 1
    assert [layout for _, _, layout in table._bound] == [IDS["bfloat16"]]
    assert nvfp4.warmup(problem, device="cpu", layout="checkpoint") == 1
    assert [layout for _, _, layout in table._bound] == [IDS["bfloat16"], "checkpoint"]
    with pytest.raises(nvfp4.InvalidInput, match="unknown weight layout; got 'fragment'"):
        nvfp4.warmup(problem, device="cpu", layout="fragment")


def test_opcheck():
    case = moe_case()
    w13, w2 = packed_moe(case)
    tensors = (case.x, w13.data, None, w13.global_scale, w2.data, None, w2.global_scale, case.ids, case.router)
    opcheck(moe, tensors, {"inter": 48, "w13_layout": w13.layout, "w2_layout": w2.layout})
    case = grouped_case()
    w = nvfp4.pack(case.weight, case.scale, case.global_scale, layout="fragment")
    tensors = (case.x.nan_to_num(), w.data, None, w.global_scale, case.offsets)
    opcheck(grouped, tensors, {"layout": w.layout, "out_features": 40})


def test_compiled_with_dynamic_tokens():
    case = moe_case(m=40)
    w13, w2 = packed_moe(case)

    def layer(x, ids, router):
        return nvfp4.moe(x, w13, w2=w2, topk_ids=ids, topk_weights=router)

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    for m in (40, 3):
        given = [t[:m].clone() for t in (case.x, case.ids, case.router)]
        assert torch.equal(compiled(*given), layer(*given))


WRONG_MOE = {
    "x of another dtype": ({"x": torch.zeros(9, 80).half()}, r'layout "fragment1-bf16-glu" of w13 is not for this x'),
    "w13 without the interleave": (
        {"w13_layout": "fragment1-bf16"},
        r"do not belong together with activation swiglu; got w13_layout='fragment1-bf16', w2_layout='fragment1-bf16'; "
        r"expected 'fragment1-bf16-glu' and 'fragment1-bf16'; pack both",
    ),
    "an activation without a gate": (
        {"activation": "relu2"},
        r"with activation relu2; got w13_layout='fragment1-bf16-glu'.*expected 'fragment1-bf16' and 'fragment1-bf16'",
    ),
    "w2 with the interleave": ({"w2_layout": "fragment1-bf16-glu"}, r"expected 'fragment1-bf16-glu' and 'fragment1-b"),
    "one of a checkpoint": ({"w2_layout": "checkpoint"}, r"expected 'checkpoint' and 'checkpoint'"),
    "two encodings": ({"w2_layout": "fragment1-nib"}, r"expected 'fragment1-nib-glu' and 'fragment1-nib'"),
    "unknown layout": ({"w13_layout": "fragment"}, "unknown weight layout; got 'fragment'"),
    "inter is missing": ({"inter": None}, "wrong inter; got None; expected the columns of w2, for layout"),
    "another inter": (
        {"inter": 80},
        r'w13 is not one in layout "fragment1-bf16-glu" with N = 160, K = 80; got.*\(E, 3',
    ),
    "no multiple of 16": ({"inter": 40}, "wrong size of w13; got N = 80, K = 80; expected .* multiples of 16"),
    "another hidden": ({"x": torch.zeros(9, 64).bfloat16()}, r"N = 96, K = 64; got torch.uint8 \(4, 2, 2, 2304\)"),
    "one expert less in w2": (
        {"w2": torch.zeros(3, 2, 1, 2304, dtype=torch.uint8)},
        "w13 and w2 have different numbers of experts",
    ),
    "a checkpoint's weight": ({"w2": torch.zeros(4, 80, 24, dtype=torch.uint8)}, "w2 is not one in layout"),
    "block scales": (
        {"w2_scale": torch.zeros(4, 80, 3, dtype=torch.uint8)},
        r'block scales were given beside w2 in layout "fragment1-bf16"; got.*expected None',
    ),
    "global scales of too few": ({"w13_scale_2": torch.ones(3)}, "wrong w13_scale_2"),
}


@pytest.mark.parametrize("name", WRONG_MOE)
def test_wrong_arguments_of_moe(name):
    spoilt, text = WRONG_MOE[name]
    case = moe_case()
    w13, w2 = packed_moe(case)
    given = {
        "x": case.x, "w13": w13.data, "w13_scale": None, "w13_scale_2": w13.global_scale, "w2": w2.data,
        "w2_scale": None, "w2_scale_2": w2.global_scale, "topk_ids": case.ids, "topk_weights": case.router,
        "w13_layout": w13.layout, "w2_layout": w2.layout, "inter": 48,
    }  # fmt: skip
    for _ in range(2):
        with pytest.raises(nvfp4.InvalidInput, match=f"(?s){text}"):
            moe(**(given | spoilt))
    case.compare(moe(**given))
    meta = {name: t.to("meta") if isinstance(t, torch.Tensor) else t for name, t in (given | spoilt).items()}
    with pytest.raises(nvfp4.InvalidInput, match=f"(?s){text}"):
        moe(**meta)


WRONG_GROUPED = {
    "x of another dtype": ({"x": torch.zeros(9, 80).half()}, 'layout "fragment1-bf16" of weight is not for this x'),
    "the interleave": (
        {"layout": "fragment1-bf16-glu"},
        "for gate and up rows; got 'fragment1-bf16-glu'; expected 'fr",
    ),
    "N is missing": ({"out_features": None}, "wrong out_features; got None; expected N of the weight, for layout"),
    "N of another padding": ({"out_features": 65}, r"N = 65, K = 80; .*\(E, 2, 2, 2304\)"),
    "K of another padding": ({"x": torch.zeros(9, 64).bfloat16()}, r"N = 40, K = 64; .*\(E, 1, 1, 2304\)"),
    "one weight": ({"weight": torch.zeros(1, 2, 2304, dtype=torch.uint8)}, r"weight is not one in layout"),
    "at an odd address": ({"weight": torch.zeros(4 * 4608 + 1, dtype=torch.uint8)[1:].view(4, 1, 2, 2304)}, "16-byte"),
    "scales": ({"weight_scale": torch.zeros(4, 40, 5, dtype=torch.uint8)}, "block scales were given beside weight"),
}


@pytest.mark.parametrize("name", WRONG_GROUPED)
def test_wrong_arguments_of_grouped_gemm(name):
    spoilt, text = WRONG_GROUPED[name]
    case = grouped_case()
    w = nvfp4.pack(case.weight, case.scale, case.global_scale, layout="fragment")
    given = {
        "x": case.x, "weight": w.data, "weight_scale": None, "weight_scale_2": w.global_scale,
        "expert_offsets": case.offsets, "layout": w.layout, "out_features": 40,
    }  # fmt: skip
    with pytest.raises(nvfp4.InvalidInput, match=f"(?s){text}"):
        grouped(**(given | spoilt))
    case.compare(grouped(**given))


def test_weights_of_other_sizes():
    """64 and 80 columns, 40 and 48 rows are padded alike."""
    case, other = moe_case(), moe_case(problem=replace(MOE, n=64))
    (w13, w2), (wide, _) = packed_moe(case), packed_moe(other)
    call = {"topk_ids": case.ids, "topk_weights": case.router}
    with pytest.raises(
        nvfp4.InvalidInput, match=r"w13 does not fit; got Weight\(4 experts, 128 x 80.*expected 96 x 80"
    ):
        nvfp4.moe(case.x, wide, w2=w2, **call)
    with pytest.raises(nvfp4.InvalidInput, match=r"w13 does not fit.*expected 96 x 96"):
        nvfp4.moe(torch.zeros(9, 96).bfloat16(), w13, w2=w2, **call)
    with pytest.raises(nvfp4.InvalidInput, match=r"w2 does not fit.*80 x 48.*expected 80 x 64"):
        nvfp4.moe(case.x, wide, w2=w2, inter=64, **call)
    raw = {"w2": w2.data, "w2_scale_2": w2.global_scale, "w2_layout": w2.layout}  # padded as one of 64 columns is
    with pytest.raises(nvfp4.InvalidInput, match=r"w13 does not fit.*96 x 80.*expected 128 x 80"):
        nvfp4.moe(case.x, w13, inter=64, **raw, **call)
    assert torch.equal(nvfp4.moe(case.x, w13, **raw, **call), nvfp4.moe(case.x, w13, w2=w2, **call))
    for x, text in ((None, "x is missing"), ([0.0], "x is no tensor"), (torch.tensor(0.0).bfloat16(), "no dimensions")):
        with pytest.raises(nvfp4.InvalidInput, match=text):
            nvfp4.moe(x, w13, w2=w2, **call)
    grouped = grouped_case()
    w = nvfp4.pack(grouped.weight, grouped.scale, grouped.global_scale, layout="fragment")
    with pytest.raises(nvfp4.InvalidInput, match=r"weight does not fit.*expected 40 x 96"):
        nvfp4.grouped_gemm(torch.zeros(9, 96).bfloat16(), w, expert_offsets=grouped.offsets)


@pytest.mark.parametrize("problem", [MOE, RELU, replace(MOE, n=80, activation="relu2"), GROUPED], ids=lambda p: p.label)
def test_pack_for_a_problem_follows_its_plan(problem, set_plan):
    case = moe_case(problem=problem) if problem.op == "moe" else grouped_case(problem=problem)
    weights = case.weights if problem.op == "moe" else (case.weight, case.scale, case.global_scale)
    stacks = [weights[i : i + 3] for i in range(0, len(weights), 3)]
    layout = IDS[problem.dtype]
    wanted = [first_layout(layout, problem), layout][: len(stacks)]
    assert [nvfp4.pack(*s, problem=problem).layout for s in stacks] == ["checkpoint"] * len(stacks)
    assert [nvfp4.pack(*s, problem=problem, layout="fragment").layout for s in stacks] == wanted
    name = "fake_fragment_moe" if problem.op == "moe" else "fake_fragment_grouped"
    config = registry.get(name).config_type(block_rows=16, threads=0)
    set_plan(problem, layout, **{layout: [(1, None, name, config.to_json())]})
    table.clear()
    assert [nvfp4.pack(*s, problem=problem).layout for s in stacks] == wanted
    assert [nvfp4.pack(*s, problem=problem, layout="checkpoint").layout for s in stacks] == ["checkpoint"] * len(stacks)
    with pytest.raises(nvfp4.InvalidInput, match=r"no stack of .* has this shape; got \(4, .*expected \(4, "):
        nvfp4.pack(*stacks[0], problem=replace(problem, k=96))


def test_pack_says_what_takes_no_experts(mirrored):
    case = grouped_case()
    with pytest.raises(nvfp4.InvalidInput, match="takes no experts; got 'mirrored'; expected one of checkpoint, fr"):
        nvfp4.pack(case.weight, case.scale, case.global_scale, layout="mirrored")
    with pytest.raises(nvfp4.InvalidInput, match='"fragment1-bf16-glu" is for experts'):
        nvfp4.pack(case.weight[0], case.scale[0], torch.ones(1), layout="fragment-glu")


@pytest.mark.parametrize("problem", [Problem(n=40, k=80), "moe"])
def test_pack_says_which_problems_have_experts(problem):
    case = grouped_case()
    with pytest.raises(nvfp4.InvalidInput, match=r"wrong problem; got .*expected a Problem of moe or grouped_gemm"):
        nvfp4.pack(case.weight, case.scale, case.global_scale, problem=problem)


@pytest.mark.parametrize("layout", ["fragment1-bf16-glu", "fragment1-fp16", "mirrored"])
def test_warmup_refuses_layouts_that_no_weight_of_the_problem_can_be_in(layout, mirrored):
    for problem in (MOE, GROUPED) if layout == "mirrored" else (MOE, GROUPED, Problem(n=32, k=64)):
        with pytest.raises(nvfp4.InvalidInput, match=f"wrong layout; got '{layout}' for {problem.op}.*one of checkp"):
            nvfp4.warmup(problem, device="cpu", layout=layout)


def test_warmup_takes_the_problem_of_experts_and_not_their_weights():
    with pytest.raises(nvfp4.InvalidInput, match=r"no weights of experts; got Weight\(4 experts.*pass their Problem"):
        nvfp4.warmup(packed_moe(moe_case())[0])


@pytest.mark.parametrize("m", [0, 2])
def test_gemm_refuses_a_layout_of_experts(m):
    w13, _ = packed_moe(moe_case())
    x = torch.zeros(m, 80).bfloat16()
    with pytest.raises(nvfp4.InvalidInput, match="in a layout for experts; got 'fragment1-bf16-glu'; expected 'fragme"):
        nvfp4.gemm(x, w13.data[0], None, torch.ones(1), layout=w13.layout, out_features=96)


def test_permuted_blobs_give_the_same_bits():
    """An expert is its slice of the blobs and its global scales, nothing else."""
    case = moe_case(1)  # global scales of gate and up
    w13, w2 = packed_moe(case)
    order = torch.tensor([2, 0, 3, 1])
    moved = [replace(w, data=w.data[order], global_scale=w.global_scale[order]) for w in (w13, w2)]
    again = packed_moe(replace(case, weights=tuple(part[order] for part in case.weights)))
    for one, other in zip(moved, again, strict=True):
        assert torch.equal(one.data, other.data) and torch.equal(one.global_scale, other.global_scale)
    place = torch.argsort(order)
    ids = torch.where((case.ids >= 0) & (case.ids < 4), place[case.ids.clamp(0, 3)], -1)
    out = nvfp4.moe(case.x, w13, w2=w2, topk_ids=case.ids, topk_weights=case.router)
    assert torch.equal(nvfp4.moe(case.x, moved[0], w2=moved[1], topk_ids=ids, topk_weights=case.router), out)


def test_a_token_s_result_does_not_depend_on_how_many_there_are():
    case = moe_case(m=40)
    w13, w2 = packed_moe(case)
    whole = nvfp4.moe(case.x, w13, w2=w2, topk_ids=case.ids, topk_weights=case.router)
    for m in (1, 7, 16, 33):
        some = {"topk_ids": case.ids[:m], "topk_weights": case.router[:m]}
        assert torch.equal(nvfp4.moe(case.x[:m], w13, w2=w2, **some), whole[:m])
