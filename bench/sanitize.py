"""Runs candidates once each, small enough for compute-sanitizer.

    compute-sanitizer --report-api-errors no --tool memcheck python bench/sanitize.py
    compute-sanitizer --tool racecheck python bench/sanitize.py
    compute-sanitizer --tool racecheck python bench/sanitize.py cutedsl_wgmma cutedsl_mma marlin_moe

Without names: five configs of `marlin` that take every way through it. With names: the default config of these kernels
and two others, on a problem with ends in every dimension. Results are not looked at; the tests do that.

(cuda-bindings asks the driver for every function it knows; those that an older driver lacks are the API errors.)
"""

from __future__ import annotations

import sys

import torch
from nvfp4.kernels import registry
from nvfp4.kernels.device import describe
from nvfp4.kernels.gemm._marlin_model import token_tile
from nvfp4.kernels.gemm.marlin import KERNEL, MarlinConfig
from nvfp4.kernels.kernel import Config, Kernel
from nvfp4.kernels.problem import Problem
from nvfp4.testing import conformance

PLACE = torch.device("cuda", 0)

# n, k, m, dtype, seed (5: with pre_quant_scale); then subtiles, row groups, K groups, chunk, stages, split, meet, copy.
MARLIN = [
    (200, 1104, 5, "bfloat16", 0, (2, 1, 4, 1, 2, 1, "memory", "bulk")),
    (200, 1104, 5, "bfloat16", 2, (1, 3, 2, 1, 3, 2, "cluster", "bulk")),
    (264, 2048, 17, "float16", 0, (4, 2, 2, 2, 2, 4, "memory", "bulk")),
    (264, 2048, 17, "bfloat16", 1, (3, 2, 2, 2, 2, 2, "cluster", "async")),
    (130, 80, 64, "bfloat16", 4, (1, 4, 1, 1, 2, 1, "memory", "bulk")),
]
PROBLEMS = {
    "gemm": (Problem(n=200, k=1104),),
    "grouped_gemm": (Problem(op="grouped_gemm", n=200, k=336, experts=5),),
    "moe": (
        Problem(op="moe", n=112, k=336, experts=5, top_k=2, activation="swiglu"),
        Problem(op="moe", n=112, k=336, experts=5, top_k=2, activation="relu2"),
    ),
}
MS = (3, 70, 200, 600)


def run(kernel: Kernel, problem: Problem, config: Config, m: int, seed: int) -> None:
    """One launch, with the options that the seed decides."""
    case = conformance.make_case(kernel, describe(PLACE), problem, m, seed, PLACE)
    out = torch.empty(case.shape, device=PLACE, dtype=case.x.dtype)
    case.launch(kernel.build(describe(PLACE), problem, config), out)
    torch.cuda.synchronize()
    print(kernel.name, problem.label, m, config.to_json(), flush=True)


def run_marlin() -> None:
    """The hand-picked configs."""
    for n, k, m, dtype, seed, fields in MARLIN:
        names = ("subtiles", "row_groups", "k_groups", "chunk", "stages", "split", "meet", "copy")
        config = MarlinConfig(tokens=token_tile(m), **dict(zip(names, fields, strict=True)))  # type: ignore[arg-type]
        run(KERNEL, Problem(n=n, k=k, dtype=dtype), config, m, seed)


def main(names: list[str]) -> None:
    """One launch per candidate."""
    if not names:
        run_marlin()
    for name in names:
        kernel = registry.get(name)
        if kernel is None:
            sys.exit(f"there is no kernel {name!r}")
        for problem in PROBLEMS[kernel.op]:
            for m in MS:
                for config in conformance.candidates(kernel, describe(PLACE), problem, m, sampled=2, seed=m):
                    run(kernel, problem, config, m, seed=m)


if __name__ == "__main__":
    main(sys.argv[1:])
