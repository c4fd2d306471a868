"""The conformance checks of experts fail kernels that are wrong in the ways that have been seen."""

from dataclasses import replace

import pytest
import torch
from nvfp4.kernels import reference
from nvfp4.kernels.moe.cpu_grouped import CpuGrouped
from nvfp4.kernels.moe.cpu_moe import CpuMoe
from nvfp4.kernels.problem import Device, Problem
from nvfp4.testing import assert_moe_close, conformance
from nvfp4.testing.close import moe_tolerance
from nvfp4.testing.experts import MoeCase, experts_case, poisoned
from nvfp4.testing.fake_experts import FragmentGrouped, FragmentMoe

CPU = Device(kind="cpu", name="test", units=2, l2_bytes=32 << 20)
MOE = Problem(op="moe", n=48, k=64, experts=4, top_k=2, activation="swiglu")
GROUPED = Problem(op="grouped_gemm", n=40, k=64, experts=4)
SEEDS = range(32)


@pytest.fixture(autouse=True)
def one_thread():
    """Cases are tiny: on busy cores the barriers between threads cost more than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Broken:
    """A right kernel whose launcher gets changed arguments, and whose result is changed."""

    deterministic = False  # one run is enough

    def __init__(self, kernel, change=lambda *a: a, after=lambda out: None):
        self.kernel, self.change, self.after = kernel, change, after

    def __getattr__(self, name):
        return getattr(self.kernel, name)

    def build(self, device, problem, config):
        launcher = self.kernel.build(device, problem, config)

        def launch(*arguments):
            launcher(*self.change(*arguments[:-1]), arguments[-1])
            self.after(arguments[-1])

        return launch


def check(kernel, problem, seed):
    conformance.check(kernel, CPU, torch.device("cpu"), problem, kernel.default_config(CPU, problem, 9), 9, seed=seed)


def fails_with_some_seed(kernel, problem):
    for seed in reversed(SEEDS):
        try:
            check(kernel, problem, seed)
        except AssertionError:
            return
    raise RuntimeError("no seed notices")


def swap_halves(a):
    half = a.w13.shape[1] // 2
    return replace(a, w13=a.w13.roll(half, 1), w13_scale=a.w13_scale.roll(half, 1))


MOE_CHANGES = {
    "drops pre_quant_scale": lambda a: (replace(a, pre_quant_scale=None),),
    "drops w2_pre_quant_scale": lambda a: (replace(a, w2_pre_quant_scale=None),),
    "swaps gate and up": lambda a: (swap_halves(a),),
    "drops up's global scale": lambda a: (replace(a, w13_scale_2=a.w13_scale_2[:, :1].contiguous()),),
    "drops the first bias": lambda a: (replace(a, w13_bias=None),),
    "drops the second bias": lambda a: (replace(a, w2_bias=None),),
    "drops the limit": lambda a: (replace(a, constants=(float("inf"), *a.constants[1:])),),
    "drops router weights": lambda a: (replace(a, topk_weights=torch.ones_like(a.topk_weights)),),
    "ignores expert_map": lambda a: (replace(a, expert_map=None),),
    "takes ids beyond the last as the last": lambda a: (replace(a, topk_ids=a.topk_ids.clamp_max(3)),),
    "takes -1 as the first": lambda a: (replace(a, topk_ids=a.topk_ids.clamp_min(0)),),
    "reads one expert's second scale for all": lambda a: (
        replace(a, w2_scale_2=a.w2_scale_2[:1].expand_as(a.w2_scale_2).contiguous()),
    ),
    "flushes subnormal block scales": lambda a: (
        replace(a, w2_scale=torch.where((a.w2_scale & 0x7F) < 0x08, 0, a.w2_scale)),
    ),
    "hides NaN of x": lambda a: (replace(a, x=a.x.nan_to_num()),),
}
# Rows of subnormal scales are lost beside others in a sum over rows of w13; those of w2 have results of their own.


@pytest.mark.parametrize("change", MOE_CHANGES.values(), ids=MOE_CHANGES)
def test_wrong_moe_is_seen(change):
    fails_with_some_seed(Broken(CpuMoe(), change), MOE)


GROUPED_CHANGES = {
    "drops the second scale": lambda x, w, s, g, o: (x, w, s, g[:, :1].contiguous(), o),
    "moves a boundary": lambda x, w, s, g, o: (x, w, s, g, (o + (o > 0) * (o < o[-1]).int())),
    "gives rows without an expert to the last": lambda x, w, s, g, o: (
        x,
        w,
        s,
        g,
        torch.cat([o[:-1], o.new_tensor([x.shape[0]])]),
    ),
    "loses the sign of block scales": lambda x, w, s, g, o: (x, w, s & 0x7F, g, o),
    "hides NaN of x": lambda x, w, s, g, o: (x.nan_to_num(), w, s, g, o),
}


@pytest.mark.parametrize("change", GROUPED_CHANGES.values(), ids=GROUPED_CHANGES)
def test_wrong_grouped_gemm_is_seen(change):
    fails_with_some_seed(Broken(CpuGrouped(), change), GROUPED)


@pytest.mark.parametrize(("kernel", "problem"), [(CpuMoe(), MOE), (CpuGrouped(), GROUPED)], ids=["moe", "grouped"])
def test_the_kernels_themselves_pass_and_unwritten_rows_are_seen(kernel, problem):
    for seed in SEEDS:
        check(Broken(kernel), problem, seed)
    fails_with_some_seed(Broken(kernel, after=lambda out: out[-1].fill_(float("nan"))), problem)


class Rounds(CpuMoe):
    """Rounds something to x's dtype that stays in float32."""

    def __init__(self, what):
        self.what = what

    def build(self, device, problem, config):
        launcher = super().build(device, problem, config)
        what = self.what

        class Rounding(type(launcher)):
            def _second(self, a, ends, pairs, between, results):
                super()._second(a, ends, pairs, between, results)
                results.copy_(results.to(a.x.dtype))

        launcher.__class__ = Rounding if what == "an expert's result" else type(launcher)
        return launcher


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_further_rounding_fails(dtype):
    problem = Problem(op="moe", n=64, k=64, experts=8, top_k=4, activation="swiglu", dtype=dtype)
    case = MoeCase.random(problem, 64, 1, torch.device("cpu"), nan=False)
    case = replace(case, ids=case.ids.clamp(0, 7))
    ref = case.reference()

    def run(kernel):
        out = torch.empty(case.shape, dtype=case.x.dtype)
        case.launch(kernel.build(CPU, problem, kernel.default_config(CPU, problem, 64)), out)
        assert_moe_close(out, ref, hidden=64, inter=64, top_k=4, dtype=case.x.dtype)

    run(Rounds("nothing"))
    with pytest.raises(AssertionError, match="relative error"):
        run(Rounds("an expert's result"))


