"""`nvfp4.nn.FusedMoE` on a GPU: moving there, ranks, and new weights under a captured CUDA graph."""

import nvfp4
import pytest
import torch
from nvfp4.kernels import reference, registry
from nvfp4.kernels.device import describe
from nvfp4.kernels.untuned import untuned_layout
from nvfp4.testing.checkpoints import as_compressed_tensors, modelopt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("untuned"),
    pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning"),
]

EXPERTS, HIDDEN, INTER, TOP_K, TOKENS = 8, 256, 128, 2, 16
NAMES = ("gate_proj", "up_proj", "down_proj")


def tensors(seed, ct=False):
    found = {}
    for e in range(EXPERTS):
        for i, name in enumerate(NAMES):
            n, k = (HIDDEN, INTER) if name == "down_proj" else (INTER, HIDDEN)
            found |= modelopt(f"{e}.{name}", n, k, 1000 * seed + 10 * e + i, bias=True)
    return as_compressed_tensors(found) if ct else found


def calls():
    g = torch.Generator().manual_seed(7)
    x = torch.randn(TOKENS, HIDDEN, generator=g).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, generator=g)[:TOP_K] for _ in range(TOKENS)])
    return [t.cuda() for t in (x, ids, torch.rand(TOKENS, TOP_K, generator=g))]


def expected(made, x, ids, weights):
    first, second = (w.to_checkpoint() for w in made.packed)
    return reference.moe(
        x, *first, *second, ids, weights,
        activation="swiglu", w13_bias=made.w13_bias, w2_bias=made.w2_bias, round_output=False,
    )  # fmt: skip


def assert_right(y, ref):
    """One rounding leaves 1.7e-3; with so few tokens, one activation that is rounded the other way shows beside it."""
    assert float((y.double() - ref).norm() / ref.norm()) < 2.0**-8


@pytest.mark.parametrize(("layout", "keep"), [("checkpoint", True), ("fragment", True), ("fragment", False)])
@pytest.mark.parametrize("ct", [False, True])
def test_a_captured_graph_runs_with_the_weights_that_are_loaded_later(ct, layout, keep):
    dialect = "compressed-tensors" if ct else "modelopt"
    made = nvfp4.nn.FusedMoE(EXPERTS, HIDDEN, INTER, bias=True, dialect=dialect, layout=layout, keep_checkpoint=keep)
    problem = made.problem(TOP_K)
    if layout == "fragment" and untuned_layout(describe("cuda"), problem, registry.kernels("moe")) == "checkpoint":
        pytest.skip("no kernel reads the fragment layout at every M")
    made.load_state_dict(tensors(1, ct))
    made, call = made.cuda(), calls()
    with torch.inference_mode():
        nvfp4.warmup(made.problem(TOP_K), layout=made.layout)
        assert_right(made(*call), expected(made, *call))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = made(*call)
        graph.replay()
        first = y.clone()
        made.load_state_dict(tensors(2, ct))
        graph.replay()
        torch.cuda.synchronize()
    assert_right(y, expected(made, *call))
    assert not torch.equal(y, first)


def test_ranks_add_up():
    whole = nvfp4.nn.FusedMoE(EXPERTS, HIDDEN, INTER, bias=True, device="cuda")
    whole.load_state_dict(tensors(1))
    call, total = calls(), 0
    for part in (range(3), range(3, EXPERTS)):
        made = nvfp4.nn.FusedMoE(EXPERTS, HIDDEN, INTER, bias=True, experts=part).cuda()
        made.load_state_dict(tensors(1))
        assert made.expert_map.is_cuda
        with torch.inference_mode():
            total = total + made(*call).double()
    assert_right(total, expected(whole, *call))
