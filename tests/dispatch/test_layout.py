"""The layout that is taken when none is asked for: the plan's, else what suits the device, and only what runs here."""

import dataclasses
import warnings

import nvfp4
import pytest
import torch
from nvfp4.cache import lookup
from nvfp4.cache.records import Environment, Interval, LayoutPlan, Plan
from nvfp4.cache.store import Store
from nvfp4.dispatch import layout as layout_module
from nvfp4.dispatch import table
from nvfp4.dispatch.layout import choose_layout
from nvfp4.dispatch.offline import TYPICAL
from nvfp4.kernels.problem import DTYPES, Device, Problem
from nvfp4.kernels.weights.fragment import fragment_id

PROBLEM = Problem(n=32, k=64)
GPU = Device(kind="cuda", name="Fake 9000", capability=(9, 0), units=8)
FRAGMENT = "fragment1-bf16"


def plan_of(marked, *, device=GPU, **us_by_layout):
    """A plan that runs kernel "of <layout>" in each of the layouts, with that mean."""
    layouts = tuple(
        LayoutPlan(
            layout=name,
            intervals=(Interval(m_lo=1, m_hi=None, kernel=f"of {name}", config='{"tile":16}', expected_us=1.0),),
            traffic_us=us,
        )
        for name, us in ((name.replace("_", "-"), us) for name, us in us_by_layout.items())
    )
    return Plan(
        device=device,
        problem=PROBLEM,
        layout=marked,
        layouts=layouts,
        traffic="test",
        environment=Environment(nvfp4="0", torch="0"),
    )


@pytest.fixture
def kernels(install, fake):
    """kernels(layout, …, **options): one kernel for each of these layouts is all that is installed."""

    def kernels(*layouts, **options):
        made = {name: fake(f"of {name}", layout=name, **options) for name in layouts}
        install(*made.values())
        return made

    return kernels


@pytest.fixture
def on_gpu(monkeypatch, no_plan):
    """The CPU passes for a GPU when a layout is chosen; nothing is tuned."""
    monkeypatch.setattr(layout_module, "describe", lambda device: GPU)


@pytest.mark.parametrize("marked", ["checkpoint", FRAGMENT])
def test_the_plan_decides(kernels, marked):
    kernels("checkpoint", FRAGMENT)
    plan = plan_of(marked, checkpoint=2.0, fragment1_bf16=1.0)
    assert choose_layout(GPU, PROBLEM, plan) == marked


def test_without_a_plan_a_gpu_gets_the_fragment_layout_of_the_dtype_and_a_cpu_the_checkpoint_s(kernels):
    kernels("checkpoint", FRAGMENT, "fragment1-fp16", "fragment1-nib")
    blackwell = dataclasses.replace(GPU, capability=(12, 0))
    for dtype, name in zip(DTYPES, (FRAGMENT, "fragment1-fp16"), strict=True):
        problem = Problem(n=32, k=64, dtype=dtype)
        assert choose_layout(GPU, problem, None) == name
        assert choose_layout(blackwell, problem, None) == "fragment1-nib"
        assert choose_layout(Device(kind="cpu", name="a CPU"), problem, None) == "checkpoint"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", [card for cards in TYPICAL.values() for card in cards], ids=lambda card: card.name)
def test_untuned_gpus_get_the_fragment_layout_with_the_kernels_that_there_are(device, dtype):
    for n, k in ((4096, 4096), (16, 16), (80, 48), (57344, 8192)):
        layout = choose_layout(device, Problem(n=n, k=k, dtype=dtype), None)
        assert layout == fragment_id(device.capability, dtype)


def test_a_gpu_without_kernels_that_read_fragments_gets_the_checkpoint_layout(kernels):
    kernels("checkpoint")
    assert choose_layout(GPU, PROBLEM, None) == "checkpoint"
    kernels("checkpoint", FRAGMENT, m_max=64)
    assert choose_layout(GPU, PROBLEM, None) == "checkpoint"
    kernels("checkpoint", FRAGMENT, refuses="needs a newer card")
    assert choose_layout(GPU, PROBLEM, None) == "checkpoint"


EXPERTS = [
    Problem(op="grouped_gemm", n=32, k=64, experts=4),
    Problem(op="moe", n=32, k=64, experts=4, top_k=2, activation="swiglu"),
]


