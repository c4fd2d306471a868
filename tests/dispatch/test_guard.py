"""The private functions of torch and what stands in for them."""

import importlib.util
import sys

import nvfp4
import pytest
import torch
from nvfp4.dispatch import call, guard

pytestmark = pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning")


def test_a_torch_without_them_only_makes_calls_slower(exact, case, monkeypatch):
    monkeypatch.setattr(guard, "_guards", None)
    monkeypatch.setattr(call, "reinterpret", torch.as_strided)
    c = case(m=6)
    for _ in range(3):
        for x in (c.x, c.x.view(2, 3, c.k)):
            y = nvfp4.gemm(x, c.weight, c.scale.view(torch.float8_e4m3fn), c.gs.view(()))
            assert y.shape == (*x.shape[:-1], c.n) and torch.equal(y.view(6, c.n), c.ref)
    assert guard.make_guard(c.x, c.weight) is None


def test_reinterpret_falls_back_to_as_strided(monkeypatch):
    monkeypatch.delattr(torch._C._dynamo, "guards")
    spec = importlib.util.spec_from_file_location("guard_alone", guard.__file__)
    alone = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(alone)
    assert "guard_alone" not in sys.modules
    assert alone.reinterpret is torch.as_strided
    empty = alone.make_empty(torch.device("cpu"))
    assert empty((2, 3), (3, 1), torch.float16).shape == (2, 3)


@pytest.mark.parametrize("make", [guard.reinterpret, torch.as_strided])
def test_reinterpret_is_an_alias(make):
    whole = torch.arange(24.0)
    part = whole[6:].view(3, 6)
    alias = make(part, (2, 9), (9, 1))
    assert alias.tolist() == part.reshape(2, 9).tolist()
    whole[6] = -1
    assert alias[0, 0] == -1


@pytest.mark.skipif(not hasattr(guard._guards, "TensorGuards"), reason="this torch has no TensorGuards")
def test_guard_reads_every_property_but_the_number_of_rows():
    rows, square = torch.zeros(4, 16), torch.zeros(8, 8)
    like = guard.make_guard(rows, square)
    for m in (0, 1, 4, 100):
        assert like(torch.zeros(m, 16), torch.ones(8, 8))
    for other in (
        square.half(),
        square.to("meta"),
        square.t(),
        square[:, ::2],
        square[:4],
        square[None],
        square.clone().requires_grad_(),
        torch.nn.Parameter(square, requires_grad=False),
        torch._neg_view(square),
        rows,
        None,
    ):
        assert not like(rows, other)
    for other in (torch.zeros(4, 8), torch.zeros(4, 32)[:, :16], torch.zeros(16, 4).t(), torch.zeros(1, 4, 16)):
        assert not like(other, square)
    with torch.inference_mode():
        assert not like(rows, square)


def test_empty_on_one_of_several_devices():
    taken = []

    def allocator(name):
        return lambda size, stride, dtype: taken.append((name, size, stride, dtype))

    current = [0]
    empty = guard._on_current(allocator("private"), allocator("public"), 1, lambda: current[0])
    empty((2, 3), (3, 1), torch.float16)
    current[0] = 1
    empty((4, 3), (3, 1), torch.float16)
    assert taken == [("public", (2, 3), (3, 1), torch.float16), ("private", (4, 3), (3, 1), torch.float16)]


@pytest.mark.parametrize("inference", [False, True])
def test_empty_is_an_ordinary_tensor(inference):
    with torch.inference_mode(inference):
        y = guard.make_empty(torch.device("cpu"))((2, 3), (3, 1), torch.bfloat16)
    assert (y.shape, y.stride(), y.dtype, y.device.type) == ((2, 3), (3, 1), torch.bfloat16, "cpu")
    assert y.is_inference() == inference and not y.requires_grad and y.data_ptr() % 16 == 0
