"""Calls after the first: which are recognised, and what is kept for it."""

import gc
import threading
import weakref

import nvfp4
import pytest
import torch
from nvfp4.dispatch import call, guard, recent, table
from nvfp4.kernels import reference
from nvfp4.kernels.problem import Problem

op = torch.ops.nvfp4.gemm

pytestmark = pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning")

needs_guards = pytest.mark.skipif(
    not hasattr(guard._guards, "TensorGuards"), reason="this torch has no torch._C._dynamo.guards.TensorGuards"
)


def known(c, **options):
    """Call until the call is recognised."""
    for _ in range(2):
        y = nvfp4.gemm(c.x, c.weight, c.scale, c.gs, **options)
    return y


@needs_guards
def test_only_the_first_call_is_checked_in_full(exact, case, checked):
    c = case(m=64)
    for m in (64, 1, 2, 33):
        assert torch.equal(nvfp4.gemm(c.x[:m], c.weight, c.scale, c.gs), c.ref[:m])
        assert torch.equal(op(c.x[:m], c.weight, c.scale, c.gs), c.ref[:m])
    assert checked == [(64, c.k)]


@needs_guards
def test_new_tensor_objects_on_the_same_memory_are_recognised(exact, case, checked):
    c = case()
    for _ in range(5):
        y = nvfp4.gemm(c.x.data, c.weight.data, c.scale.data, c.gs.data)
        assert torch.equal(y, c.ref)
    assert len(checked) == 1


@needs_guards
def test_other_weights_like_the_first_share_its_guard(exact, case, checked):
    c = case()
    for weight in [c.weight.clone() for _ in range(5)]:
        for _ in range(2):
            nvfp4.gemm(c.x, weight, c.scale, c.gs)
    assert len(checked) == 5
    assert [len(guards) for _, guards in call._calls.values()] == [1]


@needs_guards
def test_two_kinds_of_scales_at_one_address(exact, case, checked):
    c = case()
    packed = nvfp4.pack(c.weight, c.scale, c.gs)
    for _ in range(3):
        assert torch.equal(nvfp4.gemm(c.x, packed), c.ref)
        assert torch.equal(op(c.x, c.weight, c.scale.view(torch.float8_e4m3fn), c.gs.view(())), c.ref)
    assert len(checked) == 2
    seen = exact.arguments[0]
    assert seen[2].dtype == torch.uint8 and seen[3].shape == (1,)


@needs_guards
def test_inference_mode_has_a_guard_of_its_own(exact, case, checked):
    c = case()
    for _ in range(3):
        assert not nvfp4.gemm(c.x, c.weight, c.scale, c.gs).is_inference()
        with torch.no_grad():
            assert torch.equal(nvfp4.gemm(c.x, c.weight, c.scale, c.gs), c.ref)
        with torch.inference_mode():
            y = nvfp4.gemm(c.x, c.weight, c.scale, c.gs)
            assert y.is_inference() and torch.equal(y, c.ref)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(nvfp4.gemm(c.x, c.weight, c.scale, c.gs), c.ref)
    assert len(checked) == 2


@needs_guards
@pytest.mark.parametrize("lead", [(1,), (5,), (2, 3), (1, 1), (1, 6), (6, 1), (2, 1, 3)])
def test_leading_dimensions(exact, case, checked, lead):
    c = case(m=6)
    known(c)
    count = torch.Size(lead).numel()
    x = c.x[:count].reshape(*lead, c.k)
    y = nvfp4.gemm(x, c.weight, c.scale, c.gs)
    assert y.shape == (*lead, c.n) and y.is_contiguous()
    assert torch.equal(y.reshape(count, c.n), c.ref[:count])
    assert len(checked) == 1
    vector = nvfp4.gemm(c.x[0], c.weight, c.scale, c.gs)
    assert vector.shape == (c.n,) and torch.equal(vector, c.ref[0]) and len(checked) == 1


