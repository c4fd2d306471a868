"""Untuned decode over the shapes of all shipped models: which stand out from the trend of their neighbours?

    python bench/cliffs.py --output results.json

N and K of every linear layer at tensor parallelism 1, 2, 4 and 8, with M = 1, 16 and 64; each runs the default config
of one kernel on random weight bytes that rotate over more than the L2. The trend at a shape is the median over its
NEIGHBOURS nearest by weight bytes of microseconds over predicted bytes-and-launch time (`floor_us`), so that small and
large layers compare.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from nvfp4.cache.fingerprint import environment
from nvfp4.errors import InvalidInput
from nvfp4.kernels import registry
from nvfp4.kernels.device import describe
from nvfp4.kernels.problem import Problem
from nvfp4.kernels.weights.fragment import blob_shape
from nvfp4.tuner.timing import make_timer
from nvfp4.tuner.workload import model_names, problems_of_model

TENSOR_PARALLEL = (1, 2, 4, 8)
NEIGHBOURS = 15
LIMIT = 1.5
ROTATE_BYTES = 200 << 20
LAUNCH_US, BYTES_PER_US = 2.5, 4.3e6  # of `floor_us`: only its shape matters


def shapes() -> Iterator[tuple[int, int]]:
    """N and K of every shipped layer, each once; layers that do not divide are left out."""
    seen = set()
    warnings.simplefilter("ignore")  # experts are left out
    for name in model_names():
        for tp in TENSOR_PARALLEL:
            try:
                problems = problems_of_model(name, tp=tp)
            except InvalidInput:  # does not divide at this size
                continue
            for problem in problems:
                if problem.op == "gemm" and problem.k % 16 == 0:
                    seen.add((problem.n, problem.k))
    yield from sorted(seen)


def floor_us(problem: Problem) -> float:
    """A launch and one read of the weights."""
    return LAUNCH_US + problem.weight_bytes / BYTES_PER_US


def trend(rows: list[dict[str, Any]]) -> None:
    """Adds `over_trend` to rows of one M."""
    rows.sort(key=lambda row: row["weight_bytes"])
    slowdown = [row["us"] / row["floor_us"] for row in rows]
    for i, row in enumerate(rows):
        first = max(0, min(i - NEIGHBOURS // 2, len(rows) - NEIGHBOURS))
        row["over_trend"] = slowdown[i] / statistics.median(slowdown[first : first + NEIGHBOURS])


def prepare(point: tuple[str, Problem, int]) -> Any:
    """In a child: the default config of a point, built into the compilers' caches."""
    name, problem, m = point
    kernel, device = registry.get(name), describe(torch.device("cuda", 0))
    assert kernel is not None
    config = kernel.default_config(device, problem, m)
    kernel.build(device, problem, config)
    return config


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--m", default="1,16,64")
    parser.add_argument("--kernel", default="marlin")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    place = torch.device("cuda", 0)
    device, timer, kernel = describe(place), make_timer(place), registry.get(options.kernel)
    assert kernel is not None
    problems = [Problem(n=n, k=k) for n, k in shapes()]
    ms = [int(m) for m in options.m.split(",")]
    points = [(options.kernel, problem, m) for problem in problems for m in ms]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        configs = dict(zip(points, pool.map(prepare, points, chunksize=8), strict=True))

    largest = max(blob_shape(p.n, p.k)[0] * blob_shape(p.n, p.k)[1] * blob_shape(p.n, p.k)[2] for p in problems)
    bytes_ = torch.randint(0, 256, (ROTATE_BYTES + largest,), dtype=torch.uint8, device=place)
    one = torch.ones(1, device=place)
    rows: list[dict[str, Any]] = []
    for (_, problem, m), config in configs.items():
        blocks = blob_shape(problem.n, problem.k)
        size = blocks[0] * blocks[1] * blocks[2]
        blobs = [bytes_[at : at + size].view(blocks) for at in range(0, max(1, ROTATE_BYTES), size)]
        x = torch.randn(m, problem.k, device=place, dtype=torch.bfloat16)
        out = torch.empty(m, problem.n, device=place, dtype=torch.bfloat16)
        launcher = kernel.build(device, problem, config)
        launches = [partial(launcher, x, blob, None, one, None, None, out) for blob in blobs[:40]]
        launches[0]()
        timer.sync()
        replay = timer.replay(launches, max(12, len(launches)))
        us = statistics.median(timer.repeat(replay, 5))
        replay.close()
        rows.append(
            {"n": problem.n, "k": problem.k, "m": m, "us": us, "floor_us": floor_us(problem)}
            | {"weight_bytes": problem.weight_bytes, "config": json.loads(config.to_json())}
        )
    for m in ms:
        trend([row for row in rows if row["m"] == m])
    exceptions = [row for row in rows if row["over_trend"] > LIMIT]
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": asdict(device),
        "environment": msgspec.to_builtins(environment()),
        "kernel": options.kernel,
        "shapes": len(problems),
        "exceptions": len(exceptions),
        "rows": rows,
    }
    if options.output:
        options.output.write_text(json.dumps(result, indent=1))
    print(f"{len(problems)} shapes; {len(exceptions)} points more than {LIMIT} x their neighbours' trend")
    for row in sorted(exceptions, key=lambda row: -row["over_trend"])[:40]:
        print(f"  {row['n']}x{row['k']} M={row['m']}: {row['us']:.1f} us, {row['over_trend']:.2f} x; {row['config']}")


if __name__ == "__main__":
    main()