@pytest.mark.parametrize("seed", [107, 247])
def test_one_token_whose_terms_cancel_passes(seed):
    """A value between the products is rounded the other way, which shows in elements that are near zero."""
    problem = Problem(op="moe", n=352, k=1040, experts=3, top_k=1, activation="swigluoai", dtype="float16")
    case, kernel = MoeCase.random(problem, 1, seed, torch.device("cpu")), CpuMoe()
    out = torch.empty(case.shape, dtype=torch.float16)
    case.launch(kernel.build(CPU, problem, kernel.default_config(CPU, problem, 1)), out)
    case.compare(out)
    out[0, 7] += 0.02 * out.norm() / out.numel() ** 0.5  # one element is off by a fiftieth of what is usual
    with pytest.raises(AssertionError):
        case.compare(out)


def test_values_beside_a_tie_may_be_rounded_the_other_way(monkeypatch):
    """In few values, two equal slots a token: no more independent than one."""
    problem = Problem(op="moe", n=144, k=16, experts=1, top_k=2, activation="relu2", dtype="float16")
    case = MoeCase.random(problem, 7, 59, torch.device("cpu"))
    ref, whole, near = case.reference(), reference.round_once, 2 * 2**-23 * (16**0.5 + 16 / 32 + 4)
    flips = []

    def other_way(exact, dtype):
        low, right, high = (whole(exact * factor, dtype) for factor in (1 - near, 1, 1 + near))
        flips.append(int((low != high).sum()))
        return torch.where(right == low, high, low)

    monkeypatch.setattr(reference, "round_once", other_way)
    got = case.reference()
    monkeypatch.undo()
    assert 0 < sum(flips) < 20
    case.compare(whole(got, torch.float16), (ref,))
    with pytest.raises(AssertionError, match="relative error"):
        case.compare(whole(got * (1 + 2**-11), torch.float16), (ref,))


