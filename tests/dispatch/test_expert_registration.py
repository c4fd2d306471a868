"""grouped_gemm and moe: opcheck, fake tensors, torch.compile, export, autocast; and every error of an argument."""

import re
from dataclasses import replace

import nvfp4
import pytest
import torch
from nvfp4.kernels import registry
from nvfp4.kernels.problem import Problem
from nvfp4.testing.experts import GroupedCase, MoeCase
from torch.library import opcheck

moe = torch.ops.nvfp4.moe.default
grouped = torch.ops.nvfp4.grouped_gemm.default
CPU = torch.device("cpu")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def nothing_tuned(no_plan):
    pass


def moe_case(seed=0, m=5, top_k=2, **options):
    problem = Problem(op="moe", n=48, k=64, experts=4, top_k=top_k, activation="swiglu")
    return MoeCase.random(problem, m, seed, CPU, nan=False, **options)


def grouped_case(m=6):
    case = GroupedCase.random(Problem(op="grouped_gemm", n=40, k=64, experts=4), max(1, m), 2, CPU)
    return (case.x.nan_to_num()[:m], case.weight, case.scale, case.global_scale, case.offsets.clamp_max(m))


@pytest.mark.parametrize("m", [0, 1, 5])
@pytest.mark.parametrize("seed", [0, 31], ids=["plain", "full"])
def test_opcheck_moe(m, seed):
    case = moe_case(seed, max(1, m))
    opcheck(moe, (case.x[:m], *case.weights, case.ids[:m], case.router[:m]), case.options)


@pytest.mark.parametrize("m", [0, 1, 6])
def test_opcheck_grouped_gemm(m):
    opcheck(grouped, grouped_case(m))
    opcheck(grouped, grouped_case(m), {"out_features": 40})


def test_compile_with_dynamic_tokens():
    case = moe_case(27, 200)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    def layer(x, ids, router):
        return nvfp4.moe(x, *case.weights, ids, router, **case.options) * 2

    torch._dynamo.reset()
    model = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for m in (200, 3, 17):
        given = [t[:m].clone() for t in (case.x, case.ids, case.router)]
        assert torch.equal(model(*given), layer(*given))
    assert len(graphs) == 1


def test_compile_through_aot_with_a_weight():
    case = moe_case()
    first, second = nvfp4.pack(*case.weights[:3]), nvfp4.pack(*case.weights[3:])

    def layer(x):
        return nvfp4.moe(x, first, w2=second, topk_ids=case.ids, topk_weights=case.router).relu()

    torch._dynamo.reset()
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(case.x), layer(case.x))
    x, *rest = grouped_case()
    torch._dynamo.reset()
    model = torch.compile(lambda x: nvfp4.grouped_gemm(x, *rest).relu(), fullgraph=True, backend="aot_eager")
    assert torch.equal(model(x), nvfp4.grouped_gemm(x, *rest).relu())


def test_compile_raises_what_eager_raises():
    case = moe_case()
    torch._dynamo.reset()
    with pytest.raises(Exception, match="w13 does not suit activation relu2"):
        torch.compile(lambda x: moe(x, *case.weights, case.ids, case.router, activation="relu2"), backend="aot_eager")(
            case.x
        )


def test_export():
    case = moe_case()

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.names = [f"w{i}" for i in range(6)]
            for name, part in zip(self.names, case.weights, strict=True):
                self.register_buffer(name, part)

        def forward(self, x, ids, router):
            return moe(x, *(getattr(self, name) for name in self.names), ids, router)

    m = torch.export.Dim("m", min=2, max=512)
    given = (case.x, case.ids, case.router)
    program = torch.export.export(Layer(), given, dynamic_shapes=({0: m}, {0: m}, {0: m}))
    short = tuple(t[:3] for t in given)
    assert torch.equal(program.module()(*short), moe(short[0], *case.weights, *short[1:]))


@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16])
def test_autocast_casts_x_only(given):
    case = moe_case(8, w13_bias=torch.zeros(4, 96), w2_bias=torch.zeros(4, 64))
    args = (*case.weights, case.ids, case.router)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = nvfp4.moe(case.x.to(given), *args, **case.options)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, nvfp4.moe(case.x, *args, **case.options))
    x, *rest = grouped_case()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = nvfp4.grouped_gemm(x.to(given), *rest)
    assert torch.equal(got, nvfp4.grouped_gemm(x, *rest))


def test_no_kernel_lists_every_reason(monkeypatch):
    case = moe_case(m=3, top_k=1)
    monkeypatch.setattr(registry, "_all", lambda: {})
    nvfp4.dispatch.table.clear()
    with pytest.raises(nvfp4.Unsupported, match=r"no kernel can run moe 48x64 bfloat16 E4 top1 swiglu at M = 1 .*none"):
        nvfp4.moe(case.x, *case.weights, case.ids, case.router)
    nvfp4.dispatch.table.clear()


