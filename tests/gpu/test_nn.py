"""`nvfp4.nn.Linear` and checkpoints on a GPU: moving there, and new weights under a captured CUDA graph."""

import nvfp4
import pytest
import torch
from nvfp4.dispatch.checkpoint import Shard, load_linear, open_checkpoint
from nvfp4.kernels import reference
from nvfp4.testing import assert_gemm_close
from nvfp4.testing.checkpoints import as_compressed_tensors, modelopt, write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("untuned"),
    pytest.mark.filterwarnings("ignore::nvfp4.UntunedWarning"),
]

N, K = 256, 512
LAYOUTS = ["checkpoint", "fragment1-bf16", None]


def tensors(seed, ct=False):
    found = modelopt("a", N, K, seed, bias=True)
    return {name.removeprefix("a."): tensor for name, tensor in (as_compressed_tensors(found) if ct else found).items()}


def check(made, x, y):
    weight, scale, factor = made.packed.to_checkpoint()
    ref = reference.gemm(x, weight, scale, factor, made.bias, None, round_output=False)
    assert_gemm_close(y, ref, k=K, dtype=torch.bfloat16)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ct", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_a_captured_graph_runs_with_the_weight_that_is_loaded_later(layout, ct, keep):
    dialect = "compressed-tensors" if ct else "modelopt"
    made = nvfp4.nn.Linear(K, N, dialect=dialect, layout=layout, keep_checkpoint=keep)
    made.load_state_dict(tensors(1, ct))
    made = made.cuda()
    x = torch.randn(16, K, device="cuda").bfloat16()
    with torch.inference_mode():
        nvfp4.warmup(made.packed)
        check(made, x, made(x))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = made(x)
        graph.replay()
        first = y.clone()
        made.load_state_dict(tensors(2, ct))
        graph.replay()
        torch.cuda.synchronize()
    check(made, x, y)
    assert not torch.equal(y, first)


@pytest.mark.parametrize("files", [1, 3])
def test_layers_are_read_onto_the_gpu(tmp_path, files):
    found = modelopt("a.down_proj", N, K, bias=True, pqs=True)
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "m", found, files=files))
    whole = load_linear(checkpoint, "a.down_proj", device="cuda")
    assert whole.weight.is_cuda and torch.equal(whole.weight.cpu(), found["a.down_proj.weight"])
    x = torch.randn(4, K, device="cuda").bfloat16()
    ref = reference.gemm(
        x, whole.weight, whole.weight_scale, whole.weight_scale_2, whole.bias, whole.pre_quant_scale, round_output=False
    )
    parts = []
    for rank in range(2):
        part = load_linear(checkpoint, "a.down_proj", shard=Shard(rank=rank, size=2, how="row"), device="cuda")
        packed = nvfp4.pack(part.weight, part.weight_scale, part.weight_scale_2)
        columns = x[:, rank * K // 2 : (rank + 1) * K // 2]
        parts.append(nvfp4.gemm(columns, packed, bias=part.bias, pre_quant_scale=part.pre_quant_scale).double())
    assert float((sum(parts) - ref).norm() / ref.norm()) < 2.0**-7


def test_a_model_on_the_meta_device_is_filled_on_the_gpu(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(K, N, device="meta", dtype=torch.bfloat16), torch.nn.RMSNorm(N))
    found = modelopt("0", N, K, bias=True) | {"1.weight": torch.full((N,), 2.0)}
    nvfp4.convert_(model, checkpoint=write_checkpoint(tmp_path / "m", found), device="cuda")
    model.cuda()
    x = torch.randn(4, K, device="cuda").bfloat16()
    with torch.inference_mode():
        check(model[0], x, model[0](x))
    assert model[0].packed.data.is_cuda and torch.equal(model[1].weight.cpu(), torch.full((N,), 2.0))
