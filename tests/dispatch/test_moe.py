"""nvfp4.moe and nvfp4.grouped_gemm on a CPU: what they compute, from which tensors, and what they refuse."""

import math
import subprocess
import sys
import warnings
from dataclasses import replace

import nvfp4
import pytest
import torch
from nvfp4.dispatch import table
from nvfp4.dispatch.checkpoint import load_experts, open_checkpoint
from nvfp4.kernels import reference, registry
from nvfp4.kernels.moe.activations import ACTIVATIONS
from nvfp4.kernels.problem import Problem
from nvfp4.kernels.weights.swizzle import swizzle
from nvfp4.testing import assert_moe_close
from nvfp4.testing.checkpoints import dense, modelopt, write_checkpoint
from nvfp4.testing.experts import GroupedCase, MoeCase

pytestmark = pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning")
op = torch.ops.nvfp4.moe
CPU = torch.device("cpu")
PROBLEM = Problem(op="moe", n=48, k=64, experts=4, top_k=2, activation="swiglu")
GROUPED = Problem(op="grouped_gemm", n=40, k=64, experts=4)


@pytest.fixture(autouse=True)
def nothing_tuned(no_plan):
    pass


def moe_case(seed=0, m=9, problem=PROBLEM, **options):
    return MoeCase.random(problem, m, seed, CPU, nan=False, **options)


def run(case, **changed):
    options = {"activation": case.problem.activation} | case.options | changed
    return nvfp4.moe(case.x, *case.weights, case.ids, case.router, **options)