@pytest.mark.parametrize("problem", EXPERTS, ids=lambda problem: problem.op)
def test_experts_follow_the_same_rule_with_kernels_of_their_own(kernels, problem):
    made = kernels("checkpoint", FRAGMENT)
    assert choose_layout(GPU, problem, None) == "checkpoint"  # kernels of gemm do not count
    for kernel in made.values():
        kernel.op = problem.op
    layout_module._choose.cache_clear()
    assert choose_layout(GPU, problem, None) == FRAGMENT
    assert choose_layout(Device(kind="cpu", name="a CPU"), problem, None) == "checkpoint"
    made[FRAGMENT].m_max = 64
    layout_module._choose.cache_clear()
    assert choose_layout(GPU, problem, None) == "checkpoint"


def test_a_planned_kernel_that_is_gone_leaves_the_layout_to_others_that_read_it(install, fake, case, monkeypatch):
    install(fake("of checkpoint"), other := fake("other", layout=FRAGMENT))
    here = nvfp4.kernels.device.describe("cpu")
    plan = plan_of(FRAGMENT, device=here, checkpoint=2.0, fragment1_bf16=1.0)
    monkeypatch.setattr(lookup, "find_plan", lambda device, problem: plan)
    c = case()
    packed = nvfp4.pack(c.weight, c.scale, c.gs)
    assert packed.layout == FRAGMENT
    with pytest.warns(RuntimeWarning, match="kernel of fragment1-bf16 is not installed.*nvfp4 tune"):
        assert torch.equal(nvfp4.gemm(c.x, packed), c.ref)
    assert other.launches


def test_where_nothing_reads_the_marked_layout_the_plan_s_next_is_taken(kernels):
    plan = plan_of(FRAGMENT, fragment1_bf16=1.0, fragment1_nib=3.0, checkpoint=2.0)
    kernels("checkpoint", "fragment1-nib")
    assert choose_layout(GPU, PROBLEM, plan) == "checkpoint"
    kernels("fragment1-nib")
    assert choose_layout(GPU, PROBLEM, plan) == "fragment1-nib"


def test_a_layout_that_cannot_be_marked_comes_last(kernels):
    plan = plan_of("gone", fragment1_bf16=None, checkpoint=2.0)
    kernels("checkpoint", FRAGMENT)
    assert choose_layout(GPU, PROBLEM, plan) == "checkpoint"


def test_where_nothing_reads_any_layout_of_the_plan_it_is_as_without_one(kernels):
    kernels("checkpoint", FRAGMENT)
    assert choose_layout(GPU, PROBLEM, plan_of("gone", gone=1.0)) == FRAGMENT
    kernels()
    assert choose_layout(GPU, PROBLEM, plan_of("gone", gone=1.0)) == "checkpoint"


def test_a_plan_that_marks_what_x_cannot_meet_is_not_followed(kernels):
    kernels("checkpoint", FRAGMENT, "fragment1-fp16")
    plan = plan_of("fragment1-fp16", fragment1_fp16=1.0)
    assert choose_layout(GPU, PROBLEM, plan) == FRAGMENT


@pytest.mark.parametrize("layout", ["checkpoint", FRAGMENT])
def test_plans_of_this_problem_on_this_device_count_and_no_others(kernels, case, monkeypatch, tmp_path, layout):
    kernels("checkpoint", FRAGMENT, "fragment1-fp16")
    monkeypatch.setattr(layout_module, "describe", lambda device: GPU)
    monkeypatch.setenv("NVFP4_DB", str(tmp_path / "t.db"))
    elsewhere = dataclasses.replace(GPU, units=9)
    with Store.open(tmp_path / "t.db") as store:
        store.save_plan(plan_of("checkpoint", device=elsewhere, checkpoint=1.0))
    c, d = case(), case(n=48)
    assert nvfp4.pack(c.weight, c.scale, c.gs).layout == FRAGMENT
    with Store.open(tmp_path / "t.db") as store:
        store.save_plan(plan_of(layout, checkpoint=1.0, fragment1_bf16=1.0))
    assert nvfp4.pack(c.weight, c.scale, c.gs).layout == layout
    assert nvfp4.pack(c.weight, c.scale, c.gs, layout="checkpoint").layout == "checkpoint"
    assert nvfp4.pack(c.weight, c.scale, c.gs, dtype=torch.float16).layout == "fragment1-fp16"
    assert nvfp4.pack(d.weight, d.scale, d.gs).layout == FRAGMENT