@needs_guards
def test_optional_tensors_and_layouts_are_recognised(exact, install, fake, case, mirrored, checked):
    install(exact, fake("mirror", layout="mirrored"))
    c = case()
    bias, pqs, rows = torch.randn(c.n), (torch.rand(c.k) + 0.5).bfloat16(), torch.rand(c.n)
    packed = nvfp4.pack(c.weight, c.scale, c.gs, layout="mirrored")
    for _ in range(3):
        y = nvfp4.gemm(c.x, c.weight, c.scale, rows, bias=bias, pre_quant_scale=pqs)
        assert torch.equal(y, reference.gemm(c.x, c.weight, c.scale, rows, bias, pqs))
        assert torch.equal(nvfp4.gemm(c.x, packed), c.ref)
    assert len(checked) == 2


def test_new_plans_take_effect(install, fake, set_plan, case):
    a = fake("a")
    install(a)
    c = case()
    set_plan(Problem(n=c.n, k=c.k), checkpoint=[(1, None, "a", 16)])
    known(c)
    set_plan(Problem(n=c.n, k=c.k), checkpoint=[(1, 2, "a", 32), (3, None, "a", 64)])
    known(c)
    nvfp4.gemm(c.x[:2], c.weight, c.scale, c.gs)
    assert [tile for _, tile, _ in a.launches] == [16, 16, 64, 64, 32]


def test_no_tensor_is_kept_alive(exact, case):
    c = case()
    tensors = [c.x, c.weight, c.scale.view(torch.float8_e4m3fn), c.gs.view(()), torch.randn(c.n)]
    storages = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
    alive = [weakref.ref(tensor) for tensor in tensors]
    for _ in range(3):
        op(*tensors[:4], bias=tensors[4])
    exact.arguments = []
    del tensors, c
    gc.collect()
    assert [ref() for ref in alive] == [None] * 5
    assert [ref() for ref in storages] == [None] * 5


def test_what_is_known_stays_bounded(exact, case, monkeypatch):
    monkeypatch.setattr(recent, "ADDRESSES_MAX", 4)
    c = case()
    weights = [c.weight.clone() for _ in range(20)]
    for weight in weights:
        assert torch.equal(nvfp4.gemm(c.x, weight, c.scale, c.gs), c.ref)
        assert len(recent.recent) <= 4
    for m in range(1, 200):
        nvfp4.gemm(c.x[:1].expand(m, c.k), c.weight, c.scale, c.gs)
    for options in ({}, {"bias": torch.zeros(c.n)}, {"bias": torch.zeros(c.n).bfloat16()}, {"out_features": c.n}):
        for pqs in (None, torch.ones(c.k).bfloat16()):
            nvfp4.gemm(c.x, c.weight, c.scale, c.gs, pre_quant_scale=pqs, **options)
    assert len(recent.recent[c.weight.data_ptr()]) <= recent.AT_ADDRESS_MAX
    table.clear()
    assert not recent.recent and not call._calls


@needs_guards
def test_guards_of_a_call_stay_bounded(exact, case):
    class Subclass(torch.Tensor):
        pass

    c = case()
    kinds = [lambda t: t, lambda t: torch.nn.Parameter(t, requires_grad=False), lambda t: t.as_subclass(Subclass)]
    for a in kinds:
        for b in kinds:
            for d in kinds:
                tensors = (a(c.weight), b(c.scale), d(c.gs))
                for _ in range(2):
                    assert torch.equal(call.gemm(c.x, *tensors), c.ref)
    ((_, guards),) = call._calls.values()
    assert len(guards) == recent.GUARDS_MAX


def test_threads_with_weights_that_come_and_go(exact, case):
    cases = [case(m=m, n=n) for m, n in ((1, 32), (3, 48), (5, 64), (2, 32))]
    errors = []

    def work(c):
        try:
            for i in range(60):
                weight, scale = (c.weight.clone(), c.scale.clone()) if i % 3 else (c.weight, c.scale)
                scale = scale.view(torch.float8_e4m3fn) if i % 2 else scale
                with torch.inference_mode(i % 5 == 0):
                    assert torch.equal(nvfp4.gemm(c.x, weight, scale, c.gs), c.ref)
                if i % 20 == 7:
                    table.clear()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(c,)) for c in cases for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