def test_tokens_without_an_expert_leave_the_bound_of_the_others():
    sizes = {"hidden": 64, "inter": 48, "top_k": 2, "dtype": torch.float16}
    ref = torch.randn(1, 64, dtype=torch.float64)
    idle = torch.cat([torch.zeros(79, 64, dtype=torch.float64), ref])
    assert moe_tolerance(idle, **sizes) == pytest.approx(moe_tolerance(ref, **sizes))


FRAGMENTS = [(FragmentMoe(), MOE), (FragmentGrouped(), GROUPED)]


@pytest.mark.parametrize(("kernel", "problem"), FRAGMENTS, ids=["moe", "grouped"])
def test_kernels_of_a_fragment_layout_get_its_blobs(kernel, problem):
    for index, one in enumerate([problem, *conformance.problems(problem.op)]):
        config = kernel.default_config(CPU, one, 9)
        conformance.check(kernel, CPU, torch.device("cpu"), one, config, 9, seed=7 * index)
    fails_with_some_seed(Broken(kernel, after=lambda out: out[-1].fill_(float("nan"))), problem)


@pytest.mark.parametrize(
    ("kernel", "problem", "change"),
    [
        (FragmentMoe(), replace(MOE, n=64), lambda a: (replace(a, w13=a.w13.flip(1)),)),
        (FragmentMoe(), MOE, lambda a: (replace(a, w2=a.w2.roll(1, 0)),)),
        (FragmentMoe(), MOE, lambda a: (replace(a, w13_bias=None),)),
        (FragmentGrouped(), GROUPED, lambda x, w, s, g, o: (x, w.roll(1, 0), s, g, o)),
        (FragmentGrouped(), GROUPED, lambda x, w, s, g, o: (x, w, s, g[:, :1].contiguous(), o)),
    ],
    ids=["rows of w13", "experts of w2", "bias", "experts", "second scale"],
)
def test_what_is_wrong_with_blobs_is_seen(kernel, problem, change):
    fails_with_some_seed(Broken(kernel, change), problem)


@pytest.mark.parametrize(("kernel", "problem"), FRAGMENTS, ids=["moe", "grouped"])
def test_changed_blobs_are_seen(kernel, problem):
    def spoil(*given):
        blob = given[0].w2 if problem.op == "moe" else given[1]
        blob.view(-1)[-1] ^= 1
        return given

    with pytest.raises(AssertionError, match=r"an input \(4, .*2304\) torch.uint8 was changed"):
        check(Broken(kernel, spoil), problem, 0)


def test_poison_reaches_every_allocation():
    with poisoned():
        assert torch.empty(3).isnan().all() and torch.zeros(3).new_empty(3).isnan().all()
        assert (torch.empty(3, dtype=torch.int32) == 2**31 - 1).all()
        assert torch.empty_like(torch.zeros(3)).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("mode", ["default", "warn", "error"])
def test_poison_leaves_the_settings_of_its_process_and_does_not_import_a_compiler(monkeypatch, mode):
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *args, **more: pytest.fail("imports inductor"))
    torch.set_deterministic_debug_mode(mode)
    try:
        before = torch.get_deterministic_debug_mode()
        with poisoned():
            assert torch.get_deterministic_debug_mode() == 1
        assert torch.get_deterministic_debug_mode() == before
    finally:
        torch.set_deterministic_debug_mode("default")


@pytest.mark.parametrize(("kernel", "problem"), [(CpuMoe(), MOE), (CpuGrouped(), GROUPED)], ids=["moe", "grouped"])
def test_poison_changes_nothing(kernel, problem):
    case = experts_case(problem, 9, 5, torch.device("cpu"))
    launcher = kernel.build(CPU, problem, kernel.default_config(CPU, problem, 9))
    clean, dirty = torch.zeros(case.shape).bfloat16(), torch.zeros(case.shape).bfloat16()
    launcher(*arguments_of(case), clean)
    case.launch(launcher, dirty)
    assert torch.equal(clean.view(torch.int16), dirty.view(torch.int16))


def arguments_of(case):
    return (case.arguments,) if isinstance(case, MoeCase) else tuple(case.tensors())