U8 = torch.uint8
ERRORS = {  # changed arguments of a moe with E = 4, hidden 64, inter 48, top_k 2, and 5 tokens
    "x float32": ({"x": torch.zeros(5, 64)}, "wrong dtype of x; got torch.float32"),
    "x wrong": ({"x": torch.zeros(5, 32).bfloat16()}, "x, w13 and w2 do not fit; got x of shape (5, 32)"),
    "w2 of another hidden": (
        {"w2": torch.zeros(4, 80, 24, dtype=U8), "w2_scale": torch.zeros(4, 80, 3, dtype=U8)},
        "x, w13 and w2 do not fit; got x of shape (5, 64), w13 (4, 96, 32) and w2 (4, 80, 24)",
    ),
    "no w2": ({"w2": None}, "w2 is missing; got None"),
    "no factors": ({"w13_scale_2": None}, "w13_scale_2 is missing; got None"),
    "no factors of w2": ({"w2_scale_2": None}, "w2_scale_2 is missing; got None"),
    "w13 dense": ({"w13": torch.zeros(4, 96, 64)}, "wrong w13; got torch.float32 (4, 96, 64)"),
    "w13 of one expert": ({"w13": torch.zeros(96, 32, dtype=U8)}, "wrong w13; got torch.uint8 (96, 32)"),
    "w13 K": ({"w13": torch.zeros(4, 96, 20, dtype=U8)}, "K of w13 must be a multiple of 16"),
    "w13 strided": ({"w13": torch.zeros(4, 32, 96, dtype=U8).mT}, "w13 is not contiguous"),
    "w13 unaligned": ({"w13": torch.zeros(12289, dtype=U8)[1:].view(4, 96, 32)}, "w13 is not 16-byte aligned"),
    "no scale": ({"w13_scale": None}, "w13's block scales are missing; expected e4m3 (4, 96, 4)"),
    "scale of twice the groups": ({"w2_scale": torch.zeros(4, 64, 6, dtype=U8)}, "wrong block scales of w2; got"),
    "scale strided": (
        {"w2_scale": torch.zeros(4, 3, 64, dtype=U8).mT},
        "the block scales of w2 are not contiguous",
    ),
    "scale float": ({"w2_scale": torch.zeros(4, 64, 3)}, "wrong block scales of w2; got torch.float32"),
    "a scalar factor": ({"w13_scale_2": torch.ones(())}, "wrong w13_scale_2; got torch.float32 ()"),
    "two factors of w2": ({"w2_scale_2": torch.ones(4, 2)}, "wrong w2_scale_2; got torch.float32 (4, 2)"),
    "factors of other experts": ({"w13_scale_2": torch.ones(5)}, "expected torch.float32 (4,) or (4, 1) or (4, 2)"),
    "other experts": (
        {"w2": torch.zeros(3, 64, 24, dtype=U8), "w2_scale": torch.zeros(3, 64, 3, dtype=U8)},
        "w13 and w2 have different numbers of experts",
    ),
    "up rows without a gate": ({"activation": "relu2"}, "expected 48, inter rows: it has no gate"),
    "no gate": (
        {"w13": torch.zeros(4, 48, 32, dtype=U8), "w13_scale": torch.zeros(4, 48, 4, dtype=U8)},
        "w13 does not suit activation swiglu and w2; got w13 (4, 48, 32) and w2 (4, 64, 24); expected 96, 2 * inter",
    ),
    "unknown activation": ({"activation": "swish"}, "unknown activation; got 'swish'; expected one of swiglu, silu"),
    "a constant it has not": ({"alpha": 1.0}, "activation swiglu has no alpha"),
    "inter": ({"inter": 64}, "wrong inter; got 64; expected 48"),
    "ids float": ({"topk_ids": torch.zeros(5, 2)}, "wrong dtype of topk_ids"),
    "ids of other tokens": (
        {"topk_ids": torch.zeros(4, 2, dtype=torch.int32)},
        "topk_ids do not fit x; got (4, 2) for x of shape (5, 64); expected (5, top_k), top_k at least 1",
    ),
    "a scalar id": ({"topk_ids": torch.zeros((), dtype=torch.int32)}, "topk_ids do not fit x; got ()"),
    "no ids": ({"topk_ids": torch.zeros(5, 0, dtype=torch.int32)}, "topk_ids do not fit x"),
    "weights half": ({"topk_weights": torch.zeros(5, 2).half()}, "wrong dtype of topk_weights"),
    "weights of other tokens": ({"topk_weights": torch.zeros(5, 3)}, "topk_weights do not fit topk_ids; got (5, 3)"),
    "on input of two": ({"apply_router_weight_on_input": True}, "applied on the input; got top_k = 2"),
    "pqs": ({"pre_quant_scale": torch.ones(64)}, "wrong pre_quant_scale; got torch.float32 (64,)"),
    "w2 pqs": ({"w2_pre_quant_scale": torch.ones(64).bfloat16()}, "expected [inter] or [E, inter] = (48,) or (4, 48)"),
    "bias": ({"w13_bias": torch.ones(4, 48)}, "wrong w13_bias; got torch.float32 (4, 48); expected [E, F] = (4, 96)"),
    "bias of another dtype": ({"w2_bias": torch.ones(4, 64).half()}, "wrong w2_bias; got torch.float16"),
    "map": ({"expert_map": torch.zeros(8)}, "wrong expert_map; got torch.float32 (8,)"),
    "empty map": ({"expert_map": torch.zeros(0, dtype=torch.int32)}, "wrong expert_map"),
    "layout": ({"w13_layout": "foo"}, "unknown weight layout; got 'foo'"),
    "another layout": ({"w2_layout": "fragment1-bf16"}, "w13 and w2 are in layouts that do not belong together"),
    "w13 elsewhere": ({"w13": torch.zeros(4, 96, 32, dtype=U8, device="meta")}, "w13 is not where x is; got meta"),
}
NAMES = ("x", "w13", "w13_scale", "w13_scale_2", "w2", "w2_scale", "w2_scale_2", "topk_ids", "topk_weights")


