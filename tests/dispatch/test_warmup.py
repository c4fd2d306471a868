"""After warmup nothing is built any more."""

import nvfp4
import pytest
import torch
from nvfp4 import Problem
from nvfp4.dispatch import table

pytestmark = pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning")


def test_weights_and_problems(exact, case, monkeypatch):
    c, d = case(), case(n=48)
    packed = [nvfp4.pack(w.weight, w.scale, w.gs) for w in (c, d, c)]
    assert nvfp4.warmup({str(i): w for i, w in enumerate(packed)}) == 2
    assert nvfp4.warmup(Problem(n=32, k=64, dtype="float16"), device="cpu") == 1
    built = len(exact.builds)
    monkeypatch.setattr(table, "_is_capturing", lambda device: True)
    for m in (1, 77):
        for w, weight in ((c, packed[0]), (d, packed[1])):
            assert nvfp4.gemm(w.x[:1].expand(m, 64), weight).shape == (m, w.n)
    assert nvfp4.gemm(case(dtype=torch.float16).x, packed[0]).dtype == torch.float16
    assert len(exact.builds) == built


def test_a_single_weight_its_dtype_and_ms(exact, case):
    c = case()
    packed = nvfp4.pack(c.weight, c.scale, c.gs)
    assert nvfp4.warmup(packed, dtype=torch.float16, ms=(2, 5)) == 1
    assert [m for *_, m in exact.launches] == [2, 5]
    assert exact.arguments[0][0].dtype == torch.float16


def test_a_problem_is_warmed_in_the_marked_layout(install, fake, set_plan, mirrored):
    a, m = fake("a"), fake("m", layout="mirrored")
    install(a, m)
    set_plan(Problem(n=32, k=64), "mirrored", checkpoint=[(1, None, "a", 16)], mirrored=[(1, None, "m", 16)])
    nvfp4.warmup([Problem(n=32, k=64)], device="cpu")
    assert a.builds == [] and len(m.builds) == 1


@pytest.mark.parametrize(
    ("given", "options", "text"),
    [
        ([torch.zeros(3)], {}, "got Tensor"),
        (torch.zeros(3), {}, "got Tensor"),
        (3, {}, "got int"),
        (torch.nn.Linear(16, 16), {}, r"got Linear; .*pass nvfp4\.nn\.weights\(model\)"),
        ([], {"dtype": torch.float32}, "wrong dtype"),
        ([], {"ms": (0,)}, "wrong ms"),
        ([], {"ms": (1.5,)}, "wrong ms"),
        ([], {"ms": "12"}, "wrong ms"),
        ([], {"ms": 3}, "wrong ms"),
        ([], {"ms": (1 << 31,)}, "wrong ms; .* below 2"),
        (Problem(n=32, k=24), {"device": "cpu"}, "multiple of 16"),
        (Problem(n=32, k=64), {"device": "foo"}, "wrong device; got 'foo'"),
        ([], {"device": 1.5}, "wrong device"),
    ],
)
def test_what_it_cannot_use(exact, given, options, text):
    with pytest.raises(nvfp4.InvalidInput, match=text):
        nvfp4.warmup(given, **options)


@pytest.mark.parametrize("device", ["meta", "cuda:99"])
def test_a_device_that_is_not_there(exact, device):
    with pytest.raises(nvfp4.NoDevice):
        nvfp4.warmup(Problem(n=32, k=64), device=device)
    assert exact.builds == []


def test_problems_and_ms_that_no_call_has_are_refused(exact):
    with pytest.raises(nvfp4.InvalidInput, match="no weight is of this problem; got gemm 32x40 bfloat16"):
        nvfp4.warmup(nvfp4.Problem(n=32, k=40))
    with pytest.raises(nvfp4.InvalidInput, match="wrong ms"):
        nvfp4.warmup(nvfp4.Problem(n=32, k=64), ms=[True])
    assert exact.builds == []