def close(case, out):
    p = case.problem
    assert_moe_close(out, case.reference(), hidden=p.k, inter=p.n, top_k=p.top_k, dtype=case.x.dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", [entry.name for entry in ACTIVATIONS])
def test_every_activation(name, dtype):
    for seed in (4, 27):
        case = moe_case(seed, problem=replace(PROBLEM, activation=name, dtype=dtype))
        close(case, run(case))


@pytest.mark.parametrize("seed", range(0, 64, 7))
def test_every_option(seed):
    case = moe_case(seed, problem=replace(PROBLEM, top_k=1 if seed & 32 else 3))
    close(case, run(case))


@pytest.mark.parametrize(
    ("experts", "top_k", "inter", "hidden", "m"),
    [(64, 10, 80, 2560, 2), (32, 8, 48, 64, 60), (8, 1, 16, 16, 1), (3, 8, 32, 48, 30)],
    ids=["a thin shard", "many experts", "smallest", "more slots than experts"],
)
def test_sizes(experts, top_k, inter, hidden, m):
    problem = Problem(op="moe", n=inter, k=hidden, experts=experts, top_k=top_k, activation="swiglu")
    case = moe_case(5, m, problem)
    close(case, run(case))


@pytest.mark.parametrize("ids", ["one expert", "each its own", "none but the last"])
def test_skewed_routing(ids):
    case = moe_case(0, 16, replace(PROBLEM, experts=16, top_k=1))
    chosen = {"one expert": torch.full((16, 1), 3), "each its own": torch.arange(16).unsqueeze(1)}
    case = replace(case, ids=chosen.get(ids, torch.full((16, 1), 15)))
    close(case, run(case))


def wrong(case, out):
    with pytest.raises(AssertionError):
        close(case, out)


def test_what_must_not_be_dropped():
    """A dropped pre_quant_scale, swapped halves and a dropped up scale each fail the tolerance of right results."""
    case = moe_case(17)
    assert case.options.keys() >= {"pre_quant_scale", "w2_pre_quant_scale"} and case.weights[2].shape == (4, 2)
    close(case, run(case))
    wrong(case, run(case, pre_quant_scale=None))
    wrong(case, run(case, w2_pre_quant_scale=None))
    w13, s13, g13, *second = case.weights
    swapped = replace(case, weights=(w13.roll(48, 1), s13.roll(48, 1), g13.flip(1), *second))
    wrong(case, run(swapped))
    wrong(case, run(replace(case, weights=(w13, s13, g13[:, 0], *second))))


def test_global_scales_of_any_form_and_block_scales_as_e4m3():
    case = moe_case(0)
    w13, s13, g13, w2, s2, g2 = case.weights
    right = run(case)
    e4m3 = torch.float8_e4m3fn
    same = replace(case, weights=(w13, s13.view(e4m3), g13[:, 0], w2, s2.view(e4m3), g2[:, 0].double()))
    assert torch.equal(run(same), right)
    assert torch.equal(run(replace(case, weights=(w13, s13, g13.expand(4, 2), w2, s2, g2))), right)


def test_weights_from_pack():
    case = moe_case(1)
    first, second = nvfp4.pack(*case.weights[:3]), nvfp4.pack(*case.weights[3:])
    assert repr(first) == "Weight(4 experts, 96 x 64, layout 'checkpoint', 8 global scales, cpu)"
    got = nvfp4.moe(case.x, first, w2=second, topk_ids=case.ids, topk_weights=case.router)
    assert torch.equal(got, run(case))
    with pytest.raises(nvfp4.InvalidInput, match="scales of w2 were given beside a Weight"):
        nvfp4.moe(case.x, first, w2=second, w2_scale=case.weights[4], topk_ids=case.ids, topk_weights=case.router)


def test_pack_of_experts_checks_values_and_undoes_the_swizzle():
    w13, s13, g13 = moe_case(1).weights[:3]
    swizzled = torch.stack([swizzle(part).flatten() for part in s13])
    packed = nvfp4.pack(w13, swizzled, g13, scale_layout="swizzled")
    assert torch.equal(packed.scale, s13) and torch.equal(packed.global_scale, g13)
    damaged = s13.clone()
    damaged[2, 5, 1] = 0x7F
    with pytest.raises(nvfp4.InvalidInput, match=r"1 NaN; got byte 0x7F at row 197, group 1"):
        nvfp4.pack(w13, damaged, g13)
    assert nvfp4.pack(w13, damaged, g13, repair_nan=True).scale[2, 5, 1] == 0x7E
    with pytest.raises(nvfp4.InvalidInput, match=r"wrong global scale; got 0\.0 at row 96"):
        nvfp4.pack(w13, s13, g13 * torch.tensor([1.0, 0.0, 1.0, 1.0]).unsqueeze(1))
    with pytest.raises(nvfp4.InvalidInput, match=r"wrong weight_scale_2 of experts; got .*\(1, 1\)"):
        nvfp4.pack(w13, s13, g13[:1, :1])
    with pytest.raises(nvfp4.InvalidInput, match="unknown weight layout; got 'fragment9'"):
        nvfp4.pack(w13, s13, g13, layout="fragment9")


@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (2, 1, 3)])
def test_any_leading_shape(lead):
    case = moe_case(0, m=6)
    count = math.prod(lead)
    right = run(case)[:count]
    x, ids, router = (t[:count].reshape(*lead, -1) for t in (case.x, case.ids, case.router))
    got = nvfp4.moe(x, *case.weights, ids, router)
    assert got.shape == (*lead, 64) and got.is_contiguous() and got.dtype == x.dtype
    torch.testing.assert_close(got.reshape(count, -1).float(), right.float(), rtol=2**-7, atol=2**-9)


def test_ids_and_x_of_any_strides():
    case = moe_case(4)
    right = run(case)
    wide_ids = torch.stack([case.ids, case.ids], 2).flatten(1)[:, ::2]
    assert not wide_ids.is_contiguous()
    assert torch.equal(run(replace(case, ids=wide_ids, router=case.router.t().contiguous().t())), right)
    assert torch.equal(run(replace(case, x=case.x.contiguous())), right)
    odd = torch.cat([case.router.new_zeros(1), case.router.flatten()])[1:].view(case.router.shape)
    assert odd.data_ptr() % 16 and torch.equal(run(replace(case, router=odd)), right)


def test_ids_that_are_left_out_give_exactly_nothing():
    case = moe_case(0, m=4)
    ids = torch.tensor([[-1, -1], [4, 1 << 40], [0, -1], [-1, 0]])
    out = run(replace(case, ids=ids, x=case.x[:1].expand(4, -1), router=torch.full((4, 2), 0.5)))
    assert not out[:2].any()
    assert out[2].any() and torch.equal(out[2], out[3])


