"""`cutedsl_grouped` and `cutedsl_moe` through their launchers: every kernel of the chain runs on NumPy."""

from dataclasses import replace

import pytest
import torch
from nvfp4.kernels.moe import cutedsl_moe
from nvfp4.kernels.moe._cutedsl_config import CuteDslExpertsConfig
from nvfp4.kernels.moe.cutedsl_grouped import CuteDslGrouped
from nvfp4.kernels.moe.cutedsl_moe import CuteDslMoe
from nvfp4.kernels.problem import Device, Problem
from nvfp4.testing.experts import experts_case
from nvfp4.testing.ptx_launch import simulated

pytest.importorskip("cutlass")

pytestmark = pytest.mark.slow

CARD = Device(kind="cuda", name="card", capability=(9, 0), units=3, smem_bytes=232448)
USUAL = CuteDslExpertsConfig(
    rows=64,
    tokens=16,
    pieces=1,
    block_k=64,
    warpgroups=1,
    stages=3,
    schedule="each",
    blocks_per_sm=1,
    band=2,
)
MOE = Problem(op="moe", n=48, k=80, experts=5, top_k=2, activation="swiglu")


def run(kernel, problem, config, m, seed, order=0, case=None):
    case = case or experts_case(problem, m, seed, torch.device("cpu"), layout_id=kernel.layout(CARD, problem))
    out = torch.full(case.shape, torch.nan, dtype=case.x.dtype)
    with simulated([*case.tensors(), out], seed=order) as launched:
        case.launch(kernel.build(CARD, problem, config), out)
    case.compare(out)
    return out, launched


@pytest.mark.parametrize(
    ("n", "dtype", "changes", "seed"),
    [(80, "bfloat16", {"tokens": 32, "pieces": 2}, 4), (37, "float16", {"block_k": 128}, 3)],
    ids=str,
)
def test_grouped(n, dtype, changes, seed):
    problem = Problem(op="grouped_gemm", n=n, k=144, experts=4, dtype=dtype)
    run(CuteDslGrouped(), problem, replace(USUAL, **changes), 45, seed)


def test_grouped_copies_rows_that_tma_cannot_read():
    problem = Problem(op="grouped_gemm", n=64, k=64, experts=2)
    kernel = CuteDslGrouped()
    case = experts_case(problem, 9, 0, torch.device("cpu"), layout_id=kernel.layout(CARD, problem))
    wide = torch.empty((9, 67), dtype=case.x.dtype)
    wide[:, 3:] = case.x
    run(kernel, problem, USUAL, 9, 0, case=replace(case, x=wide[:, 3:]))


# Of the seeds' bits: 1 int64 ids, two global scales; 2 expert_map; 4 strided x, constants; 8 biases; 16 vectors;
# 32 router weights on the input where top_k is 1.
@pytest.mark.parametrize(
    ("activation", "top_k", "changes", "seed"),
    [
        ("swiglu", 2, {"tokens": 32, "pieces": 2}, 29),
        ("relu2", 2, {"block_k": 128}, 18),
        ("situ", 1, {"schedule": "ends", "rows": 128, "warpgroups": 2}, 47),
        ("swiglu", 2, {"tokens": 32, "pieces": 2}, 15),
        ("relu2", 1, {"block_k": 128}, 2),
    ],
    ids=str,
)
def test_moe(activation, top_k, changes, seed):
    """Without the launch that copies x, unless something is multiplied first."""
    problem = replace(MOE, activation=activation, top_k=top_k, dtype="float16" if seed & 1 else "bfloat16")
    _, launched = run(CuteDslMoe(), problem, replace(USUAL, **changes), 21, seed)
    copied = bool(seed & 16) or (top_k == 1 and bool(seed & 32))
    assert [name for name in launched if name] == ["route", *["gather"] * copied, "sum"]
    assert len(launched) == 4 + copied


@pytest.mark.parametrize(("offset", "apart"), [(3, 3), (8, 4)])
def test_moe_copies_rows_that_do_not_begin_on_16_bytes(offset, apart):
    case = experts_case(MOE, 5, 261, torch.device("cpu"), layout_id=CuteDslMoe().layout(CARD, MOE))
    wide = torch.full((5, MOE.k + offset + apart), torch.nan, dtype=case.x.dtype)
    wide[:, offset : offset + MOE.k] = case.x
    moved = replace(case, x=wide[:, offset : offset + MOE.k])
    sorted_first, launched = run(CuteDslMoe(), MOE, USUAL, 5, 261, case=moved)
    assert launched.count("gather") == 1
    where_it_lies, launched = run(CuteDslMoe(), MOE, USUAL, 5, 261, case=case)
    assert launched.count("gather") == 0
    assert torch.equal(sorted_first.nan_to_num(), where_it_lies.nan_to_num())


def test_moe_in_parts_gives_the_same_bits(monkeypatch):
    whole, launched = run(CuteDslMoe(), MOE, USUAL, 5, 261)
    monkeypatch.setattr(cutedsl_moe, "WORKSPACE_BYTES", 2 * MOE.top_k * (4 * MOE.k + 2 * MOE.n))
    parts, more = run(CuteDslMoe(), MOE, USUAL, 5, 261, order=3)
    assert len(launched) == 4 and len(more) == 12  # parts of 2, 2 and 1 tokens
    finite = ~whole.isnan()
    assert torch.equal(whole[finite], parts[finite]) and torch.equal(finite, ~parts.isnan())
