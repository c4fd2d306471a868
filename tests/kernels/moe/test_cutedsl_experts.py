"""What `cutedsl_grouped` and `cutedsl_moe` offer: configs, limits, defaults, and the model that ranks them."""

from dataclasses import replace

import pytest
import torch
from nvfp4.kernels.gemm.cutedsl_wgmma import fits
from nvfp4.kernels.kernel import implementation_hash
from nvfp4.kernels.moe import _cutedsl_config as configs
from nvfp4.kernels.moe.arguments import MoeArguments
from nvfp4.kernels.moe.cutedsl_grouped import CuteDslGrouped
from nvfp4.kernels.moe.cutedsl_moe import CuteDslMoe, gathers
from nvfp4.kernels.problem import Device, Problem
from nvfp4.testing.conformance import H200, problems

QWEN = Problem(op="moe", n=768, k=2048, experts=128, top_k=8, activation="swiglu")
DEEPSEEK = Problem(op="moe", n=2048, k=7168, experts=256, top_k=8, activation="swiglu")
NEMOTRON = Problem(op="moe", n=2688, k=1024, experts=512, top_k=22, activation="relu2")
MIXTRAL = Problem(op="moe", n=14336, k=4096, experts=8, top_k=2, activation="swiglu")
GROUPED = Problem(op="grouped_gemm", n=1001, k=4096, experts=8)
LARGE = (QWEN, DEEPSEEK, NEMOTRON, MIXTRAL, GROUPED)
KERNELS = (CuteDslGrouped(), CuteDslMoe())


def kernel_of(problem):
    return next(kernel for kernel in KERNELS if kernel.op == problem.op)


@pytest.mark.parametrize("problem", LARGE, ids=lambda p: p.label)
@pytest.mark.parametrize("m", [1, 64, 512, 4096, 20000])
def test_spaces_are_small_and_defaults_valid(problem, m):
    kernel = kernel_of(problem)
    space = kernel.space(H200, problem)
    valid = [config for config in space if kernel.is_valid(H200, problem, config, m)]
    assert 1 <= len(valid) <= 500
    assert kernel.default_config(H200, problem, m) in valid


@pytest.mark.parametrize("op", ["grouped_gemm", "moe"])
def test_defaults_are_valid_for_awkward_sizes(op):
    for problem in problems(op):
        for m in (1, 5, 33, 300, 5000):
            kernel = kernel_of(problem)
            config = kernel.default_config(H200, problem, m)
            assert config in kernel.space(H200, problem)
            assert kernel.is_valid(H200, problem, config, m), (problem, m, config)


def test_only_hopper_and_whole_groups():
    ada = replace(H200, capability=(8, 9))
    assert "needs sm_90" in KERNELS[1].supports(ada, QWEN).reason
    assert not KERNELS[1].supports(Device(kind="cpu", name="card"), QWEN)
    assert "inter = 24" in KERNELS[1].supports(H200, replace(QWEN, n=24)).reason
    assert "K = 40" in KERNELS[0].supports(H200, replace(GROUPED, k=40)).reason
    assert KERNELS[0].supports(H200, GROUPED) and KERNELS[0].layout(H200, GROUPED) == "fragment1-bf16"


@pytest.mark.parametrize(("m", "low", "high"), [(16, 16, 16), (512, 32, 64), (4096, 64, 256)])
def test_defaults_follow_the_rows_of_an_expert(m, low, high):
    assert low <= KERNELS[1].default_config(H200, QWEN, m).tokens <= high


def test_tiles_far_from_the_rows_of_an_expert_are_refused():
    few = configs.best(H200, QWEN, 16)
    many = configs.best(H200, QWEN, 8192)
    assert "in the mean" in configs.is_valid(H200, QWEN, many, 16).reason
    assert "are small" in configs.is_valid(H200, QWEN, few, 8192).reason


def test_sizes_of_padded_weights():
    first, second = configs.sizes(replace(QWEN, n=80, k=96))
    assert (first.rows, first.k, first.n, first.result) == (192, 96, 80, "activated")  # 2 * 96: halves of 32 rows
    assert (second.rows, second.k, second.n, second.result) == (128, 80, 96, "summand")
    assert configs.sizes(replace(NEMOTRON, n=80))[0].rows == 128
    assert configs.sizes(GROUPED)[0].rows == 1024