def test_a_map_may_know_one_expert():
    case = moe_case(0)
    mapped = run(replace(case, ids=torch.where(case.ids == 1, 0, 9)), expert_map=torch.tensor([2]))
    assert torch.equal(mapped, run(replace(case, ids=torch.where(case.ids == 1, 2, -1)))) and mapped.any()


def test_a_row_of_nan_stays_in_its_row():
    case = moe_case(0)
    ids = case.ids.clone()
    ids[:, 0] = 2
    x = case.x.clone()
    x[4] = math.nan
    clean, dirty = run(replace(case, ids=ids)), run(replace(case, ids=ids, x=x))
    others = torch.arange(9) != 4
    assert dirty[4].isnan().all() and torch.equal(clean[others], dirty[others])


@pytest.mark.parametrize("lead", [(0,), (0, 4), (3, 0)])
def test_no_tokens_no_launch(lead, monkeypatch):
    case = moe_case(31)
    monkeypatch.setattr(table, "bind", lambda *args: pytest.fail("bound"))
    ids, router = torch.empty(*lead, 2, dtype=torch.int64), torch.empty(*lead, 2)
    x = torch.empty(*lead, 64, dtype=torch.bfloat16)
    out = nvfp4.moe(x, *case.weights, ids, router, **case.options)
    assert out.shape == (*lead, 64) and out.dtype == torch.bfloat16
    with pytest.raises(nvfp4.InvalidInput, match="w13 does not suit"):
        nvfp4.moe(x, *case.weights, ids, router, activation="relu2")