def test_the_database_is_asked_again_when_it_has_changed(kernels, case, monkeypatch, tmp_path):
    kernels("checkpoint", FRAGMENT)
    monkeypatch.setattr(layout_module, "describe", lambda device: GPU)
    asked, find_plan = [], lookup.find_plan
    monkeypatch.setattr(lookup, "find_plan", lambda *key: asked.append(key) or find_plan(*key))
    c = case()

    def layouts():
        return [nvfp4.pack(c.weight, c.scale, c.gs).layout for _ in range(3)]

    monkeypatch.setenv("NVFP4_DB", str(tmp_path / "a.db"))
    assert layouts() == [FRAGMENT] * 3 and len(asked) == 1
    with Store.open(tmp_path / "a.db") as store:
        store.save_plan(plan_of("checkpoint", checkpoint=1.0))
    assert layouts() == ["checkpoint"] * 3 and len(asked) == 2
    monkeypatch.setenv("NVFP4_DB", str(tmp_path / "b.db"))
    assert layouts() == [FRAGMENT] * 3 and len(asked) == 3
    table.clear()
    assert layouts() == [FRAGMENT] * 3 and len(asked) == 4


@pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning")
def test_a_checkpoint_s_own_tensors_still_run_from_their_layout(kernels, on_gpu, case):
    made = kernels("checkpoint", FRAGMENT)
    c = case()
    packed = nvfp4.pack(c.weight, c.scale, c.gs)
    assert packed.layout == FRAGMENT and packed.data.data_ptr() != c.weight.data_ptr()
    assert torch.equal(nvfp4.gemm(c.x, packed), c.ref)
    assert torch.equal(torch.ops.nvfp4.gemm(c.x, c.weight, c.scale, c.gs), c.ref)
    assert {name: len(kernel.launches) for name, kernel in made.items()} == {"checkpoint": 1, FRAGMENT: 1}
    with pytest.raises(nvfp4.InvalidInput, match=r"is not for this x; got x in torch\.float16"):
        nvfp4.gemm(c.x.half(), packed)
    both = nvfp4.pack(c.weight, c.scale, c.gs, layout="checkpoint")
    assert nvfp4.gemm(c.x.half(), both).dtype == torch.float16


@pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning")
def test_warmup_of_a_problem_builds_for_the_layout_that_pack_takes(kernels, on_gpu):
    made = kernels("checkpoint", FRAGMENT)
    nvfp4.warmup(PROBLEM, device="cpu")
    assert made[FRAGMENT].launches and not made["checkpoint"].launches


@pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning")
def test_layers_follow_the_same_rule(kernels, on_gpu):
    kernels("checkpoint", FRAGMENT, "fragment1-fp16")
    dense = torch.nn.Linear(64, 32)
    assert nvfp4.nn.Linear.from_linear(dense).packed.layout == FRAGMENT
    assert nvfp4.nn.Linear.from_linear(dense.half()).packed.layout == "fragment1-fp16"
    assert nvfp4.nn.Linear.from_linear(dense, layout="checkpoint").packed.layout == "checkpoint"
    model = nvfp4.convert_(torch.nn.Sequential(torch.nn.Linear(64, 32)))
    assert model[0].packed.layout == FRAGMENT and model[0].weight is None
    assert set(model.state_dict()) == {"0.weight", "0.weight_scale", "0.weight_scale_2", "0.bias"}


def test_a_choice_is_remembered_until_the_kernels_change(kernels, fake, install):
    made = kernels("checkpoint", FRAGMENT)
    asked = []
    made[FRAGMENT].default_tile = lambda m: asked.append(m) or 16
    assert choose_layout(GPU, PROBLEM, None) == FRAGMENT and asked
    count = len(asked)
    assert choose_layout(GPU, PROBLEM, None) == FRAGMENT and len(asked) == count
    install(made["checkpoint"])
    assert choose_layout(GPU, PROBLEM, None) == "checkpoint"


def test_devices_without_kernels_are_packed_as_they_are():
    weight = torch.zeros(32, 32, dtype=torch.uint8, device="meta")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert layout_module.planned_layout(weight.device, PROBLEM) == "checkpoint"