@pytest.mark.parametrize(("changed", "text"), ERRORS.values(), ids=ERRORS)
def test_errors_of_moe(changed, text, monkeypatch):
    case = moe_case()
    monkeypatch.setattr(nvfp4.dispatch.table, "bind", lambda *args: pytest.fail("bound"))
    given = dict(zip(NAMES, (case.x, *case.weights, case.ids, case.router), strict=True)) | changed
    args = [given.pop(name) for name in NAMES]
    with pytest.raises(nvfp4.InvalidInput, match=re.escape(text)):
        moe(*args, **given)


GROUPED_ERRORS = {
    0: [
        (torch.zeros(2, 3, 64).bfloat16(), "wrong shape of x; got (2, 3, 64)"),
        (torch.zeros(6, 32).bfloat16(), "x and weight do not fit"),
    ],
    1: [
        (torch.zeros(40, 32, dtype=U8), "wrong weight; got torch.uint8 (40, 32)"),
        (None, "weight is missing; got None"),
        (torch.zeros(4, 40, 32, dtype=U8, device="meta"), "weight is not where x is; got meta"),
    ],
    2: [
        (None, "weight's block scales are missing"),
        (torch.zeros(4, 40, 4, dtype=U8, device="meta"), "weight_scale is not where x is; got meta"),
    ],
    3: [
        (torch.ones(40), "wrong weight_scale_2; got torch.float32 (40,)"),
        (None, "weight_scale_2 is missing; got None"),
        (torch.ones(4, device="meta"), "weight_scale_2 is not where x is; got meta"),
    ],
    4: [
        (torch.zeros(4, dtype=torch.int32), "wrong expert_offsets; got torch.int32 (4,); expected [E + 1] = (5,)"),
        (torch.zeros(5, dtype=torch.int64), "wrong expert_offsets; got torch.int64"),
        (torch.zeros(5, dtype=torch.int32, device="meta"), "expert_offsets is not where x is; got meta"),
        (None, "expert_offsets is missing; got None"),
    ],
}


@pytest.mark.parametrize(("at", "value", "text"), [(i, *case) for i, cases in GROUPED_ERRORS.items() for case in cases])
def test_errors_of_grouped_gemm(at, value, text):
    args = list(grouped_case())
    args[at] = value
    with pytest.raises(nvfp4.InvalidInput, match=re.escape(text)):
        grouped(*args)


def test_out_features_of_a_stack_are_its_rows():
    args = grouped_case()
    assert torch.equal(grouped(*args, out_features=40), grouped(*args))
    with pytest.raises(nvfp4.InvalidInput, match=r"wrong out_features; got 41; expected 40, the rows of weight"):
        grouped(*args, out_features=41)


def test_what_is_missing_is_named():
    case = moe_case()
    first = nvfp4.pack(*case.weights[:3])
    with pytest.raises(nvfp4.InvalidInput, match="the global scales of w2 are missing"):
        nvfp4.moe(case.x, first, topk_ids=case.ids, topk_weights=case.router)
    with pytest.raises(nvfp4.InvalidInput, match="topk_ids is missing"):
        nvfp4.moe(case.x, *case.weights)
    with pytest.raises(nvfp4.InvalidInput, match="expert_offsets is missing"):
        nvfp4.grouped_gemm(case.x, first)


def test_a_freed_weight_is_refused():
    case = moe_case()
    w13 = case.weights[0].clone()
    w13.untyped_storage().resize_(0)
    with pytest.raises(nvfp4.InvalidInput, match="w13 has no memory"):
        nvfp4.moe(case.x, w13, *case.weights[1:], case.ids, case.router)


def test_errors_come_again_for_the_same_form():
    """What was checked once is not checked again, but for what may differ between equal forms."""
    case = moe_case()
    nvfp4.moe(case.x, *case.weights, case.ids, case.router)
    unaligned = torch.zeros(12289, dtype=U8)[1:].view(4, 96, 32)
    for changed, text in (
        (replace(case, weights=(unaligned, *case.weights[1:])), "aligned"),
        (replace(case, router=case.router.half()), "dtype of topk_weights"),
        (replace(case, ids=case.ids[:4]), "topk_ids do not fit x"),
        (replace(case, x=case.x.t().contiguous().t()), "last dimension of x"),
    ):
        with pytest.raises(nvfp4.InvalidInput, match=text):
            nvfp4.moe(changed.x, *changed.weights, changed.ids, changed.router)