def test_no_tokens_in_a_process_of_its_own():
    code = (
        "import torch, nvfp4\n"
        "w = [torch.zeros(2, 32, 16, dtype=torch.uint8), torch.zeros(2, 32, 2, dtype=torch.uint8), torch.ones(2)]\n"
        "v = [torch.zeros(2, 32, 8, dtype=torch.uint8), torch.zeros(2, 32, 1, dtype=torch.uint8), torch.ones(2)]\n"
        "x, ids = torch.empty(0, 32, dtype=torch.bfloat16), torch.empty(0, 2, dtype=torch.int32)\n"
        "assert nvfp4.moe(x, *w, *v, ids, torch.empty(0, 2)).shape == (0, 32)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_permuted_experts_give_the_same_bits():
    case = moe_case(0)
    order = torch.tensor([2, 0, 3, 1])
    ids = torch.where((case.ids >= 0) & (case.ids < 4), order.argsort()[case.ids.clamp(0, 3)], -1)
    moved = replace(case, ids=ids, weights=tuple(part[order].contiguous() for part in case.weights))
    assert torch.equal(run(moved), run(case))


@pytest.mark.parametrize(
    ("problem", "command"),
    [
        (replace(PROBLEM, top_k=4), "nvfp4 tune --moe experts=4,top_k=4,hidden=64,inter=48,activation=swiglu"),
        (replace(GROUPED, n=56), "nvfp4 tune --grouped experts=4,n=56,k=64"),
        (replace(GROUPED, n=72, dtype="float16"), "nvfp4 tune --grouped experts=4,n=72,k=64 --dtype float16"),
    ],
)
def test_experts_without_a_plan_are_said_once_with_the_command(problem, command):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for m in (2, 300):
            if problem.op == "moe":
                run(moe_case(0, m=m, problem=problem))
            else:
                case = GroupedCase.random(problem, m, 0, CPU)
                nvfp4.grouped_gemm(case.x, case.weight, case.scale, case.global_scale, case.offsets)
    (told,) = [str(w.message) for w in seen if issubclass(w.category, nvfp4.UntunedWarning)]
    assert told.endswith(f"Tune it: {command}")


@pytest.mark.parametrize("problem", [PROBLEM, GROUPED])
def test_experts_with_a_plan_run_what_it_says(problem, set_plan, monkeypatch):
    kernel = registry.get("cpu_moe" if problem.op == "moe" else "cpu_grouped")
    names = {}
    for rows in (16, 32):
        names[rows] = type(kernel).config_type(block_rows=rows, threads=0).to_json()
    set_plan(problem, checkpoint=[(1, 4, kernel.name, names[16]), (5, None, kernel.name, names[32])])
    ran, whole = [], type(kernel).build

    def build(self, device, problem, config):
        launcher = whole(self, device, problem, config)

        def launch(*arguments):
            ran.append(config.block_rows)
            launcher(*arguments)

        return launch

    monkeypatch.setattr(type(kernel), "build", build)
    table.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for m in (3, 4, 5, 40):
            if problem.op == "moe":
                case = moe_case(0, m=m)
                close(case, run(case))
            else:
                case = GroupedCase.random(problem, m, 0, CPU)
                nvfp4.grouped_gemm(case.x, case.weight, case.scale, case.global_scale, case.offsets)
    assert ran == [16, 16, 32, 32]


def test_half_does_not_overflow_before_the_global_scale():
    """Raw sums of 1e7, far above the largest float16, and a result of 110.1."""
    inter = 4096
    w13, s13 = torch.zeros(1, 2 * inter, 8, dtype=torch.uint8), torch.full((1, 2 * inter, 1), 0x38, dtype=torch.uint8)
    w2 = torch.full((1, 16, inter // 2), 0x77, dtype=torch.uint8)  # every code 6
    s2 = torch.full((1, 16, inter // 16), 0x7E, dtype=torch.uint8)  # 448
    bias = torch.zeros(1, 2 * inter)
    bias[:, :inter], bias[:, inter:] = 100, 0.01
    out = nvfp4.moe(
        torch.zeros(2, 16).half(), w13, s13, torch.ones(1), w2, s2, torch.tensor([1e-5]),
        torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1), w13_bias=bias,
    )  # fmt: skip
    assert torch.equal(out, torch.full((2, 16), 110.1005, dtype=torch.float16))


@pytest.mark.parametrize("seed", range(4))
def test_grouped_gemm(seed):
    case = GroupedCase.random(GROUPED, 11, seed, CPU)
    out = nvfp4.grouped_gemm(case.x, case.weight, case.scale, case.global_scale, case.offsets)
    case.compare(out)
    packed = nvfp4.pack(case.weight, case.scale, case.global_scale)
    assert torch.equal(nvfp4.grouped_gemm(case.x, packed, expert_offsets=case.offsets).nan_to_num(), out.nan_to_num())


def test_grouped_gemm_of_equal_experts_is_gemm():
    case = GroupedCase.random(GROUPED, 11, 0, CPU)
    x = case.x.nan_to_num()
    weight, scale, factor = (part[:1] for part in (case.weight, case.scale, case.global_scale[:, 0]))
    got = nvfp4.grouped_gemm(x, weight, scale, factor, torch.tensor([0, 11], dtype=torch.int32))
    right = reference.gemm(x, weight[0], scale[0], factor)
    torch.testing.assert_close(got.float(), right.float(), rtol=2**-7, atol=2**-9)


def test_grouped_gemm_without_rows():
    case = GroupedCase.random(GROUPED, 11, 0, CPU)
    out = nvfp4.grouped_gemm(case.x[:0], case.weight, case.scale, case.global_scale, torch.zeros(5, dtype=torch.int32))
    assert out.shape == (0, 40) and out.dtype == torch.bfloat16


def test_warmup_binds_problems_of_experts(monkeypatch):
    p = replace(PROBLEM, top_k=3)
    assert nvfp4.warmup([p, p, GROUPED], device="cpu", ms=(1, 5)) == 2
    monkeypatch.setattr(table, "_is_capturing", lambda device: True)
    case = moe_case(0, problem=p)
    close(case, run(case))
    other = moe_case(0, problem=replace(p, activation="geglu"))
    with pytest.raises(
        nvfp4.NotWarm,
        match=r"nvfp4.warmup with Problem\(op='moe', n=48, k=64, .*activation='geglu'\) and layout='checkpoint' first",
    ):
        run(other)


def test_changed_weights_of_the_same_form_are_used():
    case = moe_case(0)
    before = run(case)
    w13 = case.weights[0].clone()
    changed = replace(case, weights=(w13, *case.weights[1:]))
    w13.copy_(w13 ^ 0x88)
    close(changed, run(changed))
    assert not torch.equal(run(changed), before)


def test_experts_of_a_checkpoint_run_with_their_dense_weights_result(tmp_path):
    tensors = {}
    for e in range(2):
        for i, (part, n, k) in enumerate((("gate_proj", 32, 64), ("up_proj", 32, 64), ("down_proj", 64, 32))):
            tensors |= modelopt(f"mlp.experts.{e}.{part}", n, k, 3 * e + i, factor=0.02 * (i + 1))
    found = load_experts(open_checkpoint(write_checkpoint(tmp_path, tensors)), "mlp.experts")
    w13 = nvfp4.pack(found.w13, found.w13_scale, found.w13_scale_2)
    w2 = nvfp4.pack(found.w2, found.w2_scale, found.w2_scale_2)
    x, ids = torch.randn(3, 64).half() / 50, torch.tensor([[0], [1], [1]])
    out = nvfp4.moe(x, w13, w2=w2, topk_ids=ids, topk_weights=torch.full((3, 1), 0.5))
    for row, (e,) in enumerate(ids.tolist()):
        gate, up, down = (
            dense(tensors, f"mlp.experts.{e}.{part}", factor=0.02 * (i + 1))
            for i, part in enumerate(("gate_proj", "up_proj", "down_proj"))
        )
        m = torch.nn.functional.silu(gate @ x[row].double()) * (up @ x[row].double())
        torch.testing.assert_close(out[row].double(), 0.5 * (down @ m), rtol=2e-3, atol=2e-3 * float((down @ m).std()))


def test_gradients_are_refused():
    case = moe_case(0)
    x = case.x.float().bfloat16().requires_grad_()
    with pytest.raises(nvfp4.InvalidInput, match="no gradient"):
        run(replace(case, x=x))
    with torch.no_grad():
        assert run(replace(case, x=x)).shape == x.shape


@pytest.mark.parametrize("name", ["x", "w13", "w13_scale_2", "w2", "w2_scale_2", "topk_ids", "topk_weights"])
@pytest.mark.parametrize("warm", [False, True])
def test_a_forgotten_tensor_is_named(warm, name):
    case = moe_case()
    names = ("x", "w13", "w13_scale", "w13_scale_2", "w2", "w2_scale", "w2_scale_2", "topk_ids", "topk_weights")
    given = dict(zip(names, (case.x, *case.weights, case.ids, case.router), strict=True))
    if warm:
        torch.ops.nvfp4.moe(*given.values())
    given[name] = None
    with pytest.raises(nvfp4.InvalidInput, match=f"{name} is missing; got None; expected a tensor"):
        torch.ops.nvfp4.moe(*given.values())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("activation", [None, ["swiglu"]])
def test_an_activation_that_is_no_name_is_refused(activation, packed):
    case = moe_case()
    weights = case.weights
    if packed:
        w13, w2 = nvfp4.pack(*weights[:3], layout="fragment-glu"), nvfp4.pack(*weights[3:], layout="fragment")
        weights = w13, None, None, w2, None, None
    with pytest.raises(nvfp4.InvalidInput, match=r"unknown activation; got .*; expected one of swiglu"):
        nvfp4.moe(case.x, *weights, case.ids, case.router, activation=activation)


def test_a_transform_that_asks_for_a_gradient_is_refused():
    case = moe_case()
    with pytest.raises(nvfp4.InvalidInput, match="nvfp4 ops have no gradient"):
        torch.func.grad(lambda x: nvfp4.moe(x, *case.weights, case.ids, case.router).sum())(case.x)
    first = [tensor[:, :32].contiguous() if tensor.ndim == 3 else tensor for tensor in case.weights[:3]]
    offsets = torch.tensor([0, 2, 4, 4, len(case.x)], dtype=torch.int32)
    with pytest.raises(nvfp4.InvalidInput, match="nvfp4 ops have no gradient"):
        torch.func.grad(lambda x: nvfp4.grouped_gemm(x, *first, offsets).sum())(case.x)
    for product in (
        lambda x: nvfp4.moe(x, *case.weights, case.ids, case.router),
        lambda x: nvfp4.grouped_gemm(x, *first, offsets),
    ):
        with pytest.raises(nvfp4.InvalidInput, match="no gradient; got x with a tangent"):
            torch.func.jvp(product, (case.x,), (case.x,))
