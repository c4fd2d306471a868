"""opcheck, fake tensors, torch.compile, export and autocast."""

import nvfp4
import pytest
import torch
from torch.library import opcheck

op = torch.ops.nvfp4.gemm

pytestmark = [
    pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


@pytest.mark.parametrize("m", [0, 1, 5])
@pytest.mark.parametrize("full", [False, True])
def test_opcheck_gemm(exact, case, m, full):
    c = case(m=m)
    options = (
        {"bias": torch.zeros(c.n), "pre_quant_scale": torch.ones(c.k).bfloat16(), "out_features": c.n} if full else {}
    )
    opcheck(op.default, (c.x, c.weight, c.scale, c.gs), options)


@pytest.mark.parametrize("shape", [(2, 3), (1,), ()])
def test_opcheck_other_shapes(exact, case, shape):
    c = case(m=6)
    x = c.x[: torch.Size(shape).numel()].reshape(*shape, c.k)
    opcheck(op.default, (x, c.weight, c.scale, torch.rand(c.n)))


@pytest.mark.parametrize("m", [0, 5])
def test_opcheck_gemm_out(exact, case, m):
    c = case(m=m)
    opcheck(op.out, (c.x, c.weight, c.scale, c.gs), {"out": torch.zeros(m, c.n, dtype=torch.bfloat16)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_opcheck_dequantize(case, dtype):
    c = case()
    opcheck(torch.ops.nvfp4.dequantize.default, (c.weight, c.scale, c.gs, dtype))
    opcheck(
        torch.ops.nvfp4.dequantize.default,
        (c.weight, c.scale, c.gs, dtype),
        {"out_features": c.n, "in_features": c.k},
    )


def test_compile_with_dynamic_m(exact, case):
    c = case(m=300)
    packed = nvfp4.pack(c.weight, c.scale, c.gs)
    frames = []

    def backend(graph, inputs):
        frames.append(graph)
        return graph

    torch._dynamo.reset()
    model = torch.compile(lambda x: nvfp4.gemm(x, packed) * 2, fullgraph=True, dynamic=True, backend=backend)
    for m in (300, 2, 17, 64):
        assert torch.equal(model(c.x[:m].clone()), c.ref[:m] * 2)
    assert len(frames) == 1
    assert exact.launches[-1][2] == 64
    assert any("nvfp4" in str(node.target) for node in frames[0].graph.nodes)


@pytest.mark.parametrize("m", [0, 1, 5])
def test_compile_through_aot(exact, case, m):
    c = case(m=m)
    y = compiled(lambda x: nvfp4.gemm(x, c.weight, c.scale, c.gs, bias=torch.zeros(c.n)).relu())(c.x)
    assert torch.equal(y, c.ref.relu())


def test_compile_with_out(exact, case):
    c = case()

    def step(x, out):
        nvfp4.gemm(x, c.weight, c.scale, c.gs, out=out)
        return out + 1

    out = torch.zeros(3, c.n, dtype=torch.bfloat16)
    assert torch.equal(compiled(step)(c.x, out), c.ref + 1)
    assert torch.equal(out, c.ref)


def test_compile_raises_for_a_wrong_shape_and_for_gradients(exact, case):
    c = case()
    with pytest.raises(Exception, match="x and weight do not fit"):
        compiled(lambda x: nvfp4.gemm(x, c.weight, c.scale, c.gs))(c.x[:, :32])
    with pytest.raises(Exception, match="no gradient"):
        compiled(lambda x: nvfp4.gemm(x, c.weight, c.scale, c.gs))(c.x.requires_grad_())


def test_export(exact, case):
    c = case(m=4)

    class Linear(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("weight", "scale", "gs"):
                self.register_buffer(name, getattr(c, name))

        def forward(self, x):
            return op(x, self.weight, self.scale, self.gs)

    m = torch.export.Dim("m", min=2, max=512)
    program = torch.export.export(Linear(), (c.x,), dynamic_shapes={"x": {0: m}})
    assert torch.equal(program.module()(c.x[:3]), c.ref[:3])


@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16])
def test_autocast_casts_x_only(exact, case, given):
    c = case()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = nvfp4.gemm(c.x.to(given), c.weight, c.scale, c.gs, bias=torch.zeros(c.n))
    assert y.dtype == torch.bfloat16 and torch.equal(y, c.ref)
    x, weight, scale, gs, bias, _, _ = exact.arguments[0]
    assert (x.dtype, weight.dtype, scale.dtype) == (torch.bfloat16, torch.uint8, torch.uint8)
    assert (gs.dtype, bias.dtype) == (torch.float32, torch.float32)


def test_autocast_with_out_and_under_compile(exact, case):
    c = case()
    out = torch.empty(3, c.n, dtype=torch.bfloat16)

    def step(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return nvfp4.gemm(x, c.weight, c.scale, c.gs)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        nvfp4.gemm(c.x.float(), c.weight, c.scale, c.gs, out=out)
    assert torch.equal(out, c.ref)
    assert torch.equal(compiled(step)(c.x.float()), c.ref)


def test_float32_without_autocast_raises(exact, case):
    c = case()
    with pytest.raises(nvfp4.InvalidInput, match=r"torch.autocast"):
        nvfp4.gemm(c.x.float(), c.weight, c.scale, c.gs)
    with torch.autocast("cpu", enabled=False), pytest.raises(nvfp4.InvalidInput):
        nvfp4.gemm(c.x.float(), c.weight, c.scale, c.gs)