def test_expected_tiles():
    # One token of each of 128 experts' rows in the mean: 1 - 1/e of them have any.
    active, pieces, tiles = configs.expected(QWEN, 16, 16, 16)
    assert active == pytest.approx(128 * 0.632, rel=1e-2)
    assert active == pytest.approx(tiles, rel=1e-6) and pieces == tiles
    active, pieces, tiles = configs.expected(QWEN, 4096, 128, 32)
    assert active == pytest.approx(128, rel=1e-6)
    assert 128 * 256 < pieces * 32 < 128 * (256 + 32) and 128 * 2.3 < tiles < 128 * 2.7


@pytest.mark.parametrize("problem", LARGE[:4], ids=lambda p: p.label)
def test_predictions_stay_above_the_bytes_of_the_weights(problem):
    kernel = kernel_of(problem)
    weights = sum(size.rows * size.k * 0.5625 for size in configs.sizes(problem)) * problem.experts
    for m in (512, 4096):
        us = kernel.predicted_us(H200, problem, kernel.default_config(H200, problem, m), m)
        assert us > weights / 4.3e6
        flops = 2 * m * problem.top_k * sum(size.rows * size.k for size in configs.sizes(problem))
        assert us > flops / 990e6


def test_pieces_are_whole():
    for tokens, choices in configs.PIECES.items():
        for pieces in choices:
            assert tokens % (8 * pieces) == 0, "wgmma takes tokens by eights"


@pytest.mark.parametrize("problem", LARGE[:4], ids=lambda p: p.label)
def test_what_gathers_fits_wherever_the_other_product_does(problem):
    """It keeps a list of rows, but none of factors."""
    for config in configs.space(H200, problem):
        first, _ = configs.shapes(problem, config)
        if fits(H200, first, configs.RING_BYTES):
            gathered = replace(first, gathered=True)
            assert fits(H200, gathered, configs.RING_BYTES), config
            assert gathered.consumer_registers >= first.consumer_registers


def test_the_first_product_gathers_where_it_can():
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    wide = torch.zeros(4, 72, dtype=torch.bfloat16)
    nothing = torch.zeros(1)

    def arguments(x, **given):
        weights = dict.fromkeys(("w13", "w13_scale_2", "w2", "w2_scale_2", "topk_ids", "topk_weights"), nothing)
        return MoeArguments(x=x, **weights, w13_scale=None, w2_scale=None, constants=(0.0, 0.0, 0.0), **given)

    assert gathers(arguments(x)) and gathers(arguments(wide[:, :64])) and gathers(arguments(wide[:, 8:]))
    assert gathers(arguments(x, w2_pre_quant_scale=nothing, w13_bias=nothing))
    assert not gathers(arguments(x, pre_quant_scale=nothing))
    assert not gathers(arguments(x, weights_on_input=True))
    assert not gathers(arguments(wide[:, 4:68]))
    assert not gathers(arguments(torch.zeros(4, 68, dtype=torch.bfloat16)[:, :64]))
    assert gathers(arguments(torch.zeros(1, 68, dtype=torch.bfloat16)[:, :64])), "one row has no next"
    far = torch.empty(1 << 36, dtype=torch.bfloat16, device="meta").as_strided((5, 64), (1 << 33, 1))
    assert not gathers(arguments(far)), "32 bits do not count so many pieces"


def test_what_was_seen_to_spill_is_not_in_the_space():
    """The product that gathers, with 256 tokens in eight pieces and no prefetch: eight bytes of stack."""
    problem = Problem(op="moe", n=768, k=2048, experts=128, top_k=8, activation="situ")
    found = [c for c in configs.space(H200, problem) if configs.is_valid(H200, problem, c, 4096)]
    largest = {(c.pieces, c.schedule) for c in found if c.tokens == 256}
    assert (8, "ends-prefetch") in largest and (4, "each") in largest
    assert (8, "each") not in largest


def test_device_code_counts_in_the_hash():
    names = {path.name for kernel in KERNELS for path in kernel.source_files()}
    assert {"route.cu", "gather.cu", "sum.cu", "fragment.cuh", "ptx.cuh", "consumer.py", "gather.py"} <= names
    assert "launch.py" not in names
    assert len({implementation_hash(kernel) for kernel in KERNELS}) == 2
    for kernel in KERNELS:
        paths = kernel.source_files()
        assert len(paths) == len(set(paths)) and all(path.is_file() for path in paths)
